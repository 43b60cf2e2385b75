"""Per-step metrics of episodes: the curves of Figure 2 as A.5 defines them, and the counts behind them.

Each metric declares its reduction over workers by where it is kept: a *mean* carries (total, count), a *count* adds
up. Totals are exact rationals, so any split of a step over workers finalises to the same bits::

    parts = [metric_sums(scored, rollouts) for scored, rollouts in workers]
    sum(parts, MetricSums()).finalise() == step_metrics(scored_of_all, rollouts_of_all)

| reduction | denominator or unit | names |
|---|---|---|
| mean | all candidates, malformed ones as 0 | fmt_q fact diff chal chal_before_disputes p_sel reward_q |
| mean | selected candidates | chal_selected |
| mean | all solutions, malformed ones as 0 | fmt_s correct correct_before_disputes reward_s |
| mean | the reason_count formatted solutions whose reasoning was put to the Verifier | reason |
| mean | completions of a call type (propose .. dispute) | unparsed/TYPE truncated/TYPE |
| mean | completions of a caller (questioner, solver, verifier) | truncated/CALLER response_length/CALLER (tokens) |
| count | calls, tokens | calls/TYPE prompt_tokens/TYPE completion_tokens/TYPE completion_tokens/CALLER |
| count | episodes and their parts | episodes candidates selected solutions reason_count |
| count | formatted solutions by the tier that decided | tier/TIER |
| count | disputes; adopted: the majority won without a verdict | disputes/raised disputes/overturned disputes/adopted |
| count | rollouts that survived the advantage filter (alternating trains on one role's) | retained/ROLE |

``diff`` is the Verifier's raw value and ``reason`` is not multiplied by R_correct (A.5); an unparsed reasoning verdict
counts 0 in ``reason``, as in the reward, and is told apart by ``unparsed/reason``. ``fact``, ``correct`` and ``chal``
are after disputes. Identity: chal = p_sel * chal_selected.

Degenerate case: a mean over nothing is left out (its count, 0, is there); no value is ever NaN or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from trinity_vlm.rewards import challenge, evaluable_correctness
from trinity_vlm.types import CallRecord, CallType, Episode, Role, Rollout, ScoredEpisode, Tier

CALLER: Mapping[CallType, str] = {CallType.PROPOSE: Role.QUESTIONER.value, CallType.SOLVE: Role.SOLVER.value}
CALLERS: tuple[str, ...] = (*CALLER.values(), "verifier")


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean that can still be added to: exact total and number of values."""

    total: Fraction = Fraction(0)
    count: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> Mean:
        """Raises ValueError or OverflowError for a value that is not finite."""
        exact = [Fraction(value) for value in values]
        return cls(sum(exact, Fraction(0)), len(exact))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Additive form of the metrics of any set of episodes; ``MetricSums()`` is that of the empty set."""

    means: Mapping[str, Mean] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: MetricSums) -> MetricSums:
        means, counts = dict(self.means), dict(self.counts)
        for name, mean in other.means.items():
            means[name] = means.get(name, Mean()) + mean
        for name, count in other.counts.items():
            counts[name] = counts.get(name, 0) + count
        return MetricSums(means, counts)

    def finalise(self) -> dict[str, float]:
        """Plain finite numbers by name: counts, and the means that have at least one value."""
        means = {name: float(mean.total / mean.count) for name, mean in self.means.items() if mean.count}
        return means | dict(self.counts)


def step_metrics(scored: Sequence[ScoredEpisode], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """All metrics of one step on one process; see the module's docstring for names and denominators."""
    return metric_sums(scored, rollouts).finalise()


def metric_sums(scored: Sequence[ScoredEpisode], rollouts: Sequence[Rollout]) -> MetricSums:
    """The additive metrics of one worker's part of a step.

    Raises ValueError for a reward that is not finite or a formatted solution that was not graded.
    """
    episodes = [item.episode for item in scored]
    return (
        _questioner_sums(scored)
        + _solver_sums(scored)
        + _dispute_sums(episodes)
        + _call_sums([call for episode in episodes for call in episode.calls])
        + MetricSums(counts={f"retained/{role}": sum(rollout.role == role for rollout in rollouts) for role in Role})
    )


def _questioner_sums(scored: Sequence[ScoredEpisode]) -> MetricSums:
    rewards = [reward for item in scored for reward in item.questioner_rewards]
    selected = [(item, item.episode.selected) for item in scored if item.episode.selected is not None]
    before = [challenge(evaluable_correctness(item.episode.solutions, before_dispute=True)) for item, _ in selected]
    num_unselected = len(rewards) - len(selected)
    means = {
        "fmt_q": Mean.of(reward.fmt for reward in rewards),
        "fact": Mean.of(reward.fact for reward in rewards),
        "diff": Mean.of(reward.diff for reward in rewards),
        "chal": Mean.of(reward.chal for reward in rewards),
        "chal_selected": Mean.of(item.questioner_rewards[position].chal for item, position in selected),
        "chal_before_disputes": Mean.of(before + [0.0] * num_unselected),
        "p_sel": Mean.of([1] * len(selected) + [0] * num_unselected),
        "reward_q": Mean.of(reward.total for reward in rewards),
    }
    return MetricSums(means, {"episodes": len(scored), "candidates": len(rewards), "selected": len(selected)})


def _solver_sums(scored: Sequence[ScoredEpisode]) -> MetricSums:
    rewards = [reward for item in scored for reward in item.solver_rewards]
    solutions = [solution for item in scored for solution in item.episode.solutions]
    formatted = [solution for solution in solutions if solution.format_valid]
    before = evaluable_correctness(solutions, before_dispute=True)
    reasons = [s.reasoning_verdict.score for s in formatted if s.reasoning_verdict is not None]
    tiers = [solution.correctness.tier for solution in formatted if solution.correctness is not None]
    means = {
        "fmt_s": Mean.of(reward.fmt for reward in rewards),
        "correct": Mean.of(reward.correct for reward in rewards),
        "correct_before_disputes": Mean.of(before + [0] * (len(solutions) - len(formatted))),
        "reason": Mean.of(reasons),
        "reward_s": Mean.of(reward.total for reward in rewards),
    }
    counts = {f"tier/{tier}": tiers.count(tier) for tier in Tier}
    return MetricSums(means, counts | {"solutions": len(solutions), "reason_count": len(reasons)})


def _dispute_sums(episodes: Sequence[Episode]) -> MetricSums:
    disputes = [episode.dispute for episode in episodes if episode.dispute is not None]
    return MetricSums(
        counts={
            "disputes/raised": len(disputes),
            "disputes/overturned": sum(dispute.overturned for dispute in disputes),
            "disputes/adopted": sum(dispute.adopted_without_verdict for dispute in disputes),
        }
    )


def _call_sums(calls: Sequence[CallRecord]) -> MetricSums:
    means: dict[str, Mean] = {}
    counts: dict[str, int] = {}
    for call_type in CallType:
        chosen = [call for call in calls if call.call == call_type]
        means[f"unparsed/{call_type}"] = Mean.of(not call.parsed for call in chosen)
        means[f"truncated/{call_type}"] = Mean.of(call.truncated for call in chosen)
        counts[f"calls/{call_type}"] = len(chosen)
        counts[f"prompt_tokens/{call_type}"] = sum(call.prompt_tokens for call in chosen)
        counts[f"completion_tokens/{call_type}"] = sum(call.completion_tokens for call in chosen)
    for caller in CALLERS:
        chosen = [call for call in calls if CALLER.get(call.call, "verifier") == caller]
        means[f"truncated/{caller}"] = Mean.of(call.truncated for call in chosen)
        means[f"response_length/{caller}"] = Mean.of(call.completion_tokens for call in chosen)
        counts[f"completion_tokens/{caller}"] = sum(call.completion_tokens for call in chosen)
    return MetricSums(means, counts)
