"""Every setting says what it is for: `trinity-vlm keys` has nothing else to show."""

import pytest

from trinity_vlm.config import Config
from trinity_vlm.section import Section


def fields(section, prefix=""):
    for name, info in section.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield from fields(info.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, info


FIELDS = dict(fields(Config))


def test_all_sections_are_found():
    assert {"seed", "update.lr", "engine.vllm.kv_cache_gib", "roles.policy_sampling.top_k"} <= set(FIELDS)


@pytest.mark.parametrize("key", FIELDS)
def test_a_key_says_what_it_means(key):
    assert FIELDS[key].description
