"""Parquet shards: every form of image column, and no byte of any other."""

import io
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from image_factory import (
    coloured,
    encode,
    image_cells,
    index_of,
    write_folder,
    write_parquet,
)
from source_helpers import LIMITS, failure, indices, open_path, rows_of

from trinity_vlm.config import ImagesConfig
from trinity_vlm.images import (
    BadImage,
    ImageStream,
    decode_image,
)
from trinity_vlm.images.storage import LocalStorage


def as_struct(indices_):
    return image_cells(indices_)


CELLS = {
    "struct": (as_struct, pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
    "large struct": (as_struct, pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())])),
    "bytes only": (lambda r: [{"bytes": encode(coloured(i))} for i in r], pa.struct([("bytes", pa.binary())])),
    "binary": (lambda r: [encode(coloured(i)) for i in r], pa.binary()),
    "list of struct": (lambda r: [[c] for c in image_cells(r)], pa.list_(pa.struct([("bytes", pa.binary())]))),
    "list of binary": (lambda r: [[encode(coloured(i))] for i in r], pa.list_(pa.binary())),
}


@pytest.mark.parametrize("kind", CELLS)
def test_every_form_of_image_column_is_read(tmp_path, kind):
    make, arrow_type = CELLS[kind]
    table = pa.table({"answer": ["no"] * 7, "pic": pa.array(make(range(7)), arrow_type)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    opened = open_path(tmp_path / "x.parquet", column="pic")
    assert list(rows_of(opened))[2:5] == ["x.parquet#0:2", "x.parquet#1:0", "x.parquet#1:1"]
    assert indices(opened) == list(range(7))


def test_lists_of_several_images_give_one_row_each(tmp_path):
    cells = image_cells(range(4))
    table = pa.table({"image": [cells[:2], cells[2:3], [], None, cells[3:]]})
    pq.write_table(table, tmp_path / "x.parquet")
    rows = rows_of(open_path(tmp_path))
    assert list(rows) == [f"x.parquet#0:{name}" for name in ("0", "0.1", "1", "2", "3", "4")]
    assert [index_of(decode_image(rows[f"x.parquet#0:{n}"].read(), LIMITS)) for n in ("0", "0.1", "1", "4")] == [
        0,
        1,
        2,
        3,
    ]
    for name in ("2", "3"):
        with pytest.raises(BadImage, match="null_bytes"):
            rows[f"x.parquet#0:{name}"].read()


def test_null_bytes_fall_back_to_a_path_beside_the_shard(tmp_path):
    folder = tmp_path / "data"
    (folder / "pics").mkdir(parents=True)
    (folder / "pics" / "5.png").write_bytes(encode(coloured(5)))
    (tmp_path / "secret.png").write_bytes(encode(coloured(6)))
    (folder / "pics" / "link.png").symlink_to(tmp_path / "secret.png")
    paths = ["pics/5.png", "../secret.png", str(tmp_path / "secret.png"), "pics/link.png", "pics/gone.png", None]
    for column in ([{"bytes": None, "path": path} for path in paths], paths):
        pq.write_table(pa.table({"image": column}), folder / "x.parquet")
        outcomes = []
        for row in rows_of(open_path(folder / "x.parquet")).values():
            try:
                outcomes.append(index_of(decode_image(row.read(), LIMITS)))
            except BadImage as bad:
                outcomes.append(bad.reason)
        assert outcomes == [5, "outside_root", "outside_root", "outside_root", "missing_file", "null_bytes"]


def labelled_shard(path, rows=40):
    """Images beside large, incompressible label columns, on both sides of the image column."""
    rng = np.random.default_rng(0)

    def texts():
        return [rng.bytes(30_000).hex() for _ in range(rows)]

    table = pa.table({"question": texts(), "image": image_cells(range(rows)), "answer": texts(), "solution": texts()})
    pq.write_table(table, path, row_group_size=20, use_dictionary=False)
    return path


def test_label_columns_may_be_destroyed_on_disk_and_nobody_notices(tmp_path):
    """The proof that question and answer columns are never read: all their pages are overwritten."""
    shard = labelled_shard(tmp_path / "x.parquet")
    metadata = pq.ParquetFile(shard).metadata
    raw = bytearray(shard.read_bytes())
    for group in range(metadata.num_row_groups):
        for c in range(metadata.num_columns):
            column = metadata.row_group(group).column(c)
            if not column.path_in_schema.startswith("image"):
                start = column.data_page_offset
                raw[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    shard.write_bytes(raw)
    with pytest.raises((OSError, pa.ArrowException)):
        pq.read_table(shard, columns=["answer"])
    assert indices(open_path(shard)) == list(range(40))
    assert len(ImageStream(open_path(shard), ImagesConfig(source="x", min_side=1), seed=1).take(50)) == 50


class RecordingFile(io.FileIO):
    """A file that notes which byte ranges are read."""

    ranges: ClassVar[list[range]] = []

    def read(self, size=-1):
        start = self.tell()
        data = super().read(size)
        self.ranges.append(range(start, start + len(data)))
        return data


def test_no_byte_of_a_label_column_is_fetched(tmp_path, monkeypatch):
    """Apart from the file's last 64 KiB, which Arrow reads to find the footer: they end the last label column here."""
    shard = labelled_shard(tmp_path / "x.parquet")
    ranges: list[range] = []
    monkeypatch.setattr(RecordingFile, "ranges", ranges)
    monkeypatch.setattr(LocalStorage, "open", lambda self, relative: RecordingFile(self.root / relative))
    assert indices(open_path(shard)) == list(range(40))
    metadata, size = pq.ParquetFile(shard).metadata, shard.stat().st_size
    chunks = [metadata.row_group(g).column(c) for g in range(2) for c in range(metadata.num_columns)]
    labels = [
        range(c.data_page_offset, min(c.data_page_offset + c.total_compressed_size, size - 65536))
        for c in chunks
        if not c.path_in_schema.startswith("image")
    ]
    assert len(labels) == 6
    assert ranges
    assert not [(r, label) for r in ranges for label in labels if max(r.start, label.start) < min(r.stop, label.stop)]


def test_only_image_leaves_are_requested(tmp_path, monkeypatch):
    shard = labelled_shard(tmp_path / "x.parquet")
    requested = []
    read_row_group = pq.ParquetFile.read_row_group

    def spy(self, group, columns=None, **options):
        requested.append(columns)
        return read_row_group(self, group, columns=columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", spy)
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)
    stream = ImageStream(open_path(shard), ImagesConfig(source="x", min_side=1), seed=1)
    stream.take(40)
    assert requested == [["image.bytes", "image.path"]] * 2


def test_a_column_named_like_the_image_column_is_not_part_of_it(tmp_path):
    table = pa.table({"image": image_cells([3]), "image_caption": ["a"], "image.bytes": [b"label"]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert "image_caption" in failure(tmp_path, column="picture")
    assert "image" in failure(tmp_path, column="image_captio")


def test_shards_that_cannot_be_used_are_errors_that_name_what_is_there(tmp_path):
    shard = write_parquet(tmp_path / "x.parquet", 3, answer=["a", "b", "c"])
    message = failure(shard, column="picture")
    assert "no image column 'picture'" in message
    assert "question, image, answer" in message
    pq.write_table(pa.table({"image": [1, 2]}), shard)
    assert "has type int64" in failure(shard)
    pq.write_table(pa.table({"image": pa.array([], CELLS["struct"][1])}), shard)
    assert "holds no images" in failure(shard)
    shard.write_bytes(b"PAR1 this is not a parquet file")
    assert "x.parquet is not a readable parquet file" in failure(tmp_path)


def test_images_beside_a_metadata_table_are_an_image_folder(tmp_path):
    write_folder(tmp_path, 4)
    pq.write_table(pa.table({"file_name": ["d0/0000.png"], "label": ["cat"]}), tmp_path / "metadata.parquet")
    assert indices(open_path(tmp_path)) == list(range(4))
