"""`trinity-vlm keys` says of every key what it takes, and what it says is what the configuration accepts."""

import pytest

from trinity_vlm.cli.keys import allowed_values, describe_keys
from trinity_vlm.cli.main import main
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
