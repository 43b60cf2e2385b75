"""Every question type of the microcosm, one row each: wording, difficulty, slots, program."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trinity_vlm.environments.microcosm.descriptions import Description
from trinity_vlm.environments.microcosm.nodes import (
    Arithmetic,
    Beyond,
    Coloured,
    Count,
    Exist,
    Extreme,
    ExtremeValue,
    Filter,
    Labelled,
    MoreThan,
    Neighbour,
    Number,
    Objects,
    Outermost,
    Plotted,
    Query,
    Relate,
    SameAs,
    Total,
    Turns,
    Unique,
    Value,
)
from trinity_vlm.environments.microcosm.question_type import (
    ATTRIBUTE,
    COLOUR,
    DIRECTION,
    EDGE,
    EXTREMUM,
    GROUP,
    INSTANCE,
    KIND,
    LABEL,
    NUMBER,
    POINT,
    REFERENT,
    RELATION,
    SIDE,
    SIGN,
    QuestionType,
)
from trinity_vlm.environments.microcosm.vocabulary import AXIS_MAXIMA


def _all(description: Description) -> Filter:
    return Filter(Objects(), description)


def _one(description: Description) -> Unique:
    return Unique(_all(description))


def _related(description: Description, relation: Any, anchor: Description) -> Filter:
    return Filter(Relate(_one(anchor), relation), description)


def _value(kind: Any, label: str) -> Value:
    return Value(Labelled(Plotted(kind), label))


def _colour_value(kind: Any, colour: str) -> Value:
    return Value(Coloured(Plotted(kind), colour))


def _range(kind: Any) -> Arithmetic:
    return Arithmetic(ExtremeValue(Plotted(kind), "highest"), "minus", ExtremeValue(Plotted(kind), "lowest"))


def _outside_axis(side: str, number: int) -> bool:
    """No value lies beyond such a threshold in any chart."""
    return number >= max(AXIS_MAXIMA) if side == "above" else number <= min(AXIS_MAXIMA) // 10


_SHAPES = (
    QuestionType(
        "thing_attribute",
        0.1,
        "What {attribute} is the {a}?",
        {"attribute": ATTRIBUTE, "a": REFERENT},
        "attribute",
        build=lambda attribute, a: Query(_one(a), attribute),
        blind=lambda attribute, a: a.names(attribute),
    ),
    QuestionType("count", 0.4, "How many {a} are there?", {"a": GROUP}, "count", build=lambda a: Count(_all(a))),
    QuestionType("exist", 0.4, "Is there a {a}?", {"a": INSTANCE}, "yes_no", build=lambda a: Exist(_all(a))),
    QuestionType(
        "outermost",
        0.4,
        "What {attribute} is the {edge} {a}?",
        {"attribute": ATTRIBUTE, "edge": EDGE, "a": INSTANCE},
        "attribute",
        build=lambda attribute, edge, a: Query(Outermost(_all(a), edge), attribute),
        blind=lambda attribute, edge, a: a.names(attribute),
    ),
    QuestionType(
        "neighbour",
        0.7,
        "What {attribute} is the object just {relation} the {a}?",
        {"attribute": ATTRIBUTE, "relation": RELATION, "a": REFERENT},
        "attribute",
        build=lambda attribute, relation, a: Query(Neighbour(_one(a), relation), attribute),
    ),
    QuestionType(
        "same",
        0.7,
        "How many other objects have the same {attribute} as the {a}?",
        {"attribute": ATTRIBUTE, "a": REFERENT},
        "count",
        build=lambda attribute, a: Count(SameAs(_one(a), attribute)),
        blind=lambda attribute, a: a == Description(**{attribute: getattr(a, attribute)}),
    ),
    QuestionType(
        "total",
        0.7,
        "What is the number of {a} plus the number of {b}?",
        {"a": GROUP, "b": GROUP},
        "count",
        build=lambda a, b: Arithmetic(Count(_all(a)), "plus", Count(_all(b))),
    ),
    QuestionType(
        "more",
        0.7,
        "Are there more {a} than {b}?",
        {"a": GROUP, "b": GROUP},
        "yes_no",
        build=lambda a, b: MoreThan(Count(_all(a)), Count(_all(b))),
        blind=lambda a, b: a.implies(b),
    ),
    QuestionType(
        "count_related",
        0.7,
        "How many {a} are {relation} the {b}?",
        {"a": GROUP, "relation": RELATION, "b": REFERENT},
        "count",
        build=lambda a, relation, b: Count(_related(a, relation, b)),
        blind=lambda a, relation, b: a.implies(b),
    ),
    QuestionType(
        "related_attribute",
        0.7,
        "What {attribute} is the {a} {relation} the {b}?",
        {"attribute": ATTRIBUTE, "a": REFERENT, "relation": RELATION, "b": REFERENT},
        "attribute",
        build=lambda attribute, a, relation, b: Query(Unique(_related(a, relation, b)), attribute),
        blind=lambda attribute, a, relation, b: a.names(attribute),
    ),
    QuestionType(
        "related_arithmetic",
        1.0,
        "What is the number of {a} {sign} the number of {b} {relation} the {c}?",
        {"a": GROUP, "sign": SIGN, "b": GROUP, "relation": RELATION, "c": REFERENT},
        "count",
        build=lambda a, sign, b, relation, c: Arithmetic(Count(_all(a)), sign, Count(_related(b, relation, c))),
    ),
    QuestionType(
        "outermost_related",
        1.0,
        "What {attribute} is the {edge} {a} {relation} the {b}?",
        {"attribute": ATTRIBUTE, "edge": EDGE, "a": INSTANCE, "relation": RELATION, "b": REFERENT},
        "attribute",
        build=lambda attribute, edge, a, relation, b: Query(Outermost(_related(a, relation, b), edge), attribute),
        blind=lambda attribute, edge, a, relation, b: a.names(attribute),
    ),
    QuestionType(
        "more_related",
        1.0,
        "Are there more {a} {relation} the {b} than {c}?",
        {"a": GROUP, "relation": RELATION, "b": REFERENT, "c": GROUP},
        "yes_no",
        build=lambda a, relation, b, c: MoreThan(Count(_related(a, relation, b)), Count(_all(c))),
        blind=lambda a, relation, b, c: a.implies(b) or a.implies(c),
    ),
)

_CHARTS = (
    QuestionType(
        "value",
        0.1,
        "What is the value of {k} {x}?",
        {"k": KIND, "x": LABEL},
        "value",
        build=_value,
    ),
    QuestionType(
        "mark_colour",
        0.1,
        "What colour is {k} {x}?",
        {"k": KIND, "x": LABEL},
        "colour",
        build=lambda k, x: Query(Labelled(Plotted(k), x), "colour"),
    ),
    QuestionType(
        "label_of_colour",
        0.1,
        "Which {k} is {colour}?",
        {"k": KIND, "colour": COLOUR},
        "label",
        build=lambda k, colour: Query(Coloured(Plotted(k), colour), "label"),
    ),
    QuestionType(
        "colour_value",
        0.1,
        "What is the value of the {colour} {k}?",
        {"k": KIND, "colour": COLOUR},
        "value",
        build=_colour_value,
    ),
    QuestionType(
        "extreme",
        0.4,
        "Which {k} is the {which}?",
        {"k": KIND, "which": EXTREMUM},
        "label",
        build=lambda k, which: Query(Extreme(Plotted(k), which), "label"),
    ),
    QuestionType(
        "extreme_colour",
        0.4,
        "What colour is the {which} {k}?",
        {"k": KIND, "which": EXTREMUM},
        "colour",
        build=lambda k, which: Query(Extreme(Plotted(k), which), "colour"),
    ),
    QuestionType(
        "difference",
        0.4,
        "What is the difference between {k} {x} and {k} {y}?",
        {"k": KIND, "x": LABEL, "y": LABEL},
        "value",
        build=lambda k, x, y: Arithmetic(_value(k, x), "difference", _value(k, y)),
        blind=lambda k, x, y: x == y,
    ),
    QuestionType(
        "sum",
        0.4,
        "What is the sum of {k} {x} and {k} {y}?",
        {"k": KIND, "x": LABEL, "y": LABEL},
        "value",
        build=lambda k, x, y: Arithmetic(_value(k, x), "plus", _value(k, y)),
    ),
    QuestionType(
        "count_beyond",
        0.4,
        "How many {k}s are {side} {number}?",
        {"k": KIND, "side": SIDE, "number": NUMBER},
        "count",
        build=lambda k, side, number: Count(Beyond(Plotted(k), side, Number(number))),
        blind=lambda k, side, number: _outside_axis(side, number),
    ),
    QuestionType(
        "higher",
        0.4,
        "Is {k} {x} higher than {k} {y}?",
        {"k": KIND, "x": LABEL, "y": LABEL},
        "yes_no",
        build=lambda k, x, y: MoreThan(_value(k, x), _value(k, y)),
        blind=lambda k, x, y: x == y,
    ),
    QuestionType(
        "count_beyond_mark",
        0.7,
        "How many {k}s are {side} {k} {x}?",
        {"k": KIND, "side": SIDE, "x": LABEL},
        "count",
        build=lambda k, side, x: Count(Beyond(Plotted(k), side, _value(k, x))),
    ),
    QuestionType(
        "range",
        0.7,
        "What is the highest {k} minus the lowest {k}?",
        {"k": KIND},
        "value",
        build=_range,
    ),
    QuestionType(
        "colour_sum",
        0.7,
        "What is the sum of the {first} {k} and the {second} {k}?",
        {"k": KIND, "first": COLOUR, "second": COLOUR},
        "value",
        build=lambda k, first, second: Arithmetic(_colour_value(k, first), "plus", _colour_value(k, second)),
    ),
    QuestionType(
        "turns",
        0.7,
        "How many times does the line {direction} from one {k} to the next?",
        {"k": POINT, "direction": DIRECTION},
        "count",
        build=lambda k, direction: Turns(Plotted(k), direction),
    ),
    QuestionType(
        "sum_more",
        0.7,
        "Is the sum of {k} {x} and {k} {y} more than {k} {z}?",
        {"k": KIND, "x": LABEL, "y": LABEL, "z": LABEL},
        "yes_no",
        build=lambda k, x, y, z: MoreThan(Arithmetic(_value(k, x), "plus", _value(k, y)), _value(k, z)),
        blind=lambda k, x, y, z: z in (x, y),
    ),
    QuestionType(
        "total_beyond",
        1.0,
        "What is the sum of all {k}s {side} {number}?",
        {"k": KIND, "side": SIDE, "number": NUMBER},
        "value",
        build=lambda k, side, number: Total(Beyond(Plotted(k), side, Number(number))),
        blind=lambda k, side, number: _outside_axis(side, number),
    ),
    QuestionType(
        "total_beyond_mark",
        1.0,
        "What is the sum of all {k}s {side} {k} {x}?",
        {"k": KIND, "side": SIDE, "x": LABEL},
        "value",
        build=lambda k, side, x: Total(Beyond(Plotted(k), side, _value(k, x))),
    ),
    QuestionType(
        "extreme_arithmetic",
        1.0,
        "What is the sum of the {which} {k} and {k} {x} minus {k} {y}?",
        {"k": KIND, "which": EXTREMUM, "x": LABEL, "y": LABEL},
        "value",
        build=lambda k, which, x, y: Arithmetic(
            Arithmetic(ExtremeValue(Plotted(k), which), "plus", _value(k, x)), "minus", _value(k, y)
        ),
    ),
    QuestionType(
        "range_more",
        1.0,
        "Is the highest {k} minus the lowest {k} more than {k} {x}?",
        {"k": KIND, "x": LABEL},
        "yes_no",
        build=lambda k, x: MoreThan(_range(k), _value(k, x)),
    ),
)

QUESTION_TYPES: Mapping[str, QuestionType] = MappingProxyType({kind.name: kind for kind in _SHAPES + _CHARTS})
"""By name, shapes first."""
