"""A model's sizes as far as memory depends on them, and those of the presets' models, known without a file or a hub."""

from __future__ import annotations

from dataclasses import dataclass

from trinity_vlm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory depends on; ``backbone.shapes.read_shape`` reads it from a model's config.

    parameters: all of them, tied ones once
    hidden, mlp, layers: of the language model
    query, key: width of all heads together, e.g. 32 x 128 and 8 x 128; a token adds ``2 * layers * key`` numbers to the
        key-value cache
    matrices: (in, out) of every layer that gets an adapter
    pixels_per_token: of an image, for families that resize to a grid; None: ``fixed_image_tokens`` for every image
    vision_taps: further copies of an image's features that go into deeper layers (deepstack)
    """

    name: str
    parameters: int
    hidden: int
    mlp: int
    layers: int
    query: int
    key: int
    vocabulary: int
    matrices: tuple[tuple[int, int], ...]
    pixels_per_token: int | None
    fixed_image_tokens: int = 0
    vision_taps: int = 0

    def adapter_parameters(self, rank: int | None) -> int:
        """Of one LoRA adapter, A and B of every matrix; None: of the rank of each matrix itself."""
        return sum((rank or min(width, out)) * (width + out) for width, out in self.matrices)

    def image_tokens(self, max_pixels: int) -> int:
        """Tokens of the largest image."""
        return self.fixed_image_tokens if self.pixels_per_token is None else max_pixels // self.pixels_per_token


@dataclass(frozen=True, slots=True)
class _Decoder:
    """Sizes of a decoder with grouped-query attention and gated MLPs."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """(in, out) of a layer's linear maps by name."""
        queries, keys = self.heads * self.head_width, self.kv_heads * self.head_width
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "gate_proj": (self.hidden, self.mlp),
            "up_proj": (self.hidden, self.mlp),
            "down_proj": (self.mlp, self.hidden),
        }

    def adapted(self, targets: str | tuple[str, ...]) -> tuple[tuple[int, int], ...]:
        """(in, out) of the layers that ``lora.targets`` names, over all layers; raises ConfigError for other names."""
        known = self.layer_matrices()
        names = tuple(known) if targets == "all-linear" else (targets,) if isinstance(targets, str) else targets
        for name in names:
            if name not in known:
                raise ConfigError(f"lora.targets={name!r}: this model's layers are {', '.join(known)}")
        return tuple(known[name] for name in names) * self.layers


_QWEN3_VL_8B = _Decoder(hidden=4096, mlp=12_288, layers=36, heads=32, kv_heads=8, head_width=128)
_QWEN2_5_VL_7B = _Decoder(hidden=3584, mlp=18_944, layers=28, heads=28, kv_heads=4, head_width=128)


def known_shape(path: str, targets: str | tuple[str, ...]) -> ModelShape | None:
    """The shape of a preset's model by its hub id, from the public model cards; None for any other."""
    match path:
        case "Qwen/Qwen3-VL-8B-Instruct":
            return _shape(path, _QWEN3_VL_8B, targets, 8_767_123_696, 151_936, pixels_per_token=32 * 32, vision_taps=3)
        case "Qwen/Qwen2.5-VL-7B-Instruct":
            return _shape(
                path, _QWEN2_5_VL_7B, targets, 8_292_166_656, 152_064, pixels_per_token=28 * 28, vision_taps=0
            )
    return None


def _shape(
    name: str,
    decoder: _Decoder,
    targets: str | tuple[str, ...],
    parameters: int,
    vocabulary: int,
    *,
    pixels_per_token: int,
    vision_taps: int,
) -> ModelShape:
    return ModelShape(
        name=name,
        parameters=parameters,
        hidden=decoder.hidden,
        mlp=decoder.mlp,
        layers=decoder.layers,
        query=decoder.heads * decoder.head_width,
        key=decoder.kv_heads * decoder.head_width,
        vocabulary=vocabulary,
        matrices=decoder.adapted(targets),
        pixels_per_token=pixels_per_token,
        vision_taps=vision_taps,
    )
