"""What a source is said to hold, and that it is what a run will see."""

from collections import Counter

import pytest
from image_factory import coloured, encode, make_source
from PIL import Image

from trinity_vlm.backbone.loading import load_processor
from trinity_vlm.config import ImagesConfig, load_config
from trinity_vlm.images import GridSize, ImageStream, audit, open_source
from trinity_vlm.sizing import pixel_grid

SIZES = [(1001, 667), (1023, 1025), (1001, 1002), (999, 31), (30, 2999), (641, 479), (157, 1033), (128, 128), (45, 33)]
"""Odd sides, nearly square, up to 100:1, above the grid's area and below it."""


def test_audit_counts_by_reason(tmp_path):
    config = make_source(tmp_path / "s", "folder", 30)
    for name, data in (("a.png", b""), ("b.png", b"junk"), ("c.png", encode(coloured(1, side=5)))):
        (tmp_path / "s" / name).write_bytes(data)
    report = audit(open_source(config), config, GridSize(16, 16 * 32 * 32, 16 * 32 * 32))
    assert (report.num_checked, report.num_usable) == (33, 30)
    assert report.stored == {(32, 32): 30}
    assert report.resized == {(128, 128): 30}
    assert report.reasons == {"zero_bytes": 1, "undecodable": 1, "too_small": 1}
    assert sorted(report.examples) == [("a.png", "zero_bytes"), ("b.png", "undecodable"), ("c.png", "too_small")]


@pytest.mark.parametrize("kind", ["folder", "parquet", "tar"])
def test_audit_samples_at_most_what_it_is_told(tmp_path, kind):
    config = make_source(tmp_path / "s", kind, 60)
    report = audit(open_source(config), config, sample=25)
    assert report.num_checked == report.num_usable == 25


def write_turned(folder, form, orientation):
    """One file of every size, stored as a camera held sideways does; returns the upright sizes by name."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    for width, height in SIZES:
        (folder / f"{width}x{height}.{form.lower()}").write_bytes(
            encode(Image.new("RGB", (width, height), "teal"), form, exif=exif)
        )
    return {f"{w}x{h}.{form.lower()}": (h, w) if orientation >= 5 else (w, h) for w, h in SIZES}


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_audit_foretells_what_the_models_processor_makes_of_every_image(tmp_path, form, orientation):
    """A JPEG decoded at a reduced scale has rounded sides; its grid is that of the whole size, as a PNG's is."""
    model = load_config("tiny", ["model.min_pixels=9216", "model.max_pixels=36864"]).model
    processor = load_processor(model)
    grid = pixel_grid(processor, model)
    upright = write_turned(tmp_path, form, orientation)
    config = ImagesConfig(source=str(tmp_path))
    report = audit(open_source(config), config, grid)
    seen = {r.uid: r.pixels for r in ImageStream(open_source(config), config, seed=0, grid=grid).take(len(SIZES))}
    assert {uid: pixels.size for uid, pixels in seen.items()} == {
        uid: grid.size_for(*size) for uid, size in upright.items()
    }
    assert report.stored == Counter(upright.values())
    assert report.resized == Counter(pixels.size for pixels in seen.values())
    patches = processor.image_processor(list(seen.values()), return_tensors="pt")["image_grid_thw"].tolist()
    side = processor.image_processor.patch_size
    assert [(columns * side, rows * side) for _, rows, columns in patches] == [p.size for p in seen.values()]


def test_a_jpegs_grid_is_not_that_of_its_reduced_scale(tmp_path):
    """By hand, units of 10 and at most 10,000 pixels: 203 x 201 shrinks by sqrt(4.0803) = 2.02 to 100.5 x 99.5, so
    100 x 90. At half the scale, rounded up to 102 x 101, it would have been rounded to 100 x 100."""
    (tmp_path / "a.jpg").write_bytes(encode(Image.new("RGB", (203, 201), "teal"), "JPEG"))
    config, grid = ImagesConfig(source=str(tmp_path)), GridSize(10, 100, 10_000)
    source = open_source(config)
    assert audit(source, config, grid).resized == {(100, 90): 1}
    assert ImageStream(source, config, seed=0, grid=grid).take(1)[0].pixels.size == (100, 90)
    assert audit(source, config).resized == {(203, 201): 1}
