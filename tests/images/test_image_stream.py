"""The stream: exact resume, partition between workers, bad rows."""

import json
import random
from itertools import chain

import numpy as np
import pyarrow.parquet as pq
import pytest
from image_factory import coloured, encode, index_of, make_source, noise, write_folder, write_parquet
from PIL import Image

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images import (
    DecodeLimits,
    GridSize,
    ImageSource,
    ImageStream,
    Row,
    Unit,
    decode_image,
    open_source,
)
from trinity_vlm.images.single import read_image

KINDS = ["folder", "parquet", "tar"]
CONFIG = ImagesConfig(source="memory")


def memory_source(*sizes: int) -> ImageSource:
    """Units of the given sizes; images are numbered through."""

    def unit(name: int, first: int, size: int) -> Unit:
        return Unit(
            f"u{name}", "memory", lambda: [Row(str(i), lambda i=i: coloured(i)) for i in range(first, first + size)]
        )

    return ImageSource("memory", tuple(unit(n, sum(sizes[:n]), size) for n, size in enumerate(sizes)))


def uids(stream: ImageStream, n: int) -> list[str]:
    return [record.uid for record in stream.take(n)]


def through_json(state):
    return json.loads(json.dumps(state))


# --- order


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_holds_each_image_once_and_each_epoch_has_its_own_order(tmp_path, kind):
    config = make_source(tmp_path / "s", kind, 23)
    stream = ImageStream(open_source(config), config, seed=5)
    epochs = [stream.take(23) for _ in range(3)]
    for epoch in epochs:
        assert sorted(index_of(record.pixels) for record in epoch) == list(range(23))
    orders = {tuple(record.uid for record in epoch) for epoch in epochs}
    assert len(orders) == 3
    assert all(list(order) != sorted(order) for order in orders)
    again = ImageStream(open_source(config), config, seed=5)
    assert uids(again, 23) == [record.uid for record in epochs[0]]
    assert uids(ImageStream(open_source(config), config, seed=6), 23) != [record.uid for record in epochs[0]]
    assert epochs[0][0].source == config.source


def test_rows_of_one_unit_are_reordered_in_every_epoch():
    stream = ImageStream(memory_source(20), CONFIG, seed=0)
    orders = [uids(stream, 20) for _ in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert all(sorted(order) == sorted(map(str, range(20))) for order in orders)


def test_a_source_smaller_than_a_batch_wraps_around():
    stream = ImageStream(memory_source(2, 1), CONFIG, seed=0)
    taken = uids(stream, 16)
    for start in range(0, 15, 3):
        assert sorted(taken[start : start + 3]) == ["0", "1", "2"]
    assert stream.served == 16


# --- resume


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 13])
def test_resuming_at_any_position_continues_exactly(tmp_path, kind, world):
    """take(a); save; load elsewhere; take(b) equals take(a + b): over epochs, with bad rows, shared units too."""
    config = make_source(tmp_path / "s", kind, 23, max_skip_rate=0.5)
    if kind == "folder":
        for name in ("d0/0003.png", "d1/0010.png"):
            (tmp_path / "s" / name).write_bytes(b"")
    source = open_source(config)
    rng = random.Random(f"{kind}{world}")
    for _ in range(8):
        a, b = rng.randrange(50), rng.randrange(1, 30)
        whole = ImageStream(source, config, seed=9, worker=world - 1, world=world)
        expected = uids(whole, a + b)[a:]
        first = ImageStream(source, config, seed=9, worker=world - 1, world=world)
        first.take(a)
        second = ImageStream(open_source(config), config, seed=777, worker=world - 1, world=world)
        second.load_state_dict(through_json(first.state_dict()))
        assert uids(second, b) == expected
        assert second.state_dict() == whole.state_dict()
        assert second.skipped == whole.skipped


def test_the_state_is_small_and_unchanged_by_a_round_trip():
    stream = ImageStream(memory_source(5, 5, 5), CONFIG, seed=1)
    stream.take(300)
    state = through_json(stream.state_dict())
    assert len(json.dumps(state)) < 500
    other = ImageStream(memory_source(5, 5, 5), CONFIG, seed=1)
    other.load_state_dict(state)
    assert other.state_dict() == state


def test_a_changed_source_is_refused_on_resume():
    stream = ImageStream(memory_source(5, 5), CONFIG, seed=1)
    state = stream.state_dict()
    with pytest.raises(ImageSourceError, match=r"changed since the checkpoint.*2 units then.*3 now"):
        ImageStream(memory_source(5, 5, 1), CONFIG, seed=1).load_state_dict(state)


def test_another_workers_position_is_refused():
    state = ImageStream(memory_source(5, 5), CONFIG, seed=1, worker=1, world=2).state_dict()
    with pytest.raises(ValueError, match="belongs to worker 1, this is worker 0"):
        ImageStream(memory_source(5, 5), CONFIG, seed=1, worker=0, world=2).load_state_dict(state)
    with pytest.raises(ValueError, match=r"worker=2 must be in 0\.\.1"):
        ImageStream(memory_source(5, 5), CONFIG, seed=1, worker=2, world=2)


def test_another_number_of_workers_warns_and_starts_a_new_order_that_all_workers_share():
    source = memory_source(4, 3, 6, 2, 5)
    saved = [ImageStream(source, CONFIG, seed=1, worker=w, world=2) for w in range(2)]
    for position, stream in enumerate(saved):
        stream.take(4 + 7 * position)
    resumed = []
    for worker in range(3):
        stream = ImageStream(source, CONFIG, seed=1, worker=worker, world=3)
        with pytest.warns(UserWarning, match="saved with 2 workers and is loaded with 3"):
            stream.load_state_dict(saved[worker % 2].state_dict())
        resumed.append(stream)
    assert sorted(chain.from_iterable(one_epoch(stream) for stream in resumed)) == sorted(map(str, range(20)))
    fresh = ImageStream(source, CONFIG, seed=1, worker=0, world=3)
    assert resumed[0].state_dict()["seed"] != fresh.state_dict()["seed"]


# --- workers


def one_epoch(stream: ImageStream) -> list[str]:
    """Everything a worker gets before its epoch number changes."""
    taken = []
    while True:
        record = stream.take(1)[0]
        if stream.state_dict()["epoch"] != 0:
            return taken
        taken.append(record.uid)


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("sizes", [(4, 3, 6, 2, 5), (20,), (1, 19), (1,) * 9])
def test_workers_partition_an_epoch_exactly(sizes, world):
    """Also with more workers than units, where every worker takes its share of each unit's rows."""
    source = memory_source(*sizes)
    shares = [one_epoch(ImageStream(source, CONFIG, seed=4, worker=w, world=world)) for w in range(world)]
    assert sorted(chain.from_iterable(shares)) == sorted(map(str, range(sum(sizes))))
    if sum(sizes) >= world * len(sizes):
        assert all(shares)


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_partition_real_sources(tmp_path, kind):
    config = make_source(tmp_path / "s", kind, 23)
    shares = [one_epoch(ImageStream(open_source(config), config, 4, worker=w, world=2)) for w in range(2)]
    assert all(shares)
    whole = uids(ImageStream(open_source(config), config, 4), 23)
    assert sorted(shares[0] + shares[1]) == sorted(whole)


@pytest.mark.parametrize("sizes", [(1,), (3,), (1, 0, 0)])
def test_no_worker_starves_when_there_are_fewer_images_than_workers(sizes):
    for worker in range(8):
        stream = ImageStream(memory_source(*sizes), CONFIG, seed=4, worker=worker, world=8)
        assert len(stream.take(5)) == 5


# --- bad rows


def folder_with_bad(root, good: int, bad: int, data: bytes = b"junk"):
    write_folder(root, good)
    for i in range(bad):
        (root / f"bad{i}.png").write_bytes(data)
    return str(root)


def test_bad_rows_are_skipped_counted_and_named(tmp_path):
    root = folder_with_bad(tmp_path, 40, 2)
    (tmp_path / "none.png").write_bytes(b"")
    (tmp_path / "small.png").write_bytes(encode(coloured(1, side=9)))
    config = ImagesConfig(source=root)
    stream = ImageStream(open_source(config), config, seed=0)
    assert len({record.uid for record in stream.take(40)}) == 40
    stream.take(1)
    assert stream.skipped == {"undecodable": 2, "zero_bytes": 1, "too_small": 1}
    assert dict(stream.bad_examples)["none.png"] == "zero_bytes"
    assert len(stream.bad_examples) == 4


@pytest.mark.parametrize(("bad", "stops"), [(8, False), (12, True)])
def test_the_stream_stops_when_too_many_are_bad(tmp_path, bad, stops):
    """40 files: 8 bad ones are 20 % of an epoch and allowed with 0.25, 12 are 30 % and not."""
    config = ImagesConfig(source=folder_with_bad(tmp_path, 40 - bad, bad), max_skip_rate=0.25)
    stream = ImageStream(open_source(config), config, seed=0)
    if not stops:
        assert len(stream.take(3 * (40 - bad))) == 3 * (40 - bad)
        return
    with pytest.raises(
        ImageSourceError, match=r"of the last \d+ images could not be used.*\d+ undecodable.*bad\d+\.png"
    ):
        stream.take(200)


def test_a_short_bad_streak_at_the_start_is_no_verdict():
    """Fewer than 20 images seen: no rate yet."""

    def read(i: int) -> bytes:
        return b"junk" if i < 15 else encode(coloured(i))

    rows = [Row(f"{i:03d}", lambda i=i: read(i)) for i in range(200)]
    source = ImageSource("memory", tuple(Unit(row.uid, "memory", lambda row=row: [row]) for row in rows))
    assert len(ImageStream(source, CONFIG, seed=0).take(100)) == 100


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("rate", [0.2, 1.0])
def test_an_epoch_in_which_nothing_decodes_raises_instead_of_looping(tmp_path, world, rate):
    config = ImagesConfig(source=folder_with_bad(tmp_path, 0, 7), max_skip_rate=rate)
    stream = ImageStream(open_source(config), config, seed=0, world=world)
    with pytest.raises(ImageSourceError, match="undecodable"):
        stream.take(1)
    if world == 1:
        assert stream.skipped == {"undecodable": 7}


def test_a_source_of_empty_units_raises():
    with pytest.raises(ImageSourceError, match="holds no images"):
        ImageStream(memory_source(0, 0), CONFIG, seed=0, world=5).take(1)
    with pytest.raises(ImageSourceError, match="holds no images"):
        memory_source()


def test_a_row_group_that_rots_after_opening_is_one_counted_skip(tmp_path):
    """Its pages are overwritten between opening and reading; the run goes on with the other row groups."""
    shard = write_parquet(tmp_path / "x.parquet", 30, row_group=10)
    config = ImagesConfig(source=str(shard))
    source = open_source(config)
    column = pq.ParquetFile(shard).metadata.row_group(1).column(1)
    assert column.path_in_schema == "image.bytes"
    raw = bytearray(shard.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    raw[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    shard.write_bytes(raw)
    stream = ImageStream(source, config, seed=0)
    seen = {index_of(record.pixels) for record in stream.take(20)}
    assert seen == set(range(10)) | set(range(20, 30))
    stream.take(20)
    assert stream.skipped == {"unreadable_unit": 2}
    assert stream.bad_examples[0] == ("x.parquet#1:10", "unreadable_unit")


def test_files_that_vanish_after_opening_are_skipped(tmp_path):
    config = make_source(tmp_path / "s", "tar", 24)
    source = open_source(config)
    (tmp_path / "s" / "001.tar").unlink()
    stream = ImageStream(source, config, seed=0)
    stream.take(17)
    assert stream.skipped == {"unreadable_unit": 1}


# --- one resize


def test_with_a_grid_every_image_leaves_the_stream_at_its_final_size(tmp_path):
    (tmp_path / "wide.png").write_bytes(encode(noise(900, 300)))
    (tmp_path / "photo.jpg").write_bytes(encode(noise(4000, 3000), "JPEG"))
    config = ImagesConfig(source=str(tmp_path))
    stream = ImageStream(open_source(config), config, seed=0, grid=GridSize(32, 256 * 32**2, 1024 * 32**2))
    pixels = {record.uid: record.pixels for record in stream.take(2)}
    assert {uid: image.size for uid, image in pixels.items()} == {"wide.png": (896, 320), "photo.jpg": (1152, 864)}
    draft = decode_image(tmp_path / "photo.jpg", DecodeLimits.from_config(config, draft_pixels=1024 * 32**2))
    assert draft.size == (2000, 1500)
    assert pixels["photo.jpg"] == draft.resize((1152, 864), Image.Resampling.BICUBIC)


def test_one_picture_read_from_a_file_has_the_pixels_of_the_stream(tmp_path):
    """With a grid and without; a large JPEG, which the stream decodes at a reduced scale, and a small PNG."""
    noise(1500, 900).save(tmp_path / "large.jpg")
    noise(100, 40).save(tmp_path / "small.png")
    config = ImagesConfig(source=str(tmp_path))
    for grid in (None, GridSize(16, 128 * 128, 128 * 128), GridSize(32, 65_536, 131_072)):
        for record in ImageStream(open_source(config), config, seed=0, grid=grid).take(2):
            single = read_image(tmp_path / record.uid, config, grid)
            assert np.array_equal(np.asarray(single.pixels), np.asarray(record.pixels))
            assert grid is None or grid.min_pixels <= single.pixels.width * single.pixels.height <= grid.max_pixels
