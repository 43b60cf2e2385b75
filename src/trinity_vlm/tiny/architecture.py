"""The embedded VLM's architecture: Qwen3-VL, small enough to ship inside the package.

128 x 128 pixels -> 16 x 16 patches of 8 -> 2 x 2 merge -> 64 image tokens. A thin vision tower, one deepstack tap
and four text layers came out best in short training runs of a few candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE_SIDE = 128
PATCH = 8
MERGE = 2
TEMPORAL_PATCH = 2
IMAGE_TOKENS = (IMAGE_SIDE // PATCH // MERGE) ** 2
HEAD_DIM = 64
MROPE_SECTION = (12, 10, 10)
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class TinySize:
    """The free sizes. Defaults are the shipped checkpoint's: 5.3 M parameters with a vocabulary of 2,048."""

    vision_width: int = 128
    vision_depth: int = 4
    vision_mlp: int = 512
    text_width: int = 256
    text_depth: int = 4
    text_mlp: int = 768
    heads: int = 4
    kv_heads: int = 2
    deepstack: tuple[int, ...] = (1,)


DEFAULT_SIZE = TinySize()


def tiny_config(tokenizer: PreTrainedTokenizerBase, size: TinySize = DEFAULT_SIZE) -> Qwen3VLConfig:
    """A Qwen3-VL configuration of the given size whose special ids are those of ``tokenizer``."""

    def token(text: str) -> int:
        return tokenizer.get_vocab()[text]

    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": size.text_width,
        "intermediate_size": size.text_mlp,
        "num_hidden_layers": size.text_depth,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "bos_token_id": token("<|endoftext|>"),
        "eos_token_id": token("<|im_end|>"),
        "pad_token_id": token("<|endoftext|>"),
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": list(MROPE_SECTION),
            "mrope_interleaved": True,
        },
    }
    vision = {
        "depth": size.vision_depth,
        "hidden_size": size.vision_width,
        "intermediate_size": size.vision_mlp,
        "num_heads": max(1, size.vision_width // HEAD_DIM),
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "out_hidden_size": size.text_width,
        "num_position_embeddings": (IMAGE_SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": list(size.deepstack),
        "in_channels": 3,
        "initializer_range": 0.02,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )


def build_model(
    tokenizer: PreTrainedTokenizerBase, seed: int, size: TinySize = DEFAULT_SIZE
) -> Qwen3VLForConditionalGeneration:
    """A freshly initialised float32 model; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(tiny_config(tokenizer, size))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_p=0.95,
        top_k=20,
        eos_token_id=[tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )
    return model


def processor_config(min_pixels: int = IMAGE_SIDE**2, max_pixels: int = IMAGE_SIDE**2) -> dict[str, object]:
    """The content of processor_config.json: every image becomes 128 x 128 pixels, which is 64 tokens.

    Written by hand because a processor object needs torchvision; the file loads wherever torchvision exists, and this
    package's own loader reads it where not. ``size`` holds pixel counts despite its keys (transformers' convention).
    """
    pixels: dict[str, object] = {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_size": MERGE,
        "patch_size": PATCH,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "temporal_patch_size": TEMPORAL_PATCH,
    }
    image = {
        **pixels,
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": min_pixels, "longest_edge": max_pixels},
    }
    video = {
        **pixels,
        "video_processor_type": "Qwen3VLVideoProcessor",
        "do_sample_frames": True,
        "fps": 2,
        "min_frames": 4,
        "max_frames": 768,
        "return_metadata": False,
        "size": {"shortest_edge": min_pixels * TEMPORAL_PATCH, "longest_edge": max_pixels * 48},
    }
    return {"image_processor": image, "processor_class": "Qwen3VLProcessor", "video_processor": video}
