"""``trinity-vlm keys``: every setting with its default and meaning, straight from the configuration's own fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.table import Table

from trinity_vlm.config import Config, Section, preset_names


def keys(
    search: Annotated[str, typer.Argument(help="show only keys that contain this text")] = "",
) -> None:
    """List every configuration key with its default. Any of them can be given to `train` as KEY=VALUE."""
    table = Table("key", "default", "meaning", title=f"presets: {', '.join(preset_names())}", title_justify="left")
    for key, default, meaning in describe_keys():
        if search in key:
            table.add_row(key, default, meaning)
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
