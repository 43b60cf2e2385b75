"""The rewards of both roles, Eqs. (1) and (2) of Section 2, from a finished episode.

    R_fact  = R_fact-q (1 + R_corr-a) / 2                     0, 0.5 or 1
    R_chal  = 1 - mean R_correct                              selected candidate only, over its formatted solutions
    R~_diff = R_diff (0.5 + 0.5 R_chal)
    R_Q     = -rho_f                                          if R_fmt = 0
              R_fact (alpha_Q R~_diff + beta_Q R_chal)        otherwise                                        (1)
    R_S     = w_c R_correct + w_r R_reason R_correct + w_f R_fmt                                               (2)

A dispute that overturned the reference sets R_corr-a of the selected candidate to 0; every R_correct is then the
one against the new reference (A.3). Degenerate cases: unparsed verdicts count as zeros; a selected candidate without
any formatted solution has R_chal = 0; malformed or truncated solutions have R_S = 0, stay in their group and stay out
of R_chal.
"""

from __future__ import annotations

from collections.abc import Sequence

from trinity_vlm.config import RewardsConfig
from trinity_vlm.types import Episode, QuestionerReward, Solution, SolverReward


def factuality(fact_q: int, corr_a: int) -> float:
    """R_fact (Section 2): an ungrounded question earns nothing, a grounded one with a wrong reference half."""
    return fact_q * (1 + corr_a) / 2


def challenge(correct: Sequence[int]) -> float:
    """R_chal (Section 2): the Solver's failure rate over evaluable solutions; 0 when none was evaluable."""
    return 1 - sum(correct) / len(correct) if correct else 0.0


def discounted_difficulty(diff: float, chal: float) -> float:
    """R~_diff (Section 2): a question that every Solver answers keeps half of its a-priori difficulty."""
    return diff * (0.5 + 0.5 * chal)


def questioner_reward(fmt: int, fact: float, diff: float, chal: float, config: RewardsConfig) -> QuestionerReward:
    """Eq. (1) with its terms; a malformed candidate (``fmt`` 0) has none of them and pays rho_f."""
    if not fmt:
        return QuestionerReward(fmt=0, fact=0.0, diff=0.0, chal=0.0, diff_discounted=0.0, total=-config.rho_f)
    diff_discounted = discounted_difficulty(diff, chal)
    total = fact * (config.alpha_q * diff_discounted + config.beta_q * chal)
    return QuestionerReward(fmt=1, fact=fact, diff=diff, chal=chal, diff_discounted=diff_discounted, total=total)


def solver_reward(fmt: int, correct: int, reason: float, config: RewardsConfig) -> SolverReward:
    """Eq. (2) with its terms; a malformed or truncated solution (``fmt`` 0) has none of them."""
    if not fmt:
        return SolverReward(fmt=0, correct=0, reason=0.0, total=0.0)
    total = config.w_c * correct + config.w_r * reason * correct + config.w_f
    return SolverReward(fmt=1, correct=correct, reason=reason, total=total)


def evaluable_correctness(solutions: Sequence[Solution], *, before_dispute: bool = False) -> list[int]:
    """R_correct of the formatted solutions, in order: against the final reference, or the one before a dispute.

    Raises ValueError for a formatted solution that was not graded.
    """
    return [_graded(solution, before_dispute) for solution in solutions if solution.format_valid]


def questioner_rewards(episode: Episode, config: RewardsConfig) -> tuple[QuestionerReward, ...]:
    """Eq. (1) for every candidate, index-aligned with ``episode.candidates``.

    Raises ValueError for a format-valid candidate without screening or a formatted solution without grade.
    """
    selected_chal = challenge(evaluable_correctness(episode.solutions))
    rewards = []
    for position, candidate in enumerate(episode.candidates):
        selected = position == episode.selected
        verdict = candidate.screening
        if candidate.format_valid and verdict is None:
            raise ValueError(f"candidate {position} of {episode.image.uid} is format-valid but was never screened")
        fact = diff = 0.0
        if verdict is not None and verdict.parsed:
            corr_a = 0 if selected and episode.corr_a_revoked else verdict.corr_a
            fact, diff = factuality(verdict.fact_q, corr_a), verdict.difficulty
        chal = selected_chal if selected else 0.0
        rewards.append(questioner_reward(int(candidate.format_valid), fact, diff, chal, config))
    return tuple(rewards)


def solver_rewards(episode: Episode, config: RewardsConfig) -> tuple[SolverReward, ...]:
    """Eq. (2) for every solution, index-aligned with ``episode.solutions``; empty when nothing was selected.

    A wrong solution may lack a reasoning verdict (``roles.reason_scope: correct``): the product is 0 anyway.
    Raises ValueError for a formatted solution without grade or a correct one without reasoning verdict.
    """
    rewards = []
    for solution in episode.solutions:
        correct = _graded(solution) if solution.format_valid else 0
        verdict = solution.reasoning_verdict
        if correct and verdict is None:
            raise ValueError(
                f"solution {solution.index} of {episode.image.uid} is correct, but its reasoning has no score"
            )
        reason = verdict.score if verdict is not None and verdict.parsed else 0.0
        rewards.append(solver_reward(int(solution.format_valid), correct, reason, config))
    return tuple(rewards)


def _graded(solution: Solution, before_dispute: bool = False) -> int:
    verdict = solution.correctness_before_dispute if before_dispute else solution.correctness
    if verdict is None:
        field = "correctness_before_dispute" if before_dispute else "correctness"
        raise ValueError(f"solution {solution.index} is format-valid but has no {field}; grade the episode first")
    return verdict.correct
