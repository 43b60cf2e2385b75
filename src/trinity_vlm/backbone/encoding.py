"""From a Prompt to token ids and image tensors; images, texts and whole prompts met again come from bounded caches.

The samples of a call are requests of their own, and the update reads the same prompts once more: without the caches a
step would encode each of its policy prompts K + 1 times, on the loop that all episodes share.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from PIL import Image
from torch import Tensor

from trinity_vlm.types import ImageRecord, Prompt

PIXEL_CACHE_BYTES = 2 * 2**30  # an image of 1,024 tokens takes 25 MB as patches
PROMPT_CACHE_BYTES = 2**26  # a prompt of 3,000 tokens takes 0.1 MB: some hundred prompts
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPrompt:
    """A prompt as the model reads it, on the CPU.

    input_ids: length P, image placeholders expanded (one id per image token)
    image_inputs: tensors of its image (``pixel_values``, ``image_grid_thw`` ...), empty for a text-only prompt
    image_uid: the image's name; None for a text-only prompt
    image_key: digest of the pixels; what caches of image features are keyed by
    token_inputs: further inputs with one entry per token [P], for example ``token_type_ids``
    positions: [3, P] for families with three rotary axes, else None (positions 0 .. P-1)
    """

    input_ids: tuple[int, ...]
    image_inputs: Mapping[str, Tensor]
    image_uid: str | None
    image_key: str | None = None
    token_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    positions: Tensor | None = None

    @property
    def next_position(self) -> int:
        """The rotary position of the first completion token."""
        return len(self.input_ids) if self.positions is None else int(self.positions.max()) + 1


class BoundedCache(Generic[Value]):
    """Least recently used values up to a number of bytes; one value larger than that is kept alone."""

    def __init__(self, max_bytes: int, measure: Callable[[Value], int]) -> None:
        self._max_bytes = max_bytes
        self._measure = measure
        self._values: OrderedDict[str, Value] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: str, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made if absent."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        self._bytes += self._measure(value)
        self._values[key] = value
        while self._bytes > self._max_bytes and len(self._values) > 1:
            _, dropped = self._values.popitem(last=False)
            self._bytes -= self._measure(dropped)
        return value


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Memory of the tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def image_key(pixels: Image.Image) -> str:
    """A digest of size, mode and pixel values: equal pictures share cached work whatever they are called."""
    head = f"{pixels.mode}:{pixels.size}".encode()
    return hashlib.blake2b(head + pixels.tobytes(), digest_size=16).hexdigest()


class PictureKeys:
    """``image_key`` of pictures, worked out once for as long as the picture lives; its pixels must not change."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Image.Image], str]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, pixels: Image.Image) -> str:
        """The key of this very object."""
        known = self._known.get(id(pixels))
        if known is not None and known[0]() is pixels:
            return known[1]
        key, number = image_key(pixels), id(pixels)
        self._known[number] = (weakref.ref(pixels, lambda _: self._known.pop(number, None)), key)
        return key


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt but for its image's tensors, which have a cache of their own."""

    ids: tuple[int, ...]
    token_inputs: Mapping[str, Tensor]
    positions: Tensor | None

    @property
    def num_bytes(self) -> int:
        positions = {} if self.positions is None else {"positions": self.positions}
        return 8 * len(self.ids) + tensor_bytes({**self.token_inputs, **positions})


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """What stands for one image: its tensors, and the ids its placeholder expands to with their per-token inputs."""

    image_inputs: Mapping[str, Tensor]
    ids: tuple[int, ...]
    token_inputs: Mapping[str, Tensor]


class PromptEncoder:
    """Renders and encodes prompts of one processor. ``positions_of`` gives [3, P] rotary positions or None."""

    def __init__(
        self,
        processor: Any,
        removed_tokens: tuple[str, ...],
        positions_of: Callable[[EncodedPrompt], Tensor | None],
    ) -> None:
        self._processor = processor
        self._tokenizer: Any = processor.tokenizer
        self._removed_tokens = removed_tokens
        self._positions_of = positions_of
        self._lock = threading.Lock()
        self._special_ids = {i for i, t in self._tokenizer.added_tokens_decoder.items() if t.special}
        self._placeholders: BoundedCache[_Placeholder] = BoundedCache(
            PIXEL_CACHE_BYTES, lambda value: tensor_bytes(value.image_inputs)
        )
        self._read: BoundedCache[_Read] = BoundedCache(PROMPT_CACHE_BYTES, lambda value: value.num_bytes)
        self._texts: BoundedCache[tuple[int, ...]] = BoundedCache(PROMPT_CACHE_BYTES, lambda ids: 8 * len(ids))
        self._keys = PictureKeys()

    def render(self, prompt: Prompt) -> str:
        """The chat template up to the opened assistant turn, plus ``assistant_prefix``, never doubled.

        Control tokens inside message texts are dropped: a text can't open a turn or claim an image.
        """
        conversation = [{"role": m.role, "content": self._content(m.text, m.image)} for m in prompt.messages]
        rendered = self._processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
        prefix = prompt.assistant_prefix
        opened = prefix.rstrip()
        if opened and rendered.rstrip().endswith(opened):
            rendered = rendered.rstrip().removesuffix(opened)
        rendered += prefix
        if opened and (not rendered.endswith(prefix) or rendered.endswith(opened + prefix)):
            raise AssertionError(
                f"the rendered prompt ends with {rendered[-80:]!r}, expected it to end with {prefix!r} once"
            )
        return rendered

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids and image tensors; raises ValueError for more than one image in a conversation.

        Several threads may call this method: one prompt is encoded at a time.
        """
        with self._lock:
            return self._encode(prompt)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        images = [m.image for m in prompt.messages if m.image is not None]
        if len(images) > 1:
            raise ValueError(f"a conversation holds at most one image, found {len(images)}")
        text = self.render(prompt)
        if not images:
            read = self._read.get(f" {text}", lambda: self._with_positions(self._text_ids(text), {}, {}))
            return EncodedPrompt(read.ids, {}, None, None, read.token_inputs, read.positions)
        (image,) = images
        key = self._keys.of(image.pixels)
        mark = str(self._processor.image_token)
        placeholder = self._placeholders.get(key, lambda: self._process(mark, image.pixels, add_special=False))
        read = self._read.get(f"{key} {text}", lambda: self._read_with_image(text, mark, image.pixels, placeholder))
        inputs = placeholder.image_inputs
        return EncodedPrompt(read.ids, inputs, image.uid, key, read.token_inputs, read.positions)

    def text_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the rendered prompt with the mark of its image, if any, as one token."""
        with self._lock:
            return self._text_ids(self.render(prompt))

    def _content(self, text: str, image: ImageRecord | None) -> list[dict[str, str]]:
        for token in self._removed_tokens:
            text = text.replace(token, "")
        return [{"type": "image"}] * (image is not None) + [{"type": "text", "text": text}]

    def _adds_special(self, text: str) -> bool:
        bos = self._tokenizer.bos_token
        return not (bos and text.startswith(bos))

    def _text_ids(self, text: str) -> tuple[int, ...]:
        special = self._adds_special(text)
        return self._texts.get(text, lambda: tuple(self._tokenizer(text, add_special_tokens=special)["input_ids"]))

    def _read_with_image(self, text: str, mark: str, pixels: Image.Image, placeholder: _Placeholder) -> _Read:
        if text.count(mark) == 1 and self._is_separable(placeholder):
            whole = self._splice(text, mark, placeholder)
        else:
            whole = self._process(text, pixels, add_special=self._adds_special(text))
        return self._with_positions(whole.ids, placeholder.image_inputs, whole.token_inputs)

    def _with_positions(
        self, ids: tuple[int, ...], image_inputs: Mapping[str, Tensor], token_inputs: Mapping[str, Tensor]
    ) -> _Read:
        encoded = EncodedPrompt(ids, image_inputs, None, None, token_inputs)
        return _Read(ids, token_inputs, self._positions_of(encoded))

    def _is_separable(self, placeholder: _Placeholder) -> bool:
        """Special tokens at both ends: the neighbouring text is tokenized as if the expansion were one token."""
        return {placeholder.ids[0], placeholder.ids[-1]} <= self._special_ids

    def _splice(self, text: str, mark: str, placeholder: _Placeholder) -> _Placeholder:
        ids = self._text_ids(text)
        at = ids.index(self._tokenizer.convert_tokens_to_ids(mark))
        token_inputs = {
            name: torch.cat([values.new_zeros(at), values, values.new_zeros(len(ids) - at - 1)])
            for name, values in placeholder.token_inputs.items()
        }
        return _Placeholder(placeholder.image_inputs, (*ids[:at], *placeholder.ids, *ids[at + 1 :]), token_inputs)

    def _process(self, text: str, pixels: Image.Image, *, add_special: bool) -> _Placeholder:
        out = self._processor(text=[text], images=[[pixels]], return_tensors="pt", add_special_tokens=add_special)
        ids = out["input_ids"]
        per_token = {k for k in out if k.endswith("token_type_ids") and out[k].shape == ids.shape}
        images = {k: v for k, v in out.items() if k not in per_token | {"input_ids", "attention_mask"}}
        return _Placeholder(images, tuple(ids[0].tolist()), {k: out[k][0] for k in per_token})
