"""Packed training batches and the worker processes that make them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset

from trinity_vlm.backbone import Backbone, Batch, EncodedPrompt
from trinity_vlm.backbone.batching import collate, stack_image_inputs
from trinity_vlm.config import ModelConfig
from trinity_vlm.supervised.encoding import ExampleEncoder
from trinity_vlm.supervised.examples import ExampleSource, SupervisedExample

WIDTH_MULTIPLE = 16
"""Rows are padded to a multiple of this: fewer distinct shapes, aligned kernels."""
PREFETCH = 6


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """A batch as few CPU tensors, cheap to hand from process to process; B rows, L columns, T completion tokens.

    rows: input_ids, position_ids, completion_ids, completion_mask, predicted_at as in the backbone's Batch
    token_inputs: per-token inputs [B, L]
    image_inputs: tensors of the distinct images, joined; ``image_lengths`` says how many entries each image has
    image_of_row: index of each row's image, -1 for a text-only row
    """

    rows: Mapping[str, Tensor]
    token_inputs: Mapping[str, Tensor]
    image_inputs: Mapping[str, Tensor]
    image_lengths: Mapping[str, tuple[int, ...]]
    image_of_row: tuple[int, ...]

    def pin_memory(self) -> PackedBatch:
        """Called by the loader: page-locked copies, so that transfers overlap with compute."""

        def pinned(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {name: values.pin_memory() for name, values in tensors.items()}

        return PackedBatch(
            pinned(self.rows),
            pinned(self.token_inputs),
            pinned(self.image_inputs),
            self.image_lengths,
            self.image_of_row,
        )


def pack(
    sequences: Sequence[tuple[EncodedPrompt, tuple[int, ...]]], pad_id: int, pixel_dtype: torch.dtype
) -> PackedBatch:
    """Right-padded rows and each distinct image once, its pixels in the dtype that the vision tower reads."""
    batch = collate(sequences, "right", pad_id, torch.device("cpu"))
    missing = -batch.input_ids.shape[1] % WIDTH_MULTIPLE
    images = {p.image_key: p for p in batch.prompts if p.image_key is not None}
    order = {key: index for index, key in enumerate(images)}
    inputs = stack_image_inputs(list(images.values()))
    return PackedBatch(
        {
            "input_ids": pad(batch.input_ids, (0, missing), value=pad_id),
            "position_ids": pad(batch.position_ids, (0, missing)),
            "completion_ids": batch.completion_ids,
            "completion_mask": batch.completion_mask,
            "predicted_at": batch.predicted_at,
        },
        {name: pad(values, (0, missing)) for name, values in batch.token_inputs.items()},
        {name: v.to(pixel_dtype) if v.is_floating_point() else v for name, v in inputs.items()},
        {name: tuple(len(p.image_inputs[name]) for p in images.values()) for name in inputs},
        tuple(-1 if p.image_key is None else order[p.image_key] for p in batch.prompts),
    )


def unpack(packed: PackedBatch, device: torch.device, *, with_images: bool = True) -> Batch:
    """The backbone's Batch on ``device``.

    The attention mask is all ones: rows are padded on the right and attention is causal, so no token sees padding,
    and padding needs no mask. This keeps the fast attention kernels in play. ``with_images`` False leaves the image
    tensors out, for a caller that serves image features itself.
    """
    rows = {name: values.to(device, non_blocking=True) for name, values in packed.rows.items()}
    return Batch(
        input_ids=rows["input_ids"],
        attention_mask=torch.ones_like(rows["input_ids"]),
        position_ids=rows["position_ids"],
        token_inputs={name: values.to(device, non_blocking=True) for name, values in packed.token_inputs.items()},
        prompts=_row_prompts(packed, device) if with_images else _any_image(packed),
        completion_ids=rows["completion_ids"],
        completion_mask=rows["completion_mask"],
        row_of=torch.arange(len(rows["input_ids"]), device=device),
        predicted_at=rows["predicted_at"],
    )


def _row_prompts(packed: PackedBatch, device: torch.device) -> tuple[EncodedPrompt, ...]:
    """Per row, what the backbone needs to know of its image."""
    parts = {
        name: values.to(device, non_blocking=True).split(packed.image_lengths[name])
        for name, values in packed.image_inputs.items()
    }
    num_images = 1 + max(packed.image_of_row, default=-1)
    images = [
        EncodedPrompt((), {name: part[i] for name, part in parts.items()}, str(i), str(i)) for i in range(num_images)
    ]
    return tuple(EncodedPrompt((), {}, None) if i < 0 else images[i] for i in packed.image_of_row)


def _any_image(packed: PackedBatch) -> tuple[EncodedPrompt, ...]:
    """One stand-in that makes the backbone ask for image features."""
    return (EncodedPrompt((), {"image_grid_thw": packed.image_inputs["image_grid_thw"][:1]}, "all", "all"),)


class PackedBatches(Dataset[PackedBatch]):
    """The batches of a source, encoded where they are asked for.

    A worker process loads its own copy of the model on the CPU, for its tokenizer, processor and rotary positions:
    meant for small models. In the training process (no workers) the given backbone is used.
    """

    def __init__(self, source: ExampleSource, model: ModelConfig, pixel_dtype: torch.dtype) -> None:
        self._source = source
        self._model = model.model_copy(update={"device": "cpu", "dtype": "float32"})
        self._pixel_dtype = pixel_dtype
        self._encoder: ExampleEncoder | None = None
        self._pad_id = 0

    def use(self, backbone: Backbone) -> PackedBatches:
        """Encode with this backbone instead of loading one."""
        self._encoder, self._pad_id = ExampleEncoder(backbone), backbone.pad_id
        return self

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> PackedBatch:
        if self._encoder is None:
            self.use(Backbone.load(self._model, None))
        assert self._encoder is not None
        examples: Sequence[SupervisedExample] = self._source.batch(index)
        return pack(self._encoder(examples), self._pad_id, self._pixel_dtype)


def packed_batches(
    source: ExampleSource, model: ModelConfig, backbone: Backbone, num_workers: int, first: int = 0
) -> Iterator[PackedBatch]:
    """Batches ``first``, ``first + 1``, ... in order, whatever the number of worker processes."""
    dataset = PackedBatches(source, model, backbone.dtype)
    if num_workers == 0:
        dataset.use(backbone)
    yield from DataLoader(
        dataset,
        batch_size=None,
        sampler=range(first, len(source)),
        num_workers=num_workers,
        prefetch_factor=PREFETCH if num_workers else None,
        pin_memory=backbone.device.type == "cuda",
        multiprocessing_context="spawn" if num_workers else None,
    )
