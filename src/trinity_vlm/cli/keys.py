"""``trinity-vlm keys``: every setting with its default and meaning, straight from the configuration's own fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from trinity_vlm.config import Config, Section, preset_names
from trinity_vlm.errors import ConfigError


def keys(
    search: Annotated[str, typer.Argument(help="show only keys that contain this text")] = "",
) -> None:
    """List every configuration key with its default. Any of them can be given to `train` as KEY=VALUE."""
    found = [row for row in describe_keys() if search in row[0]]
    if not found:
        raise ConfigError(f"keys {search!r}: no key contains this; `trinity-vlm keys` lists all")
    table = Table(
        Column("key", overflow="fold"),
        "default",
        "meaning",
        title=f"presets: {', '.join(preset_names())}",
        title_justify="left",
    )
    for row in found:
        table.add_row(*map(escape, row))
    Console().print(table)


def describe_keys(
    section: type[Section] = Config, prefix: str = "", owner: Any = None
) -> Iterator[tuple[str, str, str]]:
    """(dotted key, default, description) of every leaf, in order; ``owner`` holds defaults set by an outer section."""
    for name, info in section.model_fields.items():
        default = getattr(owner, name) if owner is not None else info.default
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner = default if isinstance(default, Section) else None
            yield from describe_keys(info.annotation, f"{prefix}{name}.", inner)
        else:
            shown = "required" if default is PydanticUndefined else str(default)
            yield prefix + name, shown, info.description or ""
