"""Whether an engine with an encoder of its own read a prompt as the trainer will."""

from __future__ import annotations

from collections.abc import Sequence


def difference(served: Sequence[int], trained: Sequence[int]) -> str | None:
    """How the two token sequences differ, in words; None when they are equal.

    Example: ``difference([1, 2, 9], [1, 2])`` is "3 and 2 tokens, the first difference at 2".
    """
    if tuple(served) == tuple(trained):
        return None
    pairs = zip(served, trained, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(served), len(trained)))
    return f"{len(served)} and {len(trained)} tokens, the first difference at {at}"
