"""Opening sources: what is found, in which order, under which names, and how failures are worded."""

import os
import sys
import types

import fsspec
import pytest
from image_factory import (
    coloured,
    encode,
    index_of,
    write_folder,
    write_parquet,
    write_tar,
    write_tars,
)
from source_helpers import LIMITS, failure, indices, open_path, rows_of

from trinity_vlm.config import ImagesConfig
from trinity_vlm.images import (
    BadImage,
    ImageSource,
    ImageStream,
    Row,
    Unit,
    decode_image,
    hub,
    register_source,
    source,
)

# --- files


def test_a_folder_tree_is_read_recursively_sorted_and_by_extension(tmp_path):
    write_folder(tmp_path, 7)
    (tmp_path / "d0" / "UPPER.PNG").write_bytes(encode(coloured(7)))
    (tmp_path / "d0" / "notes.txt").write_text("not an image")
    opened = open_path(tmp_path)
    assert list(rows_of(opened))[:3] == ["d0/0000.png", "d0/0003.png", "d0/0006.png"]
    assert indices(opened) == list(range(8))


def test_other_and_hidden_files_are_reported_as_ignored(tmp_path, caplog):
    """A Mac's ``._photo.png`` is no picture; a folder of .heic photos must not shrink silently."""
    write_folder(tmp_path, 3)
    for name in ("._0000.png", "a.heic", "b.heic"):
        (tmp_path / name).write_bytes(b"x")
    with caplog.at_level("INFO", logger="trinity_vlm"):
        assert indices(open_path(tmp_path)) == [0, 1, 2]
    assert "3 other files ignored (2 .heic, 1 hidden)" in caplog.text


def test_links_never_lead_out_of_the_folder(tmp_path):
    """Neither a linked folder, nor a linked file, nor a loop; a link that stays inside is read."""
    inside = write_folder(tmp_path / "in", 3)
    outside = write_folder(tmp_path / "out", 3)
    (inside / "linked").symlink_to(outside)
    (inside / "loop").symlink_to(inside)
    (inside / "linked.png").symlink_to(outside / "d0" / "0000.png")
    (inside / "same.png").symlink_to(inside / "d0" / "0000.png")
    assert sorted(rows_of(open_path(inside))) == ["d0/0000.png", "d1/0001.png", "d2/0002.png", "same.png"]
    (tmp_path / "root").symlink_to(inside)
    assert open_path(tmp_path / "root").manifest_hash == open_path(inside).manifest_hash


def test_only_links_outside_is_an_error_that_says_so(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "far").symlink_to(write_folder(tmp_path / "out", 2))
    assert "1 links were not followed" in failure(tmp_path / "in")


def test_a_snapshot_of_the_hub_cache_is_read_through_its_links(tmp_path):
    """There every file is a link into ../../blobs."""
    repository = tmp_path / "datasets--me--pictures"
    write_parquet(repository / "blobs" / "0a1b", 6)
    snapshot = repository / "snapshots" / "f00"
    (snapshot / "data").mkdir(parents=True)
    (snapshot / "data" / "train-0.parquet").symlink_to("../../../blobs/0a1b")
    assert indices(open_path(snapshot)) == list(range(6))


def test_globs_files_and_lists_of_them(tmp_path):
    write_folder(tmp_path, 9)
    assert sorted(rows_of(open_path(tmp_path / "d[01]" / "*.png"))) == [
        f"d{i % 3}/{i:04d}.png" for i in (0, 3, 6, 1, 4, 7)
    ]
    assert indices(open_path(tmp_path / "**" / "*.png")) == list(range(9))
    assert list(rows_of(open_path(tmp_path / "d0" / "0003.png"))) == ["0003.png"]
    two = open_path(tmp_path / "d0" / "0003.png", tmp_path / "d1" / "0004.png")
    assert list(rows_of(two)) == ["0003.png/0003.png", "0004.png/0004.png"]


def test_large_trees_are_grouped_into_units_that_span_the_tree(tmp_path, monkeypatch):
    monkeypatch.setattr("trinity_vlm.images.files.UNITS_BEFORE_GROUPING", 10)
    opened = open_path(write_folder(tmp_path, 45))
    assert len(opened.units) == 9
    assert all(len(unit.load()) == 5 for unit in opened.units)
    assert all(len({row.uid.split("/")[0] for row in unit.load()}) == 3 for unit in opened.units)
    assert indices(opened) == list(range(45))


def test_manifest_tells_additions_and_renames_but_not_the_place(tmp_path):
    first, second = write_folder(tmp_path / "a", 5), write_folder(tmp_path / "b", 5)
    manifest = open_path(first).manifest_hash
    assert open_path(second).manifest_hash == manifest
    (second / "d0" / "0000.png").rename(second / "d0" / "0009.png")
    assert open_path(second).manifest_hash != manifest
    (first / "new.png").write_bytes(encode(coloured(9)))
    assert open_path(first).manifest_hash != manifest


def test_missing_empty_and_textual_folders_are_errors_that_teach(tmp_path):
    assert "no such file or folder" in failure(tmp_path / "gone")
    assert "holds no files" in failure(tmp_path)
    for name in ("a.txt", "b.json", "c"):
        (tmp_path / name).write_text("x")
    message = failure(tmp_path)
    assert "none of the 3 files is an image" in message
    assert "1 .txt, 1 .json, 1 no suffix" in message
    assert ".png" in message
    assert ".parquet" in message
    assert "none of the 1 files" in failure(tmp_path / "a.txt")
    assert "holds no files" in failure(tmp_path / "*.jpg")
    assert "empty list" in failure()


# --- tars


def test_tars_give_images_only_by_offset(tmp_path):
    opened = open_path(write_tars(tmp_path, 10))
    assert list(rows_of(opened))[:2] == ["000.tar#0000.png", "000.tar#0003.png"]
    assert indices(opened) == list(range(10))


def test_bad_tars_are_refused_on_opening(tmp_path):
    (tmp_path / "x.tar").write_bytes(b"no tar " * 500)
    assert "x.tar is not a readable tar" in failure(tmp_path)
    (tmp_path / "x.tar").write_bytes(b"")
    assert "x.tar is not a readable tar" in failure(tmp_path)


@pytest.mark.parametrize("where", ["cut in a picture", "cut between members", "damaged header"])
def test_what_is_lost_of_a_damaged_tar_is_counted(tmp_path, where):
    """The pictures before the damage are used; the rest is one counted row, not a silent drop and not a crash."""
    members = [(f"{i}.png", encode(coloured(i, side=200))) for i in range(4)]
    path = write_tar(tmp_path / "x.tar", members)
    raw = bytearray(path.read_bytes())
    third = raw.index(b"2.png\0")
    if where == "damaged header":
        raw[third : third + 300] = b"\x13" * 300
    else:
        raw = raw[: third + (600 if where == "cut in a picture" else 100)]
    path.write_bytes(raw)
    outcomes = []
    for row in rows_of(open_path(path)).values():
        try:
            outcomes.append(index_of(decode_image(row.read(), LIMITS)))
        except BadImage as bad:
            outcomes.append(bad.reason)
    expected = [0, 1, "truncated", "damaged_archive"] if where == "cut in a picture" else [0, 1, "damaged_archive"]
    assert outcomes == expected


# --- several, registered, imported, hub


def test_several_sources_keep_distinct_uids_and_are_spread_over_the_epoch(tmp_path):
    many, few = write_folder(tmp_path / "x" / "pics", 40), write_folder(tmp_path / "y" / "pics", 10)
    opened = open_path(many, few)
    assert {uid.split("/")[0] for uid in rows_of(opened)} == {"pics", "pics~2"}
    config = ImagesConfig(source="x", min_side=1)
    records = ImageStream(opened, config, seed=3).take(50)
    assert len({record.uid for record in records}) == 50
    counts = [sum(r.source == str(few) for r in records[i : i + 10]) for i in range(0, 50, 10)]
    assert sum(counts) == 10
    assert all(1 <= count <= 3 for count in counts)


def test_a_registered_scheme_gets_its_argument_and_the_config(monkeypatch):
    monkeypatch.setattr(source, "_FACTORIES", {})
    seen = []

    def factory(argument, config):
        seen.append((argument, config.per_step))
        return ImageSource(argument, (Unit("all", "shapes", lambda: [Row("s0", lambda: coloured(9))]),))

    register_source("shapes", factory)
    opened = open_path("shapes:train", per_step=5)
    assert seen == [("train", 5)]
    assert indices(opened) == [9]
    assert "shapes" in failure("shape:train")


def test_a_users_own_source_is_named_by_import_path(monkeypatch):
    module = types.ModuleType("my_sources")
    module.good = lambda config: ImageSource("mine", (Unit("u", "mine", lambda: [Row("a", lambda: coloured(4))]),))
    module.wrong = lambda config: ["a.png"]
    monkeypatch.setitem(sys.modules, "my_sources", module)
    assert indices(open_path("my_sources:good")) == [4]
    assert "must return an ImageSource" in failure("my_sources:wrong")
    assert "can't be imported" in failure("my_sources:gone")
    assert "can't be imported" in failure("no_such_module_here:factory")


@pytest.fixture
def fake_hub(tmp_path, monkeypatch):
    """A local file system in the place of the hub's: paths as HfFileSystem has them."""
    write_parquet(tmp_path / "datasets/me/pics/data/train-0.parquet", 4)
    write_parquet(tmp_path / "datasets/me/pics/data/test-0.parquet", 2, start=4)
    write_parquet(tmp_path / "datasets/me/plain/all.parquet", 3)
    filesystem = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
    monkeypatch.setattr(hub, "_filesystem", lambda name: filesystem)


@pytest.mark.usefixtures("fake_hub")
def test_hub_ids_read_the_train_shards_and_globs_what_they_say():
    assert indices(open_path("me/pics")) == [0, 1, 2, 3]
    assert next(iter(rows_of(open_path("hf://datasets/me/pics")))) == "data/train-0.parquet#0:0"
    assert indices(open_path("hf://datasets/me/pics/data/*.parquet")) == [0, 1, 2, 3, 4, 5]
    assert indices(open_path("me/plain")) == [0, 1, 2]
    assert "no parquet shard" in failure("hf://datasets/me/pics/raw/*.parquet")
    assert "no image column 'photo'" in failure("me/pics", column="photo")


def test_a_missing_hub_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'trinity-vlm[hub]'" in failure("someone/pictures")


def test_a_mistyped_path_under_an_existing_folder_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    assert "no such file or folder" in failure("data/imgs")
