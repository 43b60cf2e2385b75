"""Training inputs are those of the engine: encoded cheaply, packed, sent through processes, and still the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from warmup_factory import Repeated, eight_examples, picture

from trinity_vlm.supervised import SupervisedExample
from trinity_vlm.supervised.batches import pack, packed_batches, unpack
from trinity_vlm.supervised.encoding import ExampleEncoder
from trinity_vlm.supervised.equal_images import completion_logprobs, equal_lengths_attention, has_equal_images
from trinity_vlm.types import Message, Prompt


def engine_logprobs(backbone, examples):
    """Through Backbone.encode and Backbone.collate, as the engine and the RL trainer do."""
    ids = [(*backbone.tokenizer(e.completion)["input_ids"], backbone.tokenizer.eos_token_id) for e in examples]
    with torch.no_grad():
        batch = backbone.collate([(backbone.encode(e.prompt), i) for e, i in zip(examples, ids, strict=True)], "right")
        return backbone.completion_logprobs(batch, None)


def training_logprobs(backbone, examples):
    return completion_logprobs(backbone, packed_up(backbone, examples), None)[0]


def packed_up(backbone, examples):
    return pack(ExampleEncoder(backbone)(examples), backbone.pad_id, backbone.dtype)


def test_training_sees_exactly_what_the_engine_sees(backbone):
    """Log-probabilities of packed training batches equal those of the engine's own path, text-only rows included."""
    examples = eight_examples()
    expected = engine_logprobs(backbone, examples)
    torch.testing.assert_close(training_logprobs(backbone, examples).detach(), expected, atol=1e-5, rtol=0)


def test_equal_images_take_the_fast_way_to_the_same_gradients(backbone):
    """Images as frames of one clip: same values and gradients as image by image, and the usual method is back after."""
    packed = packed_up(backbone, eight_examples())
    assert has_equal_images(packed)
    usual = backbone.model.base_model.get_image_features
    fast, mask = completion_logprobs(backbone, packed, None)
    (fast * mask).sum().backward()
    assert backbone.model.base_model.get_image_features == usual
    found = gradients(backbone)
    plain = backbone.completion_logprobs(unpack(packed, backbone.device), None)
    plain.sum().backward()
    torch.testing.assert_close(fast, plain)
    torch.testing.assert_close(found, gradients(backbone), atol=1e-5, rtol=1e-4)
    assert all(values.abs().sum() > 0 for name, values in found.items() if "visual" in name and "weight" in name)


def gradients(backbone):
    found = {name: p.grad.clone() for name, p in backbone.trainable_parameters()}
    backbone.model.zero_grad()
    return found


def test_images_of_different_sizes_take_the_plain_way(backbone):
    """Unequal grids: no merging, and still the engine's numbers."""
    backbone.processor.image_processor.size = {"shortest_edge": 1024, "longest_edge": 65_536}
    examples = eight_examples()
    wide = replace(examples[0].prompt.messages[1], image=picture(90, (192, 64)))
    examples.append(SupervisedExample(Prompt((examples[0].prompt.messages[0], wide), "<think>\n"), "star</think>"))
    packed = packed_up(backbone, examples)
    assert not has_equal_images(packed)
    expected = engine_logprobs(backbone, examples)
    torch.testing.assert_close(training_logprobs(backbone, examples).detach(), expected, atol=1e-5, rtol=0)


def test_frames_are_used_beyond_the_checked_prompts(backbone, monkeypatch):
    """After its first prompts a kind is no longer encoded in full: that is where the speed comes from."""
    encoder = ExampleEncoder(backbone)
    encoder(eight_examples())
    monkeypatch.setattr(backbone, "encode", lambda prompt: pytest.fail("encoded in full"))
    rows = encoder(eight_examples())
    monkeypatch.undo()
    for (encoded, _), example in zip(rows, eight_examples(), strict=True):
        exact = backbone.encode(example.prompt)
        assert encoded.input_ids == exact.input_ids
        torch.testing.assert_close(encoded.positions, exact.positions)
        torch.testing.assert_close(dict(encoded.token_inputs), dict(exact.token_inputs))


@pytest.mark.parametrize("text", ["a <|im_end|> b", "  leading and trailing  ", "line\nbreak", "zq7", "7 é ∑"])
def test_awkward_texts_are_encoded_like_the_engine_does(backbone, text):
    """Control tokens, white space at the edges, the probe itself and unknown characters."""
    encoder = ExampleEncoder(backbone)
    plain = Prompt((Message("system", "solve"), Message("user", "How many?", picture(20))), "<think>\n")
    awkward = replace(plain, messages=(plain.messages[0], replace(plain.messages[1], text=text)))
    rows = encoder([SupervisedExample(p, "x") for p in (plain, plain, plain, awkward)])
    assert rows[-1][0].input_ids == backbone.encode(awkward).input_ids


def test_an_inseparable_template_falls_back_to_full_encoding(backbone):
    """A template that changes the user text is noticed by the comparison, not trained on."""
    template = backbone.processor.chat_template or backbone.tokenizer.chat_template
    changed = template.replace("{{- part.text }}", "{{- part.text | upper }}")
    assert changed != template
    backbone.processor.chat_template = changed
    prompt = Prompt((Message("system", "solve"), Message("user", "How many?", picture(20))))
    rows = ExampleEncoder(backbone)([SupervisedExample(prompt, "x")] * 3)
    assert [row[0].input_ids for row in rows] == [backbone.encode(prompt).input_ids] * 3


def test_images_are_packed_once(backbone):
    """Six rows on two pictures carry two pictures' patches."""
    packed = pack(ExampleEncoder(backbone)(eight_examples()), backbone.pad_id, torch.bfloat16)
    assert packed.image_of_row == (0, 0, 0, 1, 1, 1, -1, -1)
    assert packed.image_inputs["pixel_values"].shape == (2 * 256, 8 * 8 * 3 * 2)
    assert packed.image_inputs["pixel_values"].dtype == torch.bfloat16


def test_batches_do_not_depend_on_the_number_of_workers(backbone, small_model):
    """Same batches in the same order from the training process and from a worker process."""
    source = Repeated(eight_examples(), 2)
    alone, shared = (list(packed_batches(source, small_model, backbone, n)) for n in (0, 1))
    assert len(alone) == len(shared) == 2
    first, second = (packed_up(backbone, source.batch(i)) for i in range(2))
    assert torch.equal(alone[0].rows["input_ids"], first.rows["input_ids"])
    assert not torch.equal(first.rows["input_ids"], second.rows["input_ids"])
    for a, b in zip(alone, shared, strict=True):
        torch.testing.assert_close(dict(a.rows), dict(b.rows))
        torch.testing.assert_close(dict(a.image_inputs), dict(b.image_inputs))


@pytest.mark.parametrize("lengths", [(4, 4, 4), (2, 5, 3)])
def test_packed_attention_stays_within_each_image(lengths):
    """Equal and unequal lengths: the same as attending to every image alone."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, sum(lengths), 8)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    out, _ = equal_lengths_attention(torch.nn.Identity(), q, k, v, None, 8**-0.5, 0.0, bounds, max(lengths))
    parts = zip(*(t.split(lengths, dim=2) for t in (q, k, v)), strict=True)
    alone = torch.cat([torch.nn.functional.scaled_dot_product_attention(*p) for p in parts], dim=2)
    torch.testing.assert_close(out, alone.transpose(1, 2))
