"""What a question type is: a template that words and parses it, and a builder of its program nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

from trinity_vlm.environments.microcosm.descriptions import Description, description_pattern, read_description
from trinity_vlm.environments.microcosm.nodes import Node
from trinity_vlm.environments.microcosm.vocabulary import (
    ATTRIBUTES,
    COLOURS,
    EDGES,
    EXTREMA,
    LABELS,
    MARK_KINDS,
    RELATIONS,
)

Slot: TypeAlias = str | int | Description
AnswerKind = Literal["attribute", "count", "value", "colour", "label", "yes_no"]


@dataclass(frozen=True, slots=True)
class SlotKind:
    """How one slot is written, and read back from normalised text that ``pattern`` matched."""

    name: str
    pattern: str
    read: Callable[[str], Slot] = str
    write: Callable[[Any], str] = str


def _one_of(name: str, *words: str) -> SlotKind:
    return SlotKind(name, "|".join(words))


REFERENT = SlotKind("referent", description_pattern(plural=False), read_description, Description.phrase)
"""A description meant to fit exactly one thing."""
INSTANCE = SlotKind("instance", REFERENT.pattern, read_description, Description.phrase)
"""A description in the singular that may fit any number of things."""
GROUP = SlotKind("group", description_pattern(plural=True), read_description, lambda d: d.phrase(plural=True))
ATTRIBUTE = _one_of("attribute", *ATTRIBUTES)
RELATION = _one_of("relation", *RELATIONS)
EDGE = _one_of("edge", *EDGES)
KIND = _one_of("kind", *MARK_KINDS)
POINT = _one_of("point", "point")
LABEL = SlotKind("label", f"[{LABELS.lower()}]", str.upper)
COLOUR = _one_of("colour", *COLOURS)
EXTREMUM = _one_of("extremum", *EXTREMA)
SIDE = _one_of("side", "above", "below")
NUMBER = SlotKind("number", r"\d{1,3}", int)
SIGN = _one_of("sign", "plus", "minus")
DIRECTION = _one_of("direction", "rise", "fall")


def never(*_: Slot) -> bool:
    """The blindness of types that always need the image."""
    return False


@dataclass(frozen=True)
class QuestionType:
    """One row of the catalogue. ``build`` and ``blind`` take the slots' values in the order of ``slots``.

    answer: what kind of answer it has; "attribute" is the kind its slot of that name says
    difficulty: 0.1 read, 0.4 one operation, 0.7 several, 1.0 combined (the levels of Section 2)
    blind: whether the slots alone settle the answer, so that no image is needed
    """

    name: str
    difficulty: float
    template: str
    slots: Mapping[str, SlotKind]
    answer: AnswerKind
    build: Callable[..., Node[Any]]
    blind: Callable[..., bool] = never

    @property
    def yes_no(self) -> bool:
        return self.answer == "yes_no"

    @property
    def charts(self) -> bool:
        """Whether it is asked of charts; else of shapes."""
        return KIND in self.slots.values() or POINT in self.slots.values()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The template as a regular expression over normalised questions; a repeated slot must repeat its value."""
        expression = ""
        for position, part in enumerate(re.split(r"\{(\w+)\}", normalised(self.template))):
            if position % 2 == 0:
                expression += re.escape(part)
            elif f"(?P<{part}>" in expression:
                expression += f"(?P={part})"
            else:
                expression += f"(?P<{part}>{self.slots[part].pattern})"
        return re.compile(expression)


def normalised(question: str) -> str:
    """Lower case, single spaces, British spelling, without articles and closing punctuation."""
    words = " ".join(question.lower().split()).rstrip("?.! ").replace("color", "colour")
    return re.sub(r"\b(?:the|an?) ", "", words)
