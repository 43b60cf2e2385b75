"""Import paths in the configuration: ``package.module:name`` names a user's own function or class."""

from __future__ import annotations

import importlib
from typing import Any

from trinity_vlm.errors import ConfigError


def load_object(path: str, key: str) -> Any:
    """The object that ``path`` names; raises ConfigError, quoting ``key``, when there is none."""
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{key}={path!r}: expected an import path 'package.module:name'")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{key}={path!r}: can't import {module_name}: {error}") from None
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{key}={path!r}: {module_name} has no {name!r}") from None
