"""Typed program nodes and their execution, in the manner of CLEVR's functional programs.

A node is a frozen record of its inputs and values; ``run(scene, steps)`` computes it, appends what it found to
``steps`` in fixed short wording, and raises Stop when its premise fails: the only rules are that a referent must exist
and be the only one, and that a node needs its own domain.
"""

from trinity_vlm.environments.microcosm.nodes.base import Node, Steps, Stop
from trinity_vlm.environments.microcosm.nodes.charts import (
    Beyond,
    Coloured,
    Extreme,
    ExtremeValue,
    Labelled,
    Plotted,
    Turns,
)
from trinity_vlm.environments.microcosm.nodes.shapes import (
    Filter,
    Neighbour,
    Objects,
    Outermost,
    Relate,
    SameAs,
    Unique,
)
from trinity_vlm.environments.microcosm.nodes.values import (
    Arithmetic,
    Count,
    Exist,
    MoreThan,
    Number,
    Query,
    Total,
    Value,
)

__all__ = [
    "Arithmetic",
    "Beyond",
    "Coloured",
    "Count",
    "Exist",
    "Extreme",
    "ExtremeValue",
    "Filter",
    "Labelled",
    "MoreThan",
    "Neighbour",
    "Node",
    "Number",
    "Objects",
    "Outermost",
    "Plotted",
    "Query",
    "Relate",
    "SameAs",
    "Steps",
    "Stop",
    "Total",
    "Turns",
    "Unique",
    "Value",
]
