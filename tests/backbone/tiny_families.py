"""Random VLMs of a few hundred thousand parameters, saved as complete model directories, one per architecture."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.types import ImageRecord, Message, Prompt

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "idefics3", "gemma3")
SIDE = 64
CORPUS = ["How many red circles are there? The answer is 3.", 'question: "left of", "answer": "justification"'] * 4

QWEN_SPECIAL = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
OTHER_SPECIAL = {
    "idefics3": ["<|im_start|>", "<fake_token_around_image>", "<global-img>", "<image>"],
    "gemma3": ["<bos>", "<|im_start|>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"],
}
IMAGE_IN_TEMPLATE = {
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "gemma3": "<start_of_image>",
}
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- 'IMAGE' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def build(family: str, directory: Path, template: str = TEMPLATE) -> Path:
    """A directory that loads like a published checkpoint."""
    torch.manual_seed(7)
    directory.mkdir(parents=True, exist_ok=True)
    special = QWEN_SPECIAL if family.startswith("qwen") else OTHER_SPECIAL[family]
    tokenizer = make_tokenizer(special, extra=_named_image_tokens(family))
    template = template.replace("IMAGE", IMAGE_IN_TEMPLATE[family])
    model = _make_model(family, tokenizer)
    # Sharper than the initial 0.02: distinct logits, and images that matter.
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.any() and "embed" not in name:
            parameter.data.mul_(3)
        elif parameter.ndim > 1 and not parameter.any():
            parameter.data.normal_(0, 0.2)  # gemma3's image projection starts at zero
    end, pad = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>"))
    model.generation_config = transformers.GenerationConfig(eos_token_id=[end, pad], pad_token_id=pad)
    model.save_pretrained(directory)
    _save_processor(family, directory, tokenizer, template)
    return directory


def make_tokenizer(special: list[str], extra: dict[str, str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE with some merges; thinking tags are ordinary tokens, as in Qwen3."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False))
    tokens = ["<|endoftext|>", "<|im_end|>", *special]
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    raw.add_tokens([AddedToken(t, special=False, normalized=False) for t in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token="<bos>" if "<bos>" in special else None,
        extra_special_tokens=extra or special,
        clean_up_tokenization_spaces=False,
    )


def _named_image_tokens(family: str) -> dict[str, str]:
    if family != "gemma3":
        return {}
    return {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}


def _make_model(family: str, tokenizer: PreTrainedTokenizerFast) -> transformers.PreTrainedModel:
    ids = tokenizer.convert_tokens_to_ids
    pad, end = ids("<|endoftext|>"), ids("<|im_end|>")
    text = {
        "vocab_size": len(tokenizer) + 3,  # some rows without a token, as in published models
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "pad_token_id": pad,
        "bos_token_id": pad,
        "eos_token_id": end,
        "tie_word_embeddings": True,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "depth": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
    }
    siglip = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
    }
    if family in ("qwen3_vl", "qwen2_5_vl"):
        tokens = {
            "image_token_id": ids("<|image_pad|>"),
            "video_token_id": ids("<|video_pad|>"),
            "vision_start_token_id": ids("<|vision_start|>"),
            "vision_end_token_id": ids("<|vision_end|>"),
        }
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    if family == "qwen3_vl":
        text["rope_parameters"] = rope | {"mrope_interleaved": True}
        config = transformers.Qwen3VLConfig(
            text_config=text,
            vision_config=vision | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            tie_word_embeddings=True,
            **tokens,
        )
        return transformers.Qwen3VLForConditionalGeneration(config)
    if family == "qwen2_5_vl":
        text["rope_parameters"] = rope
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens
        )
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    if family == "idefics3":
        config = transformers.Idefics3Config(
            text_config=transformers.LlamaConfig(**text),
            vision_config=siglip | {"model_type": "idefics3_vision"},
            image_token_id=ids("<image>"),
            scale_factor=2,
            tie_word_embeddings=True,
            pad_token_id=pad,
        )
        return transformers.Idefics3ForConditionalGeneration(config)
    config = transformers.Gemma3Config(
        text_config=text
        | {"sliding_window": 16, "query_pre_attn_scalar": 32, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=siglip | {"model_type": "siglip_vision_model", "vision_use_head": False},
        mm_tokens_per_image=16,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
        tie_word_embeddings=True,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _save_processor(family: str, directory: Path, tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    if family.startswith("qwen"):
        # As published: the full file with its video part, which needs torchvision to load.
        image = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "size": {"shortest_edge": 256, "longest_edge": 65536},
        }
        name = "Qwen3VL" if family == "qwen3_vl" else "Qwen2_5_VL"
        video = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
        config = {
            "processor_class": f"{name}Processor",
            "image_processor": image,
            "video_processor": {"video_processor_type": video, "patch_size": 8, "merge_size": 2},
        }
        (directory / "processor_config.json").write_text(json.dumps(config))
        (directory / "chat_template.jinja").write_text(template)
        tokenizer.save_pretrained(directory)
    elif family == "idefics3":
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        size = {"longest_edge": SIDE}
        images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
        processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=16, chat_template=template)
        processor.save_pretrained(directory)
    else:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
        processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=16, chat_template=template)
        processor.save_pretrained(directory)


def model_config(directory: Path | str, **changes: object) -> ModelConfig:
    """Settings under which every square picture becomes 64 x 64 pixels, 16 image tokens."""
    settings = {"path": str(directory), "device": "cpu", "min_pixels": SIDE**2, "max_pixels": SIDE**2, "context": 256}
    return ModelConfig(**(settings | changes))  # type: ignore[arg-type]


def load(directory: Path | str, lora: LoraConfig | None = LoraConfig(rank=4, alpha=8)) -> Backbone:  # noqa: B008
    """The backbone of a tiny directory."""
    return Backbone.load(model_config(directory), lora)


def picture(seed: int, size: tuple[int, int] = (64, 64)) -> ImageRecord:
    """A picture of coarse random colour patches."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(0, 256, (8, 8, 3), generator=generator, dtype=torch.uint8)
    return ImageRecord(f"picture-{seed}", Image.fromarray(cells.numpy()).resize(size, Image.Resampling.NEAREST))


def ask(text: str, image: ImageRecord | None = None, prefix: str = "") -> Prompt:
    """A one-turn prompt."""
    return Prompt((Message("user", text, image),), prefix)


def randomize(backbone: Backbone, adapter: str, seed: int, scale: float = 0.3) -> None:
    """Give the adapter a delta that visibly changes the model."""
    generator = torch.Generator().manual_seed(seed)
    state = {k: torch.randn(v.shape, generator=generator) * scale for k, v in backbone.adapter_state(adapter).items()}
    backbone.load_adapter_state(adapter, state)
