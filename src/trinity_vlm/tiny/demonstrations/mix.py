"""Which demonstrations are drawn how often, on images of which styles: a stream addressed by (seed, index).

Images come in groups, each with its own calls and styles, so that the Verifier can be shown more styles than the
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from trinity_vlm.environments.microcosm.environment import Microcosm, StyleMix
from trinity_vlm.seeds import derive_seed
from trinity_vlm.tiny.demonstrations.equivalence import equivalence
from trinity_vlm.tiny.demonstrations.example import Demonstration, Subject
from trinity_vlm.tiny.demonstrations.judging import dispute, reason
from trinity_vlm.tiny.demonstrations.policy import propose, solve
from trinity_vlm.tiny.demonstrations.screening import screen
from trinity_vlm.types import CallType

T = TypeVar("T")
IMAGES_PER_SEED = 1_000_000_000
BUILDERS: Mapping[CallType, Callable[[Subject], Demonstration]] = {
    CallType.PROPOSE: propose,
    CallType.SOLVE: solve,
    CallType.SCREEN: screen,
    CallType.REASON: reason,
    CallType.EQUIVALENCE: equivalence,
    CallType.DISPUTE: dispute,
}
_RARE_STYLES: StyleMix = (("more", 0.01), ("outline+grid+thin+dashed", 0.01))


@dataclass(frozen=True, slots=True)
class Group:
    """A share of the images with the calls demonstrated on them; all weights are relative."""

    share: float
    calls: tuple[tuple[CallType, float], ...]
    styles: StyleMix


@dataclass(frozen=True, slots=True)
class DemonstrationMix:
    """The whole warm-up distribution; ``per_image`` demonstrations share one image."""

    groups: tuple[Group, ...]
    per_image: int = 4


DEFAULT_MIX = DemonstrationMix(
    groups=(
        Group(
            share=0.58,
            calls=((CallType.SOLVE, 0.62), (CallType.PROPOSE, 0.38)),
            styles=(("base", 0.98), *_RARE_STYLES),
        ),
        Group(
            share=0.42,
            calls=(
                (CallType.SCREEN, 0.55),
                (CallType.REASON, 0.23),
                (CallType.DISPUTE, 0.12),
                (CallType.EQUIVALENCE, 0.1),
            ),
            styles=(("base", 0.98), *_RARE_STYLES),
        ),
    )
)


def demonstrations(mix: DemonstrationMix, seed: int, index: int) -> tuple[Demonstration, ...]:
    """The ``mix.per_image`` demonstrations of the index-th image of a seed; one image, one group's calls.

    A pure function, so that any number of workers can split the indices. Images are of the microcosm's ``train`` split.
    """
    world = Microcosm()
    rng = Random(derive_seed("demonstrations", seed, index))
    group = rng.choices(mix.groups, [group.share for group in mix.groups])[0]
    split = f"train@{_draw(rng, group.styles)}"
    image_index = seed * IMAGES_PER_SEED + index
    uid, image = world.image(split, image_index)
    subject = Subject(rng, world.scene(split, image_index), uid, image)
    return tuple(BUILDERS[_draw(rng, group.calls)](subject) for _ in range(mix.per_image))


def _draw(rng: Random, weighted: tuple[tuple[T, float], ...]) -> T:
    values, weights = zip(*weighted, strict=True)
    return rng.choices(values, weights)[0]
