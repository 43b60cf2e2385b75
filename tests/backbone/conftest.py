"""Model directories, built once per session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_families

from trinity_vlm.backbone import Backbone


@pytest.fixture(scope="session")
def family_directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family's tiny model, built on first use."""
    built: dict[str, Path] = {}

    def directory(family: str) -> Path:
        if family not in built:
            built[family] = tiny_families.build(family, tmp_path_factory.mktemp(family))
        return built[family]

    return directory


@pytest.fixture(params=tiny_families.FAMILIES)
def any_family(request: pytest.FixtureRequest, family_directory: Callable[[str], Path]) -> Backbone:
    """A fresh adapter backbone of every family."""
    return tiny_families.load(family_directory(request.param))


@pytest.fixture
def qwen(family_directory: Callable[[str], Path]) -> Backbone:
    """A fresh Qwen3-VL adapter backbone."""
    return tiny_families.load(family_directory("qwen3_vl"))
