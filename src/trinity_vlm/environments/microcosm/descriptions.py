"""Descriptions of shapes (``small red star``), in words and as predicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trinity_vlm.environments.microcosm.scenes import Thing
from trinity_vlm.environments.microcosm.vocabulary import COLOURS, SHAPES, SIZES, Attribute

ANY_SHAPE = "object"
PLURALS = {ANY_SHAPE: "objects", **{shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}}
SINGULARS = {plural: singular for singular, plural in PLURALS.items()}


@dataclass(frozen=True, slots=True)
class Description:
    """A conjunction of attribute values; None leaves an attribute open."""

    size: str | None = None
    colour: str | None = None
    shape: str | None = None

    def matches(self, thing: Thing) -> bool:
        return (
            (self.shape is None or thing.shape == self.shape)
            and (self.colour is None or thing.colour == self.colour)
            and (self.size is None or thing.size == self.size)
        )

    def names(self, attribute: Attribute) -> bool:
        """Whether the description gives this attribute away."""
        return getattr(self, attribute) is not None

    def implies(self, other: Description) -> bool:
        """Whether everything it matches is matched by ``other``, in every scene."""
        pairs = ((self.size, other.size), (self.colour, other.colour), (self.shape, other.shape))
        return all(theirs is None or mine == theirs for mine, theirs in pairs)

    def phrase(self, plural: bool = False) -> str:
        noun = self.shape or ANY_SHAPE
        words = (self.size, self.colour, PLURALS[noun] if plural else noun)
        return " ".join(word for word in words if word)


def read_description(phrase: str) -> Description:
    """The description a phrase names; the phrase is one that ``description_pattern`` accepted."""
    size = colour = shape = None
    for word in phrase.split():
        if word in SIZES:
            size = word
        elif word in COLOURS:
            colour = word
        else:
            noun = SINGULARS.get(word, word)
            shape = None if noun == ANY_SHAPE else noun
    return Description(size, colour, shape)


def description_pattern(plural: bool) -> str:
    """A regular expression of all phrases of one number."""
    nouns: Iterator[str] = iter(PLURALS.values() if plural else PLURALS)
    return f"(?:(?:{'|'.join(SIZES)}) )?(?:(?:{'|'.join(COLOURS)}) )?(?:{'|'.join(nouns)})"
