"""Held-out evaluation: which problems, and how an answer counts."""

import hashlib
import json

import pytest
from loop_factory import small_config, write_images

from trinity_vlm.answers import Matcher
from trinity_vlm.assembly import assemble
from trinity_vlm.cli.playing import _open
from trinity_vlm.config import EvaluationConfig, MatcherConfig, RolesConfig, load_config
from trinity_vlm.engine.scripted import ScriptedEngine
from trinity_vlm.environments import open_environment
from trinity_vlm.episode import Cast
from trinity_vlm.errors import ConfigError
from trinity_vlm.evaluation import evaluate_solver, load_problems
from trinity_vlm.images import GridSize, ImageStream, open_source
from trinity_vlm.recording import Recorder, Silent
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.rundir import RunDirectory


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


def digest(picture):
    return hashlib.sha256(picture.convert("RGB").tobytes()).hexdigest()


def test_held_out_images_are_not_among_the_training_images():
    """By pixels: the first 200 images a run trains on, and the training split's images at the very places of the
    held-out ones, against the first 200 held-out problems."""
    config = load_config("tiny", ["evaluation.problems=200"])
    stream = ImageStream(open_source(config.images), config.images, config.seed, 0, 1, None)
    trained = {digest(record.pixels) for record in stream.take(200)}
    problems = load_problems(config.evaluation)
    held_out = {digest(problem.image.pixels) for problem in problems}
    split = config.images.source.partition(":")[2]
    places = [int(problem.image.uid.rpartition("/")[2]) for problem in problems]
    same_places = {digest(open_environment("microcosm").image(split, place)[1]) for place in places}
    assert min(map(len, (trained, held_out, same_places))) >= 195
    assert not held_out & (trained | same_places)


def test_no_image_that_training_can_ever_serve_is_held_out():
    """By name, over the whole source: an image is a pure function of its uid, so this holds for every epoch."""
    config = load_config("tiny")
    trained = {row.uid for unit in open_source(config.images).units for row in unit.load()}
    assert len(trained) > 100_000
    assert not trained & {problem.image.uid for problem in load_problems(config.evaluation)}


@pytest.mark.parametrize("text", ["not json", '{"image": "0.png"}', "[1]"])
def test_a_bad_line_is_named_with_its_number(tmp_path, text):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"problems\.jsonl:1"):
        load_problems(EvaluationConfig(source=str(path)))


def pixels(records):
    return {record.uid: (record.pixels.size, digest(record.pixels)) for record in records}


def test_training_evaluation_and_play_see_the_same_pixels(tmp_path):
    """Of one folder, whose images are not of the model's size, by all three ways into a real run."""
    folder = tmp_path / "pictures"
    rows = [{"image": f"{i}.png", "question": "How many?", "answer": "3"} for i in range(2)]
    source = write_problems(folder, rows)
    settings = ["model.min_pixels=9216", "model.max_pixels=9216", f"images.source={folder}/[01].png", "steps=1"]
    config = small_config(*settings, f"evaluation.source={source}")
    with RunDirectory.create(tmp_path / "run", config) as run, assemble(config) as system:
        trained = pixels(system.stream.take(2))
        examined = pixels(problem.image for problem in Recorder(system, run, Silent()).problems)
    played = pixels(_open(folder / f"{i}.png", None, "tiny", settings)[2] for i in range(2))
    assert [size for size, _ in trained.values()] == [(96, 96)] * 2
    assert trained == examined == played


def test_problems_of_an_environment_are_sized_like_the_training_images_too():
    config = EvaluationConfig(source="microcosm:evolve-heldout", problems=2)
    grid = GridSize(16, 64 * 64, 64 * 64)
    assert [p.image.pixels.size for p in load_problems(config, grid)] == [(64, 64)] * 2
    assert [p.image.pixels.size for p in load_problems(config)] == [(128, 128)] * 2


def test_an_unknown_source_says_what_is_expected():
    with pytest.raises(ConfigError, match="jsonl"):
        load_problems(EvaluationConfig(source="/no/such.jsonl"))
