"""The parent's side of one symbolic worker: start, ask with a deadline, kill, start again."""

from __future__ import annotations

import enum
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

WORKER_SCRIPT = Path(__file__).with_name("_worker.py")
START_SECONDS = 60.0


class Outcome(enum.Enum):
    """What a comparison came to."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"
    TIMEOUT = "timeout"
    FAILURE = "failure"

    @property
    def verdict(self) -> bool | None:
        return {Outcome.EQUAL: True, Outcome.DIFFERENT: False}.get(self)


class WorkerProcess:
    """One Python process that runs ``_worker.py`` by path, so that neither the user's ``__main__`` nor this package is
    imported there, and speaks one JSON value a line over pipes. One comparison at a time; ``close`` from any thread."""

    def __init__(self, deadline: float, memory_mb: int) -> None:
        self._deadline = deadline
        self._memory_mb = memory_mb
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize | None = None
        self._owner = os.getpid()
        self._closed = False
        self._busy = threading.Lock()
        self._starting = threading.Lock()

    def compare(self, ref_latex: str, pred_latex: str) -> Outcome:
        """Ask the worker, started when needed; one that overruns or dies is killed and replaced at the next call."""
        with self._busy:
            process = self._running()
            if process is None:
                return Outcome.FAILURE
            line = _ask(process, json.dumps([ref_latex, pred_latex]), self._deadline)
            try:
                return Outcome.TIMEOUT if line is None else Outcome(json.loads(line))
            except ValueError:
                return Outcome.FAILURE
            finally:
                if not line:
                    self._stop()

    @property
    def pid(self) -> int | None:
        """Process id of the live worker, None when there is none."""
        process = self._process
        return process.pid if process and process.poll() is None else None

    def close(self) -> None:
        """Kill the worker and refuse to start another; a comparison in flight ends as a failure."""
        with self._starting:
            self._closed = True
            if self._process is not None and self._owner == os.getpid():
                self._process.kill()
        with self._busy:
            self._stop()

    def _running(self) -> subprocess.Popen[bytes] | None:
        if self._owner != os.getpid():  # a forked copy leaves its parent's worker alone and starts its own
            self._process, self._finalizer, self._owner = None, None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        with self._starting:
            if self._closed:
                return None
            process = self._process = self._start()
        if _read_line(process, START_SECONDS) == b'"ready"':
            return process
        self._stop()
        return None

    def _start(self) -> subprocess.Popen[bytes]:
        settings = (str(os.getpid()), str(self._deadline), str(self._memory_mb))
        process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER_SCRIPT), *settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._finalizer = weakref.finalize(self, _kill, process, os.getpid())
        return process

    def _stop(self) -> None:
        finalizer, self._finalizer, self._process = self._finalizer, None, None
        if finalizer is not None:
            finalizer()


def _kill(process: subprocess.Popen[bytes], owner: int) -> None:
    """Kill, reap and close, unless this is a forked copy of the process that started it."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe:
            pipe.close()


def _ask(process: subprocess.Popen[bytes], request: str, seconds: float) -> bytes | None:
    """The reply line; None when the time is up, b"" when the worker is dead."""
    assert process.stdin is not None
    try:
        process.stdin.write(request.encode() + b"\n")
    except OSError:
        return b""
    return _read_line(process, seconds)


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """One line without its end; None when the time is up, b"" when the pipe was closed."""
    assert process.stdout is not None
    end = time.monotonic() + seconds
    poll = select.poll()
    descriptor = process.stdout.fileno()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    received = b""
    while not received.endswith(b"\n"):
        left = end - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            return None
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return b""
        received += chunk
    return received.rstrip(b"\n")
