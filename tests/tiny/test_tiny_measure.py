"""The role report, played by scripted models whose right scores are known."""

from __future__ import annotations

import json
import math

import pytest

from trinity_vlm.engine.scripted import TRUNCATED, ScriptedEngine
from trinity_vlm.environments.microcosm import Microcosm, text
from trinity_vlm.environments.microcosm.sampler import sample_question
from trinity_vlm.errors import ConfigError
from trinity_vlm.tiny.curriculum import tiny_roles
from trinity_vlm.tiny.measure import Measurer, Sizes, held_out_demonstrations, split_style, table
from trinity_vlm.types import CallType

SIZES = Sizes(problems=40, images=6, candidates=2, screenings=60, judgements=60)
WORLD = Microcosm()


def completions_by_prompt(split, count):
    """What the demonstrations of each call want, keyed by image and prompt text."""
    from trinity_vlm.tiny.curriculum import RolePrompts

    prompts = RolePrompts(tiny_roles())
    wanted = {}
    for call in (CallType.SCREEN, CallType.REASON, CallType.EQUIVALENCE, CallType.DISPUTE):
        for d in held_out_demonstrations(call, split, count):
            prompt = prompts.prompt(d)
            wanted[call, prompt.image.uid if prompt.image else None, prompt.messages[-1].text] = d.completion
    return wanted


def oracle(split):
    """A model that is always right and always in form."""
    wanted = completions_by_prompt(split, 60)

    def answer(request):
        image, message = request.prompt.image, request.prompt.messages[-1].text
        if request.call is CallType.SOLVE:
            truth = WORLD.judge(WORLD.scene_of(image.uid), message, "").answer
            thinking = f"answer {truth}" if not request.sampling.temperature else "looked"
            return [f"{thinking}</think><answer>\\boxed{{{truth}}}</answer>"]
        if request.call is CallType.PROPOSE:
            from random import Random

            program, truth = sample_question(Random(image.uid), WORLD.scene_of(image.uid))
            return ["looked</think>" + json.dumps({"question": text(program), "answer": truth.text})]
        key = (request.call, image.uid if image else None, message)
        if key not in wanted:  # the oracle's own, right pair
            return ['{"justification": "", "fact_q": 1, "corr_a": 1, "difficulty": 0.4}']
        return [wanted[key]]

    return answer


def test_an_oracle_scores_one_everywhere():
    """Every accuracy, format and precision is 1; ungrounded pairs that pass are 0; it glances when greedy only."""
    report = Measurer(ScriptedEngine(oracle("base-heldout")), tiny_roles()).report("base-heldout", SIZES)
    other = {"screen/ungrounded_passed": 0.0, "questioner/distinct": 0.5, "solver/glanced_sampled": 0.0}
    assert math.isnan(report.pop("solver/accuracy_glanced"))
    assert report == {name: other.get(name, 1.0) for name in report}


def test_a_model_that_passes_everything():
    """Precision falls to the share of good pairs, recall stays 1, and every ungrounded pair passes."""

    def answer(request):
        if request.call is CallType.SCREEN:
            return ['{"justification": "", "fact_q": 1, "corr_a": 1, "difficulty": 0.1}']
        return oracle_of_base(request)

    oracle_of_base = oracle("base-heldout")
    report = Measurer(ScriptedEngine(answer), tiny_roles()).report("base-heldout", SIZES)
    demos = held_out_demonstrations(CallType.SCREEN, "base-heldout", SIZES.screenings)
    good = sum(d.case in ("right", "right_reworded") for d in demos) / len(demos)
    assert report["screen/pass_precision"] == pytest.approx(good)
    assert report["screen/pass_recall"] == report["screen/ungrounded_passed"] == 1.0
    assert report["screen/corr_a"] == pytest.approx(good)


def test_malformed_and_truncated_completions_count_against_format():
    """A model that never closes anything has format 0 and accuracy 0, and no pair of its own to be judged."""
    report = Measurer(ScriptedEngine(lambda request: ["a1 a1" + TRUNCATED]), tiny_roles()).report("base-heldout", SIZES)
    formats = {name: value for name, value in report.items() if "/format" in name}
    assert set(formats.values()) == {0.0}
    assert report["solver/accuracy"] == 0.0
    assert math.isnan(report["questioner/right"])


def test_groups_of_the_solver():
    """Domains, levels and yes/no split the problems; their weighted means give the total back."""
    wrong_on_charts = lambda request: [  # noqa: E731
        "x</think><answer>\\boxed{nothing}</answer>"
        if "bar" in request.prompt.messages[-1].text or "point" in request.prompt.messages[-1].text
        else oracle("base-heldout")(request)[0]
    ]
    metrics = Measurer(ScriptedEngine(wrong_on_charts), tiny_roles()).solver("base-heldout", 40)
    assert metrics["solver/shapes"] == 1.0
    assert metrics["solver/charts"] < 0.2
    problems = WORLD.problems("base-heldout", 40, 700_001)
    yes_no = sum(p.answer in ("yes", "no") for p in problems)
    total = yes_no * metrics.get("solver/yes_no", 0) + (40 - yes_no) * metrics["solver/no_yes_no"]
    assert metrics["solver/accuracy"] == pytest.approx(total / 40)


def test_adapter_and_sampling_reach_the_engine():
    """Solver greedy at temperature 0, Verifier calls as configured, no schema: format is the model's own."""
    engine = ScriptedEngine(oracle("base-heldout"))
    Measurer(engine, tiny_roles(), adapter="policy").report("base-heldout", SIZES)
    assert {r.adapter for r in engine.requests} == {"policy"}
    assert {r.json_schema for r in engine.requests} == {None}
    assert {r.sampling.temperature for r in engine.requests if r.call is CallType.SOLVE} == {0.0, 1.0}
    assert {r.sampling.temperature for r in engine.requests if r.call is CallType.SCREEN} == {0.7}


def test_splits_of_one_style_only():
    """The training split mixes styles: there is no single style to make Verifier demonstrations in."""
    assert split_style("base-heldout") == "base"
    with pytest.raises(ConfigError, match="one style"):
        split_style("train")


def test_table_has_a_row_per_metric():
    result = table({"a": {"x": 1.0, "y": 0.5}, "b": {"x": 0.25}})
    assert result.row_count == 2
    assert [list(c.cells) for c in result.columns] == [["x", "y"], ["1.000", "0.500"], ["0.250", "nan"]]
