"""An endless, exactly resumable stream of decoded images, split between workers.

    epoch e:   permute units by (seed, e)  ->  worker w takes units w, w + world, w + 2 world, ...
    in a unit: shuffle rows by (seed, e, unit)

There is no shuffle buffer, so a position is three integers. With fewer units than workers every worker visits all
units and takes its share of their rows. Over one epoch the workers' shares partition the source; workers with unequal
shares start their next epoch at different times.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from typing import TypedDict

from trinity_vlm.config import ImagesConfig
from trinity_vlm.errors import ImageSourceError
from trinity_vlm.images.decode import BadImage
from trinity_vlm.images.resize import GridSize, load_image
from trinity_vlm.images.source import ImageSource, Row, Unit, epoch_order, load_rows
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import ImageRecord

SKIP_WINDOW = 100
MIN_SEEN = 20
MAX_BAD_EXAMPLES = 200


class StreamState(TypedDict):
    """A position, JSON-ready. unit and row point behind the last image that was handed out.

    window: the last outcomes, oldest first, "." decoded and "x" skipped
    """

    epoch: int
    unit: int
    row: int
    seed: int
    worker: int
    world: int
    manifest: str
    num_units: int
    served: int
    epoch_rows: int
    bad_streak: int
    window: str
    skipped: dict[str, int]


class ImageStream:
    """Images of ``source`` for one of ``world`` workers, for ever.

    grid: when given, images are resized to it here, once
    skipped: how many images were passed over, by reason (BadImage); again in every epoch
    bad_examples: (uid, reason) of the first 200 of them
    served: how many images were handed out
    """

    def __init__(
        self,
        source: ImageSource,
        config: ImagesConfig,
        seed: int,
        worker: int = 0,
        world: int = 1,
        grid: GridSize | None = None,
    ) -> None:
        if not 0 <= worker < world:
            raise ValueError(f"worker={worker} must be in 0..{world - 1} (world={world})")
        self.skipped: Counter[str] = Counter()
        self.bad_examples: list[tuple[str, str]] = []
        self.served = 0
        self._source = source
        self._config = config
        self._max_skip_rate = config.max_skip_rate
        self.grid = grid
        self._worker, self._world = worker, world
        self._window: deque[bool] = deque(maxlen=SKIP_WINDOW)
        self._bad_streak = 0
        self._start(seed)

    def take(self, n: int) -> list[ImageRecord]:
        """The next ``n`` images that decode. A source smaller than ``n`` repeats: each image once per epoch.

        Raises ImageSourceError when more than ``max_skip_rate`` of the last 100 images (at least 20 seen) are bad, or
        when a whole epoch holds nothing that decodes.
        """
        return [self._next() for _ in range(n)]

    def state_dict(self) -> StreamState:
        """The exact position: ``take(a)``, save, load elsewhere, ``take(b)`` gives what ``take(a + b)`` gives."""
        return StreamState(
            epoch=self._epoch,
            unit=self._unit,
            row=self._row,
            seed=self._seed,
            worker=self._worker,
            world=self._world,
            manifest=self._source.manifest_hash,
            num_units=len(self._source.units),
            served=self.served,
            epoch_rows=self._epoch_rows,
            bad_streak=self._bad_streak,
            window="".join(".x"[bad] for bad in self._window),
            skipped=dict(self.skipped),
        )

    def load_state_dict(self, state: StreamState) -> None:
        """Continue from a saved position.

        With another number of workers the position has no exact meaning: a warning, and a new order from its start,
        the same for all workers. Raises ImageSourceError when the source is not the one the position belongs to, and
        ValueError when the position is another worker's.
        """
        self._check_manifest(state)
        self.served = state["served"]
        self.skipped = Counter(state["skipped"])
        if state["world"] != self._world:
            warnings.warn(
                f"the data position was saved with {state['world']} workers and is loaded with {self._world}: "
                "images are reshuffled from the start of a new epoch, some may be seen again early",
                stacklevel=2,
            )
            self._start(derive_seed(state["seed"], "world", self._world, state["world"]))
            return
        if state["worker"] != self._worker:
            raise ValueError(f"the data position belongs to worker {state['worker']}, this is worker {self._worker}")
        self._start(state["seed"], state["epoch"])
        self._unit, self._row = state["unit"], state["row"]
        self._epoch_rows, self._bad_streak = state["epoch_rows"], state["bad_streak"]
        self._window.extend(outcome == "x" for outcome in state["window"])

    def _check_manifest(self, state: StreamState) -> None:
        if state["manifest"] != self._source.manifest_hash:
            raise ImageSourceError(
                f"images.source={self._source.name!r} changed since the checkpoint: manifest {state['manifest']} with "
                f"{state['num_units']} units then, {self._source.manifest_hash} with {len(self._source.units)} now. "
                "Files were added, removed or renamed; restore them, or start a new run from the trained weights"
            )

    def _start(self, seed: int, epoch: int = 0) -> None:
        self._seed = seed
        self._window.clear()
        self._bad_streak = 0
        self._begin_epoch(epoch)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._unit = self._row = self._epoch_rows = 0
        self._rows: Sequence[Row] | None = None
        rng = random.Random(derive_seed(self._seed, "units", epoch))
        order = epoch_order(self._source.units, rng)
        self._order = order if self._shares_units else order[self._worker :: self._world]

    @property
    def _shares_units(self) -> bool:
        return len(self._source.units) < self._world

    def _next(self) -> ImageRecord:
        while True:
            row, unit = self._advance()
            try:
                pixels = load_image(row.read(), self._config, self.grid)
            except BadImage as bad:
                self._count_bad(row.uid, bad.reason)
                continue
            self._window.append(False)
            self._bad_streak = 0
            self.served += 1
            return ImageRecord(row.uid, pixels, unit.source)

    def _advance(self) -> tuple[Row, Unit]:
        """Move behind the next row of this worker, over the ends of units and epochs, and return it."""
        while True:
            if self._unit >= len(self._order):
                self._end_epoch()
                continue
            unit = self._source.units[self._order[self._unit]]
            if self._rows is None:
                self._rows = self._shuffled_rows(unit)
            if self._row < len(self._rows):
                self._row += 1
                self._epoch_rows += 1
                return self._rows[self._row - 1], unit
            self._unit, self._row, self._rows = self._unit + 1, 0, None

    def _shuffled_rows(self, unit: Unit) -> Sequence[Row]:
        """This worker's rows of a unit. A shared unit's rows are dealt out like cards; the first one goes to another
        worker in each epoch, so that even a single image reaches all of them."""
        rows = load_rows(unit)
        random.Random(derive_seed(self._seed, "rows", self._epoch, unit.key)).shuffle(rows)
        if not self._shares_units:
            return rows
        first = (self._worker - self._epoch - self._order[self._unit]) % self._world
        return rows[first :: self._world]

    def _count_bad(self, uid: str, reason: str) -> None:
        self.skipped[reason] += 1
        self._bad_streak += 1
        self._window.append(True)
        if len(self.bad_examples) < MAX_BAD_EXAMPLES:
            self.bad_examples.append((uid, reason))
        num_bad, num_seen = sum(self._window), len(self._window)
        if num_seen >= MIN_SEEN and num_bad > self._max_skip_rate * num_seen:
            raise self._failure(
                f"{num_bad} of the last {num_seen} images could not be used, more than "
                f"images.max_skip_rate={self._max_skip_rate:g} allows"
            )

    def _end_epoch(self) -> None:
        """Go on to the next epoch, unless this one shows that it would never end."""
        fruitless = 0 < self._epoch_rows <= self._bad_streak
        if fruitless and (self._world == 1 or self._bad_streak >= MIN_SEEN):
            raise self._failure(f"none of the {self._epoch_rows} images of an epoch could be used")
        if self._epoch_rows == 0 and not any(load_rows(unit) for unit in self._source.units):
            raise ImageSourceError(f"images.source={self._source.name!r} holds no images")
        self._begin_epoch(self._epoch + 1)

    def _failure(self, what: str) -> ImageSourceError:
        counts = ", ".join(f"{count} {reason}" for reason, count in self.skipped.most_common())
        examples = ", ".join(f"{uid} ({reason})" for uid, reason in self.bad_examples[-3:])
        return ImageSourceError(
            f"images.source={self._source.name!r}: {what}. Skipped since the start: {counts}; for example {examples}. "
            "Repair or remove these files, or relax the images.* limit that the reason names"
        )
