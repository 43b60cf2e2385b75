"""One writer per run directory: an flock that the kernel releases when its holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from trinity_vlm.errors import RunDirectoryError

_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Holds ``path`` exclusively from construction until ``release`` or the end of this process.

    Forked children close their copy at birth, so that a worker that outlives a killed trainer does not keep the lock.
    Raises RunDirectoryError, naming the holder's process id, when another process (or this one) holds it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            if not isinstance(error, BlockingIOError):
                raise RunDirectoryError(f"{path}: this file system can't lock files ({error.strerror})") from error
            raise RunDirectoryError(
                f"{path.parent} is in use by process {holder}; wait for it or stop it, or choose another run_dir"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"{os.getpid()}\n".encode())
        _held.add(self)

    @property
    def held(self) -> bool:
        return self._descriptor >= 0

    def release(self) -> None:
        """Let another process in; harmless when called twice."""
        if self.held:
            os.close(self._descriptor)
            self._descriptor = -1


def _drop_in_forked_child() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_drop_in_forked_child)
