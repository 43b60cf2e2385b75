"""`trinity-vlm keys` says of every key what it takes, and what it says is what the configuration accepts."""

import pytest

from trinity_vlm.cli.keys import allowed_values, describe_keys
from trinity_vlm.cli.main import EXIT_USER, main
from trinity_vlm.config import (
    Config,
    ImagesConfig,
    LoraConfig,
    ModelConfig,
    RolesConfig,
    TrackingConfig,
    UpdateConfig,
    all_keys,
    build_config,
    load_config,
    preset_names,
)
from trinity_vlm.errors import ConfigError


@pytest.mark.parametrize(
    ("section", "name", "expected"),
    [
        (RolesConfig, "candidates", "integer >= 1"),
        (RolesConfig, "dispute_majority", "number > 0.5 and <= 1"),
        (RolesConfig, "disputes", "true | false"),
        (RolesConfig, "reason_scope", "all | correct"),
        (UpdateConfig, "lr", "number > 0"),
        (UpdateConfig, "beta1", "number >= 0 and < 1"),
        (LoraConfig, "targets", "text | list of text"),
        (ImagesConfig, "thumbnails", "on | off"),
        (ModelConfig, "revision", "text"),
        (TrackingConfig, "trackers", "list of tensorboard | wandb | trackio"),
        (Config, "seed", "integer"),
    ],
)
def test_ranges_and_choices_in_words(section, name, expected):
    assert allowed_values(section, name) == expected


def test_every_key_says_what_it_takes():
    rows = list(describe_keys())
    assert [row[0] for row in rows] == all_keys()
    assert all(allowed for _, _, allowed, _ in rows)


def test_the_choices_that_are_named_are_accepted_and_others_are_not():
    """Of every key with a closed set of words: each one alone validates or contradicts another key by name."""
    values = load_config("tiny").model_dump(mode="json")
    for key, _, allowed, _ in describe_keys():
        choices = allowed.split(" | ")
        if len(choices) < 2 or {"text", "true"} & set(choices) or allowed.startswith("list"):
            continue
        *parents, leaf = key.split(".")
        for choice in (*choices, "nonsense"):
            section = values
            for parent in parents:
                section = section[parent]
            before, section[leaf] = section[leaf], choice
            try:
                build_config(values)
                assert choice != "nonsense", key
            except ConfigError as error:
                assert choice == "nonsense" or "with" in str(error), (key, choice, str(error))  # noqa: PT017
            section[leaf] = before


@pytest.mark.parametrize("columns", ["40", "120"])
def test_in_a_pipe_each_key_is_one_whole_line(capsys, monkeypatch, columns):
    """So that it can be searched and copied, however narrow the terminal."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["keys"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" = ")[0] for line in lines] == all_keys()
    (line,) = [line for line in lines if line.startswith("ema.kind")]
    assert line.startswith("ema.kind = factored  # ")
    assert line.endswith("(factored | dense | none | frozen)")
    assert any(line.startswith("update.compile_layers = true  # ") for line in lines)


def test_on_a_terminal_a_key_is_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["keys", "gradient_checkpointing"]) == 0
    assert "update.gradient_checkpointing" in capsys.readouterr().out


def shown(capsys, *arguments):
    """The lines of ``keys`` in a pipe by key: value, and what follows it."""
    assert main(["keys", *arguments]) == 0
    pairs = (line.split(" = ", 1) for line in capsys.readouterr().out.splitlines())
    return {key: tuple(rest.split("  # ", 1)) for key, rest in pairs}


@pytest.mark.parametrize("preset", preset_names())
def test_a_presets_values_are_shown_and_marked_where_they_differ(capsys, preset):
    """What is shown sets the same configuration again, key by key; a mark stands where the default is another value."""
    plain, values = shown(capsys), shown(capsys, "--preset", preset)
    assert list(values) == all_keys()
    config = load_config(preset)
    nested = [key for key, (value, _) in values.items() if value.startswith("{")]
    assert not nested, "presets set no whole sections"
    settings = [f"{key}={'null' if value == 'unset' else value}" for key, (value, _) in values.items()]
    assert load_config(preset, settings) == config
    for key, (value, text) in values.items():
        default = plain[key][0]
        mark = "(required) " if default == "required" else f"(default {default}) " if value != default else ""
        assert text == mark + plain[key][1]


def test_a_files_values_are_shown_and_searched(capsys, tmp_path):
    """Lists and whole sections as they are written; an unknown preset is refused."""
    file = tmp_path / "own.yaml"
    file.write_text(
        "{model: {path: tiny}, images: {source: [a, b]}, update: {lr: 0.25},"
        " roles: {verifier_engine: {kind: openai, urls: ['http://a:1'], model: m}}}"
    )
    meaning = shown(capsys, "update.lr")["update.lr"][1]
    assert shown(capsys, "update.lr", "--preset", str(file)) == {"update.lr": ("0.25", f"(default 1e-05) {meaning}")}
    values = shown(capsys, "--preset", str(file))
    assert values["images.source"][0] == "[a, b]"
    assert "urls: [http://a:1]" in values["roles.verifier_engine"][0]
    assert main(["keys", "--preset", "huge"]) == EXIT_USER
    assert "qwen3-vl-8b" in capsys.readouterr().err


def test_the_help_of_keys_shows_the_way_to_a_presets_values(capsys):
    assert main(["keys", "--help"]) == 0
    assert "keys lr --preset tiny" in capsys.readouterr().out
