"""Tiny models and engines for the engine tests; the builders live beside the backbone tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backbone"))

import tiny_families

from trinity_vlm.backbone import Backbone


@pytest.fixture(scope="session")
def engine_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL directory."""
    return tiny_families.build("qwen3_vl", tmp_path_factory.mktemp("engine-qwen3-vl"))


@pytest.fixture(scope="module")
def players(engine_model_directory: Path) -> Backbone:
    """A backbone with a policy and a verifier that differ from the base and from each other. Not to be changed."""
    backbone = tiny_families.load(engine_model_directory)
    backbone.add_adapter("verifier", 6, 6.0)
    tiny_families.randomize(backbone, "policy", 1)
    tiny_families.randomize(backbone, "verifier", 2)
    return backbone


@pytest.fixture(params=tiny_families.FAMILIES, scope="module")
def any_players(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    """A backbone of every family whose policy differs from the base."""
    backbone = tiny_families.load(tiny_families.build(request.param, tmp_path_factory.mktemp(request.param)))
    tiny_families.randomize(backbone, "policy", 1)
    return backbone
