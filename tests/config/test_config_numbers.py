"""What counts as a number, a boolean and a switch in settings."""

import pytest

from trinity_vlm.config import all_keys, load_config
from trinity_vlm.errors import ConfigError
from trinity_vlm.section import suggestion


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("steps=yes", "steps=True: must be an integer >= 1, no boolean"),
        ("seed=no", "seed=False: must be an integer, no boolean"),
        ("ema.rank=true", "ema.rank=True: must be an integer >= 1, no boolean"),
        ("ema.alpha=on", "ema.alpha=True: must be a number >= 0 and <= 1, no boolean"),
        ("update.lr=off", "update.lr=False: must be a number > 0, no boolean"),
        ("matcher.relative_tolerance=no", "matcher.relative_tolerance=False: must be a number >= 0 and < 1"),
        ("roles.policy_sampling.top_k=yes", "roles.policy_sampling.top_k=True: must be an integer >= 0"),
    ],
)
def test_a_boolean_is_no_number(override, expected, tmp_path):
    """The error names key, value and range, from the command line and from a file alike."""
    with pytest.raises(ConfigError) as error:
        load_config("tiny", [override])
    assert expected in str(error.value)
    *sections, leaf = override.split("=")[0].split(".")
    lines = ["model: {path: tiny}", "images: {source: photos}"] if sections[:1] != ["model"] else []
    lines += [f"{'  ' * depth}{name}:" for depth, name in enumerate(sections)]
    lines += [f"{'  ' * len(sections)}{leaf}: {override.split('=')[1]}"]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("override", "value"), [("steps=20", 20), ("steps='20'", 20), ("steps=1e2", 100), ("steps=2e1", 20)]
)
def test_numbers_in_strings_are_numbers(override, value):
    assert load_config("tiny", [override]).steps == value


def test_booleans_stay_booleans_and_switches_need_no_quotes():
    """YAML reads an unquoted off as false; images.thumbnails means the word."""
    config = load_config("tiny", ["roles.disputes=no", "dry_run=yes", "images.thumbnails=off", "ema.rank=null"])
    assert (config.roles.disputes, config.dry_run, config.images.thumbnails) == (False, True, "off")
    assert config.ema.rank is None
    assert load_config("tiny", ["images.thumbnails=on"]).images.thumbnails == "on"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("update.warmup_step", "update.warmup_step: unknown key; did you mean update.warmup_steps?"),
        ("update.learning_rate", "update.learning_rate: unknown key; update has lr, weight_decay,"),
        ("engine.vllm.gpu_memory", "engine.vllm.gpu_memory: unknown key; engine.vllm has kv_cache_gib,"),
        ("stepz", "stepz: unknown key; did you mean steps?"),
        ("lr", "lr: unknown key; did you mean update.lr?"),
        ("rank", "rank: unknown key; did you mean lora.rank or ema.rank?"),
        ("lora.lr", "lora.lr: unknown key; did you mean update.lr?"),
        ("update.kv_cache_gib", "update.kv_cache_gib: unknown key; did you mean engine.vllm.kv_cache_gib?"),
        ("optimizer.lr", "optimizer.lr: unknown key; did you mean update.lr?"),
        ("optimiser.adam.beta1", "optimiser.adam.beta1: unknown key; did you mean update.beta1?"),
        ("foo", "foo: unknown key; `trinity-vlm keys` lists all"),
    ],
)
def test_an_unknown_key_is_answered_with_keys_of_its_own_section(key, message):
    """update.learning_rate was once answered with update.regularizer, which only looks alike."""
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", [f"{key}=1"])
    assert str(caught.value).startswith(message)


def test_the_last_part_alone_names_every_key_that_ends_with_it():
    """Whatever key a user remembers without its section: it is named, and so are its namesakes."""
    known = all_keys()
    for key in known:
        leaf = key.rpartition(".")[2]
        if leaf == key:
            continue
        said = suggestion(leaf, [other for other in known if other != leaf])
        assert said.startswith("; did you mean ")
        named = set(said.removeprefix("; did you mean ").rstrip("?").replace(" or ", ", ").split(", "))
        assert named == {other for other in known if other.endswith(f".{leaf}")}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("model: {path: tiny}", "images: required, but not set; for example images.source=photos/"),
        ("images: {source: a}\nmodel: {}", "model.path: required, but not set; for example model.path=Qwen/"),
    ],
)
def test_what_has_no_default_is_asked_for_with_an_example(lines, message, tmp_path):
    (tmp_path / "run.yaml").write_text(lines)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "run.yaml")
    assert str(error.value).startswith(message)
