"""How much memory the activations of one forward-backward pass take: an estimate from the model's widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Widths(NamedTuple):
    """How often a token's activation of each width is kept: hidden state, queries, keys, MLP."""

    hidden: int
    query: int
    key: int
    mlp: int


COMPILED = Widths(hidden=6, query=4, key=5, mlp=2)
"""Of a compiled bfloat16 layer, its adapters multiplied in bfloat16 too: fitted to one measurement. The 8B shape's row
of 9,040 tokens with nothing recomputed peaked at 52.0 GiB on an H200, of which about 3.5 are adapters, their gradients
and image features, and up to 3 the output layer."""
COMPILED_FLOAT32_ADAPTERS = Widths(hidden=9, query=4, key=5, mlp=4)
"""Each adapted product keeps its input in float32."""
EAGER = Widths(hidden=17, query=6, key=6, mlp=5)
"""And without compilation the norms keep float32 copies as well, and products with the same input one copy each."""
LAYERS_IN_FLIGHT = 2
"""What the backward pass holds of a layer beside kept activations: its gradients, and itself if it runs again."""


@dataclass(frozen=True, slots=True)
class ActivationModel:
    """Widths of a decoder with gated MLPs; ``itemsize`` in bytes of its dtype."""

    hidden: int
    query: int
    key: int
    mlp: int
    num_layers: int
    itemsize: int

    @classmethod
    def of(cls, text_config: Any, itemsize: int) -> ActivationModel:
        """From a text model's configuration."""
        heads = text_config.num_attention_heads
        head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // heads
        return cls(
            text_config.hidden_size,
            heads * head_dim,
            (getattr(text_config, "num_key_value_heads", None) or heads) * head_dim,
            text_config.intermediate_size,
            text_config.num_hidden_layers,
            itemsize,
        )

    def num_bytes(self, tokens: int, num_recomputed: int, counts: Widths) -> int:
        """Of ``tokens`` tokens when ``num_recomputed`` layers keep only their input; without the output layer."""
        widths = Widths(self.hidden, self.query, self.key, self.mlp)
        layer = sum(count * width for count, width in zip(counts, widths, strict=True))
        kept = (self.num_layers - num_recomputed) * layer + num_recomputed * self.hidden
        return tokens * self.itemsize * (kept + LAYERS_IN_FLIGHT * layer)
