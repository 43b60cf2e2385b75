"""The folder of checkpoints: names, integrity, which one to resume from, what is kept. Free of torch.

checkpoints/
  best.json                  {"step": 120}, when a best one was named
  step-000120/
    manifest.json            format version, step, and per file its size and sha256
    meta.json                strict JSON
    policy.safetensors ...   one file per tensor group
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass
from pathlib import Path

from trinity_vlm.config import FORMAT_VERSION
from trinity_vlm.errors import CheckpointError
from trinity_vlm.rundir.atomic import remove_folder_atomically, replace_file
from trinity_vlm.rundir.strict_json import JSON, dumps, loads_object

MANIFEST_NAME = "manifest.json"
BEST_NAME = "best.json"
_STEP_NAME = re.compile(r"step-(\d{6,})")
_READ_CHUNK = 1 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size in bytes and lower-case hexadecimal sha256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """What a checkpoint must contain to count as complete; keys of ``files`` are file names."""

    step: int
    files: dict[str, FileDigest]

    def to_json(self) -> bytes:
        files: JSON = {name: {"bytes": d.bytes, "sha256": d.sha256} for name, d in sorted(self.files.items())}
        return dumps({"format_version": FORMAT_VERSION, "step": self.step, "files": files}, indent=1).encode()


def checkpoint_name(step: int) -> str:
    """``123 -> 'step-000123'``."""
    return f"step-{step:06d}"


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every committed checkpoint, ascending; their content is not checked."""
    if not root.is_dir():
        return []
    matches = [(_STEP_NAME.fullmatch(path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


def digest(data: bytes) -> FileDigest:
    """Size and sha256 of ``data``."""
    return FileDigest(len(data), hashlib.sha256(data).hexdigest())


def read_manifest(path: Path) -> CheckpointManifest:
    """Read the manifest of the checkpoint folder ``path``.

    Raises CheckpointError when the format is newer than this package, ValueError or OSError when it is damaged.
    """
    values = loads_object((path / MANIFEST_NAME).read_bytes())
    version, step, files = values.get("format_version"), values.get("step"), values.get("files")
    if not isinstance(version, int) or not isinstance(step, int) or not isinstance(files, dict):
        raise ValueError(f"{MANIFEST_NAME} lacks format_version, step or files")
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: checkpoint format {version} is newer than this trinity-vlm reads (up to {FORMAT_VERSION}); "
            "upgrade trinity-vlm"
        )
    return CheckpointManifest(step, {name: _file_digest(name, entry) for name, entry in files.items()})


def find_damage(path: Path) -> str | None:
    """Why the checkpoint folder ``path`` can't be used, or None when every file has its recorded size and sha256.

    Raises CheckpointError for a newer format: such a checkpoint is not damaged.
    """
    try:
        manifest = read_manifest(path)
        if path.name != checkpoint_name(manifest.step):
            return f"its manifest is of step {manifest.step}"
        for name, expected in manifest.files.items():
            size = (path / name).stat().st_size
            if size != expected.bytes:
                return f"{name} has {size} bytes instead of {expected.bytes}"
            if _sha256_of(path / name) != expected.sha256:
                return f"{name} does not match its sha256"
    except (OSError, ValueError) as error:
        return str(error)
    return None


def latest_checkpoint(root: Path) -> Path | None:
    """The newest complete checkpoint under ``root``; None when there is none at all.

    A damaged one is skipped with a warning and the one before is used. Raises CheckpointError when checkpoints are
    there but none is intact: starting over would throw the run away, so that is for a person to decide.
    """
    damaged: list[str] = []
    for _, path in reversed(list_checkpoints(root)):
        damage = find_damage(path)
        if damage is None:
            return path
        damaged.append(f"{path.name}: {damage}")
        logger.warning("checkpoint %s is damaged (%s); trying the one before", path, damage)
    if damaged:
        raise CheckpointError(
            f"{root}: no checkpoint is intact ({'; '.join(damaged)}); restore one from a copy, "
            "or move this folder away to start from step 0"
        )
    return None


def mark_best(root: Path, step: int) -> None:
    """Name the checkpoint of ``step`` the best: retention keeps it until another one is named.

    Raises CheckpointError when there is no checkpoint of that step or the name can't be written.
    """
    if not (root / checkpoint_name(step)).is_dir():
        raise CheckpointError(f"{root}: no checkpoint of step {step} to name as best; save it first")
    try:
        replace_file(root / BEST_NAME, dumps({"step": step}).encode())
    except OSError as error:
        raise CheckpointError(f"could not name step {step} as best: {error}") from error


def best_checkpoint(root: Path) -> Path | None:
    """The checkpoint named as best, or None. Raises CheckpointError when its name can't be read."""
    path = root / BEST_NAME
    if not path.exists():
        return None
    try:
        step = loads_object(path.read_bytes())["step"]
        if not isinstance(step, int):
            raise ValueError(f"step is {step!r}")
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged ({error}); delete it, the next evaluation names a best one") from None
    return root / checkpoint_name(step)


def apply_retention(root: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete all but the ``keep_last`` newest, every step divisible by ``keep_every`` (0: none), and the best one."""
    everything = list_checkpoints(root)
    best = best_checkpoint(root)
    for step, path in everything[: -max(keep_last, 1)]:
        if path != best and not (keep_every and step % keep_every == 0):
            remove_folder_atomically(path)


def discard_after(root: Path, step: int) -> None:
    """Delete every checkpoint later than ``step``: damaged ones, or a future that a resumed run will play again.

    Raises CheckpointError, and deletes nothing, when an intact one named as best is among them.
    """
    later = [path for number, path in list_checkpoints(root) if number > step]
    best = best_checkpoint(root)
    if best in later and find_damage(best) is None:
        raise CheckpointError(
            f"{best} is named as best but is later than step {step}, which is being resumed; "
            f"copy it elsewhere and delete {root / BEST_NAME} to give it up"
        )
    for path in later:
        remove_folder_atomically(path)
    if best in later:
        (root / BEST_NAME).unlink()


def _file_digest(name: str, entry: JSON) -> FileDigest:
    if not isinstance(entry, dict) or Path(name).name != name:
        raise ValueError(f"{MANIFEST_NAME}: bad entry for {name!r}")
    size, sha256 = entry.get("bytes"), entry.get("sha256")
    if not isinstance(size, int) or not isinstance(sha256, str):
        raise ValueError(f"{MANIFEST_NAME}: {name} lacks bytes or sha256")
    return FileDigest(size, sha256)


def _sha256_of(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
