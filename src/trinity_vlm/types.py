"""The typed carriers handed from one part to the next; vocabulary as in docs/algorithm.md.

Everything here is frozen, slotted and free of torch. Reading order follows an episode: image -> candidates ->
screening -> selected candidate -> solutions -> verdicts -> dispute -> episode -> rewards -> rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from PIL import Image

DIFFICULTY_LEVELS: tuple[float, ...] = (0.1, 0.4, 0.7, 1.0)
REASONING_LEVELS: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
POLICY = "policy"
VERIFIER = "verifier"

FinishReason = Literal["stop", "length"]


class Role(StrEnum):
    """The two trained roles. The Verifier receives no gradients and so never owns a rollout."""

    QUESTIONER = "questioner"
    SOLVER = "solver"


class CallType(StrEnum):
    """Every kind of model call of an episode; metrics and seeds are keyed by it."""

    PROPOSE = "propose"
    SCREEN = "screen"
    SOLVE = "solve"
    EQUIVALENCE = "equivalence"
    REASON = "reason"
    DISPUTE = "dispute"


class Tier(StrEnum):
    """Which tier of the correctness procedure decided (Section 2, A.3).

    NUMERIC_GUARD stands for every mismatch decided by rule: clean numbers apart, other options, an empty answer.
    """

    RULE = "rule"
    NUMERIC_GUARD = "numeric_guard"
    MODEL = "model"
    UNPARSED = "unparsed"


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One decoded image: RGB, EXIF orientation applied, transparency on white.

    ``uid`` is stable between runs, for example ``"charts/a.png"`` or ``"train-00.parquet#3:17"``.
    """

    uid: str
    pixels: Image.Image
    source: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One chat turn. When it carries an image, the image stands before the text."""

    role: Literal["system", "user", "assistant"]
    text: str
    image: ImageRecord | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered-to-be conversation; ``assistant_prefix`` (for example ``"<think>\\n"``) opens the assistant turn
    and belongs to the prompt: the completion continues it, parsers restore it."""

    messages: tuple[Message, ...]
    assistant_prefix: str = ""

    @property
    def image(self) -> ImageRecord | None:
        """The single image of the conversation, or None for a text-only call."""
        return next((m.image for m in self.messages if m.image is not None), None)


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returned for one sample.

    prompt_token_ids: ids the model saw, image placeholders expanded, length P
    token_ids: sampled ids, length T, the end-of-turn id included when ``finish_reason == "stop"``
    text: decoded ``token_ids`` without the end-of-turn id; thinking tags kept
    logprobs: natural-log probabilities of ``token_ids`` under the sampling adapter, *before* temperature, top-k and
        top-p, length T; None when not asked for
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class CallRecord:
    """Accounting of one completion of one call: sizes in tokens."""

    call: CallType
    prompt_tokens: int
    completion_tokens: int
    truncated: bool
    parsed: bool


@dataclass(frozen=True, slots=True)
class ScreeningVerdict:
    """The Verifier's QA screening. Unparsed verdicts carry zeros and ``parsed=False`` and never pass."""

    parsed: bool
    fact_q: int
    corr_a: int
    difficulty: float
    justification: str = ""
    raw: str = ""

    @property
    def passed(self) -> bool:
        return self.parsed and self.fact_q == 1 and self.corr_a == 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One Questioner completion and what became of it. ``question``/``answer`` are None when malformed.

    ``format_error`` is a short stable slug, for example ``"no_json"``; None when ``format_valid``.
    """

    index: int
    prompt: Prompt
    completion: Completion
    format_valid: bool
    format_error: str | None
    question: str | None
    answer: str | None
    screening: ScreeningVerdict | None = None


@dataclass(frozen=True, slots=True)
class CorrectnessVerdict:
    """R_correct of one solution against the current reference, and the tier and rule that decided it.

    ``raw`` is what the Verifier wrote, where it was asked.
    """

    correct: int
    tier: Tier
    rule: str = ""
    raw: str = ""


@dataclass(frozen=True, slots=True)
class ReasoningVerdict:
    """The Verifier's reasoning score, one of REASONING_LEVELS; unparsed counts 0."""

    parsed: bool
    score: float
    justification: str = ""
    raw: str = ""


@dataclass(frozen=True, slots=True)
class Solution:
    """One Solver completion. ``reasoning`` is the thinking block, ``answer`` the content of the single box.

    ``correctness_before_dispute`` equals ``correctness`` unless a dispute replaced the reference.
    """

    index: int
    prompt: Prompt
    completion: Completion
    format_valid: bool
    format_error: str | None
    reasoning: str | None
    answer: str | None
    correctness: CorrectnessVerdict | None = None
    correctness_before_dispute: CorrectnessVerdict | None = None
    reasoning_verdict: ReasoningVerdict | None = None


@dataclass(frozen=True, slots=True)
class Dispute:
    """A strong consensus against the reference and how it ended.

    ``winner`` is "majority" both when the Verifier said so and when no verdict parsed (``adopted_without_verdict``).
    """

    reference: str
    majority_answer: str
    member_indices: tuple[int, ...]
    winner: Literal["ref", "majority"]
    adopted_without_verdict: bool
    attempts: int
    justification: str = ""
    raw: str = ""

    @property
    def overturned(self) -> bool:
        return self.winner == "majority"


@dataclass(frozen=True, slots=True)
class Episode:
    """Everything that happened for one image in one outer step (Section 2), before any filter.

    ``selected`` indexes ``candidates``; None when no candidate passed, and then ``solutions`` is empty.
    ``reference`` is a* after a possible dispute, ``corr_a_revoked`` tells that the selected candidate lost corr_a.
    """

    step: int
    image: ImageRecord
    candidates: tuple[Candidate, ...]
    selected: int | None
    solutions: tuple[Solution, ...]
    dispute: Dispute | None
    reference: str | None
    calls: tuple[CallRecord, ...] = field(default=())

    @property
    def corr_a_revoked(self) -> bool:
        return self.dispute is not None and self.dispute.overturned


@dataclass(frozen=True, slots=True)
class QuestionerReward:
    """Terms of Eq. (1) for one candidate. ``diff`` is the Verifier's raw value, ``diff_discounted`` is R̃_diff."""

    fmt: int
    fact: float
    diff: float
    chal: float
    diff_discounted: float
    total: float


@dataclass(frozen=True, slots=True)
class SolverReward:
    """Terms of Eq. (2) for one solution. ``reason`` is not multiplied by ``correct``."""

    fmt: int
    correct: int
    reason: float
    total: float


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """An episode with the rewards of its candidates and solutions, index-aligned."""

    episode: Episode
    questioner_rewards: tuple[QuestionerReward, ...]
    solver_rewards: tuple[SolverReward, ...]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One policy completion that is trained on. ``slot`` is its index within its group (image_uid, role)."""

    role: Role
    image_uid: str
    slot: int
    prompt: Prompt
    completion: Completion
    reward: float
    advantage: float
