"""What the workers send one another about a step: records, never pixels."""

import pickle

import pytest
from loop_factory import picture, small_config
from PIL import Image

from trinity_vlm.advantages import collect_rollouts
from trinity_vlm.assembly import assemble
from trinity_vlm.extensions import score
from trinity_vlm.recording import Recorder, Silent, StepResult
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.types import Candidate, Completion, Episode, Message, Prompt
from trinity_vlm.workers import Workers


class PickyWorkers(Workers):
    """One worker whose values go through pickle, as they do between processes."""

    def gather(self, value):
        return [pickle.loads(pickle.dumps(value))]

    def gather_to_main(self, value):
        return [pickle.loads(pickle.dumps(value))]


def step_result(config, count=2):
    """Episodes of one malformed candidate each; image, prompt and rollout hold the pixels, as in a real step."""
    scored = []
    for index in range(count):
        image = picture(index)
        prompt = Prompt((Message("user", "Ask.", image),))
        candidate = Candidate(0, prompt, Completion((1,), (2, 3), "text", "stop"), False, "no_json", None, None)
        scored.append(score(Episode(1, image, (candidate,), None, (), None, None), config.rewards))
    return StepResult(tuple(scored), tuple(collect_rollouts(scored)), {})


def refuse_to_travel(image):
    raise AssertionError(f"the pixels of {image} were about to be sent to another worker")


@pytest.mark.parametrize("thumbnails", ["on", "off"])
def test_a_step_is_recorded_without_sending_pixels(tmp_path, monkeypatch, thumbnails):
    """The file holds what it always held: advantages, sizes and, unless switched off, thumbnails."""
    config = small_config("evaluation.source=null", f"images.thumbnails='{thumbnails}'", "checkpoint.every=5")
    monkeypatch.setattr(Image.Image, "__getstate__", refuse_to_travel)
    with pytest.raises(AssertionError, match="pixels"):
        pickle.dumps(picture(0))
    with RunDirectory.create(tmp_path / "run", config) as run, assemble(config) as system:
        system.workers = PickyWorkers()
        Recorder(system, run, Silent()).record(1, step_result(config))
    table = RunDirectory.open(tmp_path / "run").read_episodes(1)
    assert table.column("image_uid").to_pylist() == ["picture-0", "picture-1"]
    assert (table.column("thumbnail").null_count == 0) == (thumbnails == "on")
    assert table.column("image_width").to_pylist() == [128, 128]
    assert [c[0]["advantage"] for c in table.column("candidates").to_pylist()] == [-0.5, -0.5]


def test_the_parts_of_all_workers_make_one_file(tmp_path):
    """In rank order, equal to one worker's table of the same episodes."""
    config = small_config()
    result = step_result(config, 3)
    with RunDirectory.create(tmp_path / "run", config) as run:
        parts = [run.episode_table(result.scored[a:b], result.rollouts[a:b]) for a, b in ((0, 1), (1, 3), (3, 3))]
        run.write_episodes(1, parts)
        assert run.read_episodes(1).equals(run.episode_table(result.scored, result.rollouts))
