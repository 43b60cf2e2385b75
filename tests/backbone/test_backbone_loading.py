"""Loading: families, missing files, pixel limits, token ids that are never sampled."""

from __future__ import annotations

import shutil

import pytest
import torch
from tiny_families import ask, load, model_config, picture

from trinity_vlm.backbone import Backbone, load_processor
from trinity_vlm.backbone.loading import load_model
from trinity_vlm.config import LoraConfig
from trinity_vlm.errors import ConfigError, ModelLoadError


def test_every_family_scores_image_and_text_prompts_in_one_batch(any_family):
    """One generic path: an image row beside a text-only row gives finite log-probabilities and sees the image."""
    rows = [(any_family.encode(ask("How many?", picture(1))), [5, 6, 7]), (any_family.encode(ask("1 = 1.0?")), [8])]
    with torch.no_grad():
        logprobs = any_family.completion_logprobs(any_family.collate(rows, "right"), "policy")
    assert logprobs.shape == (2, 3)
    assert torch.isfinite(logprobs).all()
    assert (logprobs[0] < 0).all()
    assert logprobs[1, 1:].tolist() == [0, 0]
    assert any_family.blank_image_gap(ask("How many?", picture(1))) > 1e-3


def test_blank_image_gap_is_zero_for_a_model_that_ignores_pixels(qwen):
    """What the start-up check exists for: pixels that never reach the model."""
    prompt = ask("How many?", picture(1))
    assert qwen.blank_image_gap(prompt, [5, 6]) > 1e-3
    with pytest.raises(ValueError, match="with an image"):
        qwen.blank_image_gap(ask("How many?"))
    for parameter in qwen.model.get_base_model().model.visual.parameters():
        parameter.data.zero_()
    qwen._vision._cache._values.clear()
    assert qwen.blank_image_gap(prompt, [5, 6]) == 0.0


@pytest.mark.parametrize("path", ["/no/such/directory", "./missing", "missing"])
def test_a_missing_directory_is_named(path):
    """Local-looking paths never reach the network."""
    with pytest.raises(ModelLoadError, match=r"no such directory"):
        Backbone.load(model_config(path), None)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_missing_files_are_named(family_directory, tmp_path, name):
    """The error says which file was looked for."""
    copy = shutil.copytree(family_directory("qwen3_vl"), tmp_path / "copy")
    (copy / name).unlink()
    with pytest.raises(ModelLoadError, match=name.split(".")[-1]):
        Backbone.load(model_config(copy), None)


def test_a_damaged_config_is_a_load_error(family_directory, tmp_path):
    """Anything from_pretrained can't read is reported with the path."""
    copy = shutil.copytree(family_directory("qwen3_vl"), tmp_path / "copy")
    (copy / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="copy"):
        Backbone.load(model_config(copy), None)


def test_a_directory_without_processor_is_a_load_error(family_directory, tmp_path):
    """A tokenizer alone is not enough for images."""
    copy = shutil.copytree(family_directory("idefics3"), tmp_path / "copy")
    (copy / "processor_config.json").unlink()
    with pytest.raises(ModelLoadError, match="processor"):
        load_processor(model_config(copy))


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_pixel_limits_bound_the_image_tokens(family_directory, family):
    """min_pixels and max_pixels act on small and large pictures; a token is 16 x 16 pixels here."""
    processor = load_processor(model_config(family_directory(family), min_pixels=32**2, max_pixels=64**2))
    for side, tokens in ((8, 4), (32, 4), (48, 9), (64, 16), (200, 16)):
        grid = processor.image_processor(images=[picture(0, (side, side)).pixels], return_tensors="pt")[
            "image_grid_thw"
        ]
        assert int(grid.prod()) // 4 == tokens, side


def test_pixel_limits_below_one_token_are_refused(family_directory):
    """The unit is patch size times merge size."""
    with pytest.raises(ConfigError, match=r"model.max_pixels=100"):
        load_processor(model_config(family_directory("qwen3_vl"), min_pixels=10, max_pixels=100))


def test_models_that_change_their_logits_are_refused(family_directory):
    """A soft cap after the output layer would make recomputed log-probabilities wrong."""
    config = model_config(family_directory("qwen3_vl"))
    model = load_model(config)
    forward = model.forward

    def capped(**inputs):
        out = forward(**inputs)
        out.logits = 5 * torch.tanh(out.logits / 5)
        return out

    Backbone(model, load_processor(config), None, 256)
    model.forward = capped
    with pytest.raises(ModelLoadError, match="changes the logits after its output layer"):
        Backbone(model, load_processor(config), None, 256)


def test_never_sampled_ids_are_structure_and_rows_without_a_token(qwen):
    """Image, video and turn marks and padding rows are out; ends of turn, text and thinking tags stay in."""
    ids = qwen.tokenizer.convert_tokens_to_ids
    marks = ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    spare = set(range(len(qwen.tokenizer), qwen.num_logits))
    assert len(spare) == 3
    assert qwen.placeholder_ids == {ids(m) for m in marks} | spare
    assert qwen.eos_ids == {ids("<|im_end|>"), ids("<|endoftext|>")}


def test_targets_of_the_vision_tower_are_refused_with_the_names_that_would_match(family_directory):
    """'qkv' exists, but only in the vision tower."""
    with pytest.raises(ConfigError, match=r"lora.targets='qkv'.*down_proj, gate_proj, k_proj"):
        load(family_directory("qwen3_vl"), LoraConfig(targets=("q_proj", "qkv")))


def test_targets_name_language_layers_only(family_directory):
    """idefics3's vision tower has q_proj layers too: none of them is adapted."""
    backbone = load(family_directory("idefics3"), LoraConfig(rank=2, targets=("q_proj",)))
    names = [name for name, _ in backbone.trainable_parameters()]
    assert len(names) == 2 * 2
    assert all("text_model" in name and "vision" not in name for name in names)
    assert "q_proj" in backbone.describe_trainable()


def test_all_linear_is_every_language_layer_and_nothing_else(any_family):
    """Seven linear layers in each of the two decoder layers; no head, embedding, tower or merger."""
    trainable = dict(any_family.trainable_parameters())
    assert len(trainable) == 2 * 7 * 2
    assert all(p.dtype == torch.float32 and p.requires_grad for p in trainable.values())
    others = [
        n
        for n, p in any_family.model.named_parameters()
        if p.requires_grad and id(p) not in map(id, trainable.values())
    ]
    assert others == []


def test_the_seed_decides_the_initial_adapter(family_directory):
    """Equal in every process whatever was drawn before; another seed, another adapter."""
    config = model_config(family_directory("qwen3_vl"))
    states = []
    for seed in (1, 1, 2):
        torch.rand(17)
        states.append(Backbone.load(config, LoraConfig(rank=4), seed).adapter_state("policy"))
    key = next(k for k in states[0] if "lora_A" in k)
    assert torch.equal(states[0][key], states[1][key])
    assert not torch.equal(states[0][key], states[2][key])


def test_full_parameter_mode_trains_everything(family_directory):
    """lora=None: the vision tower gets gradients too."""
    backbone = load(family_directory("qwen3_vl"), None)
    batch = backbone.collate([(backbone.encode(ask("How many?", picture(1))), [5, 6])], "right")
    backbone.completion_logprobs(batch, None).sum().backward()
    without = [n for n, p in backbone.trainable_parameters() if p.grad is None]
    assert without == []
    assert any("visual" in n for n, _ in backbone.trainable_parameters())
