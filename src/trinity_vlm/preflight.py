"""Does the model look at the pixels, and does the engine speak with the model that is trained?

Both are asked before step 1; the second again with the rollouts of every step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from trinity_vlm.assembly import System, open_stream
from trinity_vlm.engine.parity import PARITY_BOUNDS, Gap, parity_gaps, require_parity
from trinity_vlm.engine_settings import ENGINES_WITH_THEIR_OWN_MODEL
from trinity_vlm.errors import TrainingError
from trinity_vlm.recording import Reporter
from trinity_vlm.types import POLICY, VERIFIER, Prompt, Role

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

    The same tokens, with images and without, under the policy, and under the Verifier where it is our own adapter;
    ``check_that_the_engine_still_agrees`` follows after each step.
    """
    if system.config.engine.kind not in ENGINES_WITH_THEIR_OWN_MODEL:
        return
    images = open_stream(system.config, system.backbone, system.workers).take(PARITY_IMAGES)
    prompts = [system.cast.questioner.prompt(image) for image in images] + _verifier_prompts(system, 2)
    for adapter in (POLICY, VERIFIER) if _verifier_is_ours(system) else (POLICY,):
        gaps = asyncio.run(parity_gaps(system.engine, system.backbone, prompts, adapter, system.config.seed))
        found = ", ".join(f"{gap.mean:.2g} with {kind} prompts" for kind, gap in gaps.items())
        reporter.note(f"parity check, {adapter}: engine and trainer differ by {found} (nat a token)")
        require_parity(gaps, PARITY_BOUNDS[system.backbone.dtype], adapter)


def check_that_the_engine_still_agrees(system: System, metrics: Mapping[str, float]) -> dict[str, float]:
    """Stop when a step's rollouts came with other log-probabilities than the trainer's: a stale or deaf adapter.

    Verdicts come without any. So the servers, each of them that is ready, are asked again for what the Verifier's new
    average says; the engine in this process looks at every adapter as it loads it. Returns what that found over all
    workers: ``verifier_gap`` (the largest mean of a worker), ``verifier_gap_max``, and ``seconds/parity``, which no
    other ``seconds/*`` holds; nothing where nothing was asked. Every worker calls it, and a gap that is too
    large stops them all.
    """
    if system.config.engine.kind not in ENGINES_WITH_THEIR_OWN_MODEL:
        return {}
    bound = PARITY_BOUNDS[system.backbone.dtype]
    if "engine_gap" in metrics:
        tokens = int(sum(metrics[f"completion_tokens/{role}"] for role in Role))
        require_parity({"this step's": Gap(metrics["engine_gap"], metrics["engine_gap_max"], tokens)}, bound)
    servers = system.config.engine.servers
    if servers is None or not _verifier_is_ours(system):
        return {}
    start = time.perf_counter()
    prompts = _verifier_prompts(system, max(2, len(servers.urls)))
    own = asyncio.run(parity_gaps(system.engine, system.backbone, prompts, VERIFIER, system.config.seed))
    gaps = _labelled(system.workers.gather(own))
    require_parity(gaps, bound, VERIFIER)
    if not gaps:
        return {}
    return {
        "verifier_gap": max(gap.mean for gap in gaps.values()),
        "verifier_gap_max": max(gap.maximum for gap in gaps.values()),
        "seconds/parity": time.perf_counter() - start,
    }


def _labelled(by_worker: Sequence[Mapping[str, Gap]]) -> dict[str, Gap]:
    """All workers' gaps under names of their own."""
    if len(by_worker) == 1:
        return dict(by_worker[0])
    return {f"worker {rank}'s {kind}": gap for rank, gaps in enumerate(by_worker) for kind, gap in gaps.items()}


def _verifier_is_ours(system: System) -> bool:
    return system.config.roles.verifier_engine is None


def _verifier_prompts(system: System, count: int) -> list[Prompt]:
    words = ["two", *map(str, range(3, count + 2))]
    return [system.cast.verifier.equivalence_prompt("How many?", "2", word) for word in words]
