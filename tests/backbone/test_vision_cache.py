"""Image features: computed once per distinct image, equal to the model's own path."""

from __future__ import annotations

import pytest
import torch
from tiny_families import ask, load, picture

from trinity_vlm.backbone.batching import stack_image_inputs
from trinity_vlm.backbone.vision import supports_feature_cache

SIZES = ((64, 64), (64, 64), (32, 96))


def rows(backbone):
    """Three pictures over five rows, one of another grid, and a text-only row in between."""
    pictures = [picture(i, size) for i, size in enumerate(SIZES)]
    order = [0, 1, 0, None, 2, 1]
    prompts = [backbone.encode(ask(f"row {r}", None if i is None else pictures[i])) for r, i in enumerate(order)]
    return [(prompt, [5, 6, 7]) for prompt in prompts]


def count_tower_runs(backbone):
    """A list that grows by the number of patches at every run of the vision tower."""
    base = backbone.model.get_base_model() if hasattr(backbone.model, "get_base_model") else backbone.model
    runs = []
    base.model.visual.register_forward_pre_hook(lambda _, args, kwargs: runs.append(len(args[0])), with_kwargs=True)
    return runs


def plain_hidden(backbone, batch):
    """Hidden states with pixels handed to the model directly."""
    inputs = stack_image_inputs(batch.prompts)
    return backbone._inner(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
        **inputs,
    )[0]


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("full", [False, True])
def test_hidden_states_equal_the_plain_path(family_directory, family, full):
    """Frozen (one image at a time, cached) and trained (distinct images together), incl. deepstack."""
    backbone = load(family_directory(family), None) if full else load(family_directory(family))
    batch = backbone.collate(rows(backbone), "right")
    with torch.no_grad():
        mask = batch.attention_mask.bool()
        found = backbone.hidden_states(batch)[mask]
        again = backbone.hidden_states(batch)[mask]
        expected = plain_hidden(backbone, batch)[mask]
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert torch.equal(found, again)


def test_a_frozen_tower_runs_once_per_distinct_image(qwen):
    """Across rows and calls, without gradients; a new picture is one more run."""
    runs = count_tower_runs(qwen)
    batch = qwen.collate(rows(qwen), "right")
    qwen.completion_logprobs(batch, "policy").sum().backward()
    qwen.completion_logprobs(batch, "policy")
    patches = [len(p.image_inputs["pixel_values"]) for p in batch.prompts if p.image_uid]
    assert runs == [patches[0], patches[1], patches[3]]
    qwen.blank_image_gap(ask("row", picture(0)))
    assert len(runs) == 4


def test_features_do_not_depend_on_the_batch(family_directory):
    """Bit for bit, so that a resumed run with a cold cache repeats itself."""
    first, second = (load(family_directory("qwen3_vl")) for _ in range(2))
    batches = [b.collate(rows(b), "right") for b in (first, second)]
    with torch.no_grad():
        together = first.hidden_states(batches[0])
        for row in rows(second):
            second.hidden_states(second.collate([row], "right"))
        assert torch.equal(second.hidden_states(batches[1]), together)


def test_a_trained_tower_runs_once_per_batch_with_gradients_of_all_rows(family_directory):
    """Features are expanded to rows: gradients equal those of the plain path on repeated pixels."""
    backbone = load(family_directory("qwen3_vl"), None)
    runs = count_tower_runs(backbone)
    batch = backbone.collate(rows(backbone), "right")
    mask = batch.attention_mask.bool()
    gradients = []
    for forward in (backbone.hidden_states, lambda b: plain_hidden(backbone, b)):
        backbone.model.zero_grad()
        forward(batch)[mask].square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in backbone.model.named_parameters() if "visual" in n})
    patches = [len(p.image_inputs["pixel_values"]) for p in batch.prompts if p.image_uid]
    assert runs == [patches[0] + patches[1] + patches[3], sum(patches)]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], atol=1e-3, rtol=1e-3)


def test_families_with_other_towers_take_the_plain_path(family_directory):
    """Support is read off the method's signature."""
    supported = {
        f: load(family_directory(f))._vision is not None for f in ("qwen3_vl", "qwen2_5_vl", "idefics3", "gemma3")
    }
    assert supported == {"qwen3_vl": True, "qwen2_5_vl": True, "idefics3": False, "gemma3": False}
    assert not supports_feature_cache(torch.nn.Linear(1, 1))


def test_the_model_itself_still_answers_outside(qwen):
    """Someone who calls the model directly gets its own vision path."""
    inputs = qwen.encode(ask("a", picture(0))).image_inputs
    inner = qwen.model.get_base_model().model
    out = inner.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
    assert out.pooler_output[0].shape == (16, 64)
    assert len(out.deepstack_features) == 1
