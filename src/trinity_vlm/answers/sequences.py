"""Tuples, intervals, sets and bare lists, split into elements. The kind of bracket is part of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from trinity_vlm.answers.plain import closing_bracket

MAX_ELEMENTS = 32

_OPEN = {"(": ")", "[": "]", "{": "}"}
_CONJUNCTION = re.compile(r"\s*,?\s+(?:and|&)\s+")


@dataclass(frozen=True, slots=True)
class Sequence:
    """brackets: ``"()"``, ``"[)"`` ..., ``"{}"`` for a set, ``""`` for a bare list; elements: their texts in order."""

    brackets: str
    elements: tuple[str, ...]

    @property
    def unordered(self) -> bool:
        return self.brackets == "{}"


def parse_sequence(text: str) -> Sequence | None:
    """Split ``(1, 2)``, ``[0, 1)``, ``{a, b}`` or ``1, 2 and 3``; None for fewer than two elements outside a set."""
    brackets = ""
    if text[:1] in _OPEN and text[-1:] in _OPEN.values() and closing_bracket(text) == len(text) - 1:
        brackets, text = text[0] + text[-1], text[1:-1]
    else:
        text = _CONJUNCTION.sub(", ", text)
    elements = tuple(part.strip() for part in _split(text))
    if not 1 <= len(elements) <= MAX_ELEMENTS or not all(elements) or (len(elements) == 1 and brackets != "{}"):
        return None
    return Sequence(brackets, elements)


def same_sequence(ref: Sequence, pred: Sequence, same: Callable[[str, str], bool]) -> bool:
    """Same brackets and pairwise same elements, in any order for sets."""
    if ref.brackets != pred.brackets or len(ref.elements) != len(pred.elements):
        return False
    if not ref.unordered:
        return all(same(a, b) for a, b in zip(ref.elements, pred.elements, strict=True))
    return _perfect_matching([[same(a, b) for b in pred.elements] for a in ref.elements])


def _split(text: str) -> list[str]:
    """Cut at commas and semicolons outside brackets; semicolons win when both occur."""
    separators: list[int] = []
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0 and char in ",;":
            separators.append(i)
    if any(text[i] == ";" for i in separators):
        separators = [i for i in separators if text[i] == ";"]
    bounds = [-1, *separators, len(text)]
    return [text[a + 1 : b] for a, b in pairwise(bounds)]


def _perfect_matching(allowed: list[list[bool]]) -> bool:
    """Whether rows and columns can be paired one to one (augmenting paths)."""
    owner: dict[int, int] = {}

    def assign(row: int, seen: set[int]) -> bool:
        for column, possible in enumerate(allowed[row]):
            if possible and column not in seen:
                seen.add(column)
                if column not in owner or assign(owner[column], seen):
                    owner[column] = row
                    return True
        return False

    return all(assign(row, set()) for row in range(len(allowed)))
