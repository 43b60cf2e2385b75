"""A quick look at a source before a run: what would be skipped, and why."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass

from trinity_vlm.images.decode import BadImage, DecodeLimits, decode_image
from trinity_vlm.images.source import ImageSource, load_rows
from trinity_vlm.seeds import derive_seed

MIN_ROWS_PER_UNIT = 16
MAX_EXAMPLES = 20


@dataclass(frozen=True, slots=True)
class ImageAudit:
    """``num_checked`` images, ``num_usable`` of them decode; ``reasons`` counts the others (BadImage's slugs)."""

    num_units: int
    num_checked: int
    num_usable: int
    reasons: dict[str, int]
    examples: tuple[tuple[str, str], ...]


def audit(source: ImageSource, limits: DecodeLimits, sample: int | None = None, seed: int = 0) -> ImageAudit:
    """Decode every image, or a random ``sample`` of at most that many: up to 16 rows a unit, more when units are few,
    so that few row groups are fetched."""
    rng = random.Random(derive_seed(seed, "audit"))
    units = rng.sample(source.units, len(source.units))
    per_unit = None if sample is None else max(MIN_ROWS_PER_UNIT, math.ceil(sample / len(units)))
    reasons: Counter[str] = Counter()
    examples: list[tuple[str, str]] = []
    num_checked = 0
    for unit in units:
        if sample is not None and num_checked >= sample:
            break
        rows = load_rows(unit)
        rng.shuffle(rows)
        room = None if sample is None else sample - num_checked
        for row in rows[:per_unit][:room]:
            num_checked += 1
            try:
                decode_image(row.read(), limits)
            except BadImage as bad:
                reasons[bad.reason] += 1
                examples.append((row.uid, bad.reason))
    num_usable = num_checked - reasons.total()
    return ImageAudit(len(units), num_checked, num_usable, dict(reasons), tuple(examples[:MAX_EXAMPLES]))
