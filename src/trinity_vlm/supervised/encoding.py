"""Examples to tensors, in worker processes: the very inputs an engine will see, at a fraction of the cost.

SupervisedExample --encode--> (EncodedPrompt, completion ids) --pack--> PackedBatch --unpack--> Batch
'------------------- worker process --------------------------------'                 '- training -'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from trinity_vlm.backbone import Backbone, EncodedPrompt
from trinity_vlm.backbone.encoding import image_key
from trinity_vlm.supervised.examples import SupervisedExample
from trinity_vlm.types import Prompt

_PROBE = "zq7"
_CHECKS = 2


@dataclass(frozen=True, slots=True)
class _Frame:
    """What surrounds the last user text in prompts of one kind: the encoded part before it, the ids behind it."""

    head: EncodedPrompt
    tail: tuple[int, ...]


class ExampleEncoder:
    """Encodes examples as ``Backbone.encode`` does, rendering each kind of prompt once and images in one call.

    Prompts that differ in their last user text only (same earlier turns, same image size, same prefix) share a frame:
    the ids before and behind that text. A new text is tokenized alone and put between. The first prompts of every kind
    are compared with ``Backbone.encode``; kinds that turn out different there are encoded in full for good.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._frames: dict[tuple[object, ...], _Frame | None] = {}
        self._checked: dict[tuple[object, ...], int] = {}
        self._end: int = backbone.tokenizer.eos_token_id

    def __call__(self, examples: Sequence[SupervisedExample]) -> list[tuple[EncodedPrompt, tuple[int, ...]]]:
        """Encoded prompts with completion ids, the end-of-turn id included."""
        texts = self._tokens([e.prompt.messages[-1].text for e in examples])
        completions = self._tokens([e.completion for e in examples])
        images = self._images([e.prompt.image.pixels for e in examples if e.prompt.image is not None])
        return [
            (self._encode(example.prompt, text, images), (*completion, self._end))
            for example, text, completion in zip(examples, texts, completions, strict=True)
        ]

    def _encode(self, prompt: Prompt, text: tuple[int, ...], images: Mapping[int, EncodedPrompt]) -> EncodedPrompt:
        image = prompt.image
        kind = (prompt.messages[:-1], prompt.assistant_prefix, None if image is None else image.pixels.size)
        if kind not in self._frames:
            self._frames[kind] = self._frame(prompt)
        frame = self._frames[kind]
        if frame is None or "<|" in prompt.messages[-1].text:
            return self._backbone.encode(prompt)
        encoded = _filled(frame, text, None if image is None else images.get(id(image.pixels)))
        if self._checked.get(kind, 0) < _CHECKS:
            self._checked[kind] = self._checked.get(kind, 0) + 1
            exact = self._backbone.encode(prompt)
            if not _same(encoded, exact):
                self._frames[kind] = None
                return exact
        return encoded

    def _frame(self, prompt: Prompt) -> _Frame | None:
        """Encode the prompt with a probe as its last text and cut there; None when the probe isn't found once."""
        if any(m.image is not None for m in prompt.messages[:-1]):
            return None
        last = replace(prompt.messages[-1], text=_PROBE)
        encoded = self._backbone.encode(Prompt((*prompt.messages[:-1], last), prompt.assistant_prefix))
        ids, (probe,) = encoded.input_ids, self._tokens([_PROBE])
        starts = [i for i in range(len(ids)) if ids[i : i + len(probe)] == probe]
        if len(starts) != 1:
            return None
        at = starts[0]
        head = replace(
            encoded,
            input_ids=ids[:at],
            token_inputs={name: values[:at] for name, values in encoded.token_inputs.items()},
            positions=None if encoded.positions is None else encoded.positions[:, :at],
        )
        return _Frame(head, ids[at + len(probe) :])

    def _images(self, pictures: Sequence[Image.Image]) -> dict[int, EncodedPrompt]:
        """Image inputs of each distinct picture, by its identity; empty for families that need more than pixels."""
        distinct = list({id(p): p for p in pictures}.values())
        if not distinct:
            return {}
        out = self._backbone.processor.image_processor(images=distinct, return_tensors="pt")
        if set(out) != {"pixel_values", "image_grid_thw"}:
            return {}
        grids: Tensor = out["image_grid_thw"]
        pixels = out["pixel_values"].split(grids.prod(dim=1).tolist())
        return {
            id(picture): EncodedPrompt(
                (), {"pixel_values": pixels[i], "image_grid_thw": grids[i : i + 1]}, str(i), image_key(picture)
            )
            for i, picture in enumerate(distinct)
        }

    def _tokens(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(ids) for ids in self._backbone.tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def _filled(frame: _Frame, text: tuple[int, ...], image: EncodedPrompt | None) -> EncodedPrompt:
    head = frame.head
    behind = len(text) + len(frame.tail)
    positions = head.positions
    if positions is not None:
        following = torch.arange(behind) + head.next_position
        positions = torch.cat([positions, following.expand(len(positions), -1)], dim=1)
    return EncodedPrompt(
        head.input_ids + text + frame.tail,
        {} if image is None else image.image_inputs,
        None if image is None else image.image_uid,
        None if image is None else image.image_key,
        {name: torch.cat([v, v.new_zeros(behind)]) for name, v in head.token_inputs.items()},
        positions,
    )


def _same(a: EncodedPrompt, b: EncodedPrompt) -> bool:
    """Whether two encodings of one prompt agree in ids, image tensors, per-token inputs and positions."""
    if a.input_ids != b.input_ids or (a.positions is None) != (b.positions is None):
        return False
    if a.positions is not None and b.positions is not None and not torch.equal(a.positions, b.positions):
        return False
    return _equal(a.token_inputs, b.token_inputs) and _equal(a.image_inputs, b.image_inputs)


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
