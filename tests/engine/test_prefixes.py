"""Prompts of one image that begin alike: what is computed once, and that nothing else changes."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_families import ask, picture

from trinity_vlm.backbone import EncodedPrompt
from trinity_vlm.engine.decoding import Row, prefill
from trinity_vlm.engine.kv_cache import growing_cache
from trinity_vlm.engine.prefixes import Beginnings, split_prompts
from trinity_vlm.engine.protocol import Sampling

COMMON = "Look at the picture closely and answer the question in a word or two. "
TEXTS = [(COMMON + tail, image) for image in (1, 2) for tail in ("What?", "Who is there?", "How many?")]


def prompts_of(backbone, texts=TEXTS):
    return [backbone.encode(ask(text, picture(image))) for text, image in texts]


def test_parts_make_up_the_prompt(players):
    """Ids and rotary positions of beginning and rest are the prompt's; a rest is text and never empty."""
    prompts = prompts_of(players)
    split = split_prompts(prompts)
    assert [p.image_key for p in split.prefixes] == [prompts[0].image_key, prompts[3].image_key]
    for prompt, suffix, index in zip(prompts, split.suffixes, split.prefix_of, strict=True):
        prefix = split.prefixes[index]
        assert prefix.input_ids + suffix.input_ids == prompt.input_ids
        assert torch.equal(torch.cat([prefix.positions, suffix.positions], dim=1), prompt.positions)
        assert suffix.input_ids
        assert not suffix.image_inputs


def test_no_split_where_it_does_not_pay_or_cuts_an_image(players):
    """One prompt an image saves nothing; texts that part before the image leave it in the rest."""
    assert split_prompts(prompts_of(players, TEXTS[::3])) is None
    kinds = {"mm_token_type_ids": torch.tensor([0] * 80 + [1] * 10 + [0] * 10)}
    early, late = (
        EncodedPrompt(tuple(100 if i == place else i for i in range(100)), {}, "u", "k", kinds, torch.zeros(3, 100))
        for place in (70, 95)
    )
    assert split_prompts([early, replace(early, input_ids=tuple(range(100)))]) is None
    assert split_prompts([late, replace(late, input_ids=tuple(range(100)))]) is not None


@pytest.mark.parametrize("extra", [0, 1])
def test_split_prefill_equals_the_whole(players, extra, monkeypatch):
    """First and following hidden states equal those of undivided prompts; tokens computed are fewer."""
    rows = [Row(p, Sampling(0.0, 1.0, 0, 4), 0, 4) for p in prompts_of(players) for _ in range(1 + extra)]
    sizes = []
    forward = players.hidden_states
    monkeypatch.setattr(
        players, "hidden_states", lambda batch, cache: sizes.append(batch.input_ids.numel()) or forward(batch, cache)
    )
    with torch.no_grad(), players.use_adapter("policy"):
        shared = prefill(players, rows)
        computed = sum(sizes)
        batch = players.collate([(row.prompt, ()) for row in rows], "left")
        cache = growing_cache(players.model.config)
        whole = forward(batch, cache)[:, -1]
        torch.testing.assert_close(shared.hidden, whole, atol=1e-4, rtol=1e-4)
        assert computed < 0.7 * sum(len(p.input_ids) for p in prompts_of(players))
        shared.cache.batch_select_indices(shared.prompt_of)
        tokens = torch.full((len(rows), 1), 65)
        after = [
            players.next_hidden(
                tokens, torch.cat([mask, torch.ones_like(tokens)], dim=1), shared.next_position[:, None], kv
            )
            for mask, kv in ((shared.mask, shared.cache), (batch.attention_mask, cache))
        ]
        torch.testing.assert_close(after[0], after[1], atol=1e-4, rtol=1e-4)


def made_up(image, *ids):
    """A text-only prompt of the given ids that is said to belong to an image."""
    return EncodedPrompt(ids, {}, image, image)


def test_the_width_of_split_prompts_is_the_longest_beginning_and_the_longest_rest():
    """By hand: three prompts of image a share 8 ids, with rests of 2; two of image b share 2, with rests of 1 and 6.
    16 + 2 ids of 41 are saved, enough: 8 + 6 = 14 columns, though no prompt has more than 10. With two of image a only
    8 + 2 of 31 would be saved, less than a third: nothing is split."""
    begin = tuple(range(8))
    a = [made_up("a", *begin, 20 + i, 30) for i in range(3)]
    b = [made_up("b", 1, 2, 3), made_up("b", 1, 2, *range(40, 46))]
    found = reduce(Beginnings.joined, [*a, *b], Beginnings())
    assert (found.longest, found.width) == (10, 14)
    assert reduce(Beginnings.joined, [*a, *b, a[0], b[1]], Beginnings()) == found
    assert reduce(Beginnings.joined, [*a[:2], *b], Beginnings()).width == 10


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 60), st.text("xyz", max_size=40)), min_size=1, max_size=7))
def test_the_width_foretold_is_that_of_the_prefill(players, texts):
    """Whatever the prompts of two pictures share, split or not, repeated or not."""
    encoded = prompts_of(players, [(COMMON[:shared] + rest, image) for image, shared, rest in texts])
    rows = [Row(prompt, Sampling(0.0, 1.0, 0, 4), 0, 4) for prompt in encoded]
    with torch.no_grad():
        width = prefill(players, rows).mask.shape[1]
    assert reduce(Beginnings.joined, encoded, Beginnings()).width == width
