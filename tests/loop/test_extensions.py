"""A user's reward functions and advantage rules: what they return is checked, and the error names them."""

from dataclasses import replace

import numpy as np
import pytest

from trinity_vlm import rewards
from trinity_vlm.advantages import collect_rollouts, group_advantages
from trinity_vlm.config import RewardsConfig
from trinity_vlm.errors import ConfigError
from trinity_vlm.extensions import advantage_rule, score
from trinity_vlm.types import Candidate, Completion, Episode, ImageRecord, Prompt, QuestionerReward, Solution

MODULE = "test_extensions"
COMPLETION = Completion((1,), (2, 3), "text", "stop")


def malformed_episode(candidates=2, solutions=2):
    """Two completions of each role, all malformed: Eq. (1) gives -0.5 each, Eq. (2) 0."""
    return Episode(
        1,
        ImageRecord("a.png", None),
        tuple(Candidate(i, Prompt(()), COMPLETION, False, "no_json", None, None) for i in range(candidates)),
        None,
        tuple(Solution(i, Prompt(()), COMPLETION, False, "no_box", None, None) for i in range(solutions)),
        None,
        None,
    )


def too_few(episode, config):
    return rewards.questioner_rewards(episode, config)[:1]


def too_many(episode, config):
    return [*rewards.solver_rewards(episode, config)] * 2


def plain_numbers(episode, config):
    return [0.5] * len(episode.candidates)


def nothing(*_arguments):
    return None


def not_finite(episode, config):
    return [replace(r, total=float("nan")) for r in rewards.questioner_rewards(episode, config)]


def infinite_term(episode, config):
    return [replace(r, reason=float("inf")) for r in rewards.solver_rewards(episode, config)]


def as_list(episode, config):
    return [QuestionerReward(1, 0.0, 0.0, 0.0, 0.0, np.float32(c.index)) for c in episode.candidates]


@pytest.mark.parametrize(
    ("role", "name", "found"),
    [
        ("questioner", "too_few", "1 values"),
        ("questioner", "plain_numbers", r"0\.5, 0\.5"),
        ("questioner", "nothing", "None"),
        ("questioner", "not_finite", "nan"),
        ("solver", "too_many", "4 values"),
        ("solver", "infinite_term", "inf"),
    ],
)
def test_a_reward_function_that_returns_something_else_is_named(role, name, found):
    """Key, path, image, what came and what was expected."""
    path, kind = f"{MODULE}:{name}", {"questioner": "QuestionerReward", "solver": "SolverReward"}[role]
    text = rf"rewards\.{role}='{path}' returned .*{found}.*a\.png.*expected 2 {kind}"
    with pytest.raises(ConfigError, match=text):
        score(malformed_episode(), RewardsConfig(**{role: path}))


def test_any_collection_of_finite_rewards_is_taken():
    scored = score(malformed_episode(), RewardsConfig(questioner=f"{MODULE}:as_list"))
    assert [r.total for r in scored.questioner_rewards] == [0.0, 1.0]
    assert [r.total for r in scored.solver_rewards] == [0.0, 0.0]


def first_only(group):
    return group[:1]


def divided_by_zero(group):
    return [float("inf")] * len(group)


def words(group):
    return ["high"] * len(group)


def array(group):
    return np.asarray(group) / 2


@pytest.mark.parametrize(
    ("name", "found"), [("first_only", "1 values"), ("divided_by_zero", "inf"), ("words", "high"), ("nothing", "None")]
)
def test_an_advantage_rule_that_returns_something_else_is_named(name, found):
    config = RewardsConfig(advantages=f"{MODULE}:{name}")
    scored = score(malformed_episode(), config)
    with pytest.raises(ConfigError, match=rf"rewards\.advantages='{MODULE}:{name}' returned .*{found}.*expected 2 "):
        collect_rollouts([scored], advantage_rule(config))


def test_arrays_and_the_shipped_rule_pass_the_check():
    assert advantage_rule(RewardsConfig(advantages=f"{MODULE}:array"))([1.0, -1.0]) == (0.5, -0.5)
    for group in ([1.0, 0.0, 0.0, 0.0], [0.85] * 6, [-0.5] * 4, []):
        assert advantage_rule(RewardsConfig())(group) == group_advantages(group)
