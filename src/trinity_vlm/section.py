"""The base of all configuration sections: closed, frozen, and no boolean where a number is meant."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]

_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _unquoted(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["on", "off"], BeforeValidator(_unquoted)]
"""YAML reads an unquoted on or off as a boolean."""

AutoSwitch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_unquoted)]


class Section(BaseModel):
    """Unknown keys are refused, values can't change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic would take a boolean for 1 or 0."""
        name = str(info.field_name)
        if isinstance(value, bool) and (expected := _number_range(cls, name)):
            raise PydanticCustomError("boolean", f"must be {expected}, no boolean (YAML reads yes and no as such)")
        return value


@functools.cache
def _number_range(section: type[Section], name: str) -> str | None:
    """What a numeric field takes, for example ``"an integer >= 1"``; None for any other field."""
    schema = section.model_json_schema()["properties"][name]
    for kind in schema.get("anyOf", [schema]):
        if kind.get("type") in ("integer", "number"):
            bounds = " and ".join(f"{sign} {kind[bound]:g}" for bound, sign in _BOUNDS.items() if bound in kind)
            return f"{'an integer' if kind['type'] == 'integer' else 'a number'} {bounds}".rstrip()
    return None


def leaf_keys(section: type[Section], prefix: str = "") -> list[str]:
    """Every dotted key below ``section`` that holds a value, in order."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            keys += leaf_keys(annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


EXAMPLES = {"images": "images.source=photos/", "model": "model.path=Qwen/Qwen3-VL-8B-Instruct"}
"""Settings without a default, by their section."""


def explain(error: Any, known: Sequence[str]) -> str:
    """One of pydantic's errors in our words: the key, its value, and what it takes; ``known``: all keys."""
    key, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        while isinstance(value, dict) and value:  # a section that is none: what was to be set in it
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        return f"{key}: unknown key{suggestion(key, known)}"
    if error["type"] == "missing":
        example = EXAMPLES.get(key.partition(".")[0])
        return f"{key}: required, but not set" + (f"; for example {example}" if example else "")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message
    return f"{key}={value!r}: {message[0].lower()}{message[1:]}"


def suggestion(key: str, known: Sequence[str]) -> str:
    """What to say of an unknown key: a similar key of its section, keys of other sections with the same last part, all
    keys of its section, a similar key of any section, or where to look."""
    section, _, leaf = key.rpartition(".")
    siblings = {k.removeprefix(f"{section}."): k for k in known if section and k.startswith(f"{section}.")}
    if close := difflib.get_close_matches(leaf, siblings, n=1):
        return _did_you_mean([siblings[close[0]]])
    if namesakes := [k for k in known if k.rpartition(".")[2] == leaf]:
        return _did_you_mean(namesakes)
    if siblings:
        return f"; {section} has {', '.join(siblings)}"
    close = difflib.get_close_matches(key, known, n=1)
    return _did_you_mean(close) if close else "; `trinity-vlm keys` lists all"


def _did_you_mean(keys: Sequence[str]) -> str:
    """For example ``"; did you mean lora.rank or ema.rank?"``"""
    *others, last = keys
    return f"; did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
