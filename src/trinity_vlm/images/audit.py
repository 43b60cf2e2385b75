"""A look at a source before a run: what would be skipped and why, and the sizes that the model would see."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from trinity_vlm.config import ImagesConfig
from trinity_vlm.images.decode import BadImage
from trinity_vlm.images.resize import GridSize, load_sized
from trinity_vlm.images.source import ImageSource, Row, load_rows
from trinity_vlm.seeds import derive_seed

MIN_ROWS_PER_UNIT = 16
MAX_EXAMPLES = 20

Size = tuple[int, int]


@dataclass(slots=True)
class ImageAudit:
    """What was found so far.

    stored, resized: how many usable images have each upright (width, height), before and after the grid's resize
    reasons: how many could not be used, by BadImage's slugs; examples: (uid, reason) of the first 20
    """

    stored: Counter[Size] = field(default_factory=Counter)
    resized: Counter[Size] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_usable(self) -> int:
        return self.stored.total()

    @property
    def num_checked(self) -> int:
        return self.num_usable + self.reasons.total()


def audit(
    source: ImageSource,
    config: ImagesConfig,
    grid: GridSize | None = None,
    sample: int | None = None,
    progress: Callable[[ImageAudit], None] = lambda report: None,
) -> ImageAudit:
    """Load every image as a run would, or a random ``sample`` of at most that many; ``progress`` is told after each."""
    report = ImageAudit()
    for row in _rows(source, sample):
        try:
            found = load_sized(row.read(), config, grid)
        except BadImage as bad:
            report.reasons[bad.reason] += 1
            if len(report.examples) < MAX_EXAMPLES:
                report.examples.append((row.uid, bad.reason))
        else:
            report.stored[found.size] += 1
            report.resized[found.pixels.size] += 1
        progress(report)
    return report


def _rows(source: ImageSource, sample: int | None) -> Iterator[Row]:
    """All rows, or a random sample: up to 16 of a unit, more when units are few, so that few row groups are fetched."""
    if sample is None:
        for unit in source.units:
            yield from load_rows(unit)
        return
    rng, left = random.Random(derive_seed(0, "audit")), sample
    per_unit = max(MIN_ROWS_PER_UNIT, math.ceil(sample / len(source.units)))
    for unit in rng.sample(source.units, len(source.units)):
        rows = load_rows(unit)
        chosen = rng.sample(rows, min(per_unit, left, len(rows)))
        yield from chosen
        left -= len(chosen)
        if left == 0:
            return
