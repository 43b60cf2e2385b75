"""Import paths in the configuration: ``package.module:name`` names a user's own function or class.

What a user's reward function or advantage rule returns is checked at once, so that an error names the function and
what it returned, and not the tensor that would fail much later.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from numbers import Real
from typing import Any, TypeVar

from trinity_vlm.advantages import AdvantageRule
from trinity_vlm.config import RewardsConfig
from trinity_vlm.errors import ConfigError
from trinity_vlm.types import Episode, QuestionerReward, ScoredEpisode, SolverReward

Reward = TypeVar("Reward", QuestionerReward, SolverReward)


def load_object(path: str, key: str, names: Sequence[str] = ()) -> Any:
    """The object that ``path`` names; raises ConfigError, quoting ``key``, when there is none.

    names: plain names that ``key`` takes too, for the error about a path that is neither
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        choices = "".join(f"{known!r}, " for known in names)
        raise ConfigError(
            f"{key}={path!r}: expected {choices}{'or ' if names else ''}an import path 'package.module:name'"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}={path!r}: can't import {module_name}: {error}") from None
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key}={path!r}: {module_name} has no {name!r}") from None


def score(episode: Episode, config: RewardsConfig) -> ScoredEpisode:
    """Attach the rewards of Eqs. (1) and (2), or those of the user's own functions.

    Raises ConfigError, naming the function, unless it returns one finite reward per candidate or solution.
    """

    def rewards(name: str, kind: type[Reward], count: int) -> tuple[Reward, ...]:
        path: str = getattr(config, name)
        found = load_object(path, f"rewards.{name}")(episode, config)
        items = _items(found)
        if len(items) != count or not all(isinstance(i, kind) and all(map(_is_finite, astuple(i))) for i in items):
            raise ConfigError(
                f"rewards.{name}={path!r} returned {_shown(found)} for the image {episode.image.uid}; "
                f"expected {count} {kind.__name__}, one per {'candidate' if name == 'questioner' else 'solution'}, "
                "every term a finite number"
            )
        return items

    return ScoredEpisode(
        episode,
        rewards("questioner", QuestionerReward, len(episode.candidates)),
        rewards("solver", SolverReward, len(episode.solutions)),
    )


def advantage_rule(config: RewardsConfig) -> AdvantageRule:
    """The rule that ``rewards.advantages`` names.

    Each call raises ConfigError, naming the rule, unless it returns a finite number or None for every reward.
    """
    rule = load_object(config.advantages, "rewards.advantages")

    def checked(rewards: Sequence[float]) -> tuple[float | None, ...]:
        found = rule(rewards)
        items = _items(found)
        if len(items) != len(rewards) or not all(item is None or _is_finite(item) for item in items):
            raise ConfigError(
                f"rewards.advantages={config.advantages!r} returned {_shown(found)} for the rewards {list(rewards)}; "
                f"expected {len(rewards)} values, each a finite number or None"
            )
        return tuple(None if item is None else float(item) for item in items)

    return checked


def _items(found: Any) -> tuple[Any, ...]:
    """What a user's function returned as a tuple; something that is no collection holds nothing."""
    return tuple(found) if isinstance(found, Iterable) else ()


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _shown(found: Any) -> str:
    text = repr(found)
    count = f"{len(found)} values, " if isinstance(found, Sequence) else ""
    return count + (text if len(text) <= 300 else f"{text[:300]} ...")
