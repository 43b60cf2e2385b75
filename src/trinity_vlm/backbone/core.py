"""Backbone: one model object shared by the engine, the trainer and the supervised warm-up."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import Cache

from trinity_vlm.activations import COMPILED, COMPILED_FLOAT32_ADAPTERS, EAGER, ActivationModel
from trinity_vlm.backbone.adapters import Adapters
from trinity_vlm.backbone.batching import Batch, Pack, collate, collate_row, collate_shared, stack_image_inputs
from trinity_vlm.backbone.decoder_layers import DecoderLayers
from trinity_vlm.backbone.encoding import EncodedPrompt, PromptEncoder
from trinity_vlm.backbone.loading import attends_by_mask, end_ids, load_model, load_processor, never_sampled_ids
from trinity_vlm.backbone.logprobs import frozen_head_logprobs, logit_bytes, token_logprobs
from trinity_vlm.backbone.shared_attention import take_segments
from trinity_vlm.backbone.vision import VisionFeatures, supports_feature_cache
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.ema import LowRank
from trinity_vlm.errors import EngineError, ModelLoadError
from trinity_vlm.types import POLICY, ImageRecord, Message, Prompt

_SHORT_TEXT = "yes 1 2 3"
FINGERPRINT_VALUES = 64


class Backbone:
    """A vision-language model with its processor and, unless all parameters train, its adapters.

    model: the PEFT model, or the plain one in full-parameter mode
    context: most tokens of a prompt and its completion together
    num_logits: rows of the output layer, at least the tokenizer's vocabulary
    eos_ids: ids that end a completion
    attends_by_mask: whether every layer obeys a boolean mask given per query
    shares_prompts: whether completions of one prompt may share a row of a batch (``collate_shared``, ``collate_row``)
    placeholder_ids: ids that are never sampled; log-probabilities are normalised without them
    """

    def __init__(self, model: Any, processor: Any, lora: LoraConfig | None, context: int, seed: int = 0) -> None:
        self._base: Any = model
        self._inner: Any = model.base_model
        self._head: Any = self._base.get_output_embeddings()
        self.processor: Any = processor
        self.tokenizer: Any = self.processor.tokenizer
        self.device: torch.device = self._base.device
        self.dtype: torch.dtype = self._base.dtype
        self.context = context
        self.num_logits: int = self._head.weight.shape[0]
        self.eos_ids = end_ids(model, self.tokenizer)
        self.placeholder_ids = never_sampled_ids(model, self.tokenizer, self.eos_ids)
        self.pad_id: int = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else min(self.eos_ids)
        self._banned = torch.tensor(sorted(self.placeholder_ids), dtype=torch.long, device=self.device)
        self._arguments = inspect.signature(self._inner.forward).parameters
        self._encoder = PromptEncoder(processor, self._removed_tokens(), self._rotary_positions)
        self._check_head()
        self._adapters = None if lora is None else Adapters(model, lora, seed)
        self.model: nn.Module = model if self._adapters is None else self._adapters.model
        self._vision = None
        has_features = supports_feature_cache(self._inner)
        self.attends_by_mask = attends_by_mask(model)
        self.shares_prompts = has_features and self.attends_by_mask
        self._layers = DecoderLayers(getattr(model.get_decoder(), "layers", ()))
        if self.shares_prompts:
            take_segments(model.get_decoder())
        if has_features:
            self._vision = VisionFeatures(self._inner, frozen=lora is not None)

    @classmethod
    def load(cls, config: ModelConfig, lora: LoraConfig | None, seed: int = 0) -> Backbone:
        """Load model and processor; ``lora=None`` trains every parameter. ``seed`` sets the initial adapter.

        Raises ModelLoadError for an unreadable path or missing files, ConfigError for LoRA targets that match nothing.
        """
        return cls(load_model(config), load_processor(config), lora, config.context, seed)

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits of the frozen weights: names, shapes and some values, rounded to bfloat16."""
        digest = hashlib.blake2b(digest_size=8)
        for name, parameter in self._inner.named_parameters():
            if "lora_" in name:
                continue
            some = parameter.detach().flatten()[:FINGERPRINT_VALUES].to(torch.bfloat16).cpu()
            digest.update(f"{name.replace('.base_layer', '')} {tuple(parameter.shape)}".encode())
            digest.update(some.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # Prompts and batches

    def render(self, prompt: Prompt) -> str:
        """The prompt as text: chat template, opened assistant turn, ``assistant_prefix`` once."""
        return self._encoder.render(prompt)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Token ids and image tensors of a prompt; an image's pixels are processed once while cached."""
        return self._encoder.encode(prompt)

    def text_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of the rendered prompt with its image's mark as one token, for engines that expand it themselves."""
        return self._encoder.text_ids(prompt)

    def collate(self, sequences: Sequence[tuple[EncodedPrompt, Sequence[int]]], pad: Literal["left", "right"]) -> Batch:
        """Pad prompts with their completions to one batch on the model's device."""
        return collate(sequences, pad, self.pad_id, self.device)

    def collate_shared(self, packs: Sequence[Pack]) -> Batch:
        """One row per prompt with all of its completions behind it; only where ``shares_prompts``."""
        return collate_shared(packs, self.pad_id, self.device)

    def collate_row(self, prompt: EncodedPrompt, completions: Sequence[Sequence[int]]) -> Batch:
        """One prompt with its completions behind it, for long rows: no mask, no padding; where ``shares_prompts``."""
        return collate_row((prompt, completions), self.pad_id, self.device)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion without its end-of-turn ids; thinking tags are kept."""
        return self.tokenizer.decode([i for i in token_ids if i not in self.eos_ids], skip_special_tokens=False)

    # Forward passes

    def hidden_states(self, batch: Batch, cache: Cache | None = None) -> Tensor:
        """Final hidden states [B, L, H] of the active adapter; fills ``cache`` when one is given."""
        inputs: dict[str, Any] = {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask,
            "position_ids": batch.position_ids,
            **{k: v for k, v in batch.token_inputs.items() if k in self._arguments},
        }
        if batch.segments is not None:
            inputs |= {"attention_mask": None, "segments": batch.segments}
        with self.image_inputs(batch.prompts) as image_inputs:
            return self._inner(**inputs, **image_inputs, **self.cache_arguments(cache))[0]

    def next_hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, cache: Cache) -> Tensor:
        """Hidden states [B, 1, H] of one further token per row [B, 1]; mask [B, S] or [B, 1, 1, S] over the cache."""
        return self._inner(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **self.cache_arguments(cache)
        )[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] of hidden states [..., H]; ids that are never sampled hold -inf."""
        return self._head(hidden).float().index_fill_(-1, self._banned, float("-inf"))

    def completion_logprobs(self, batch: Batch, adapter: str | None) -> Tensor:
        """Natural-log probabilities [B, T], float32, of the completion tokens at temperature 1; 0 on padding.

        Normalised over the ids that may be sampled. Gradients flow to the policy adapter, or to all
        parameters in full-parameter mode; other adapters give values only.
        """
        trains = torch.is_grad_enabled() and (self._adapters is None or adapter == POLICY)
        self.model.train(trains)
        rows, columns = batch.completion_mask.nonzero(as_tuple=True)
        predicted_at, token_ids = batch.predicted_at[rows, columns], batch.completion_ids[rows, columns]
        with torch.set_grad_enabled(trains), self.use_adapter(adapter):
            with self._layers.arranged(compiled=batch.segments is not None):
                hidden = self.hidden_states(batch)
            values = self._token_logprobs(hidden[batch.row_of[rows], predicted_at], token_ids)
        blank = torch.zeros(batch.completion_ids.shape, device=hidden.device)
        return blank.index_put((rows, columns), values)

    def _token_logprobs(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        head = self._head
        if type(head) is nn.Linear and not head.weight.requires_grad:
            return frozen_head_logprobs(hidden, token_ids, head.weight, head.bias, self._banned)
        return token_logprobs(hidden, token_ids, self.logits, self.num_logits)

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute layer activations in the backward pass instead of keeping them."""
        self._layers.num_recomputed = len(self._layers) if enabled else 0
        if self._adapters is not None and len(self._layers) > 0:
            return
        if enabled:  # of layers elsewhere: a vision tower that trains too
            self._base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self._base.gradient_checkpointing_disable()

    def fit_checkpointing(self, batch: Batch, budget: float) -> int:
        """Recompute as few layers as let the activations of ``batch`` stay within ``budget`` bytes, by an estimate.

        Returns the number of layers; all of them where no number is enough.
        """
        total, tokens, is_row = len(self._layers), batch.input_ids.numel(), batch.segments is not None
        fitting = (n for n in range(total) if self._activation_bytes(tokens, n, is_row) <= budget)
        self._layers.num_recomputed = next(fitting, total)
        return self._layers.num_recomputed

    def activation_bytes(self, tokens: int, checkpointed: bool) -> int:
        """An estimate of what a forward-backward pass over a row (``collate_row``) of ``tokens`` tokens takes beside
        weights and gradients."""
        return self._activation_bytes(tokens, len(self._layers) if checkpointed else 0, is_row=True)

    def _activation_bytes(self, tokens: int, num_recomputed: int, is_row: bool) -> int:
        """``is_row``: only rows run through compiled layers."""
        compiled = COMPILED if self._layers.low_precision else COMPILED_FLOAT32_ADAPTERS
        counts = compiled if is_row and self._layers.is_compiled else EAGER
        head = logit_bytes(self.device, tokens, self.num_logits)
        shape = ActivationModel.of(self._base.config.get_text_config(), self.dtype.itemsize)
        return shape.num_bytes(tokens, num_recomputed, counts) + head

    def compile_layers(self, backend: str = "inductor") -> None:
        """Compile the decoder layers for ``completion_logprobs`` of ``collate_row`` batches; all else stays as it is.

        One compilation, at the first such call, serves all layers, lengths and numbers of completions.
        """
        self._layers.compile(backend)

    def round_adapters(self, enabled: bool) -> None:
        """Let ``completion_logprobs`` multiply with the float32 adapters in the model's own dtype, as vLLM does.

        In bfloat16 products with an adapter in float32 take longer than their share, and each keeps a float32 copy of
        its input for the backward pass. Parameters and gradients stay float32. A float32 model is not affected.
        """
        self._layers.low_precision = enabled

    def blank_image_gap(self, prompt: Prompt, token_ids: Sequence[int] = (), adapter: str | None = None) -> float:
        """Mean absolute change of token log-probabilities when the image is replaced by a grey one of its size.

        Zero means that the forward pass ignores the pixels. ``token_ids`` is a completion of the prompt; without one
        a short fixed text is scored. Raises ValueError for a prompt without an image.
        """
        if prompt.image is None:
            raise ValueError("a blank-image check needs a prompt with an image")
        tokens = list(token_ids) or self.tokenizer(_SHORT_TEXT, add_special_tokens=False)["input_ids"]
        pair = [(self.encode(p), tokens) for p in (prompt, _greyed(prompt))]
        with torch.no_grad():
            logprobs = self.completion_logprobs(self.collate(pair, "right"), adapter)
        return float((logprobs[0] - logprobs[1]).abs().mean())

    # Adapters

    def add_adapter(self, name: str, ranks: int | Mapping[str, int], alpha: float) -> None:
        """A further adapter that changes nothing yet; ``ranks`` for all layers or by full layer name."""
        self._need_adapters().add(name, ranks, alpha)

    @contextmanager
    def use_adapter(self, name: str | None) -> Iterator[None]:
        """Run the block under adapter ``name``, None for the bare base model; EngineError for an unknown name."""
        with nullcontext() if self._adapters is None and name is None else self._need_adapters().use(name):
            yield

    def fused_for_decoding(self) -> AbstractContextManager[None]:
        """The active adapter's layers as one product each, where that is exact enough to decode with.

        In float32 on a CPU it spares a small model the two extra products and the library's bookkeeping per layer; in
        bfloat16 most of the adapter would be rounded away, and captured CUDA graphs hold on to the adapter's own
        tensors: there nothing changes.
        """
        if self._adapters is None or self.dtype != torch.float32 or self.device.type != "cpu":
            return nullcontext()
        return self._adapters.fused()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, none in full-parameter mode."""
        return () if self._adapters is None else tuple(self._adapters.names)

    def factors(self, name: str) -> dict[str, LowRank]:
        """Per adapted layer the delta the adapter adds, scaling folded into ``left``."""
        return self._need_adapters().factors(name)

    def set_factors(self, name: str, factors: Mapping[str, LowRank]) -> None:
        """Make the adapter add exactly these deltas."""
        self._need_adapters().set_factors(name, factors)

    def adapter_state(self, name: str) -> dict[str, Tensor]:
        """CPU copies of the adapter's tensors under PEFT's saved names."""
        return self._need_adapters().state(name)

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Replace the adapter's tensors in place; EngineError naming wrong or missing keys."""
        self._need_adapters().load_state(name, state)

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Names and parameters that train: the policy adapter's, or all in full-parameter mode."""
        if self._adapters is None:
            return list(self.model.named_parameters())
        return list(self._adapters.parameters(POLICY).items())

    def describe_trainable(self) -> str:
        """A table of what trains, for the start of a run."""
        if self._adapters is None:
            return f"all {sum(p.numel() for p in self.model.parameters()):,} parameters train"
        total = sum(p.numel() for p in self._base.parameters())
        return (
            f"{self._adapters.describe()}\nof {total:,} parameters, adapters included; vision tower, embeddings and "
            "head are frozen"
        )

    # Details of the family

    def cache_arguments(self, cache: Cache | None) -> dict[str, Any]:
        """How this version of transformers takes a key-value cache."""
        name = "cache" if "cache" in self._arguments else "past_key_values"
        return {"use_cache": False} if cache is None else {name: cache, "use_cache": True}

    @contextmanager
    def image_inputs(self, prompts: Sequence[EncodedPrompt]) -> Iterator[dict[str, Tensor]]:
        """What the model's forward takes for these rows' images; to be called within the block."""
        if self._vision is not None:
            with self._vision.serving(prompts) as inputs:
                yield inputs
        else:
            yield {name: values.to(self.device) for name, values in stack_image_inputs(prompts).items()}

    def _rotary_positions(self, encoded: EncodedPrompt) -> Tensor | None:
        if not hasattr(self._inner, "get_rope_index"):
            return None
        if "mm_token_type_ids" not in encoded.token_inputs:
            return torch.arange(len(encoded.input_ids)).expand(3, -1)
        positions, _ = self._inner.get_rope_index(
            input_ids=torch.tensor([encoded.input_ids]),
            mm_token_type_ids=encoded.token_inputs["mm_token_type_ids"][None],
            image_grid_thw=encoded.image_inputs["image_grid_thw"],
            attention_mask=torch.ones(1, len(encoded.input_ids), dtype=torch.long),
        )
        return positions[:, 0]

    def _removed_tokens(self) -> tuple[str, ...]:
        control = self.placeholder_ids | self.eos_ids
        tokens = [t.content for i, t in self.tokenizer.added_tokens_decoder.items() if i in control]
        return tuple(sorted(tokens, key=len, reverse=True))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Log-probabilities apply the output layer to the last hidden states; refuse models where that is not all."""
        ids = torch.tensor([self.tokenizer(_SHORT_TEXT, add_special_tokens=False)["input_ids"]], device=self.device)
        expected = self._base(input_ids=ids).logits
        found = self._head(self._inner(input_ids=ids)[0])
        if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
            raise ModelLoadError(
                f"{type(self._base).__name__} changes the logits after its output layer (for example by a soft cap); "
                "such models are not supported yet"
            )

    def _need_adapters(self) -> Adapters:
        if self._adapters is None:
            raise EngineError("this backbone was loaded in full-parameter mode (lora=None) and has no adapters")
        return self._adapters


def _greyed(prompt: Prompt) -> Prompt:
    def grey(message: Message) -> Message:
        if message.image is None:
            return message
        pixels = Image.new("RGB", message.image.pixels.size, (128, 128, 128))
        return Message(message.role, message.text, ImageRecord(f"{message.image.uid}#grey", pixels))

    return Prompt(tuple(grey(m) for m in prompt.messages), prompt.assistant_prefix)
