"""The small configuration of these tests; the rest is in rundir_helpers."""

import pytest
from rundir_helpers import make_config


@pytest.fixture
def config():
    return make_config()
