"""Seeds derived from what a draw is for, never from when it happens, so that episodes are independent of neighbours."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int) -> int:
    """A 63-bit seed from the given parts, for example ``derive_seed(run_seed, step, image_uid, call, slot, attempt)``.

    Stable between processes, machines and Python versions.
    """
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
