"""What every environment offers: structure -> image, program -> answer, question -> program.

    scene --render--> image            what the models see
      |
      +--sample----> program --text--> question
      |                 ^                 |
      +--execute(scene, program)       parse(question)

A *scene* is plain data, a *program* is a typed question over scenes. The microcosm is the first implementation; other
domains (rendered CLEVR scenes, chart tables, annotated photos) fit behind the same few methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from PIL import Image

SceneT = TypeVar("SceneT")
ProgramT = TypeVar("ProgramT")


class Failure(StrEnum):
    """Why a question has no answer in a scene, or needs no scene."""

    MISSING = "missing"
    AMBIGUOUS = "ambiguous"
    OTHER_DOMAIN = "other_domain"
    BLIND = "blind"


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's answer as the short text a Solver boxes, and the steps that led to it."""

    text: str
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ungrounded:
    """No answer: a premise fails in the scene, or the question can be answered without it (``Failure.BLIND``).

    ``trace`` ends with the step that failed.
    """

    reason: Failure
    trace: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is true of a proposed (question, answer) pair, whoever wrote it.

    ``answer`` is the executor's answer, None unless parsable and grounded; ``right`` compares the proposed one with it.
    """

    parsable: bool
    grounded: bool
    right: bool
    answer: str | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One held-out question with its known answer. ``type`` is the environment's question type."""

    image: Image.Image
    uid: str
    question: str
    answer: str
    difficulty: float
    type: str


class Environment(Protocol[SceneT, ProgramT]):
    """A source of images whose questions can be judged exactly.

    Images are addressed by (split, index) or by uid alone; everything is a pure function of its arguments.
    """

    @property
    def name(self) -> str: ...

    def scene(self, split: str, index: int) -> SceneT: ...

    def scene_of(self, uid: str) -> SceneT: ...

    def uid(self, split: str, index: int) -> str: ...

    def image(self, split: str, index: int) -> tuple[str, Image.Image]: ...

    def render(self, scene: SceneT) -> Image.Image: ...

    def text(self, program: ProgramT) -> str: ...

    def parse(self, question: str) -> ProgramT | None: ...

    def execute(self, scene: SceneT, program: ProgramT) -> Answer | Ungrounded: ...

    def judge(self, scene: SceneT, question: str, answer: str) -> Judgement: ...

    def problems(self, split: str, n: int, seed: int) -> list[Problem]: ...
