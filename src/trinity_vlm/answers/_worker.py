"""A symbolic worker process; run by path, it imports math-verify and nothing of this package.

Reads ``["ref", "pred"]`` a line, answers ``"equal"``, ``"different"``, ``"undecided"`` or ``"failure"`` a line. It ends
when its input closes, when its parent is gone, at its own alarm (so that a hanging orphan dies too), and after running
out of memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import sys

PARENT_CHECK_SECONDS = 5.0


def main(parent: int, deadline: float, memory_mb: int) -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    compare("x+x", "2x")
    replies.write(b'"ready"\n')
    while os.getppid() == parent:
        if not select.select([requests], [], [], PARENT_CHECK_SECONDS)[0]:
            continue
        line = requests.readline()
        if not line:
            break
        signal.setitimer(signal.ITIMER_REAL, deadline + 1.0)
        reply = answer(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        replies.write(json.dumps(reply).encode() + b"\n")
        if reply == "failure":
            break


def answer(ref_latex: str, pred_latex: str) -> str:
    """Verdict on one pair; a failure of the library is an answer too, since the pair may be any model output."""
    try:
        verdict = compare(ref_latex, pred_latex)
    except (Exception, RecursionError, MemoryError):
        return "failure"
    return "undecided" if verdict is None else "equal" if verdict else "different"


def compare(ref_latex: str, pred_latex: str) -> bool | None:
    """Equality each way round by math-verify without its own timeouts; None when either side does not parse."""
    from math_verify import LatexExtractionConfig, parse, verify

    sides = [
        parse(
            rf"\boxed{{{latex}}}",
            extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            parsing_timeout=None,
            raise_on_error=True,
        )
        for latex in (ref_latex, pred_latex)
    ]
    if not all(sides):
        return None
    return all(verify(a, b, timeout_seconds=None, raise_on_error=True) for a, b in (sides, sides[::-1]))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
