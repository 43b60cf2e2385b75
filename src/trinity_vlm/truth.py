"""What the loop believed against what is true, for images whose scenes are known. Never read by the loop itself.

Images of an environment carry only pixels into the loop; afterwards their uid leads back to the scene, and every
question, verdict and answer of an episode can be judged exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from trinity_vlm.environments import Environment
from trinity_vlm.metrics import Mean, MetricSums
from trinity_vlm.types import Episode, ScoredEpisode


def truth_sums(scored: Sequence[ScoredEpisode], environment: Environment) -> MetricSums:
    """Additive ground-truth metrics of a step, all by the environment's own judgement, never the loop's matcher.

    truth/grounded, truth/right: share of format-valid candidates whose question has an answer / whose answer is it
    truth/pass_precision: right among candidates the Verifier passed; truth/pass_recall: passed among right ones
    truth/reference_right: selected candidates whose reference is true in the end; truth/reference_right_before:
    before disputes; truth/solver_right: formatted solutions whose answer is true, over grounded selected questions
    truth/label_agreement: R_correct equals that truth
    """
    return sum((_episode_sums(item.episode, environment) for item in scored), MetricSums())


def _episode_sums(episode: Episode, environment: Environment) -> MetricSums:
    scene = environment.scene_of(episode.image.uid)
    formatted = [c for c in episode.candidates if c.format_valid]
    judged = [environment.judge(scene, c.question or "", c.answer or "") for c in formatted]
    passed = [c.screening is not None and c.screening.passed for c in formatted]
    means = {
        "truth/grounded": Mean.of(j.grounded for j in judged),
        "truth/right": Mean.of(j.right for j in judged),
        "truth/pass_precision": Mean.of(j.right for j, p in zip(judged, passed, strict=True) if p),
        "truth/pass_recall": Mean.of(p for j, p in zip(judged, passed, strict=True) if j.right),
    }
    if episode.selected is not None and episode.reference is not None:
        chosen = episode.candidates[episode.selected]
        before = environment.judge(scene, chosen.question or "", chosen.answer or "")
        after = environment.judge(scene, chosen.question or "", episode.reference)
        means["truth/reference_right"] = Mean.of([after.right])
        means["truth/reference_right_before"] = Mean.of([before.right])
        if before.answer is not None:
            graded = [s for s in episode.solutions if s.correctness is not None]
            right = [environment.judge(scene, chosen.question or "", s.answer or "").right for s in graded]
            means["truth/solver_right"] = Mean.of(right)
            means["truth/label_agreement"] = Mean.of(
                r == bool(s.correctness and s.correctness.correct) for r, s in zip(right, graded, strict=True)
            )
    return MetricSums(means)
