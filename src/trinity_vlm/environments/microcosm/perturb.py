"""Plausible errors: scenes as a weak eye would read them, and wrong answers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from trinity_vlm.environments.microcosm.programs import Program, execute
from trinity_vlm.environments.microcosm.scenes import ChartScene, Mark, Scene, ShapesScene, Thing, reading_order
from trinity_vlm.environments.microcosm.vocabulary import CELLS, COLOURS, LABELS, SHAPES, SIZES, VALUE_STEPS
from trinity_vlm.environments.protocol import Answer

_VALUES = {"size": SIZES, "colour": COLOURS, "shape": SHAPES}


def misread(rng: Random, scene: Scene, errors: int = 1) -> Scene:
    """The scene with ``errors`` of its items read wrongly: an attribute, a value, a cell, or the item overlooked."""
    if isinstance(scene, ShapesScene):
        return replace(scene, things=_misread_things(rng, scene.things, errors))
    return replace(scene, marks=_misread_marks(rng, scene, errors))


def misread_answer(rng: Random, scene: Scene, program: Program) -> tuple[Scene, Answer] | None:
    """A misread scene in which the question has another answer than in the true one; None when 12 tries found none."""
    truth = execute(scene, program)
    for _ in range(12):
        wrong_scene = misread(rng, scene)
        answer = execute(wrong_scene, program)
        if isinstance(answer, Answer) and isinstance(truth, Answer) and answer.text != truth.text:
            return wrong_scene, answer
    return None


def neighbouring_answer(rng: Random, scene: Scene, answer: str) -> str:
    """Another answer of the same kind: one or two units off, the other of yes and no, another word of its kind."""
    if answer in ("yes", "no"):
        return "no" if answer == "yes" else "yes"
    if answer.isdigit():
        unit = scene.unit if isinstance(scene, ChartScene) and int(answer) >= scene.unit else 1
        offsets = [step * unit for step in (-2, -1, 1, 2) if int(answer) + step * unit >= 0]
        return str(int(answer) + rng.choice(offsets))
    for words in _VALUES.values():
        if answer in words:
            return rng.choice([word for word in words if word != answer])
    labels = [mark.label for mark in scene.marks] if isinstance(scene, ChartScene) else []
    return rng.choice([label for label in labels if label != answer])


def _misread_things(rng: Random, things: tuple[Thing, ...], errors: int) -> tuple[Thing, ...]:
    read = list(things)
    for index in sorted(rng.sample(range(len(things)), min(errors, len(things))), reverse=True):
        thing = read[index]
        draw = rng.random()
        if draw < 0.12 and len(read) > 1:
            del read[index]
        elif draw < 0.2:
            free = [cell for cell in _beside(thing.cell) if all(other.cell != cell for other in read)]
            read[index] = replace(thing, cell=rng.choice(free or [thing.cell]))
        else:
            read[index] = _with_other_value(rng, thing)
    return reading_order(read)


def _with_other_value(rng: Random, thing: Thing) -> Thing:
    attribute = rng.choice(("colour", "colour", "shape", "shape", "size"))
    others = [value for value in _VALUES[attribute] if value != getattr(thing, attribute)]
    return replace(thing, **{attribute: rng.choice(others)})


def _misread_marks(rng: Random, scene: ChartScene, errors: int) -> tuple[Mark, ...]:
    read = list(scene.marks)
    for index in sorted(rng.sample(range(len(read)), min(errors, len(read))), reverse=True):
        mark = read[index]
        draw = rng.random()
        if draw < 0.1 and len(read) > 1:
            del read[index]
        elif draw < 0.35:
            unused = [colour for colour in COLOURS if all(other.colour != colour for other in read)]
            read[index] = replace(mark, colour=rng.choice(unused))
        else:
            steps = mark.value // scene.unit
            nearby = [
                s for s in (steps - 2, steps - 1, steps - 1, steps + 1, steps + 1, steps + 2) if 1 <= s <= VALUE_STEPS
            ]
            read[index] = replace(mark, value=rng.choice(nearby) * scene.unit)
    return tuple(read)


def _beside(cell: str) -> list[str]:
    column, row = ord(cell[0]), int(cell[1])
    beside = (chr(column - 1) + str(row), chr(column + 1) + str(row), cell[0] + str(row - 1), cell[0] + str(row + 1))
    return [c for c in beside if c in CELLS]


def plausible_answer(rng: Random, scene: Scene, program: Program) -> str:
    """An answer of the right kind for a question that may have none in this scene."""
    kind = program.kind
    if kind.answer == "yes_no":
        return rng.choice(("yes", "no"))
    if kind.answer == "count":
        return str(rng.randint(0, 4))
    if kind.answer == "value":
        return str(rng.randint(1, VALUE_STEPS) * (scene.unit if isinstance(scene, ChartScene) else 10))
    if kind.answer == "label":
        return rng.choice(LABELS)
    attribute = str(program.slots[list(kind.slots).index("attribute")]) if kind.answer == "attribute" else "colour"
    return rng.choice(_VALUES[attribute])
