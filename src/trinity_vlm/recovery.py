"""From a running system to a checkpoint and back: what must be kept so that a resumed run repeats the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from trinity_vlm.checkpoint import CheckpointState, load_checkpoint, save_checkpoint
from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir import RunDirectory, best_checkpoint, latest_checkpoint
from trinity_vlm.types import POLICY, VERIFIER

if TYPE_CHECKING:
    from trinity_vlm.assembly import System
    from trinity_vlm.backbone import Backbone
    from trinity_vlm.images import StreamState


def save(system: System, run: RunDirectory, step: int) -> None:
    """Write the state after ``step`` outer steps; every worker calls it, the main one writes.

    All draws derive from seeds and names, so there is no generator state to keep.
    Raises CheckpointError when it can't be written; the last complete checkpoint is left as it was.
    """
    streams = system.workers.gather(system.stream.state_dict())
    if not system.workers.is_main:
        return
    optimizer_tensors, optimizer_meta = system.trainer.state()
    state = CheckpointState(
        step=step,
        tensors={
            POLICY: system.backbone.adapter_state(POLICY),
            VERIFIER: system.backbone.adapter_state(VERIFIER),
            "ema": system.ema.state_dict(),
            "optimizer": optimizer_tensors,
        },
        meta={"optimizer": optimizer_meta, "streams": streams, "base": system.backbone.fingerprint()},
    )
    keep = system.config.checkpoint
    save_checkpoint(run.checkpoints_path, state, keep_last=keep.keep_last, keep_every=keep.keep_every)


def restore(system: System, run: RunDirectory) -> int:
    """Load the last complete checkpoint, drop everything written after it, and return the steps already done."""
    path = latest_checkpoint(run.checkpoints_path)
    if path is None:
        if system.workers.is_main:
            run.truncate_after(0)
        return 0
    state = load_checkpoint(path)
    _require_same_base(state, system.backbone, run)
    system.backbone.load_adapter_state(POLICY, state.tensors[POLICY])
    system.backbone.load_adapter_state(VERIFIER, state.tensors[VERIFIER])
    system.ema.load_state_dict(state.tensors["ema"])
    meta = cast("dict[str, Any]", state.meta)
    system.trainer.load_state(state.tensors["optimizer"], meta["optimizer"])
    streams: list[StreamState] = meta["streams"]
    system.stream.load_state_dict(streams[system.workers.rank % len(streams)])
    if system.workers.is_main:
        run.truncate_after(state.step)
    return state.step


def load_adapters(backbone: Backbone, run: RunDirectory) -> int:
    """Load policy and Verifier of the run's best checkpoint (by held-out accuracy), else the latest; returns its step.

    Raises RunDirectoryError when the run has no complete checkpoint.
    """
    path = best_checkpoint(run.checkpoints_path) or latest_checkpoint(run.checkpoints_path)
    if path is None:
        raise RunDirectoryError(f"{run.path} has no complete checkpoint yet; train at least checkpoint.every steps")
    state = load_checkpoint(path)
    _require_same_base(state, backbone, run)
    for name in (POLICY, VERIFIER):
        backbone.load_adapter_state(name, state.tensors[name])
    return state.step


def _require_same_base(state: CheckpointState, backbone: Backbone, run: RunDirectory) -> None:
    """Adapters belong to the weights they were trained on; checkpoints of earlier versions don't say which."""
    before, now = state.meta.get("base"), backbone.fingerprint()
    if before is not None and before != now:
        raise RunDirectoryError(
            f"{run.path} was trained on other base weights than model.path={run.config.model.path!r} holds now "
            f"(fingerprint {before} then, {now} now): restore that model or package version, or start a new run"
        )
