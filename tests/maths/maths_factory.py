"""Small episodes for the equations' tests: only what a formula reads is spelled out, the rest is filler."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st
from PIL import Image

from trinity_vlm.advantages import collect_rollouts
from trinity_vlm.config import RewardsConfig
from trinity_vlm.rewards import questioner_rewards, solver_rewards
from trinity_vlm.types import (
    DIFFICULTY_LEVELS,
    REASONING_LEVELS,
    CallRecord,
    CallType,
    Candidate,
    Completion,
    CorrectnessVerdict,
    Dispute,
    Episode,
    ImageRecord,
    Message,
    Prompt,
    ReasoningVerdict,
    Rollout,
    ScoredEpisode,
    ScreeningVerdict,
    Solution,
    Tier,
)

PROMPT = Prompt(messages=(Message(role="user", text="?"),))
PIXELS = Image.new("RGB", (1, 1))
PAPER = RewardsConfig()


def completion(*, tokens: int = 3) -> Completion:
    return Completion((1, 2), tuple(range(tokens)), "text", "stop" if tokens else "length")


def candidate(
    index: int = 0,
    fmt: bool = True,
    fact: int = 1,
    corr: int = 1,
    diff: float = 0.7,
    parsed: bool = True,
    tokens: int = 3,
) -> Candidate:
    """One Questioner candidate; ``fmt=False`` is malformed and never screened."""
    screening = ScreeningVerdict(parsed=parsed, fact_q=fact, corr_a=corr, difficulty=diff) if fmt else None
    error = None if fmt else "no_json"
    text = "x" if fmt else None
    return Candidate(index, PROMPT, completion(tokens=tokens), fmt, error, text, text, screening)


def solution(
    index: int = 0,
    fmt: bool = True,
    correct: int = 1,
    reason: float | None = 1.0,
    before: int | None = None,
    tier: Tier = Tier.RULE,
    parsed: bool = True,
    tokens: int = 3,
) -> Solution:
    """One Solver solution; ``before`` is its correctness before the dispute, where that differs."""
    if not fmt:
        return Solution(index, PROMPT, completion(tokens=tokens), False, "no_box", None, None)
    return Solution(
        index,
        PROMPT,
        completion(tokens=tokens),
        True,
        None,
        "trace",
        "7",
        correctness=CorrectnessVerdict(correct, tier),
        correctness_before_dispute=CorrectnessVerdict(correct if before is None else before, tier),
        reasoning_verdict=None if reason is None else ReasoningVerdict(parsed, reason),
    )


def dispute(winner: str = "majority", adopted: bool = False) -> Dispute:
    return Dispute("6", "7", (0, 1, 2), winner, adopted, attempts=1)


def episode(
    candidates: Sequence[Candidate],
    solutions: Sequence[Solution] = (),
    selected: int | None = None,
    dispute: Dispute | None = None,
    uid: str = "a.png",
    calls: Sequence[CallRecord] = (),
) -> Episode:
    reference = None if selected is None else "7"
    image = ImageRecord(uid, PIXELS)
    return Episode(1, image, tuple(candidates), selected, tuple(solutions), dispute, reference, tuple(calls))


def score(item: Episode) -> ScoredEpisode:
    return ScoredEpisode(item, questioner_rewards(item, PAPER), solver_rewards(item, PAPER))


@dataclass(frozen=True)
class Worker:
    """What one data-parallel worker holds at the end of a step."""

    scored: tuple[ScoredEpisode, ...]
    rollouts: tuple[Rollout, ...]


def worker(*episodes: Episode) -> Worker:
    scored = tuple(score(item) for item in episodes)
    return Worker(scored, tuple(collect_rollouts(scored)))


candidates = st.builds(
    candidate,
    fmt=st.booleans(),
    fact=st.integers(0, 1),
    corr=st.integers(0, 1),
    diff=st.sampled_from(DIFFICULTY_LEVELS),
    tokens=st.integers(0, 2),
)
solutions = st.builds(
    solution,
    fmt=st.booleans(),
    correct=st.integers(0, 1),
    before=st.integers(0, 1),
    reason=st.sampled_from(REASONING_LEVELS),
    tier=st.sampled_from(Tier),
    tokens=st.integers(0, 2),
)
calls = st.builds(
    CallRecord,
    call=st.sampled_from(CallType),
    prompt_tokens=st.integers(1, 99),
    completion_tokens=st.integers(0, 99),
    truncated=st.booleans(),
    parsed=st.booleans(),
)


@st.composite
def episodes(draw) -> Episode:
    """Any episode the types allow: all malformed, nothing selected, nothing evaluable, disputed, ..."""
    proposed = draw(st.lists(candidates, min_size=1, max_size=5))
    passed = [i for i, c in enumerate(proposed) if c.screening is not None and c.screening.passed]
    selected = draw(st.sampled_from(passed)) if passed else None
    solved = draw(st.lists(solutions, min_size=1, max_size=7)) if passed else []
    disputes = st.none() | st.builds(dispute, winner=st.sampled_from(["ref", "majority"]), adopted=st.booleans())
    return episode(
        proposed,
        solved,
        selected,
        draw(disputes) if passed else None,
        uid=draw(st.sampled_from("ab")),
        calls=draw(st.lists(calls, max_size=6)),
    )
