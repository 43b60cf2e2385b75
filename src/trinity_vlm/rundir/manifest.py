"""manifest.json: what makes a folder a run directory, and which version of the format it is."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import trinity_vlm
from trinity_vlm.config import FORMAT_VERSION
from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.atomic import replace_file
from trinity_vlm.rundir.strict_json import dumps, loads_object

MANIFEST_NAME = "manifest.json"
FORMAT_NAME = "trinity-vlm-run"


@dataclass(frozen=True, slots=True)
class RunManifest:
    """Written when the run directory is complete. Only the hash may be written once more, when a later version that
    counts fewer settings as fixed resumes the run.

    run_id: 12 random hexadecimal digits, the same over all resumes, e.g. to find the run in a tracker
    config_hash: over the settings that can't change on resume
    prompt_digest: of the prompt templates the run was started with; "" when unknown
    """

    run_id: str
    config_hash: str
    prompt_digest: str
    format: str = FORMAT_NAME
    format_version: int = FORMAT_VERSION
    package_version: str = trinity_vlm.__version__


def new_manifest(config_hash: str, prompt_digest: str) -> RunManifest:
    return RunManifest(uuid.uuid4().hex[:12], config_hash, prompt_digest)


def write_manifest(run: Path, manifest: RunManifest) -> None:
    """Raises OSError when the disk refuses it."""
    replace_file(run / MANIFEST_NAME, dumps(asdict(manifest), indent=1).encode())


def read_manifest(run: Path) -> RunManifest:
    """Raises RunDirectoryError when ``run`` is no run directory, damaged, or of a newer format than this package."""
    path = run / MANIFEST_NAME
    if not path.is_file():
        raise RunDirectoryError(f"{run} is not a run directory: it has no {MANIFEST_NAME}")
    try:
        values = loads_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}: damaged: {error}; restore it from a copy") from None
    version = values.get("format_version")
    if values.get("format") != FORMAT_NAME or not isinstance(version, int):
        raise RunDirectoryError(f"{path} belongs to another program: format is {values.get('format')!r}")
    if version > FORMAT_VERSION:
        raise RunDirectoryError(
            f"{run} has run format {version}, written by trinity-vlm {values.get('package_version')}; "
            f"this trinity-vlm {trinity_vlm.__version__} reads formats up to {FORMAT_VERSION}: upgrade it"
        )
    fields = ("run_id", "config_hash", "prompt_digest", "format", "package_version")
    texts = {name: str(values.get(name, "")) for name in fields}
    return RunManifest(**texts, format_version=version)
