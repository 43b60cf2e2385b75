"""Environments by name, and their images as a source of the loop."""

import pytest

from trinity_vlm.config import ImagesConfig
from trinity_vlm.environments import environment_of, open_environment
from trinity_vlm.environments.microcosm import Microcosm
from trinity_vlm.environments.source import ROWS_PER_UNIT, UNITS
from trinity_vlm.errors import ConfigError
from trinity_vlm.images import open_source


def test_microcosm_split_opens_as_image_source():
    """``microcosm:SPLIT`` is an image source whose rows are the split's images under the split's uids."""
    source = open_source(ImagesConfig(source="microcosm:evolve"))
    assert len(source.units) == UNITS
    rows = source.units[3].load()
    assert len(rows) == ROWS_PER_UNIT
    uid, image = Microcosm().image("evolve", 3 * ROWS_PER_UNIT + 5)
    assert rows[5].uid == uid
    assert rows[5].read().tobytes() == image.tobytes()


def test_units_share_no_image():
    """Every image of an epoch has its own uid."""
    source = open_source(ImagesConfig(source="microcosm:train@small-0.5"))
    uids = [row.uid for unit in source.units[:10] for row in unit.load()]
    assert len(set(uids)) == 10 * ROWS_PER_UNIT


@pytest.mark.parametrize("split", ["nowhere", "evolve@sepia", ""])
def test_unknown_split_is_refused_when_opened(split):
    """A wrong split or style stops a run before any image is read."""
    with pytest.raises(ConfigError):
        open_source(ImagesConfig(source=f"microcosm:{split}"))


def test_environment_by_name():
    """A name opens its environment; an unknown one lists those that exist."""
    assert open_environment("microcosm").name == "microcosm"
    with pytest.raises(ConfigError, match="known are microcosm"):
        open_environment("macrocosm")


@pytest.mark.parametrize(
    ("sources", "known"),
    [
        (("microcosm:evolve",), True),
        (("/data/images",), False),
        (("microcosm:evolve", "/data/images"), False),
        (("microcosm:evolve", "microcosm:train"), False),
        ((), False),
    ],
)
def test_truth_is_known_for_a_single_environment_source(sources, known):
    """Mixed sources relabel uids, so scenes are looked up only when one environment split is the whole source."""
    assert (environment_of(sources) is not None) is known
