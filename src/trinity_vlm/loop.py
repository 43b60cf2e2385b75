"""The outer loop. Open this first: ``outer_step`` is the paper's Figure 1.

unlabeled images
      │
      ▼
episodes  (policy asks, Verifier screens, policy solves, Verifier grades and settles disputes)
      │
      ▼
rewards ─▶ advantages ─▶ one GSPO update of the policy ─▶ EMA ─▶ the Verifier of the next step
      │
      ▼
metrics, episode files, checkpoint
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from typing import TypeVar

import psutil

from trinity_vlm.advantages import collect_rollouts
from trinity_vlm.assembly import System, assemble
from trinity_vlm.config import Config
from trinity_vlm.episode import Cast, play_episode
from trinity_vlm.extensions import advantage_rule, score
from trinity_vlm.metrics import Mean, MetricSums, metric_sums
from trinity_vlm.overlap import step_update
from trinity_vlm.preflight import (
    check_that_images_matter,
    check_that_the_engine_agrees,
    check_that_the_engine_still_agrees,
)
from trinity_vlm.recording import Recorder, Reporter, Silent, StepResult
from trinity_vlm.recovery import restore
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.truth import truth_sums
from trinity_vlm.types import POLICY, Episode, ImageRecord, Rollout, ScoredEpisode
from trinity_vlm.workers import Workers

T = TypeVar("T")


def evolve(config: Config, run: RunDirectory, reporter: Reporter | None = None) -> None:
    """Train from the run's last checkpoint (or from scratch) to ``config.steps`` outer steps.

    Can be killed at any instant and called again: it goes on from the last checkpoint and, on the ``transformers``
    engine and the same hardware, ends with the same metrics and weights. Raises UserError subclasses for what the
    user can fix, TrainingError when the update can't go on; the last checkpoint stays usable.
    """
    reporter = reporter or Silent()
    with assemble(config, Workers.from_environment()) as system:
        done = restore(system, run)
        system.serve(done)
        reporter.note(system.backbone.describe_trainable())
        check_that_images_matter(system, reporter)
        check_that_the_engine_agrees(system, reporter)
        with closing(Recorder(system, run, reporter)) as recorder:
            if done == 0:
                recorder.record_start()
            if done >= config.steps:
                reporter.note(f"{done} of {config.steps} steps are done already; to go on, resume with steps=N")
            elif done:
                reporter.note(f"going on after step {done} of {config.steps}")
            for step in range(done, config.steps):
                result = outer_step(system, step)
                result.metrics.update(check_that_the_engine_still_agrees(system, result.metrics))
                recorder.record(step + 1, result)


def outer_step(system: System, step: int) -> StepResult:
    """Images in, an updated policy and Verifier out (Section 2). ``step`` counts from 0; what is written, from 1."""
    clock = _Clock()
    images = system.stream.take(system.images_per_worker)
    earlier = system.workers.gather([image.uid for image in images])[: system.workers.rank]
    seen = Counter(uid for uids in earlier for uid in uids)
    rule = advantage_rule(system.config.rewards)
    with step_update(system.trainer, step, system.config) as update:

        async def graded(episode: Episode) -> tuple[ScoredEpisode, list[Rollout]]:
            scored = score(episode, system.config.rewards)
            rollouts = collect_rollouts([scored], rule)
            await update.take(rollouts)
            return scored, rollouts

        played = asyncio.run(play_episodes(images, step + 1, system.cast, graded, seen))
        clock.lap("episodes")
        scored = [episode for episode, _ in played]
        rollouts = [rollout for _, retained in played for rollout in retained]
        trained = update.finish(rollouts)
    clock.lap("update")
    ema = system.ema.update(system.backbone.factors(POLICY))
    system.serve(step + 1)
    clock.lap("ema")
    metrics = _merge(system, scored, rollouts) | trained | ema.metrics() | clock.seconds
    metrics["memory/rss_gib"] = psutil.Process().memory_info().rss / 2**30
    return StepResult(tuple(scored), tuple(rollouts), metrics)


async def play_episodes(
    images: Sequence[ImageRecord],
    step: int,
    cast: Cast,
    graded: Callable[[Episode], Awaitable[T]],
    seen: Counter[str] | None = None,
) -> list[T]:
    """One episode per image, all at once: the engine batches whatever waits. Each goes to ``graded`` when it ends.

    ``seen`` counts the images that workers before this one play in the same step.
    """
    seen = Counter(seen)

    async def play(image: ImageRecord, occurrence: int) -> T:
        return await graded(await play_episode(image, step, cast, occurrence=occurrence))

    coroutines = []
    for image in images:
        coroutines.append(play(image, seen[image.uid]))
        seen[image.uid] += 1
    return list(await asyncio.gather(*coroutines))


def _merge(system: System, scored: Sequence[ScoredEpisode], rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Episode metrics over all workers, with ground truth where the images' scenes are known.

    ``blank_image_gap``: mean change of a rollout's token log-probabilities when its image is replaced by a grey one.
    """
    sums = metric_sums(scored, rollouts)
    if system.environment is not None:
        sums = sums + truth_sums(scored, system.environment)
    sums = sums + MetricSums(counts=_failures(system))
    if rollouts:
        seen = rollouts[0]
        gap = system.backbone.blank_image_gap(seen.prompt, seen.completion.token_ids, POLICY)
        sums = sums + MetricSums(means={"blank_image_gap": Mean.of([gap])})
    return sum(system.workers.gather(sums), MetricSums()).finalise()


def _failures(system: System) -> dict[str, int]:
    """What went wrong quietly: symbolic comparisons given up and requests sent again since the (re)start, images
    skipped since step 1."""
    counters = system.cast.matcher.counters
    counts = {"symbolic/timeouts": counters.timeouts, "symbolic/failures": counters.failures}
    counts |= {f"engine/{what}": number for what, number in getattr(system.engine, "counters", {}).items()}
    return counts | {f"images/skipped/{reason}": number for reason, number in system.stream.skipped.items()}


class _Clock:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds/{phase}"] = now - self._last
        self.seconds["seconds/step"] = now - self._start
        self._last = now
