"""Held-out evaluation: which problems, and how an answer counts."""

import json

import pytest
from loop_factory import write_images

from trinity_vlm.answers import Matcher
from trinity_vlm.config import EvaluationConfig, MatcherConfig, RolesConfig
from trinity_vlm.engine.scripted import ScriptedEngine
from trinity_vlm.episode import Cast
from trinity_vlm.errors import ConfigError
from trinity_vlm.evaluation import evaluate_solver, load_problems
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier


def cast_of(answers):
    """A cast whose Solver gives these answers in order; None is a malformed completion."""
    config, prompts = RolesConfig(prompts="short"), PromptSet.load("short")
    texts = iter("no box" if a is None else f"so</think>\n<answer>\\boxed{{{a}}}</answer>" for a in answers)
    engine = ScriptedEngine(lambda request: [next(texts)])
    matcher = Matcher(MatcherConfig(symbolic=False))
    return Cast(
        Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config), matcher, engine, config, 0
    )


def write_problems(folder, rows):
    write_images(folder)
    path = folder / "problems.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_only_a_rule_match_counts_and_malformed_is_wrong(tmp_path):
    rows = [{"image": f"{i}.png", "question": "How many?", "answer": "3"} for i in range(4)]
    config = EvaluationConfig(source=str(write_problems(tmp_path, rows)))
    found = evaluate_solver(load_problems(config), cast_of(["3.0", "4", None, "a trio"]), config)
    assert found.correct == (True, False, False, False)
    assert found.formatted == (True, True, False, True)
    assert found.accuracy.value == 0.25


def test_the_same_configuration_asks_the_same_problems():
    config = EvaluationConfig(source="microcosm:evolve-heldout", problems=20)
    first, second = load_problems(config), load_problems(config)
    assert [(p.image.uid, p.question, p.answer) for p in first] == [(p.image.uid, p.question, p.answer) for p in second]
    assert len(first) == 20


def test_held_out_images_never_occur_in_training():
    config = EvaluationConfig(source="microcosm:evolve-heldout", problems=50)
    assert all(p.image.uid.startswith("microcosm:evolve-heldout/") for p in load_problems(config))


@pytest.mark.parametrize("text", ["not json", '{"image": "0.png"}', "[1]"])
def test_a_bad_line_is_named_with_its_number(tmp_path, text):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"problems\.jsonl:1"):
        load_problems(EvaluationConfig(source=str(path)))


def test_an_unknown_source_says_what_is_expected():
    with pytest.raises(ConfigError, match="jsonl"):
        load_problems(EvaluationConfig(source="/no/such.jsonl"))
