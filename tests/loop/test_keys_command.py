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


def test_the_command_prints_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["keys", "ema."]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "number >= 0 and <= 1" in text
    assert "factored | dense | none | frozen" in text
