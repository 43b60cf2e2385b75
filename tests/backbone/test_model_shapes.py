"""A model's sizes from its config alone agree with the loaded model; the built-in ones with transformers' own."""

import shutil

import pytest
import tiny_families
import torch
from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

from trinity_vlm.backbone import logprobs, shapes, vision
from trinity_vlm.backbone.shapes import read_shape, shape_of
from trinity_vlm.config import LoraConfig, ModelConfig
from trinity_vlm.engine.kv_cache import growing_cache, layer_tensors
from trinity_vlm.errors import ConfigError, ModelLoadError
from trinity_vlm.memory_demand import GIB
from trinity_vlm.memory_plan import FEATURE_CACHE_GIB, LOGIT_CHUNK_GIB, LOGIT_TENSORS
from trinity_vlm.model_shapes import known_shape

LORA = LoraConfig(rank=32, alpha=64)
PUBLIC = {
    "Qwen/Qwen3-VL-8B-Instruct": (
        Qwen3VLConfig,
        {
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
        },
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        Qwen2_5_VLConfig,
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584, "patch_size": 14},
    ),
}
"""The public configs, as far as they differ from transformers' defaults."""


def model_at(directory):
    return ModelConfig(path=str(directory))


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")])
@pytest.mark.parametrize("path", PUBLIC)
def test_built_in_shapes_are_those_of_the_public_configs(path, targets):
    """Parameter for parameter; only the order of the matrices is free."""
    kind, text, tower = PUBLIC[path]
    config = kind(text_config=text, vision_config=tower, tie_word_embeddings=False)
    read, known = shape_of(config, LoraConfig(targets=targets), path), known_shape(path, targets)
    for field in (
        "parameters",
        "hidden",
        "mlp",
        "layers",
        "vocabulary",
        "query",
        "key",
        "pixels_per_token",
        "vision_taps",
    ):
        assert getattr(read, field) == getattr(known, field), field
    assert sorted(read.matrices) == sorted(known.matrices)


@pytest.mark.parametrize("family", tiny_families.FAMILIES)
def test_the_shape_is_that_of_the_loaded_model(family, family_directory):
    """All parameters, those of the adapter, the values that a token adds to the cache."""
    backbone = tiny_families.load(family_directory(family))
    rank = backbone.model.peft_config["policy"].r
    shape, built_in = read_shape(model_at(family_directory(family)), LoraConfig(rank=rank), fetch=False)
    assert not built_in
    assert shape.adapter_parameters(rank) == sum(p.numel() for _, p in backbone.trainable_parameters())
    assert shape.parameters == sum(p.numel() for n, p in backbone.model.named_parameters() if "lora_" not in n)
    cache = growing_cache(backbone.model.config)
    with torch.no_grad():
        batch = backbone.collate([(backbone.encode(tiny_families.ask("How many?")), [])], "right")
        backbone.hidden_states(batch, cache)
    tokens = batch.input_ids.shape[1]
    if family != "gemma3":  # a sliding window holds fewer: the plan is on the safe side
        assert 2 * shape.layers * shape.key * tokens == sum(t.numel() for pair in layer_tensors(cache) for t in pair)


def test_an_images_tokens_are_counted_as_the_processor_does(qwen, family_directory):
    shape, _ = read_shape(model_at(family_directory("qwen3_vl")), LORA, fetch=False)
    grid = qwen.processor.image_processor(images=[tiny_families.picture(0).pixels], return_tensors="pt")[
        "image_grid_thw"
    ]
    pixels = int(grid.prod()) * qwen.processor.image_processor.patch_size**2
    assert shape.image_tokens(pixels) == int(grid.prod()) // qwen.processor.image_processor.merge_size**2


def test_no_weights_are_needed(family_directory, tmp_path):
    shutil.copy(family_directory("qwen3_vl") / "config.json", tmp_path)
    assert read_shape(ModelConfig(path=str(tmp_path)), LORA, fetch=False)[0].parameters > 0


def test_a_folder_without_a_config_and_a_hub_that_is_away_are_named(tmp_path, monkeypatch):
    for path in (str(tmp_path), "/no/such/folder"):
        with pytest.raises(ModelLoadError, match=path):
            read_shape(ModelConfig(path=path), LORA, fetch=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match=r"model.path='nobody/nothing'.*hf download nobody/nothing"):
        read_shape(ModelConfig(path="nobody/nothing"), LORA, fetch=False)
    assert read_shape(ModelConfig(path="Qwen/Qwen3-VL-8B-Instruct"), LORA, fetch=False)[1], "its shape is built in"


@pytest.mark.parametrize(
    "text",
    ['{"model_type": "qwen3_vl",', '{"model_type": "nonsense"}', "[1]", '{"model_type":"qwen3_vl","text_config":3}'],
)
def test_a_broken_config_is_named_by_its_file(tmp_path, text):
    """A directory can't be downloaded: no such advice."""
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ModelLoadError, match=rf"model.path='{tmp_path}'.*Look at {file}") as raised:
        read_shape(ModelConfig(path=str(tmp_path)), LORA, fetch=True)
    assert "hf download" not in str(raised.value)


def test_the_skeleton_is_built_once_per_process(family_directory, tmp_path, monkeypatch):
    """However often a start asks; other targets are another question, and a failure is asked again."""
    built = []
    real = shapes.shape_of
    monkeypatch.setattr(shapes, "shape_of", lambda *arguments: built.append(arguments) or real(*arguments))
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelLoadError):
        read_shape(model_at(folder), LORA, fetch=False)
    shutil.copy(family_directory("qwen3_vl") / "config.json", folder)
    found = [read_shape(model_at(folder), LoraConfig(rank=32, alpha=64), fetch=False) for _ in range(3)]
    assert found[0] == found[1] == found[2]
    assert len(built) == 1
    read_shape(model_at(folder), LoraConfig(targets=("q_proj",)), fetch=False)
    assert len(built) == 2


def test_targets_that_match_nothing_are_refused(family_directory):
    with pytest.raises(ConfigError, match=r"lora.targets='qkv'"):
        read_shape(model_at(family_directory("qwen3_vl")), LoraConfig(targets="qkv"), fetch=False)


def test_the_plan_knows_the_size_of_the_feature_cache():
    assert FEATURE_CACHE_GIB * GIB == vision.FEATURE_CACHE_BYTES


def test_the_plan_knows_the_size_of_a_chunk_of_logits():
    planned = {device: LOGIT_CHUNK_GIB[device == "cuda"] * GIB for device in logprobs.CHUNK_BYTES}
    assert planned == logprobs.CHUNK_BYTES
    assert LOGIT_TENSORS == logprobs.TENSORS_PER_CHUNK
