"""Policies that move, and averages over them."""

import torch

from trinity_vlm.config import EmaConfig
from trinity_vlm.ema import LowRank, make_ema

ALPHA = 0.999
KINDS = ["factored", "dense", "none", "frozen"]


def ema(kind, initial, rank=16, alpha=ALPHA):
    return make_ema(EmaConfig(kind=kind, alpha=alpha), initial, rank)


def fresh_policy(out=96, into=160, r=8, seed=0):
    """A LoRA adapter at step 0 (B = 0, A uniform) and the generator that moves it."""
    generator = torch.Generator().manual_seed(seed)
    right = (2 * torch.rand(r, into, generator=generator) - 1) / into**0.5
    return LowRank(torch.zeros(out, r), right), generator


def random_policy(out=12, into=20, r=3, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    left = scale * torch.randn(out, r, generator=generator)
    return LowRank(left, torch.randn(r, into, generator=generator))


def walk(policy, generator, lr, drift=0.0):
    """One AdamW-sized step: every entry of B and A moves by about lr, in part in a constant direction; s is 2.

    ``drift`` 0 is pure noise, the hardest case for a low-rank average: every step adds new directions.
    """

    def step(factor):
        constant = torch.sign(torch.randn(factor.shape, generator=torch.Generator().manual_seed(factor.shape[0])))
        noise = torch.randn(factor.shape, generator=generator)
        return lr * (drift**0.5 * constant + (1 - drift) ** 0.5 * noise)

    return LowRank(policy.left + 2 * step(policy.left), policy.right + step(policy.right))


def relative_error(found, expected):
    return float((found.double() - expected.double()).norm() / expected.double().norm())
