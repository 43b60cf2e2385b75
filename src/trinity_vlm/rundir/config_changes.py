"""Which settings of a run may change when it is resumed, the hash over those that may not, and keys of the past."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

from trinity_vlm.config import Config
from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.strict_json import JSON, dumps

RESOURCES = (
    "engine.vllm",
    "update.gradient_checkpointing",
    "update.compile_layers",
    "update.overlap",
    "update.tokens_per_microbatch",
)
"""How something is computed, not what, up to rounding: a run may go on on another GPU. Runs of earlier versions counted
these among their fixed settings."""

CHANGEABLE = ("steps", "run_dir", "dry_run", "checkpoint", "evaluation", "tracking", *RESOURCES)
"""Keys that may change between sessions; a section stands for all of its keys. ``steps`` also stretches the
learning-rate schedule, which ends at the last step."""

RETIRED = ("engine.vllm.gpu_memory_utilization",)
"""Keys that earlier versions wrote and that no longer mean anything: the cache has a size of its own now."""

SERVERS = ("engine.servers.", "roles.verifier_engine.")
WHAT_ANSWERS = ("model", "dialect", "prefix", "kind")
"""Of a list of servers only these must stay: addresses, patience and the name of a key's variable may change."""


def config_hash(config: Config) -> str:
    """sha256 (hexadecimal) over every setting that must stay as it is for the whole run."""
    return hash_values(config.model_dump(mode="json"))


def hash_values(values: Mapping[str, JSON], also_fixed: tuple[str, ...] = ()) -> str:
    """``config_hash`` of plain values, so that a run of an earlier version keeps its hash when new keys appear.

    also_fixed: changeable keys that count as fixed
    """
    fixed = {key: value for key, value in flatten(values).items() if not _changeable(key) or _within(key, also_fixed)}
    return hashlib.sha256(dumps(dict(sorted(fixed.items()))).encode()).hexdigest()


def check_resumable(stored: Config, requested: Config) -> None:
    """Raises RunDirectoryError naming each fixed key whose value differs, with both values."""
    before, after = flatten(stored.model_dump(mode="json")), flatten(requested.model_dump(mode="json"))
    keys = dict.fromkeys([*before, *after])  # a section that may be unset has other keys when it is set
    changed = [key for key in keys if before.get(key) != after.get(key) and not _changeable(key)]
    if changed:
        lines = [f"{key}: the run has {before.get(key)!r}, asked for is {after.get(key)!r}" for key in changed]
        raise RunDirectoryError(
            "a resumed run can't change these settings:\n  " + "\n  ".join(lines) + "\n"
            f"restore them, or start a new run; only {', '.join(CHANGEABLE)} may change"
        )


def flatten(values: Mapping[str, JSON], prefix: str = "") -> dict[str, JSON]:
    """``{"update": {"lr": 1e-5}} -> {"update.lr": 1e-5}``."""
    flat: dict[str, JSON] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Stored values without the keys of RETIRED, which this version would not know."""
    kept = copy.deepcopy(dict(values))
    for *parents, leaf in (key.split(".") for key in RETIRED):
        node: Any = kept
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(leaf, None)
    return kept


def with_changes(values: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Stored values with everything changeable as it is in ``asked``; what can't change stays as it was written."""
    changed = copy.deepcopy(dict(values))
    for *parents, leaf in (key.split(".") for key in CHANGEABLE):
        old: Any = changed
        new: Any = asked
        for parent in parents:
            old, new = old.setdefault(parent, {}), new[parent]
        old[leaf] = new[leaf]
    for section, key in (name.rstrip(".").split(".") for name in SERVERS):
        if asked[section][key] is not None:
            changed[section][key] = asked[section][key]
    return changed


def _changeable(key: str) -> bool:
    if key.startswith(SERVERS):
        return key.split(".")[2] not in WHAT_ANSWERS
    return _within(key, CHANGEABLE)


def _within(key: str, names: tuple[str, ...]) -> bool:
    """Whether ``key`` is one of ``names`` or in a section among them."""
    return any(key == name or key.startswith(f"{name}.") for name in names)
