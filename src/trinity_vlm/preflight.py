"""Does the model look at the pixels, and does the engine speak with the model that is trained?

Both are asked before step 1; the second again with the rollouts of every step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from trinity_vlm.assembly import System, open_stream
from trinity_vlm.engine.parity import PARITY_BOUNDS, Gap, parity_gaps, require_parity
from trinity_vlm.engine_settings import ENGINES_WITH_THEIR_OWN_MODEL
from trinity_vlm.errors import TrainingError
from trinity_vlm.recording import Reporter
from trinity_vlm.types import POLICY, Role

BLANK_IMAGE_GAP = 1e-4
PARITY_IMAGES = 4


def check_that_images_matter(system: System, reporter: Reporter) -> None:
    """Stop before step 1 when the update would not see the pixels: a blank image must change log-probabilities."""
    (image,) = open_stream(system.config, system.backbone, system.workers).take(1)
    gap = system.backbone.blank_image_gap(system.cast.questioner.prompt(image))
    reporter.note(f"blank-image check: log-probabilities move by {gap:.3g} nat a token without the image")
    if gap < BLANK_IMAGE_GAP:
        raise TrainingError(
            f"log-probabilities move by only {gap:.3g} nat a token (at least {BLANK_IMAGE_GAP} expected) when the "
            f"image {image.uid} is replaced by a blank one: the model is not looking at its input; "
            "check model.path and its processor"
        )


def check_that_the_engine_agrees(system: System, reporter: Reporter) -> None:
    """Stop before step 1 when an engine with a model of its own gives other log-probabilities than the trainer's.

    The same tokens, with images and without; ``check_that_the_engine_still_agrees`` follows after each step.
    """
    if system.config.engine.kind not in ENGINES_WITH_THEIR_OWN_MODEL:
        return
    images = open_stream(system.config, system.backbone, system.workers).take(PARITY_IMAGES)
    prompts = [system.cast.questioner.prompt(image) for image in images]
    prompts += [system.cast.verifier.equivalence_prompt("How many?", "2", word) for word in ("two", "3")]
    gaps = asyncio.run(parity_gaps(system.engine, system.backbone, prompts, POLICY, system.config.seed))
    found = ", ".join(f"{gap.mean:.2g} with {kind} prompts" for kind, gap in gaps.items())
    reporter.note(f"parity check: engine and trainer differ by {found} (nat a token)")
    require_parity(gaps, PARITY_BOUNDS[system.backbone.dtype])


def check_that_the_engine_still_agrees(system: System, metrics: Mapping[str, float]) -> None:
    """Stop when a step's rollouts came with other log-probabilities than the trainer's: a stale or deaf adapter."""
    if system.config.engine.kind not in ENGINES_WITH_THEIR_OWN_MODEL or "engine_gap" not in metrics:
        return
    tokens = int(sum(metrics[f"completion_tokens/{role}"] for role in Role))
    gap = Gap(metrics["engine_gap"], metrics["engine_gap_max"], tokens)
    require_parity({"this step's": gap}, PARITY_BOUNDS[system.backbone.dtype])
