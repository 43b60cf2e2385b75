"""Programs: text, parse and execute. ``parse(text(program)) == program`` for every program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trinity_vlm.environments.microcosm.catalogue import QUESTION_TYPES
from trinity_vlm.environments.microcosm.nodes import Node, Steps, Stop
from trinity_vlm.environments.microcosm.question_type import QuestionType, Slot, normalised
from trinity_vlm.environments.microcosm.scenes import Scene
from trinity_vlm.environments.protocol import Answer, Failure, Ungrounded


@dataclass(frozen=True, slots=True)
class Program:
    """A question: the name of its type and its slots' values in the type's order; hashable and comparable."""

    type: str
    slots: tuple[Slot, ...]

    @property
    def kind(self) -> QuestionType:
        return QUESTION_TYPES[self.type]

    @property
    def difficulty(self) -> float:
        return self.kind.difficulty

    @property
    def blind(self) -> bool:
        """Whether the slots alone settle the answer."""
        return self.kind.blind(*self.slots)

    @property
    def root(self) -> Node[Any]:
        """The tree of typed nodes that ``execute`` runs."""
        return self.kind.build(*self.slots)


def text(program: Program) -> str:
    """The question in words."""
    kind = program.kind
    words = {name: slot.write(value) for (name, slot), value in zip(kind.slots.items(), program.slots, strict=True)}
    return kind.template.format(**words)


@lru_cache(maxsize=4096)
def parse(question: str) -> Program | None:
    """The program of any question the catalogue can word, whoever wrote it; None for every other text.

    Case, articles, spacing, closing punctuation and American spelling don't matter.
    """
    words = normalised(question)
    for kind in QUESTION_TYPES.values():
        match = kind.pattern.fullmatch(words)
        if match:
            return Program(kind.name, tuple(slot.read(match[name]) for name, slot in kind.slots.items()))
    return None


def execute(scene: Scene, program: Program) -> Answer | Ungrounded:
    """Answer a question in a scene, or say which premise fails. Blind questions are ungrounded in every scene."""
    return Ungrounded(Failure.BLIND, ("no image needed",)) if program.blind else evaluate(scene, program)


def evaluate(scene: Scene, program: Program) -> Answer | Ungrounded:
    """What the program's nodes compute, blind or not."""
    steps = Steps()
    try:
        value = program.root.run(scene, steps)
    except Stop as stop:
        return Ungrounded(stop.reason, tuple(steps.lines))
    if isinstance(value, bool):
        value = "yes" if value else "no"
        steps.extend(f" so {value}")
    return Answer(str(value), tuple(steps.lines))
