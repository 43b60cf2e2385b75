from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from warmup_factory import load_small, write_small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return write_small_model(tmp_path_factory.mktemp("small"))


@pytest.fixture
def backbone(small_model):
    return load_small(small_model)
