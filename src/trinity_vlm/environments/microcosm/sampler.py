"""Questions about a given scene: grounded ones with spread-out answers, and ungrounded ones of a wanted kind."""

from __future__ import annotations

from random import Random

from trinity_vlm.environments.microcosm.catalogue import QUESTION_TYPES
from trinity_vlm.environments.microcosm.descriptions import Description
from trinity_vlm.environments.microcosm.programs import Program, execute
from trinity_vlm.environments.microcosm.question_type import POINT, QuestionType, Slot, SlotKind
from trinity_vlm.environments.microcosm.scenes import ChartScene, Scene, ShapesScene, Thing, domain_of, sample_scene
from trinity_vlm.environments.microcosm.vocabulary import (
    ATTRIBUTES,
    COLOURS,
    EDGES,
    EXTREMA,
    RELATIONS,
    SHAPES,
    SIZES,
    VALUE_STEPS,
)
from trinity_vlm.environments.protocol import Answer, Failure, Ungrounded
from trinity_vlm.types import DIFFICULTY_LEVELS

YES_NO_RATE = 0.12
"""Chance that a difficulty level's yes/no types are drawn from, where it has any."""

_WORDS = {
    "attribute": ATTRIBUTES,
    "relation": RELATIONS,
    "edge": EDGES,
    "extremum": EXTREMA,
    "side": ("above", "below"),
    "sign": ("plus", "minus"),
    "direction": ("rise", "fall"),
}
_REFERENT_KEYS = (("colour",), ("shape",), ("colour", "shape"), ("size", "shape"), ("size", "colour"))
_GROUP_KEYS = (*_REFERENT_KEYS, ("colour",), ("shape",), ("size",))
_DOMAINS = ("shapes", "bar", "point")
_ATTEMPTS = 40


def sample_question(
    rng: Random, scene: Scene, difficulty: float | None = None, yes_no: bool | None = None
) -> tuple[Program, Answer]:
    """Draw a grounded question with a non-negative answer; levels are equally likely, then types within a level.

    ``yes_no`` demands or excludes yes/no types; unset, they come at YES_NO_RATE.
    """
    for _ in range(_ATTEMPTS):
        level = difficulty or rng.choice(DIFFICULTY_LEVELS)
        wants_yes_no = rng.random() < YES_NO_RATE if yes_no is None else yes_no
        kinds = [k for k in types_for(scene) if k.difficulty == level]
        kinds = [k for k in kinds if k.yes_no == wants_yes_no] or ([] if yes_no else kinds)
        found = sample_of_type(rng, scene, rng.choice(kinds)) if kinds else None
        if found:
            return found
    return _surely_grounded(rng, scene)


def sample_of_type(rng: Random, scene: Scene, kind: QuestionType) -> tuple[Program, Answer] | None:
    """A grounded question of one type, or None when a dozen or two draws found none.

    A few grounded draws compete and each distinct *answer* has the same chance, which flattens the distribution of
    answers, so that guessing a type's commonest answer pays little. A yes/no type is asked only where draws of both
    answers were found.
    """
    by_answer: dict[str, tuple[Program, Answer]] = {}
    grounded = 0
    for _ in range(30 if kind.yes_no else 12):
        program = draw_program(rng, scene, kind)
        answer = execute(scene, program)
        if isinstance(answer, Answer) and not answer.text.startswith("-"):
            by_answer.setdefault(answer.text, (program, answer))
            grounded += 1
            if len(by_answer) == 2 if kind.yes_no else grounded == 3:
                break
    if len(by_answer) < (2 if kind.yes_no else 1):
        return None
    return by_answer[rng.choice(list(by_answer))]


def sample_ungrounded(rng: Random, scene: Scene, reason: Failure) -> tuple[Program, Ungrounded] | None:
    """A well-formed question that fails in this scene for one reason, or None when none was found."""
    for _ in range(_ATTEMPTS):
        domain = domain_of(scene)
        if reason is Failure.OTHER_DOMAIN:
            domain = rng.choice([d for d in _DOMAINS if d != domain])
        source = scene if reason is Failure.AMBIGUOUS else sample_scene(rng, scene.style, domain)
        careful = reason not in (Failure.AMBIGUOUS, Failure.BLIND)
        program = draw_program(rng, source, rng.choice(types_for(source)), careful)
        outcome = execute(scene, program)
        if isinstance(outcome, Ungrounded) and outcome.reason is reason:
            return program, outcome
    return None


def types_for(scene: Scene) -> list[QuestionType]:
    """The question types that can be asked of a scene's domain."""
    return _TYPES_OF_DOMAIN[domain_of(scene)]


def draw_program(rng: Random, scene: Scene, kind: QuestionType, careful: bool = True) -> Program:
    """Fill a type's slots from what the scene shows, grounded or not.

    A careful draw keeps slot values from repeating and prefers referents that are unique.
    """
    slots: list[Slot] = []
    for slot in kind.slots.values():
        slots.append(_draw_slot(rng, scene, slot, tuple(slots), careful))
    return Program(kind.name, tuple(slots))


def _draw_slot(rng: Random, scene: Scene, slot: SlotKind, taken: tuple[Slot, ...], careful: bool) -> Slot:
    if slot.name in _WORDS:
        return rng.choice(_WORDS[slot.name])
    if isinstance(scene, ChartScene):
        return _draw_chart_slot(rng, scene, slot, taken if careful else ())
    tries = 6 if careful else 1
    if slot.name == "referent":
        return _draw_referent(rng, scene, tries)
    return _draw_description(rng, scene, 0.3 if slot.name == "instance" else 0.8, taken, tries)


def _draw_chart_slot(rng: Random, scene: ChartScene, slot: SlotKind, taken: tuple[Slot, ...]) -> Slot:
    if slot.name == "number":
        return rng.randint(1, VALUE_STEPS - 1) * scene.unit
    if slot.name in ("label", "colour"):
        shown = [getattr(mark, slot.name) for mark in scene.marks]
        return rng.choice([value for value in shown if value not in taken] or shown)
    return scene.kind


def _draw_referent(rng: Random, scene: ShapesScene, tries: int) -> Description:
    """A description of one of the things, that fits no other where a few tries find one."""
    for _ in range(tries):
        description = _describe(rng.choice(scene.things), rng.choice(_REFERENT_KEYS))
        if sum(map(description.matches, scene.things)) == 1:
            break
    return description


def _draw_description(
    rng: Random, scene: ShapesScene, present: float, taken: tuple[Slot, ...], tries: int
) -> Description:
    """A description of a thing that is there (with chance ``present``) or made up."""
    for _ in range(tries):
        made_up = Thing("", rng.choice(SIZES), rng.choice(COLOURS), rng.choice(SHAPES))
        thing = rng.choice(scene.things) if rng.random() < present else made_up
        description = _describe(thing, () if rng.random() < 0.1 else rng.choice(_GROUP_KEYS))
        if description not in taken:
            break
    return description


def _describe(thing: Thing, keys: tuple[str, ...]) -> Description:
    return Description(**{key: getattr(thing, key) for key in keys})


def _surely_grounded(rng: Random, scene: Scene) -> tuple[Program, Answer]:
    """A type that no scene leaves without an answer."""
    found = sample_of_type(rng, scene, QUESTION_TYPES["count" if isinstance(scene, ShapesScene) else "value"])
    assert found is not None
    return found


_TYPES_OF_DOMAIN = {
    domain: [
        kind
        for kind in QUESTION_TYPES.values()
        if kind.charts == (domain != "shapes") and (domain != "bar" or POINT not in kind.slots.values())
    ]
    for domain in _DOMAINS
}
