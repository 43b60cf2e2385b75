"""Exported pairs: what is in, with which answer, and that ``datasets`` loads the file."""

from dataclasses import replace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rundir_helpers import make_config, make_scored

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir import RunDirectory, export_pairs
from trinity_vlm.types import ScreeningVerdict


def variants():
    """An overturned pair; one kept without dispute and never formatted; one passed but not selected; none passed."""
    overturned = make_scored("overturned.png")
    episode = overturned.episode
    question = episode.candidates[0]
    unsolved = replace(
        make_scored("unsolved.png"),
        episode=replace(
            make_scored("unsolved.png").episode, dispute=None, reference="2", solutions=(episode.solutions[1],)
        ),
        solver_rewards=(overturned.solver_rewards[1],),
    )
    second = replace(question, index=1, question="Which colour?", answer="red")
    spare = replace(
        make_scored("spare.png"), episode=replace(make_scored("spare.png").episode, candidates=(question, second))
    )
    failed = replace(question, screening=ScreeningVerdict(True, 1, 0, 1.0))
    unparsed = replace(question, index=1, screening=ScreeningVerdict(False, 1, 1, 1.0))
    none_passed = replace(
        make_scored("none.png"),
        episode=replace(
            make_scored("none.png").episode,
            candidates=(failed, unparsed), selected=None, solutions=(), dispute=None, reference=None,
        ),
        solver_rewards=(),
    )  # fmt: skip
    return [overturned, unsolved, spare, none_passed]


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run", make_config()) as run:
        run.write_episodes(1, [run.episode_table(variants(), [])])
        run.write_episodes(12, [run.episode_table([make_scored("late.png", step=12)], [])])
    return run


def load(path, tmp_path):
    return datasets.load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))


def test_selected_pairs_carry_the_final_reference(run, tmp_path):
    """Answers after disputes, success rates over formatted solutions, provenance; no pixels unless asked."""
    assert export_pairs(run, tmp_path / "out" / "pairs.parquet", images=False) == 4
    data = load(tmp_path / "out" / "pairs.parquet", tmp_path)
    assert "image" not in data.column_names
    rows = {row["image_uid"]: row for row in data}
    assert rows["overturned.png"] == {
        "question": "How many?", "answer": "3", "proposed_answer": "2", "difficulty": 0.7, "solver_success_rate": 1.0,
        "num_solutions": 1, "selected": True, "disputed": True, "adopted_without_verdict": True,
        "step": 1, "image_uid": "overturned.png", "run_id": run.run_id,
    }  # fmt: skip
    assert (rows["unsolved.png"]["answer"], rows["unsolved.png"]["disputed"]) == ("2", False)
    assert (rows["unsolved.png"]["solver_success_rate"], rows["unsolved.png"]["num_solutions"]) == (None, 0)
    assert rows["late.png"]["step"] == 12
    assert list(rows) == ["overturned.png", "unsolved.png", "spare.png", "late.png"]


def test_all_passed_adds_the_unselected_ones(run, tmp_path):
    """A passed but unselected candidate keeps its own answer and no success rate; failed or unparsed never appear."""
    assert export_pairs(run, tmp_path / "all.parquet", images=False, selected_only=False) == 5
    (row,) = [row for row in load(tmp_path / "all.parquet", tmp_path) if not row["selected"]]
    assert (row["image_uid"], row["question"], row["answer"]) == ("spare.png", "Which colour?", "red")
    assert (row["solver_success_rate"], row["num_solutions"], row["disputed"]) == (None, 0, False)


def test_images_are_decoded_by_datasets(run, tmp_path):
    """Asked for, the thumbnail is a column that ``datasets`` gives as a PIL image."""
    assert export_pairs(run, tmp_path / "pairs.parquet", images=True) == 4
    data = load(tmp_path / "pairs.parquet", tmp_path)
    assert isinstance(data.features["image"], datasets.Image)
    assert data[0]["image"].size == (64, 32)


def test_images_that_were_never_kept_cant_be_exported(tmp_path):
    """thumbnails=off and images=True contradict each other: named, and nothing is written."""
    config = make_config(images={"source": "photos", "thumbnails": "off"})
    with RunDirectory.create(tmp_path / "run", config) as run:
        run.write_episodes(1, [run.episode_table(variants(), [])])
    with pytest.raises(RunDirectoryError, match=r"images\.thumbnails=off"):
        export_pairs(run, tmp_path / "pairs.parquet", images=True)
    assert not (tmp_path / "pairs.parquet").exists()
    assert export_pairs(run, tmp_path / "pairs.parquet", images=False) == 3


def test_a_run_without_pairs_gives_an_empty_typed_file(tmp_path):
    """No episode yet: zero rows, typed columns."""
    RunDirectory.create(tmp_path / "run", make_config()).close()
    assert export_pairs(RunDirectory.open(tmp_path / "run"), tmp_path / "pairs.parquet", images=True) == 0
    table = pq.read_table(tmp_path / "pairs.parquet")
    assert table.num_rows == 0
    assert table.schema.field("solver_success_rate").type == pa.float64()


def test_a_damaged_step_leaves_no_half_export(run, tmp_path):
    """The export fails with the step's file named; an earlier export at that path stays as it was."""
    out = tmp_path / "pairs.parquet"
    out.write_bytes(b"earlier")
    (run.path / "episodes" / "step-000012.parquet").write_bytes(b"junk")
    with pytest.raises(RunDirectoryError, match="step-000012"):
        export_pairs(run, out, images=False)
    assert out.read_bytes() == b"earlier"
    assert not list(tmp_path.glob(".tmp-*"))
