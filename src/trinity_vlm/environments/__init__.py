"""Environments: image sources whose questions can be judged exactly, and how a run finds one by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from trinity_vlm.environments.microcosm.environment import Microcosm
from trinity_vlm.environments.protocol import Answer, Environment, Failure, Judgement, Problem, Ungrounded
from trinity_vlm.environments.source import environment_source
from trinity_vlm.errors import ConfigError
from trinity_vlm.images.source import register_source

__all__ = [
    "ENVIRONMENTS",
    "Answer",
    "Environment",
    "Failure",
    "Judgement",
    "Problem",
    "Ungrounded",
    "environment_of",
    "open_environment",
]

ENVIRONMENTS: Mapping[str, Environment] = {environment.name: environment for environment in (Microcosm(),)}
for _environment in ENVIRONMENTS.values():
    register_source(_environment.name, partial(environment_source, _environment))


def open_environment(name: str) -> Environment:
    """The environment of a name, the part of ``microcosm:SPLIT`` before the colon; ConfigError when there is none."""
    if name not in ENVIRONMENTS:
        raise ConfigError(f"no environment is named {name!r}; known are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def environment_of(sources: Sequence[str]) -> Environment | None:
    """The environment a run's images come from, when they all come from a single ``NAME:SPLIT`` source."""
    name, separator, _ = sources[0].partition(":") if len(sources) == 1 else ("", "", "")
    return ENVIRONMENTS.get(name) if separator and not Path(sources[0]).exists() else None
