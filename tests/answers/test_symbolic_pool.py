"""The symbolic workers, as real processes: verdicts, deadlines, memory, threads, life and death."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from answer_pairs import AMBIGUOUS, NEEDS_ALGEBRA, flatten

from trinity_vlm.answers import SymbolicPool, match
from trinity_vlm.answers.worker_process import WORKER_SCRIPT
from trinity_vlm.errors import TrinityError

HANG = ("x+9^{9^{9^{9}}}", "x+1")
SECONDS = 20.0


@pytest.fixture(scope="module")
def pool():
    shared = SymbolicPool(deadline=SECONDS)
    yield shared
    shared.close()


def worker_pids(pool):
    return [w.pid for w in pool._workers if w.pid]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(map(is_alive, pids)):
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def test_every_algebraic_pair_matches(pool):
    """What rules leave open and algebra can decide is decided."""
    assert [p for p in NEEDS_ALGEBRA if match(*p, symbolic=pool).status != "match"] == []


def test_no_ambiguous_pair_becomes_a_match(pool):
    """Words, ranges, dates, chains and formulas are not made equal by reading them as algebra."""
    pairs = [p for p in flatten(AMBIGUOUS) if p not in NEEDS_ALGEBRA]
    assert [p for p in pairs if match(*p, symbolic=pool).status != "ambiguous"] == []


def test_different_and_unparsable(pool):
    assert pool("x+1", "x-1") is False
    assert pool("x+", "\\foo{") in (None, False)


def test_threads_share_the_pool(pool):
    """Off the main thread, where math-verify's own alarm would raise, verdicts are the same."""
    pairs = [(f"x+{n}", f"{n}+x") for n in range(8)] + [(f"x+{n}", f"x-{n + 1}") for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        verdicts = list(threads.map(lambda p: pool(*p), pairs))
    assert verdicts == [True] * 8 + [False] * 8


def test_a_hang_is_killed_counted_and_survived():
    """An expression without end gives None at the deadline; its worker dies and the next comparison works."""
    pool = SymbolicPool(workers=1, deadline=1.0)
    try:
        assert pool("x+1", "1+x") is True
        (before,) = worker_pids(pool)
        start = time.monotonic()
        results = []
        thread = threading.Thread(target=lambda: results.append(pool(*HANG)))
        thread.start()
        thread.join(SECONDS)
        assert results == [None]
        assert time.monotonic() - start < 5.0
        assert not is_alive(before)
        assert pool("x+2", "2+x") is True
        assert pool.counters.calls == 3
        assert pool.counters.timeouts == 1
    finally:
        pool.close()


def test_memory_is_capped():
    """A worker that wants more than the cap fails and is replaced; the run's own memory is safe."""
    pool = SymbolicPool(workers=1, deadline=SECONDS, memory_mb=160)
    try:
        assert pool("x+1", "1+x") is True
        (pid,) = worker_pids(pool)
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert str(160 * 2**20) in next(line for line in limits.splitlines() if "address space" in line)
        assert pool("x" * 120_000_000, "x+1") is None
        assert pool.counters.failures == 1
        assert pool("x+1", "1+x") is True
    finally:
        pool.close()


def test_a_killed_worker_is_a_failure_and_is_replaced():
    pool = SymbolicPool(workers=1, deadline=SECONDS)
    try:
        assert pool("x+1", "1+x") is True
        os.kill(worker_pids(pool)[0], signal.SIGKILL)
        assert pool("x+1", "1+x") in (None, True)
        assert pool("x+1", "1+x") is True
    finally:
        pool.close()


def test_close_ends_workers_and_refuses_more():
    pool = SymbolicPool(workers=1, deadline=SECONDS)
    pool("x+1", "1+x")
    pids = worker_pids(pool)
    pool.close()
    pool.close()
    assert wait_until_dead(pids, 5.0)
    with pytest.raises(TrinityError, match="closed"):
        pool("x+1", "1+x")


def test_close_ends_a_comparison_in_flight():
    """Closing from another thread does not wait for the deadline; the comparison counts as a failure."""
    pool = SymbolicPool(workers=1, deadline=60.0)
    assert pool("x+1", "1+x") is True
    results = []
    thread = threading.Thread(target=lambda: results.append(pool(*HANG)))
    thread.start()
    time.sleep(0.3)
    pool.close()
    thread.join(10.0)
    assert results == [None]
    assert pool.counters.failures == 1


def test_a_pool_that_was_never_used_starts_nothing():
    pool = SymbolicPool()
    assert worker_pids(pool) == []
    pool.close()


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit(0)"], ids=["killed", "exited"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "hanging"])
def test_workers_die_with_their_parent(ending, busy, tmp_path):
    """However the parent ends, no worker outlives it; one that hangs dies at its own alarm."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys, threading, time
        from trinity_vlm.answers import SymbolicPool
        raise_if_imported_again = os.environ.setdefault("PARENT_IMPORTED", str(os.getpid()))
        assert raise_if_imported_again == str(os.getpid()), "a worker imported __main__"
        pool = SymbolicPool(workers=1, deadline=2.0)
        assert pool("x+1", "1+x") is True
        print(pool._workers[0].pid, flush=True)
        if {busy}:
            threading.Thread(target=pool, args={HANG!r}, daemon=True).start()
            time.sleep(0.3)
        {ending}
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    assert wait_until_dead([pid], 10.0)


def test_workers_are_light_and_ignore_the_working_directory(tmp_path):
    """A worker imports neither torch nor this package, nor a stray sympy.py or numbers.py where the user stands."""
    for name in ("sympy", "numbers", "math_verify"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('shadowed')")
    code = "import runpy, sys; m = runpy.run_path(sys.argv[1]); assert m['compare']('x+1', '1+x'); print(*sys.modules)"
    command = [sys.executable, "-P", "-c", code, str(WORKER_SCRIPT)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "sympy" in loaded
    assert not [m for m in loaded if m.split(".")[0] in ("torch", "transformers", "trinity_vlm", "numpy")]
