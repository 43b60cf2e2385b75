"""Episode files: typed, nested, complete, and without pixels or paths when asked."""

import io

import pyarrow.parquet as pq
import pytest
from PIL import Image
from rundir_helpers import completion, make_config, make_rollouts, make_scored

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir import EPISODE_SCHEMA, RunDirectory, write_episode_file
from trinity_vlm.rundir.episode_table import build_episode_table
from trinity_vlm.types import Role, Rollout


def test_an_episode_comes_back_whole(tmp_path, config):
    """Every field of a hand-made episode with a malformed candidate and solution and an adopted dispute."""
    scored = make_scored()
    with RunDirectory.create(tmp_path / "a", config) as run:
        run.write_episodes(1, [run.episode_table([scored], make_rollouts(scored))])
    table = RunDirectory.open(tmp_path / "a").read_episodes(1)
    assert table.schema.equals(EPISODE_SCHEMA)
    (row,) = table.to_pylist()
    question, malformed = row["candidates"]
    assert question == {
        "index": 0, "format_valid": True, "format_error": None, "text": '{"question": "How many?"}',
        "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2, "question": "How many?", "answer": "2",
        "screening": {
            "parsed": True, "fact_q": 1, "corr_a": 1, "difficulty": 0.7, "justification": "three dots",
            "raw": '{"fact_q": 1}',
        },
        "reward": {"fmt": 1, "fact": 0.5, "diff": 0.7, "chal": 0.0, "diff_discounted": 0.35, "total": 0.0525},
        "advantage": 1.0,
    }  # fmt: skip
    assert (malformed["format_error"], malformed["screening"], malformed["advantage"]) == ("no_json", None, None)
    assert (malformed["finish_reason"], malformed["reward"]["total"]) == ("length", -0.5)
    right, broken = row["solutions"]
    assert right["correctness"] == {"correct": 1, "tier": "unparsed", "rule": "equivalence", "raw": "3 is 3"}
    assert right["correctness_before_dispute"] == {"correct": 0, "tier": "numeric_guard", "rule": "numbers", "raw": ""}
    assert right["reasoning_verdict"] == {"parsed": True, "score": 0.5, "justification": "fine", "raw": "{}"}
    assert (right["reasoning"], right["answer"], right["advantage"]) == ("I count three.", "3", -0.5)
    assert right["reward"] == {"fmt": 1, "correct": 1, "reason": 0.5, "total": 0.85}
    assert (broken["correctness"], broken["reasoning_verdict"], broken["advantage"]) == (None, None, None)
    assert row["dispute"] == {
        "reference": "2", "majority_answer": "3", "member_indices": [0], "winner": "majority",
        "adopted_without_verdict": True, "attempts": 3, "justification": "", "raw": "I can't tell",
    }  # fmt: skip
    assert row["calls"] == [
        {"call": "propose", "prompt_tokens": 3, "completion_tokens": 2, "truncated": False, "parsed": True},
        {"call": "screen", "prompt_tokens": 5, "completion_tokens": 4, "truncated": False, "parsed": False},
    ]
    assert (row["step"], row["image_uid"], row["selected"], row["reference"]) == (1, "a.png", 0, "3")
    assert (row["image_width"], row["image_height"], row["corr_a_revoked"]) == (64, 32, True)


def test_thumbnails_are_small_and_can_be_switched_off(tmp_path):
    """On: a JPEG of at most thumbnail_side pixels. Off: the file holds no pixel, and no path either way."""
    for setting in ("on", "off"):
        images = {"source": "photos", "thumbnails": setting, "thumbnail_side": 16}
        with RunDirectory.create(tmp_path / setting, make_config(images=images)) as run:
            path = run.write_episodes(1, [run.episode_table([make_scored()], [])])
            (thumbnail,) = run.read_episodes(1)["thumbnail"].to_pylist()
        content = path.read_bytes()
        assert b"/home/someone" not in content
        if setting == "on":
            image = Image.open(io.BytesIO(thumbnail))
            assert (image.format, image.size) == ("JPEG", (16, 8))
            red, green, _ = image.getpixel((8, 4))
            assert red > 200 > 60 > green
        else:
            assert thumbnail is None
            assert b"JFIF" not in content


def test_the_image_is_not_changed_by_its_thumbnail():
    """The episode's own pixels keep their size: they may still be trained on."""
    scored = make_scored()
    build_episode_table([scored], [], 8)
    assert scored.episode.image.pixels.size == (64, 32)


def test_one_image_twice_in_a_step_keeps_its_advantages_apart():
    """Two episodes of one image, their completions different or equal: each gets its own advantages."""
    first, second = make_scored(token=10), make_scored(token=99)
    rollouts = [*make_rollouts(first), *make_rollouts(second)]
    values = [1.0, -0.5, 0.25, 0.125]
    rollouts = [
        Rollout(r.role, r.image_uid, r.slot, r.prompt, r.completion, r.reward, v)
        for r, v in zip(rollouts, values, strict=True)
    ]
    rows = build_episode_table([first, second], rollouts, None).to_pylist()
    assert [(r["candidates"][0]["advantage"], r["solutions"][0]["advantage"]) for r in rows] == [
        (1, -0.5),
        (0.25, 0.125),
    ]


@pytest.mark.parametrize("field", ["uid", "role", "slot", "tokens"])
def test_a_rollout_of_no_episode_is_refused(field):
    """A rollout that matches no completion would be an advantage lost from the log."""
    scored = make_scored()
    rollout = make_rollouts(scored)[0]
    stray = Rollout(
        Role.SOLVER if field == "role" else rollout.role,
        "b.png" if field == "uid" else rollout.image_uid,
        1 if field == "slot" else 0,
        rollout.prompt,
        completion("other", 5) if field == "tokens" else rollout.completion,
        0.0,
        1.0,
    )
    with pytest.raises(RunDirectoryError, match="belongs to no episode"):
        build_episode_table([scored], [rollout, stray], None)


def test_a_step_without_episodes_is_a_typed_empty_file(tmp_path, config):
    """Columns and types are there with no row; the format version is in the file."""
    with RunDirectory.create(tmp_path / "a", config) as run:
        path = run.write_episodes(1, [run.episode_table([], [])])
    table = pq.read_table(path)
    assert table.num_rows == 0
    assert table.schema.equals(EPISODE_SCHEMA)
    assert table.schema.metadata[b"trinity_vlm.format_version"] == b"1"


def test_one_episode_can_be_written_outside_of_a_run(tmp_path):
    """The same table as in a run, in a folder made for it."""
    scored = make_scored()
    write_episode_file(tmp_path / "new" / "episode.parquet", [scored], make_rollouts(scored), None)
    assert pq.read_table(tmp_path / "new" / "episode.parquet").equals(
        build_episode_table([scored], make_rollouts(scored), None)
    )
