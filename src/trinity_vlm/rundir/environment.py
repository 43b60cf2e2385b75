"""What a run ran on: versions, source commit, hardware. No host names, user names or paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

import trinity_vlm
from trinity_vlm.rundir.strict_json import JSON

PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy", "pillow", "pyarrow", "math-verify", "vllm")
_PACKAGE_FOLDER = Path(trinity_vlm.__file__).parent


def describe_environment() -> dict[str, JSON]:
    """One session's environment, ready for environment.json.

    GPU names are asked of torch only if the process has loaded it (a trainer always has), so that this module and
    whoever reads run directories stay free of torch.
    """
    versions: dict[str, JSON] = {"python": platform.python_version(), "trinity-vlm": trinity_vlm.__version__}
    versions |= {name: version for name in PACKAGES if (version := _version(name)) is not None}
    return {
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions,
        "git_commit": _git_commit(),
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": list(_gpu_names()),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _git_commit() -> str | None:
    """Commit of the checkout this package is imported from ("+changes" when edited), None for an installed package."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git("rev-parse", "HEAD")
    return f"{commit}+changes" if commit and _git("status", "--porcelain", ".") else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=_PACKAGE_FOLDER, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_names() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
