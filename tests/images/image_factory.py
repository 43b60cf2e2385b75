"""Hand-made pictures and shards for the image tests."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from trinity_vlm.config import ImagesConfig


def encode(image: Image.Image, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def coloured(index: int, side: int = 32) -> Image.Image:
    """A one-coloured picture that tells which one it is."""
    return Image.new("RGB", (side, side), (index % 256, index // 256, 77))


def index_of(image: Image.Image) -> int:
    red, green, _ = image.getpixel((0, 0))
    return red + 256 * green


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def write_folder(root: Path, count: int) -> Path:
    for i in range(count):
        path = root / f"d{i % 3}" / f"{i:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(coloured(i)))
    return root


def image_cells(indices) -> list[dict]:
    return [{"bytes": encode(coloured(i)), "path": None} for i in indices]


def write_parquet(path: Path, count: int, row_group: int = 4, start: int = 0, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"question": ["?"] * count, "image": image_cells(range(start, start + count)), **columns})
    pq.write_table(table, path, row_group_size=row_group)
    return path


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_tars(root: Path, count: int, tars: int = 3) -> Path:
    for t in range(tars):
        members = []
        for i in range(t, count, tars):
            members += [(f"{i:04d}.png", encode(coloured(i))), (f"{i:04d}.json", b'{"answer": 1}')]
        write_tar(root / f"{t:03d}.tar", members)
    return root


def make_source(root: Path, kind: str, count: int, **settings) -> ImagesConfig:
    """Write one of the local source kinds with ``count`` pictures; returns the config that opens it."""
    if kind == "folder":
        write_folder(root, count)
    elif kind == "parquet":
        half = count // 2
        write_parquet(root / "a.parquet", half)
        write_parquet(root / "sub" / "b.parquet", count - half, start=half)
    else:
        write_tars(root, count)
    return ImagesConfig(source=str(root), **settings)
