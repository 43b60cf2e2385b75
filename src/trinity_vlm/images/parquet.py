"""Parquet shards: a unit is one row group, and only the image column's own leaves are ever requested.

Accepted columns: struct{bytes, path} (as written by Hugging Face datasets), raw binary, a path as string, and lists of
these. ``bytes`` that are null fall back to ``path``, looked up beside the shard.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import BadImage, ImageData
from trinity_vlm.images.source import Row, Unit
from trinity_vlm.images.storage import Storage, read_file


def parquet_units(storage: Storage, relatives: Sequence[str], column: str, source: str) -> list[Unit]:
    """One unit per non-empty row group of each shard, in order; reads the footers only.

    Raises ImageSourceError for a shard that is no parquet file, or whose image column is missing or of another type.
    """
    units: list[Unit] = []
    for relative in relatives:
        try:
            with storage.open(relative) as stream:
                footer = pq.ParquetFile(stream)
                leaves = image_leaves(footer, column, f"{source}: {relative}")
                sizes = [footer.metadata.row_group(g).num_rows for g in range(footer.metadata.num_row_groups)]
        except (OSError, pa.ArrowException) as error:
            raise ImageSourceError(
                f"images.source={source!r}: {relative} is not a readable parquet file: {error}"
            ) from error
        units += [
            Unit(f"{relative}#{group}:{num_rows}", source, partial(_load, storage, relative, group, leaves, column))
            for group, num_rows in enumerate(sizes)
            if num_rows
        ]
    return units


def image_leaves(footer: pq.ParquetFile, column: str, where: str) -> list[str]:
    """The column paths to request, for example ``["image.bytes", "image.path"]``; never another column's.

    Raises ImageSourceError naming the columns present when ``column`` is not there or can't hold images.
    """
    schema = footer.schema_arrow
    if column not in schema.names:
        raise ImageSourceError(
            f"{where}: no image column {column!r}; columns are {', '.join(schema.names)}; "
            "set images.column to one of them"
        )
    paths = [footer.schema.column(i).path for i in range(len(footer.schema.names))]
    own = [path for path in paths if path == column or path.startswith(column + ".")]
    kind = _value_type(schema.field(column).type)
    if _is_binary(kind) or _is_string(kind):
        return own
    leaves = [path for path in own if path.rsplit(".", 1)[-1] in ("bytes", "path")] if pa.types.is_struct(kind) else []
    if not leaves:
        raise ImageSourceError(
            f"{where}: column {column!r} has type {schema.field(column).type}; expected struct<bytes, path>, binary, "
            "a path as string, or a list of these"
        )
    return leaves


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if _is_list(kind) else kind


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _is_string(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _load(storage: Storage, relative: str, group: int, leaves: Sequence[str], column: str) -> list[Row]:
    """Read one row group's image leaves (kept as Arrow buffers) and name its images.

    A list cell gives one row per element: ``shard#group:row`` and then ``shard#group:row.1`` and so on.
    """
    try:
        with storage.open(relative) as stream:
            cells = pq.ParquetFile(stream, pre_buffer=True).read_row_group(group, columns=list(leaves)).column(column)
    except (OSError, pa.ArrowException) as error:
        raise BadImage("unreadable_unit", f"{relative}#{group}: {error}") from error
    is_list = _is_list(cells.type)
    rows: list[Row] = []
    for index in range(len(cells)):
        uid = f"{relative}#{group}:{index}"
        length = len(cells[index]) if is_list and cells[index].is_valid else 1
        for element in range(max(length, 1)):
            position = element if is_list else None
            read = partial(_read_cell, storage, relative, cells, index, position)
            rows.append(Row(f"{uid}.{element}" if element else uid, read))
    return rows


def _read_cell(storage: Storage, shard: str, cells: pa.ChunkedArray, index: int, element: int | None) -> ImageData:
    value: Any = cells[index].as_py()
    if element is not None:
        value = value[element] if value else None
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if value is None:
        raise BadImage("null_bytes")
    return value if isinstance(value, bytes) else read_file(storage, posixpath.join(posixpath.dirname(shard), value))
