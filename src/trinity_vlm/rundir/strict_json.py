"""JSON as RFC 8259 has it: no NaN, no Infinity, no duplicate keys, nothing that comes back as something else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeAlias

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"


def dumps(value: JSON, *, indent: int | None = None) -> str:
    """Serialise; raises ValueError, naming the place, for a value that JSON can't return unchanged."""
    _check(value, "$")
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)


def loads(text: str | bytes) -> JSON:
    """Parse; raises ValueError for NaN, Infinity or a key that appears twice in one object."""
    return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)


def loads_object(text: str | bytes) -> dict[str, JSON]:
    """Parse one object; raises ValueError for any other JSON value."""
    value = loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _check(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is not a string")
            _check(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not a JSON number")
    elif value is not None and not isinstance(value, bool | int | str):
        raise ValueError(f"{where}: {type(value).__name__} is not a JSON type")


def _refuse_constant(name: str) -> JSON:
    raise ValueError(f"{name} is not a JSON number")


def _unique_keys(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return result
