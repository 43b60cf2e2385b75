"""The grid rule and the thumbnails."""

import io

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from image_factory import noise
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as processors_rule

from trinity_vlm.errors import ConfigError
from trinity_vlm.images import BadImage, resize_image, smart_resize, thumbnail

QWEN25 = (28, 256 * 28**2, 1024 * 28**2)
QWEN3 = (32, 256 * 32**2, 1024 * 32**2)
TINY = (32, 16384, 16384)


@st.composite
def sizes_up_to(draw, ratio):
    """Widths and heights up to 20,000 whose aspect ratio is at most ``ratio``."""
    longer = draw(st.integers(1, 20_000))
    size = longer, draw(st.integers(-(-longer // ratio), longer))
    return size if draw(st.booleans()) else size[::-1]


@pytest.mark.parametrize(
    ("size", "grid", "expected"),
    [
        ((1024, 1024), QWEN3, (1024, 1024)),
        ((512, 512), QWEN3, (512, 512)),
        ((640, 480), QWEN3, (640, 480)),
        ((100, 100), QWEN3, (512, 512)),
        ((4000, 3000), QWEN3, (1152, 864)),
        ((3000, 4000), QWEN3, (864, 1152)),
        ((1000, 500), QWEN25, (1008, 504)),
        ((128, 128), TINY, (128, 128)),
        ((640, 640), TINY, (128, 128)),
        ((400, 200), TINY, (128, 128)),
        ((400, 100), TINY, (256, 64)),
    ],
)
def test_hand_worked_sizes(size, grid, expected):
    assert smart_resize(*size, *grid) == expected


@settings(max_examples=400, deadline=None)
@given(sizes_up_to(200), st.sampled_from([QWEN25, QWEN3, TINY, (28, 28**2 * 7, 28**2 * 9)]))
def test_result_is_on_the_grid_in_the_limits_and_maps_to_itself(size, grid):
    """So the model's own processor, given the same limits, changes nothing: trainer and engine see the same pixels."""
    unit, smallest, largest = grid
    width, height = smart_resize(*size, *grid)
    assert width % unit == height % unit == 0
    assert smallest <= width * height <= largest
    assert smart_resize(width, height, *grid) == (width, height)
    assert smart_resize(size[1], size[0], *grid) == (height, width)


@settings(max_examples=400, deadline=None)
@given(sizes_up_to(100), st.sampled_from([QWEN25, QWEN3]))
@example((13_673, 13_673), QWEN25)  # 896 / 28 is just below 32 before it is rounded
def test_agrees_with_the_processors_rule_up_to_100_to_1(size, grid):
    """The rule as the Qwen processors compute it, to the last bit of its divisions: the ordinary case."""
    assert smart_resize(*size, *grid) == processors_rule(size[1], size[0], *grid)[::-1]


def test_extreme_images_and_impossible_limits_are_refused():
    with pytest.raises(BadImage) as caught:
        smart_resize(201, 1, *QWEN3)
    assert caught.value.reason == "extreme_aspect"
    with pytest.raises(ConfigError, match=r"max_pixels=16300.*multiples of 32"):
        smart_resize(128, 128, 32, 16000, 16300)


def test_resize_is_bicubic_and_leaves_fitting_images_alone():
    image = noise(640, 480)
    assert resize_image(image, (640, 480)) is image
    small = noise(100, 80)
    expected = small.resize((576, 480), Image.Resampling.BICUBIC)
    assert np.array_equal(np.asarray(resize_image(small, (576, 480))), np.asarray(expected))


@pytest.mark.parametrize(("size", "expected"), [((640, 320), (128, 64)), ((1000, 8), (128, 1)), ((50, 40), (50, 40))])
def test_thumbnail_is_a_small_jpeg_and_leaves_the_image_alone(size, expected):
    image = noise(*size)
    small = Image.open(io.BytesIO(thumbnail(image, 128)))
    assert small.format == "JPEG"
    assert small.size == expected
    assert image.size == size
