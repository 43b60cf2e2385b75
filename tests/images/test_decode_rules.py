"""The decoder's rules, each on hand-made files."""

import contextlib
import struct
import warnings
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_factory import encode, noise
from PIL import Image, ImageFile

from trinity_vlm.config import ImagesConfig
from trinity_vlm.images import BadImage, DecodeLimits, decode_image

LIMITS = DecodeLimits(min_side=28, max_pixels=200_000_000, max_aspect_ratio=100.0)


def reason_of(data, limits=LIMITS) -> str:
    with pytest.raises(BadImage) as caught:
        decode_image(data, limits)
    return caught.value.reason


def decoded(image: Image.Image, form: str = "PNG", **options) -> np.ndarray:
    result = decode_image(encode(image, form, **options), LIMITS)
    assert result.mode == "RGB"
    assert type(result) is Image.Image
    return np.asarray(result)


def quadrants() -> Image.Image:
    """48 x 32 with red, green, blue and white quarters: every orientation looks different."""
    image = Image.new("RGB", (48, 32), "white")
    for box, colour in (((0, 0, 24, 16), "red"), ((24, 0, 48, 16), "lime"), ((0, 16, 24, 32), "blue")):
        image.paste(colour, box)
    return image


def stored_as(orientation: int) -> Image.Image:
    """What a camera would store so that ``orientation`` shows quadrants() upright."""
    inverse = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    return quadrants() if inverse is None else quadrants().transpose(inverse)


# --- orientation


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_every_exif_orientation_is_turned_upright(form, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if form == "JPEG" else {"lossless": True} if form == "WEBP" else {}
    pixels = decoded(stored_as(orientation), form, exif=exif, **options)
    expected = np.asarray(quadrants())
    assert pixels.shape == expected.shape
    for y, x in ((4, 4), (4, 40), (28, 4), (28, 40)):
        assert np.abs(pixels[y, x].astype(int) - expected[y, x]).max() < 12


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0MM\0*\xff\xff\xff\xff", b"\xff" * 40])
def test_damaged_exif_does_not_cost_the_picture(exif):
    assert decoded(quadrants(), exif=exif).shape == (32, 48, 3)


def test_metadata_is_not_carried_along():
    """GPS positions and the like must not travel into thumbnails or run directories."""
    exif = Image.Exif()
    exif[0x010E] = "secret place"
    assert decode_image(encode(quadrants(), "JPEG", exif=exif), LIMITS).info == {}


# --- colour modes


def test_grey_bilevel_palette_and_cmyk_keep_their_look():
    grey = Image.new("L", (32, 32), 100)
    assert (decoded(grey) == 100).all()
    assert (decoded(Image.new("1", (32, 32), 1)) == 255).all()
    palette = Image.new("RGB", (32, 32), (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE)
    assert (decoded(palette) == (10, 200, 30)).all()
    for form in ("JPEG", "TIFF"):
        cmyk = Image.new("CMYK", (32, 32), (0, 255, 255, 0))
        red, green, blue = decoded(cmyk, form)[16, 16]
        assert red > 200
        assert green < 60
        assert blue < 60


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_composited_on_white(mode):
    """A transparent figure background is paper, not black; half transparent black is mid-grey."""
    image = Image.new("RGBA", (32, 32), (0, 0, 0, 0))
    image.paste((0, 0, 0, 128), (0, 0, 16, 32))
    pixels = decoded(image.convert(mode))
    assert (pixels[:, 20:] == 255).all()
    assert np.abs(pixels[:, :12].astype(int) - 127).max() <= 1


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "1"])
def test_keyed_transparency_becomes_white(mode):
    """tRNS chunks of palette, grey and RGB files: the keyed colour is paper."""
    image = Image.new(mode, (32, 32), 0)
    key = (0, 0, 0) if mode == "RGB" else 0
    image.paste((200, 10, 10) if mode == "RGB" else 1 if mode == "1" else 120, (0, 0, 16, 32))
    if mode == "P":
        image.putpalette([v for i in range(256) for v in (i, i, i)])
    pixels = decoded(image, transparency=key)
    assert (pixels[:, 16:] == 255).all()
    assert tuple(pixels[0, 0]) == {"P": (120,) * 3, "L": (120,) * 3, "RGB": (200, 10, 10), "1": (255,) * 3}[mode]


def test_palette_with_partial_alpha_is_composited():
    image = Image.new("P", (32, 32), 0)
    image.putpalette([0, 0, 0] * 256)
    assert np.abs(decoded(image, transparency=bytes([128] + [255] * 255)).astype(int) - 127).max() <= 1


# --- deep greys


def ramp(dtype, low, high) -> np.ndarray:
    return np.linspace(low, high, 64 * 64).reshape(64, 64).astype(dtype)


@pytest.mark.parametrize(
    ("values", "form"),
    [
        (ramp(np.uint16, 0, 65535), "PNG"),
        (ramp(np.uint16, 0, 65535), "TIFF"),
        (ramp(np.uint16, 900, 3000), "TIFF"),
        (ramp(">u2", 0, 65535), "TIFF"),
        (ramp(np.int32, -5_000_000, 5_000_000), "TIFF"),
        (ramp(np.float32, -1, 1), "TIFF"),
        (ramp(np.float32, 0, 1e-6), "TIFF"),
    ],
)
def test_deep_greys_are_stretched_instead_of_clipped(values, form):
    """Pillow's own conversion leaves a 16-bit ramp with a handful of levels near white."""
    pixels = decoded(Image.fromarray(values), form)
    assert len(np.unique(pixels)) > 200
    assert pixels[0, 0, 0] < 5
    assert pixels[-1, -1, 0] > 250


def test_a_few_hot_pixels_do_not_darken_a_micrograph():
    values = ramp(np.uint16, 100, 1100)
    values[0, :5] = 65535
    pixels = decoded(Image.fromarray(values), "TIFF")
    assert len(np.unique(pixels)) > 200
    assert (pixels[0, :5] == 255).all()


def test_masks_constants_and_non_finite_values_survive():
    mask = np.zeros((32, 32), np.uint16)
    mask[0, 0] = 1
    assert sorted(np.unique(decoded(Image.fromarray(mask), "PNG"))) == [0, 255]
    assert (decoded(Image.fromarray(np.full((32, 32), 5000, np.uint16)), "PNG") == 128).all()
    values = ramp(np.float32, 0, 1)
    values[0, 0], values[0, 1], values[0, 2] = np.nan, np.inf, -np.inf
    pixels = decoded(Image.fromarray(values), "TIFF")
    assert (pixels[0, :3] == 0).all()
    assert len(np.unique(pixels)) > 200
    assert (decoded(Image.fromarray(np.full((32, 32), np.nan, np.float32)), "TIFF") == 0).all()


def test_a_keyed_16_bit_grey_is_white():
    """A tRNS chunk in a 16-bit grey PNG, inserted by hand behind the header chunk."""
    values = ramp(np.uint16, 1000, 3000)
    values[:8] = 60000
    png = encode(Image.fromarray(values))
    keyed = png[:33] + chunk(b"tRNS", struct.pack(">H", 60000)) + png[33:]
    pixels = np.asarray(decode_image(keyed, LIMITS))
    assert (pixels[:8] == 255).all()
    assert pixels[8].max() < 5
    assert len(np.unique(pixels)) > 200


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def test_sixteen_bit_rgb_png_keeps_its_colours():
    """Written by hand: Pillow can read but not write this form."""
    row = b"\0" + struct.pack(">HHH", 0xFFFF, 0x8000, 0) * 32
    header = struct.pack(">IIBBBBB", 32, 32, 16, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(row * 32)) + chunk(b"IEND", b"")
    assert tuple(np.asarray(decode_image(png, LIMITS))[5, 5]) == (255, 128, 0)


# --- several frames


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_the_first_frame_of_many_is_taken(form):
    frames = [Image.new("RGB", (40, 30), colour) for colour in ("red", "lime", "blue")]
    pixels = decoded(frames[0], form, save_all=True, append_images=frames[1:])
    assert pixels.shape == (30, 40, 3)
    assert pixels[..., 0].min() > 250
    assert pixels[..., 1:].max() < 5


def test_a_transparent_animation_is_shown_on_white():
    frames = [Image.new("RGBA", (32, 32), (0, 0, 0, 0)) for _ in range(2)]
    for position, frame in enumerate(frames):
        frame.paste((255, 0, 0, 255), (position, 0, position + 8, 8))
    assert (decoded(frames[0], "GIF", save_all=True, append_images=frames[1:])[20, 20] == 255).all()


# --- rejections


def test_empty_and_foreign_bytes_are_named(tmp_path):
    empty = tmp_path / "empty.png"
    empty.touch()
    assert reason_of(b"") == "zero_bytes"
    assert reason_of(empty) == "zero_bytes"
    assert reason_of(tmp_path / "gone.png") == "missing_file"
    assert reason_of(tmp_path) == "unreadable_file"
    assert reason_of(b"<html>404 not found</html>") == "undecodable"
    assert reason_of(b"\x89PNG\r\n\x1a\n") == "undecodable"


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000"])
@pytest.mark.parametrize("keep", [0.3, 0.7, 0.95])
def test_a_file_cut_short_is_skipped_in_every_format(form, keep):
    """Never a picture whose lower part is grey."""
    data = encode(noise(96, 80), form)
    assert decode_image(data, LIMITS).size == (96, 80)
    assert reason_of(data[: int(len(data) * keep)]) in ("truncated", "undecodable")


def test_cut_jpegs_and_pngs_are_called_truncated():
    for form in ("JPEG", "PNG"):
        data = encode(noise(96, 80), form)
        assert reason_of(data[: len(data) // 2]) == "truncated"


def test_the_global_switch_for_truncated_images_is_left_alone():
    before = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    reason_of(encode(noise(96, 80), "JPEG")[:2000])
    decode_image(encode(quadrants()), LIMITS)
    assert before == (ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS)


def png_header(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"never read") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("width", "height", "reason"),
    [
        (60_000, 60_000, "too_large"),
        (12_000, 10_000, "too_large"),
        (27, 500, "too_small"),
        (500, 27, "too_small"),
        (2829, 28, "extreme_aspect"),
        (28, 2829, "extreme_aspect"),
    ],
)
def test_size_is_judged_by_the_header_alone(width, height, reason):
    """The pixel data of these files are garbage: reading them would say undecodable or truncated."""
    limits = DecodeLimits(min_side=28, max_pixels=100_000_000, max_aspect_ratio=100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        assert reason_of(png_header(width, height), limits) == reason


def test_limits_are_inclusive():
    limits = DecodeLimits(min_side=30, max_pixels=30 * 60, max_aspect_ratio=2.0)
    assert decode_image(encode(noise(60, 30)), limits).size == (60, 30)
    assert reason_of(encode(noise(61, 30)), limits) == "too_large"
    assert reason_of(encode(noise(60, 29)), limits) == "too_small"


def test_limits_come_from_the_configuration():
    config = ImagesConfig(source="x", min_side=5, max_decode_pixels=77, max_aspect_ratio=3.0)
    assert DecodeLimits.from_config(config, draft_pixels=9) == DecodeLimits(5, 77, 3.0, 9)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_hostile_bytes_only_ever_raise_bad_image(data):
    """Real files with random damage: an image or a named reason, never another exception."""
    form = data.draw(st.sampled_from(["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "JPEG2000"]))
    raw = bytearray(encode(noise(40, 40), form))
    for _ in range(data.draw(st.integers(1, 12))):
        raw[data.draw(st.integers(0, min(len(raw) - 1, 200)))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(BadImage):
            assert decode_image(bytes(raw), DecodeLimits(1, 10_000_000, 1e9)).mode == "RGB"


@pytest.mark.parametrize("form", ["EPS", "PCX", "ICO"])
def test_formats_outside_the_list_are_refused(form):
    """EPS above all: Pillow hands it to Ghostscript, a program that obeys the file."""
    assert reason_of(encode(noise(64, 64), form)) == "undecodable"


# --- draft


def test_large_jpegs_are_decoded_at_a_reduced_scale_that_keeps_enough_pixels():
    data = encode(noise(1600, 1200), "JPEG")
    full = decode_image(data, LIMITS)
    draft = decode_image(data, DecodeLimits(28, 10**8, 100.0, draft_pixels=400 * 300))
    assert full.size == (1600, 1200)
    assert draft.size == (400, 300)
    assert decode_image(data, DecodeLimits(28, 10**8, 100.0, draft_pixels=400 * 300 + 1)).size == (800, 600)
    assert decode_image(encode(noise(160, 120)), DecodeLimits(28, 10**8, 100.0, draft_pixels=100)).size == (160, 120)


def test_draft_keeps_the_colours_of_grey_and_cmyk_files():
    limits = DecodeLimits(28, 10**8, 100.0, draft_pixels=100 * 100)
    assert np.abs(np.asarray(decode_image(encode(Image.new("L", (800, 800), 90), "JPEG"), limits)) - 90.0).max() <= 2
    cmyk = decode_image(encode(Image.new("CMYK", (800, 800), (0, 255, 255, 0)), "JPEG"), limits)
    assert cmyk.size == (100, 100)
    assert cmyk.getpixel((50, 50))[0] > 200
