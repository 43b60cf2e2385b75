"""The judge of the loop: hand-made episodes on a known scene, compared with what the scene says."""

import dataclasses

import pytest

from trinity_vlm.environments import open_environment
from trinity_vlm.truth import truth_sums
from trinity_vlm.types import (
    Candidate,
    Completion,
    CorrectnessVerdict,
    Dispute,
    Episode,
    ImageRecord,
    Prompt,
    ScoredEpisode,
    ScreeningVerdict,
    Solution,
    Tier,
)

MICROCOSM = open_environment("microcosm")
NOTHING = Completion((), (1,), "", "stop")


def known_problem():
    """A real problem of the evolve split: its image record, question and true answer."""
    problem = MICROCOSM.problems("evolve", 1, 0)[0]
    return ImageRecord(problem.uid, problem.image), problem.question, problem.answer


def candidate(index, question, answer, passed):
    verdict = ScreeningVerdict(True, 1, int(passed), 0.4)
    return Candidate(index, Prompt(()), NOTHING, True, None, question, answer, verdict)


def solution(index, answer, correct):
    verdict = CorrectnessVerdict(correct, Tier.RULE)
    return Solution(index, Prompt(()), NOTHING, True, None, "trace", answer, verdict, verdict)


def judged(episode):
    return truth_sums([ScoredEpisode(episode, (), ())], MICROCOSM).finalise()


def test_every_belief_is_compared_with_the_scene():
    """One right candidate passed, one right one rejected, one wrong one passed, one question that means nothing."""
    image, question, answer = known_problem()
    candidates = (
        candidate(0, question, answer, True),
        candidate(1, question, answer, False),
        candidate(2, question, "nonsense", True),
        candidate(3, "Why is the sky blue?", "air", False),
    )
    solutions = (solution(0, answer, 1), solution(1, "nonsense", 0), solution(2, "nonsense", 1))
    found = judged(Episode(0, image, candidates, 0, solutions, None, answer))
    assert found["truth/grounded"] == pytest.approx(3 / 4)
    assert found["truth/right"] == pytest.approx(2 / 4)
    assert found["truth/pass_precision"] == pytest.approx(1 / 2)
    assert found["truth/pass_recall"] == pytest.approx(1 / 2)
    assert found["truth/reference_right"] == 1
    assert found["truth/solver_right"] == pytest.approx(1 / 3)
    assert found["truth/label_agreement"] == pytest.approx(2 / 3)


def test_a_dispute_that_corrects_the_reference_shows():
    image, question, answer = known_problem()
    dispute = Dispute("nonsense", answer, (0, 1), "majority", False, 1)
    base = Episode(0, image, (candidate(0, question, "nonsense", True),), 0, (), dispute, answer)
    assert judged(base)["truth/reference_right_before"] == 0
    assert judged(base)["truth/reference_right"] == 1
    unsettled = dataclasses.replace(base, dispute=None, reference="nonsense")
    assert judged(unsettled)["truth/reference_right"] == 0
