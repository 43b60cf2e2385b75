"""A value that is no import path is answered with everything that the key takes."""

import pytest

from trinity_vlm.errors import ConfigError
from trinity_vlm.extensions import load_object


@pytest.mark.parametrize("typo", ["vlm", "vllm:", ":make", "", "Transformers"])
def test_a_typo_of_a_plain_name_lists_the_known_ones(typo):
    with pytest.raises(ConfigError) as refusal:
        load_object(typo, "engine.kind", ("transformers", "vllm", "openai"))
    assert str(refusal.value) == (
        f"engine.kind={typo!r}: expected 'transformers', 'vllm', 'openai', or an import path 'package.module:name'"
    )


def test_a_key_without_plain_names_takes_import_paths_only():
    with pytest.raises(ConfigError, match=r"rewards.solver='mine': expected an import path"):
        load_object("mine", "rewards.solver")


def test_an_import_path_is_loaded_whatever_the_names():
    assert load_object("math:pi", "engine.kind", ("vllm",)) == pytest.approx(3.14159, abs=1e-5)
