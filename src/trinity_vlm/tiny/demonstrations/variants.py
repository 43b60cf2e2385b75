"""Other wordings of one short answer, and answers that settle nothing."""

from __future__ import annotations

from random import Random

from trinity_vlm.environments.microcosm.answers import NUMBER_WORDS
from trinity_vlm.environments.microcosm.descriptions import ANY_SHAPE, PLURALS, Description
from trinity_vlm.environments.microcosm.perturb import neighbouring_answer
from trinity_vlm.environments.microcosm.programs import Program
from trinity_vlm.environments.microcosm.scenes import Scene
from trinity_vlm.environments.microcosm.vocabulary import COLOURS, SHAPES

_OTHER_NAMES = {"big": "large", "small": "little", "purple": "violet", "circle": "disc", "yes": "true", "no": "false"}


def same_in_other_words(rng: Random, answer: str, program: Program) -> str:
    """The answer as somebody else may write it; never the identical text."""
    return rng.choice(wordings(answer, program))


def wordings(answer: str, program: Program) -> list[str]:
    """Every other wording this module knows for the answer of a program."""
    mark = str(program.slots[0]) if program.kind.charts else ""
    if answer.isdigit():
        return _number_wordings(int(answer), _counted_noun(program, mark))
    if program.kind.answer == "label":
        return [f"{mark} {answer}", f"the {mark} {answer}", f"{mark.capitalize()} {answer}", answer.lower()]
    other = [_OTHER_NAMES[answer]] if answer in _OTHER_NAMES else []
    if answer in COLOURS:
        other += [f"{answer} colour", f"the colour {answer}"]
    elif answer in SHAPES:
        other += [PLURALS[answer], f"a {answer}"]
    return [*other, answer.capitalize(), f"{answer.capitalize()}."]


def hedge(rng: Random, scene: Scene, answer: str) -> str:
    """An answer that commits to nothing or to two things at once."""
    other = neighbouring_answer(rng, scene, answer)
    pair = rng.sample((answer, other), 2)
    return rng.choice((f"{pair[0]} or {pair[1]}", f"{pair[0]} and {pair[1]}", "unknown", "not sure", "it depends"))


def _number_wordings(value: int, noun: str | None) -> list[str]:
    other = [f"{value}.0"]
    if value < len(NUMBER_WORDS):
        other += [NUMBER_WORDS[value], NUMBER_WORDS[value].capitalize()]
    if noun:
        other += [f"{value} {noun}"]
        other += ["none"] if value == 0 else []
    return other


def _counted_noun(program: Program, mark: str) -> str | None:
    """What a count counts, in the plural; None for values and for counts of more than one kind of thing."""
    if program.kind.answer != "count" or program.type in ("turns", "total", "related_arithmetic"):
        return None
    if mark:
        return f"{mark}s"
    first = program.slots[0]
    return PLURALS[first.shape or ANY_SHAPE] if isinstance(first, Description) else PLURALS[ANY_SHAPE]
