"""Sequences side by side: padding, masks, positions, and where the completion tokens are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trinity_vlm.backbone.encoding import EncodedPrompt


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B sequences (prompt, then completion) padded to length L, on the model's device; T: longest completion.

    input_ids, attention_mask: [B, L]; the mask is 1 on tokens and 0 on padding
    position_ids: [B, L], or [3, B, L] for families with three rotary axes
    token_inputs: further per-token inputs [B, L], zero over completions and padding
    prompts: row-aligned; rows with the same picture share ``image_key``
    completion_ids: [B, T]; completion_mask: [B, T], True on completion tokens
    predicted_at: [B, T] index into L of the position whose output predicts the token
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    token_inputs: Mapping[str, Tensor]
    prompts: tuple[EncodedPrompt, ...]
    completion_ids: Tensor
    completion_mask: Tensor
    predicted_at: Tensor


def collate(
    sequences: Sequence[tuple[EncodedPrompt, Sequence[int]]],
    pad: Literal["left", "right"],
    pad_id: int,
    device: torch.device,
) -> Batch:
    """Batch prompts with their completions (empty ones for generation)."""
    lengths = [len(p.input_ids) + len(c) for p, c in sequences]
    rows, width, longest = len(sequences), max(lengths), max(len(c) for _, c in sequences)
    axes = 3 if any(p.positions is not None for p, _ in sequences) else 1
    ids = torch.full((rows, width), pad_id)
    mask = torch.zeros(rows, width, dtype=torch.long)
    positions = torch.zeros(axes, rows, width, dtype=torch.long)
    extras = {name: torch.zeros(rows, width, dtype=v.dtype) for p, _ in sequences for name, v in p.token_inputs.items()}
    completion_ids = torch.full((rows, longest), pad_id)
    completion_mask = torch.zeros(rows, longest, dtype=torch.bool)
    predicted_at = torch.zeros(rows, longest, dtype=torch.long)
    for row, ((prompt, completion), length) in enumerate(zip(sequences, lengths, strict=True)):
        start = width - length if pad == "left" else 0
        split, stop = start + len(prompt.input_ids), start + length
        ids[row, start:stop] = torch.tensor([*prompt.input_ids, *completion])
        mask[row, start:stop] = 1
        positions[:, row, start:stop] = sequence_positions(prompt, len(completion), axes)
        for name, values in prompt.token_inputs.items():
            extras[name][row, start:split] = values
        completion_ids[row, : len(completion)] = ids[row, split:stop]
        completion_mask[row, : len(completion)] = True
        predicted_at[row, : len(completion)] = torch.arange(split - 1, stop - 1)
    return Batch(
        ids.to(device),
        mask.to(device),
        (positions if axes == 3 else positions[0]).to(device),
        {name: values.to(device) for name, values in extras.items()},
        tuple(p for p, _ in sequences),
        completion_ids.to(device),
        completion_mask.to(device),
        predicted_at.to(device),
    )


def sequence_positions(prompt: EncodedPrompt, num_completion: int, axes: int) -> Tensor:
    """Rotary positions [axes, P + T]: the prompt's own, then counting on from its largest."""
    given = prompt.positions
    head = torch.arange(len(prompt.input_ids)).expand(axes, -1) if given is None else given
    return torch.cat([head, (torch.arange(num_completion) + prompt.next_position).expand(axes, -1)], dim=1)


def stack_image_inputs(prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
    """Image tensors of all rows joined along their first dimension, zero-padded where other dimensions differ."""
    names = {name for p in prompts for name in p.image_inputs}
    return {name: _join([p.image_inputs[name] for p in prompts if name in p.image_inputs]) for name in sorted(names)}


def _join(tensors: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(t.shape[1:] for t in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        if list(tensor.shape[1:]) != shape:
            grown = tensor.new_zeros(tensor.shape[0], *shape)
            grown[tuple(slice(n) for n in tensor.shape)] = tensor
            tensor = grown
        padded.append(tensor)
    return torch.cat(padded)
