"""Tests of the vLLM engine. Those marked ``vllm`` run vLLM's CPU build on the embedded model: `make test-vllm`."""

from __future__ import annotations

import importlib.util

import pytest

MISSING = "vLLM is not installed here; `make test-vllm` sets up an environment of its own"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs vLLM where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=MISSING))
