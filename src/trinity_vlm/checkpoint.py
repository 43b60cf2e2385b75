"""Saving and loading the whole state of a run, bit for bit, without pickle.

    CheckpointState --save_checkpoint--> checkpoints/step-000123/ --load_checkpoint--> equal CheckpointState

A checkpoint becomes visible by one rename, after all its bytes are on the disk: a run killed at any instant finds the
last complete one. The folder's layout, integrity and retention are in :mod:`trinity_vlm.rundir.checkpoints`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as decode_tensors
from safetensors.torch import save as encode_tensors

from trinity_vlm.errors import CheckpointError
from trinity_vlm.rundir.atomic import (
    TEMPORARY_PREFIX,
    free_space,
    names_path,
    remove,
    remove_folder_atomically,
    remove_temporaries,
    sync_folder,
    write_new_file,
)
from trinity_vlm.rundir.checkpoints import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileDigest,
    apply_retention,
    best_checkpoint,
    checkpoint_name,
    digest,
    find_damage,
    latest_checkpoint,
    list_checkpoints,
    logger,
    mark_best,
    read_manifest,
)
from trinity_vlm.rundir.strict_json import JSON, dumps, loads_object

__all__ = [
    "CheckpointState",
    "best_checkpoint",
    "latest_checkpoint",
    "load_checkpoint",
    "load_optimizer",
    "mark_best",
    "optimizer_tensors",
    "save_checkpoint",
]

META_NAME = "meta.json"
_TENSOR_SUFFIX = ".safetensors"
_GROUP_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Everything needed to go on after outer step ``step``.

    tensors: group ("policy", "verifier", "ema", "optimizer") -> name -> tensor of any shape and dtype that
        safetensors holds; loaded tensors lie on the CPU
    meta: strict JSON: the optimizer's options and step counts, each worker's position in the image stream
    """

    step: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    meta: Mapping[str, JSON]


def save_checkpoint(root: Path, state: CheckpointState, *, keep_last: int, keep_every: int) -> Path:
    """Commit ``state`` as ``root/step-NNNNNN`` and apply retention; returns the new folder.

    Never deletes the newest complete checkpoint nor the one named as best. Saving the same content twice is harmless.
    Raises CheckpointError when the state can't be stored exactly, when a later or another checkpoint of this step
    exists, and when the disk refuses a write: then its temporary is removed and the earlier checkpoints are untouched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1")
    target = root / checkpoint_name(state.step)
    temporary = root / f"{TEMPORARY_PREFIX}{target.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_temporaries(root)
        manifest = _write_files(temporary, state)
        if not _already_saved(target, manifest):
            os.rename(temporary, target)
            sync_folder(root)
    except OSError as error:
        raise CheckpointError(_explain_write_failure(root, state.step, error)) from error
    finally:
        remove(temporary)
    try:
        apply_retention(root, keep_last=keep_last, keep_every=keep_every)
    except OSError as error:
        logger.warning("an old checkpoint could not be deleted: %s", error)
    return target


def load_checkpoint(path: Path) -> CheckpointState:
    """Read a checkpoint folder; every byte is checked against the manifest before it is used.

    Raises CheckpointError when a file is missing or damaged, or the format is newer than this package.
    """
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    try:
        manifest = read_manifest(path)
        meta = loads_object(_read_checked(path / META_NAME, manifest.files[META_NAME]))
        for name in sorted(manifest.files.keys() - {META_NAME}):
            data = _read_checked(path / name, manifest.files[name])
            tensors[name.removesuffix(_TENSOR_SUFFIX)] = decode_tensors(data)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path}: damaged checkpoint: {error}; use the one before it") from error
    return CheckpointState(manifest.step, tensors, meta)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, JSON]]:
    """The optimizer's state keyed by parameter name, exact: AdamW's step counts and both moments.

    names: one unique name per parameter, in the order of the optimizer's groups
    Returns tensors named ``"<parameter>/<state>"`` (e.g. ``"q.lora_A/exp_avg"``) and the options of each group.
    Raises CheckpointError for names that don't match the parameters, or a state or option that can't be stored.
    """
    tensors: dict[str, torch.Tensor] = {}
    groups: list[JSON] = []
    for group, members in zip(optimizer.param_groups, _names_by_group(optimizer, names), strict=True):
        for name, parameter in zip(members, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if not isinstance(value, torch.Tensor):
                    raise CheckpointError(f"optimizer state {name}/{key} is a {type(value).__name__}, not a tensor")
                tensors[f"{name}/{key}"] = value.detach()
        options = {key: _plain_option(key, value) for key, value in group.items() if key != "params"}
        groups.append({"parameters": list(members), "options": options})
    return tensors, {"class": type(optimizer).__name__, "groups": groups}


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    meta: Mapping[str, Any],
) -> None:
    """Put back what ``optimizer_tensors`` returned; parameters are matched by name, whatever their order.

    Raises CheckpointError, before anything is changed, when the optimizer's class, groups or shapes differ.
    """
    members = _names_by_group(optimizer, names)
    saved_options = _match_groups(optimizer, members, meta)
    states = _states_by_name(optimizer, members, tensors)
    for group, options, group_names in zip(optimizer.param_groups, saved_options, members, strict=True):
        for key, value in options.items():
            group[key] = tuple(value) if isinstance(value, list) else value
        step_on_device = group.get("capturable") or group.get("fused")
        for name, parameter in zip(group_names, group["params"], strict=True):
            optimizer.state[parameter] = {
                key: value.to("cpu" if key == "step" and not step_on_device else parameter.device, copy=True)
                for key, value in states[name].items()
            }


def _write_files(folder: Path, state: CheckpointState) -> CheckpointManifest:
    """Write and fsync every file and the folder; one group's bytes are held in memory at a time."""
    with names_path(folder):
        folder.mkdir()
    files: dict[str, FileDigest] = {}
    for group, tensors in state.tensors.items():
        name = group + _TENSOR_SUFFIX
        data = _encode_group(group, tensors)
        write_new_file(folder / name, data)
        files[name] = digest(data)
    meta = _encode_meta(state.meta)
    write_new_file(folder / META_NAME, meta)
    files[META_NAME] = digest(meta)
    manifest = CheckpointManifest(state.step, files)
    write_new_file(folder / MANIFEST_NAME, manifest.to_json())
    sync_folder(folder)
    return manifest


def _already_saved(target: Path, manifest: CheckpointManifest) -> bool:
    """Whether ``target`` holds these very files. A damaged one is deleted; raises CheckpointError for another one."""
    newest = list_checkpoints(target.parent)[-1:]
    if newest and newest[0][0] > manifest.step:
        raise CheckpointError(
            f"{newest[0][1]} is later than step {manifest.step}, which is being saved; "
            "call truncate_after on the run directory before training goes on from an earlier step"
        )
    if not target.exists():
        return False
    damage = find_damage(target)
    if damage is not None:
        logger.warning("checkpoint %s is damaged (%s) and is written anew", target, damage)
        remove_folder_atomically(target)
        return False
    if read_manifest(target) != manifest:
        raise CheckpointError(f"{target} already holds another state of step {manifest.step}")
    return True


def _encode_group(group: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    if not _GROUP_NAME.fullmatch(group):
        raise CheckpointError(f"tensor group {group!r} can't be a file name: letters, digits, '_' and '-' can")
    try:
        return encode_tensors({name: _storable(tensor) for name, tensor in tensors.items()})
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"tensor group {group!r} can't be stored exactly: {error}") from error


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor that owns its memory: tied weights and views are stored as separate copies."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _encode_meta(meta: Mapping[str, JSON]) -> bytes:
    try:
        return dumps(dict(meta), indent=1).encode()
    except ValueError as error:
        raise CheckpointError(f"checkpoint meta is not plain JSON: {error}") from None


def _read_checked(path: Path, expected: FileDigest) -> bytes:
    data = path.read_bytes()
    if digest(data) != expected:
        raise ValueError(f"{path.name} does not match its recorded size and sha256")
    return data


def _explain_write_failure(root: Path, step: int, error: OSError) -> str:
    committed = list_checkpoints(root)
    last = f"the last complete one is {committed[-1][1].name}" if committed else "there is none before it"
    return (
        f"checkpoint of step {step} was not written: {error.filename or root}: {error.strerror}; "
        f"{free_space(root)} on that disk; {last}. Free some space (or lower checkpoint.keep_last), then resume"
    )


def _names_by_group(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> list[list[str]]:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if len(names) != sum(sizes) or len(set(names)) != len(names):
        raise CheckpointError(f"{len(names)} names ({len(set(names))} different) for {sum(sizes)} optimizer parameters")
    rest = iter(names)
    return [list(islice(rest, size)) for size in sizes]


def _plain_option(key: str, value: Any) -> JSON:
    if isinstance(value, torch.Tensor):
        raise CheckpointError(f"the optimizer option {key} is held in a tensor, which is not supported")
    return list(value) if isinstance(value, tuple) else value


def _match_groups(
    optimizer: torch.optim.Optimizer, members: list[list[str]], meta: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The saved options of each group of ``optimizer``, in its order."""
    if meta["class"] != type(optimizer).__name__:
        raise CheckpointError(
            f"the checkpoint is of optimizer {meta['class']}, this run's is {type(optimizer).__name__}"
        )
    saved = {frozenset(group["parameters"]): group["options"] for group in meta["groups"]}
    present = {name for group in members for name in group}
    expected = {name for group in saved for name in group}
    if present != expected:
        missing, extra = sorted(expected - present), sorted(present - expected)
        raise CheckpointError(f"optimizer parameters differ from the checkpoint: missing {missing}, unexpected {extra}")
    try:
        return [saved[frozenset(group)] for group in members]
    except KeyError:
        raise CheckpointError("the optimizer's parameter groups are split otherwise than in the checkpoint") from None


def _states_by_name(
    optimizer: torch.optim.Optimizer, members: list[list[str]], tensors: Mapping[str, torch.Tensor]
) -> dict[str, dict[str, torch.Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shapes = dict(zip(chain.from_iterable(members), (parameter.shape for parameter in parameters), strict=True))
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in shapes}
    for key, tensor in tensors.items():
        name, _, state = key.rpartition("/")
        if name not in states:
            raise CheckpointError(f"optimizer state {key!r} belongs to no parameter of this optimizer")
        if tensor.dim() and tensor.shape != shapes[name]:
            raise CheckpointError(f"optimizer state {key!r}: {tuple(tensor.shape)} against {tuple(shapes[name])}")
        states[name][state] = tensor
    return states
