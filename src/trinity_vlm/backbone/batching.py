"""Sequences side by side: padding, masks, positions, and where the completion tokens are predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trinity_vlm.backbone.encoding import EncodedPrompt
from trinity_vlm.backbone.shared_attention import Segments

Pack = tuple[EncodedPrompt, Sequence[Sequence[int]]]
"""A prompt and its completions."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """S sequences (prompt, then completion) in B rows of padded length L, on the model's device; T: longest completion.

    Usually a sequence is a row. With shared prompts a row is one prompt and, behind it, the completions of several
    sequences, none of which sees another.

    input_ids: [B, L]
    attention_mask: [B, L], 1 on tokens and 0 on padding; with shared prompts [B, 1, L, L], True where a query may look
    position_ids: [B, L], or [3, B, L] for families with three rotary axes
    token_inputs: further per-token inputs [B, L], zero over completions and padding
    prompts: row-aligned; rows with the same picture share ``image_key``
    completion_ids: [S, T]; completion_mask: [S, T], True on completion tokens
    row_of: [S] row of each sequence
    predicted_at: [S, T] index into L of the position whose output predicts the token
    segments: lengths of a single row's prompt and completions, which then take the place of the mask
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    token_inputs: Mapping[str, Tensor]
    prompts: tuple[EncodedPrompt, ...]
    completion_ids: Tensor
    completion_mask: Tensor
    row_of: Tensor
    predicted_at: Tensor
    segments: Segments | None = None


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
        torch.arange(rows, device=device),
        predicted_at.to(device),
    )


def collate_shared(packs: Sequence[Pack], pad_id: int, device: torch.device) -> Batch:
    """One row per prompt with all of its completions behind it: the prompt is computed once for all of them.

    Sequences are in the order of the packs. Values are those of separate rows up to rounding. For families with three
    rotary axes and causal attention.
    """
    return _lay_out(packs, pad_id, device, None)


def collate_row(pack: Pack, pad_id: int, device: torch.device) -> Batch:
    """As ``collate_shared`` for one prompt with one or more completions, without a mask: memory grows with the length
    of the row, not with its square. Needs the attention of ``shared_attention``."""
    prompt, completions = pack
    return _lay_out([pack], pad_id, device, Segments(len(prompt.input_ids), tuple(map(len, completions))))


def _lay_out(packs: Sequence[Pack], pad_id: int, device: torch.device, segments: Segments | None) -> Batch:
    lengths = [len(prompt.input_ids) + sum(map(len, completions)) for prompt, completions in packs]
    width, longest = max(lengths), max(len(c) for _, completions in packs for c in completions)
    number = sum(len(completions) for _, completions in packs)
    ids = torch.full((len(packs), width), pad_id)
    positions = torch.zeros(3, len(packs), width, dtype=torch.long)
    extras = {
        name: torch.zeros(len(packs), width, dtype=v.dtype) for p, _ in packs for name, v in p.token_inputs.items()
    }
    completion_ids = torch.full((number, longest), pad_id)
    completion_mask = torch.zeros(number, longest, dtype=torch.bool)
    predicted_at = torch.zeros(number, longest, dtype=torch.long)
    row_of: list[int] = []
    for row, (prompt, completions) in enumerate(packs):
        size = start = len(prompt.input_ids)
        ids[row, :size] = torch.tensor(prompt.input_ids)
        positions[:, row, :size] = sequence_positions(prompt, 0, 3)
        for name, values in prompt.token_inputs.items():
            extras[name][row, :size] = values
        for completion in completions:
            index, stop = len(row_of), start + len(completion)
            row_of.append(row)
            ids[row, start:stop] = torch.tensor(completion)
            positions[:, row, start:stop] = prompt.next_position + torch.arange(stop - start)
            completion_ids[index, : stop - start] = ids[row, start:stop]
            completion_mask[index, : stop - start] = True
            predicted_at[index, : stop - start] = torch.tensor([size - 1, *range(start, stop - 1)])
            start = stop
    mask = _mask_per_query(packs, width) if segments is None else torch.ones(1, width, dtype=torch.long)
    return Batch(
        ids.to(device),
        mask.to(device),
        positions.to(device),
        {name: values.to(device) for name, values in extras.items()},
        tuple(prompt for prompt, _ in packs),
        completion_ids.to(device),
        completion_mask.to(device),
        torch.tensor(row_of, device=device),
        predicted_at.to(device),
        segments,
    )


def _mask_per_query(packs: Sequence[Pack], width: int) -> Tensor:
    """[B, 1, L, L]: prompt tokens see earlier ones; completion tokens the prompt and earlier ones of their own."""
    mask = torch.eye(width, dtype=torch.bool).repeat(len(packs), 1, 1)
    for row, (prompt, completions) in zip(mask, packs, strict=True):
        size = start = len(prompt.input_ids)
        row[:size, :size] = torch.ones(size, size, dtype=torch.bool).tril()
        for length in map(len, completions):
            own = slice(start, start + length)
            row[own, :size] = True
            row[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
            start += length
    return mask[:, None]


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
