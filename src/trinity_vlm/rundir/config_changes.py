"""Which settings of a run may change when it is resumed, and the hash over those that may not."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from trinity_vlm.config import Config
from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.strict_json import JSON, dumps

CHANGEABLE = ("steps", "run_dir", "dry_run", "checkpoint", "evaluation", "tracking")
"""Top-level keys that may change between sessions; a section stands for all of its keys. ``steps`` also stretches the
learning-rate schedule, which ends at the last step."""

SERVERS = ("engine.servers.", "roles.verifier_engine.")
WHAT_ANSWERS = ("model", "dialect", "prefix", "kind")
"""Of a list of servers only these must stay: addresses, patience and the name of a key's variable may change."""


def config_hash(config: Config) -> str:
    """sha256 (hexadecimal) over every setting that must stay as it is for the whole run."""
    return hash_values(config.model_dump(mode="json"))


def hash_values(values: Mapping[str, JSON]) -> str:
    """``config_hash`` of plain values, so that a run of an earlier version keeps its hash when new keys appear."""
    fixed = {key: value for key, value in flatten(values).items() if not _changeable(key)}
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


def _changeable(key: str) -> bool:
    if key.startswith(SERVERS):
        return key.split(".")[2] not in WHAT_ANSWERS
    return key.partition(".")[0] in CHANGEABLE
