"""``trinity-vlm keys``: every setting with its default and meaning, straight from the configuration's own fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic_core import PydanticUndefined
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from trinity_vlm.config import Config, Section, load_config, preset_names
from trinity_vlm.errors import ConfigError

REQUIRED = "required"
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def keys(
    search: Annotated[str, typer.Argument(help="show only keys that contain this text")] = "",
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="PRESET|CONFIG.yaml", help="show its values, and where they differ"),
    ] = None,
) -> None:
    """List every configuration key with its default and what it takes. `train` takes any of them as KEY=VALUE.

    Defaults are those without a preset. With --preset a value that differs is
    marked, for example (default 1e-05).

        trinity-vlm keys                    all, with their defaults
        trinity-vlm keys update.            those of a section
        trinity-vlm keys lr --preset tiny   with a preset's or a file's values
    """
    values = list(describe_keys(owner=None if preset is None else load_config(preset)))
    defaults = [default for _, default, _, _ in describe_keys()]
    found = [(row, default) for row, default in zip(values, defaults, strict=True) if search in row[0]]
    if not found:
        raise ConfigError(f"keys {search!r}: no key contains this; `trinity-vlm keys` lists all")
    console = Console()
    if console.is_terminal:
        console.print(f"[dim]presets, to be shown with --preset: {', '.join(preset_names())}[/]", highlight=False)
    for row, default in found:
        _show_key(row, default, console)


def _show_key(row: tuple[str, str, str, str], default: str, console: Console) -> None:
    """Of a row of ``describe_keys``; on a terminal two lines, else one, to be searched and copied."""
    key, value, allowed, meaning = row
    mark = "" if value == default else "required" if default == REQUIRED else f"default {default}"
    takes = f"{meaning} ({allowed})" if meaning else allowed
    if console.is_terminal:
        marked = f" [yellow]({escape(mark)})[/]" if mark else ""
        console.print(f"[bold]{escape(key)}[/] = {escape(value)}{marked}", highlight=False, soft_wrap=True)
        console.print(Padding(escape(takes), (0, 0, 0, 4)), highlight=False)
    else:
        print(f"{key} = {value}  # {f'({mark}) ' if mark else ''}{takes}")


def describe_keys(
    section: type[Section] = Config, prefix: str = "", owner: Any = None
) -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, value, what it takes, description) of every leaf, in order; ``owner`` holds the values of the
    section, a whole configuration's or defaults set by an outer section; without it they are the section's defaults."""
    for name, info in section.model_fields.items():
        default = getattr(owner, name) if owner is not None else info.default
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            inner = default if isinstance(default, Section) else None
            yield from describe_keys(info.annotation, f"{prefix}{name}.", inner)
        else:
            yield prefix + name, _shown(default), allowed_values(section, name), info.description or ""


def _shown(default: Any) -> str:
    """As it would be written on the command line."""
    if default is PydanticUndefined:
        return REQUIRED
    if default is None:
        return "unset"
    if isinstance(default, tuple):
        return f"[{', '.join(map(_shown, default))}]"
    if isinstance(default, Section):
        return f"{{{', '.join(f'{name}: {_shown(value)}' for name, value in default if value is not None)}}}"
    if isinstance(default, str) and not default.isprintable():
        return json.dumps(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def allowed_values(section: type[Section], name: str) -> str:
    """What a field takes, for example ``"integer >= 1"``, ``"auto | on | off"`` or ``"text | list of text"``."""
    schema = section.model_json_schema()["properties"][name]
    texts = [_allowed(kind) for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    return " | ".join(texts)


def _allowed(kind: dict[str, Any]) -> str:
    """Of one alternative of a JSON schema."""
    if "enum" in kind or "const" in kind:
        return " | ".join(kind.get("enum", [kind.get("const")]))
    match kind.get("type"):
        case "boolean":
            return "true | false"
        case "array":
            return f"list of {_allowed(kind['items'])}"
        case "integer" | "number":
            bounds = " and ".join(f"{sign} {kind[bound]:g}" for bound, sign in BOUNDS.items() if bound in kind)
            return f"{kind['type']} {bounds}".rstrip()
        case "string":
            return "text"
    return "a section"
