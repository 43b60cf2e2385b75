"""JSON schemas of verdicts in the forms that servers enforce.

vLLM takes a *structural tag*, a sequence of pieces. A verdict is spelled out in it key by key, in the layout of
``json.dumps``: no free white space to fill a budget with, and enumerated numbers are words (``0``, ``0.0``, ``0.25``),
so that a model about to write ``0.0`` is not led from ``0.`` to ``0.25``. It also says in one call what "think first"
means: any text up to the closing tag, then the verdict, then the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_LINE_BREAKS = {"type": "regex", "pattern": r"\n{0,2}"}


def verdict_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The ``response_format`` of a verdict that starts at once."""
    return _structural_tag(_pieces(schema))


def thinking_format(schema: Mapping[str, Any], after: str) -> dict[str, Any]:
    """The ``response_format`` of any text up to ``after``, then the verdict."""
    thinking = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": after}
    return _structural_tag([thinking, _LINE_BREAKS, *_pieces(schema)])


def json_schema_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The standard ``response_format``; enumerated numbers become strings, which the parsers read as well.

    As numbers, most servers know 0.0 only as ``0`` and would lead ``0.`` to ``0.25``; quoted, each spelling is a word.
    """
    properties = {key: _quoted_enumeration(value) for key, value in schema.get("properties", {}).items()}
    adapted = {**schema, "properties": properties} if properties else dict(schema)
    return {"type": "json_schema", "json_schema": {"name": "verdict", "schema": adapted}}


def _structural_tag(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": pieces}}


def _pieces(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A closed object of required keys is spelled out, in order; any other schema is left to the server."""
    properties = schema.get("properties", {})
    if schema.get("type") != "object" or not properties or set(schema.get("required", ())) != set(properties):
        return [{"type": "json_schema", "json_schema": dict(schema)}]
    pieces: list[dict[str, Any]] = []
    opening = "{"
    for key, value in properties.items():
        pieces += [{"type": "const_string", "value": f"{opening}{json.dumps(key)}: "}, _value(value)]
        opening = ", "
    return [*pieces, {"type": "const_string", "value": "}"}]


def _value(schema: Mapping[str, Any]) -> dict[str, Any]:
    if "enum" not in schema:
        return {"type": "json_schema", "json_schema": dict(schema)}
    return {"type": "regex", "pattern": "|".join(re.escape(word) for word in _spellings(schema["enum"]))}


def _quoted_enumeration(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if not any(isinstance(value, float) for value in schema.get("enum", ())):
        return schema
    return {"type": "string", "enum": _spellings(schema["enum"])}


def _spellings(values: list[Any]) -> list[str]:
    """Every value as ``json.dumps`` writes it, whole floats also without their fraction; no duplicates."""
    words: dict[str, None] = {}
    for value in values:
        words[json.dumps(value)] = None
        if isinstance(value, float) and value.is_integer():
            words[str(int(value))] = None
    return list(words)
