"""A directory that loads like any checkpoint: Qwen3-VL-8B's shape, random weights, a tokenizer with real merges.

    python benchmarks/eight_billion.py /dev/shm/qwen3-vl-8b            # 16.3 GiB in bfloat16, made on the GPU
    python benchmarks/eight_billion.py build/qwen3-vl-tiny --tiny      # the same family, small; for a rehearsal

``model.path=DIR`` then means this model to the trainer and to vLLM alike, so that weights can be shared and the parity
check compares the same numbers. Prompts have realistic lengths: the byte-level BPE is trained on this package's own
prompts, docs and sources (about 4 characters a token) and filled up to Qwen's 151,643 entries, special tokens at Qwen's
ids.

The weights are drawn so that two bfloat16 implementations agree as they do on trained ones. Layers whose outputs all
have the size of the residual stream amplify rounding: 36 of them at a plain 0.02 put bfloat16 0.08 nat a token away
from float32 (measured on a CPU at width 512), more than the parity bound allows. So embeddings have size 1 and each
layer adds 1 / (4 sqrt(2 layers)) of it: 0.024 nat. The output layer's 0.03 gives logits of standard deviation 1.9: the
20 likeliest of 151,936 tokens, from which top-k draws, lie within 2 nat of each other.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from trinity_vlm.tiny.architecture import processor_config
from trinity_vlm.tiny.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

ENTRIES = 151_643
ROWS = 151_936
TRAINED_ENTRIES = 24_000
PLAIN_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
SHARD_BYTES = 4 * 2**30
LINEAR_STD, HEAD_STD, EMBEDDING_STD = 0.02, 0.03, 1.0
HEAD_WIDTH = 4096
BRANCHES = ("self_attn.o_proj", "mlp.down_proj")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_config(folder: Path, tiny: bool = False) -> None:
    """Everything but the weights: config, generation config, processor, tokenizer with its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    tokens = {token: tokenizer.get_vocab()[token] for token in SPECIAL_TOKENS}
    if tokens["<|im_end|>"] != 151_645 or tokens["<|image_pad|>"] != 151_655:
        raise ValueError(f"the special tokens are not at Qwen's ids: {tokens}")
    generation = {
        "bos_token_id": tokens["<|endoftext|>"],
        "pad_token_id": tokens["<|endoftext|>"],
        "eos_token_id": [tokens["<|im_end|>"], tokens["<|endoftext|>"]],
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
    }
    processor: dict[str, dict] = processor_config(256 * 32 * 32, 1024 * 32 * 32)  # type: ignore[assignment]
    for part in ("image_processor", "video_processor"):
        processor[part]["patch_size"] = 16
    for name, content in (
        ("config.json", model_config(tokens, tiny)),
        ("generation_config.json", generation),
        ("processor_config.json", processor),
    ):
        (folder / name).write_text(json.dumps(content, indent=1))


def model_config(tokens: dict[str, int], tiny: bool) -> dict[str, object]:
    """The content of config.json: Qwen3-VL-8B's published sizes, or small ones of the same family."""
    text = {
        **{"model_type": "qwen3_vl_text", "vocab_size": ROWS, "max_position_embeddings": 262_144},
        **{"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "head_dim": 128},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "attention_bias": False, "attention_dropout": 0.0},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "initializer_range": 0.02},
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        **{"bos_token_id": tokens["<|endoftext|>"], "eos_token_id": tokens["<|im_end|>"], "dtype": "bfloat16"},
    }
    vision = {
        **{"model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16},
        **{"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
        **{"num_position_embeddings": 2304, "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
        **{"hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.02},
    }
    if tiny:
        text |= {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
        text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        vision |= {"depth": 3, "hidden_size": 144, "intermediate_size": 256, "num_heads": 2}
        vision |= {"out_hidden_size": 256, "deepstack_visual_indexes": [0, 1, 2]}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "dtype": "bfloat16",
        "transformers_version": transformers.__version__,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": vision,
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": tokens["<|video_pad|>"],
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of this package's own texts, filler entries that no merge reaches, Qwen's added tokens."""
    trained = Tokenizer(models.BPE())
    _as_qwen_reads(trained)
    trainer = trainers.BpeTrainer(
        vocab_size=TRAINED_ENTRIES,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    trained.train_from_iterator(_own_texts(), trainer)
    learned = json.loads(trained.to_str())["model"]
    vocabulary: dict[str, int] = learned["vocab"]
    for i in range(len(vocabulary), ENTRIES):
        vocabulary[f"zq{i}"] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in learned["merges"]]))
    _as_qwen_reads(tokenizer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        bos_token=None,
        unk_token=None,
        extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|im_end|>", "<|endoftext|>")],
        model_max_length=262_144,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _as_qwen_reads(tokenizer: Tokenizer) -> None:
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()


def _own_texts() -> Iterator[str]:
    root = Path(__file__).parents[1]
    for pattern in ("src/**/*.jinja", "docs/*.md", "README.md", "src/**/*.py", "tests/**/*.py"):
        for path in sorted(root.glob(pattern)):
            yield path.read_text(encoding="utf-8")


def random_weights(folder: Path, device: torch.device, seed: int = 0) -> int:
    """Write bfloat16 shards of the model that ``folder/config.json`` describes; returns their bytes.

    Raises OSError when the file system has too little room.
    """
    with torch.device("meta"):
        skeleton = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    total = 2 * sum(shape.numel() for shape in shapes.values())
    free = shutil.disk_usage(folder).free
    if free < total:
        raise OSError(f"{folder}: {free / 2**30:.1f} GiB free, {total / 2**30:.1f} GiB needed")
    layers = skeleton.config.text_config.num_hidden_layers
    generator = torch.Generator(device).manual_seed(seed)
    shards = _shards(shapes)
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _drawn(name, shapes[name], layers, generator).cpu() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return total


def _shards(shapes: dict[str, torch.Size]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if shards[-1] and size + 2 * shape.numel() > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += 2 * shape.numel()
    return shards


def _drawn(name: str, shape: torch.Size, layers: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    if len(shape) == 1:
        fill = torch.ones if name.endswith("weight") else torch.zeros
        return fill(shape, dtype=torch.bfloat16, device=device)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(
        0, _std(name, shape, layers), generator=generator
    )


def _std(name: str, shape: torch.Size, layers: int) -> float:
    """Standard deviation of a matrix; of the text model's as at width 4,096, whatever the width."""
    if "visual" in name:
        return LINEAR_STD
    if "embed_tokens" in name:
        return EMBEDDING_STD
    at_this_width = math.sqrt(HEAD_WIDTH / shape[-1])
    if "lm_head" in name:
        return HEAD_STD * at_this_width
    if any(branch in name for branch in BRANCHES):
        at_this_width = math.sqrt(HEAD_WIDTH / shape[-1] * (3 if "down_proj" in name else 1))
        return LINEAR_STD * at_this_width / (4 * math.sqrt(2 * layers))
    return LINEAR_STD * at_this_width


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start = time.perf_counter()
    write_config(args.folder, args.tiny)
    print(f"config, processor, tokenizer: {time.perf_counter() - start:.1f} s", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = random_weights(args.folder, device, args.seed)
    print(f"{size / 2**30:.2f} GiB of weights in {args.folder}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
