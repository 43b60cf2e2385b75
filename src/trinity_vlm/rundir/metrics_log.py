"""metrics.jsonl: one strict JSON object a step, appended and fsynced, steps ascending.

A line counts once its newline is on the disk. A line torn by a kill or a full disk is not there for readers, and the
next writer cuts it off.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir.atomic import disk_errors, sync_folder
from trinity_vlm.rundir.strict_json import JSON, dumps, loads_object

STEP_KEY = "step"


class MetricsLog:
    """Reads and appends the metrics of one run. A process that appends must hold the run's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last_step: int | None = None

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add the line of ``step``; it is on the disk when this returns. NaN and infinities are stored as null.

        Raises RunDirectoryError for a step that is not after the last one, for a value named "step", and when the
        disk refuses the write (the line is then taken back).
        """
        if STEP_KEY in values:
            raise RunDirectoryError(f"a metric can't be called {STEP_KEY!r}: that key holds the step's number")
        if self._last_step is None:
            self._last_step = self._cut_after(None)
        if step <= self._last_step:
            raise RunDirectoryError(
                f"{self.path} already holds step {self._last_step}, so step {step} can't be added; "
                "each step has one line: merge its values, or call truncate_after when resuming"
            )
        line: dict[str, JSON] = {STEP_KEY: step}
        for name, value in values.items():
            line[name] = number if math.isfinite(number := float(value)) else None
        self._write(f"{dumps(line)}\n".encode())
        self._last_step = step

    def read(self) -> list[dict[str, float]]:
        """All complete lines; ``"step"`` is an int, null comes back as NaN.

        Raises RunDirectoryError naming the line when one is not such an object.
        """
        return [values for values, _ in self._lines()]

    def truncate_after(self, step: int) -> None:
        """Drop every line later than ``step`` and a torn last one."""
        self._last_step = self._cut_after(step)

    def _cut_after(self, step: int | None) -> int:
        """Keep complete lines up to ``step`` (None: all of them); returns the last step kept, -1 if none."""
        kept_step, kept_bytes = -1, 0
        for values, end in self._lines():
            if step is not None and values[STEP_KEY] > step:
                break
            kept_step, kept_bytes = int(values[STEP_KEY]), end
        if self.path.exists() and self.path.stat().st_size > kept_bytes:
            with self.path.open("r+b") as file:
                file.truncate(kept_bytes)
                os.fsync(file.fileno())
        return kept_step

    def _lines(self) -> Iterator[tuple[dict[str, float], int]]:
        """(values, byte offset of the line's end) of each complete line."""
        content = self.path.read_bytes() if self.path.exists() else b""
        end = 0
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield self._parse(line, number), end

    def _parse(self, line: bytes, number: int) -> dict[str, float]:
        try:
            raw = loads_object(line)
            if not isinstance(raw.get(STEP_KEY), int):
                raise ValueError(f"no whole number under {STEP_KEY!r}")
            return {name: _as_number(name, value) for name, value in raw.items()}
        except ValueError as error:
            raise RunDirectoryError(f"{self.path}, line {number}: {error}; delete or repair this line") from None

    def _write(self, data: bytes) -> None:
        created = not self.path.exists()
        with disk_errors(self.path):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(descriptor).st_size
            try:
                if os.write(descriptor, data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
                if created:
                    sync_folder(self.path.parent)
            except OSError:
                os.ftruncate(descriptor, size)
                raise
            finally:
                os.close(descriptor)


def _as_number(name: str, value: JSON) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        raise ValueError(f"{name} holds {value!r}, not a number")
    return value
