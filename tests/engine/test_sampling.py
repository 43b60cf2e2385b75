"""Draws: right frequencies, filters, determinism per (seed, position, id), exact ties."""

from __future__ import annotations

import math

import pytest
import torch

from trinity_vlm.engine.protocol import Sampling
from trinity_vlm.engine.sampling import SamplingRows, chosen_logprobs, gumbel, sample, uniform

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf])


def rows(seeds, temperature=1.0, top_p=1.0, top_k=0, vocabulary=6):
    """All rows under one rule."""
    rule = Sampling(temperature, top_p, top_k, 8)
    return SamplingRows.of(list(seeds), [rule] * len(list(seeds)), vocabulary, CPU)


def at(position):
    return torch.tensor(position)


def frequencies(number=20_000, **rule):
    """Share of each id over many seeds."""
    drawn = sample(LOGITS.expand(number, -1), rows(range(number), **rule), at(3))
    return torch.bincount(drawn, minlength=6) / number


def assert_close_to(found, expected, number=20_000):
    """Within five standard errors, exactly 0 where nothing may be drawn."""
    expected = torch.tensor(expected)
    error = 5 * (expected * (1 - expected) / number).sqrt()
    assert torch.all((found - expected).abs() <= error), (found, expected)


def test_frequencies_match_the_softmax():
    """exp(2), exp(1), exp(.5), 1, exp(-1), 0 over their sum 13.4737."""
    weights = [math.exp(2), math.e, math.exp(0.5), 1.0, math.exp(-1), 0.0]
    assert_close_to(frequencies(), [w / sum(weights) for w in weights])


def test_temperature_comes_before_the_filters():
    """At T = 0.5 logits double: the top-p 0.9 nucleus is then {0, 1} (0.829 before id 1, 0.942 before id 2),
    at T = 1 it is {0, 1, 2, 3} (0.872 before id 3, 0.947 before id 4)."""
    assert_close_to(frequencies(temperature=0.5, top_p=0.9), [0.880797, 0.119203, 0, 0, 0, 0])
    four = [math.exp(2), math.e, math.exp(0.5), 1.0]
    assert_close_to(frequencies(top_p=0.9), [w / sum(four) for w in four] + [0, 0])


def test_top_k_comes_before_top_p():
    """k = 3 renormalises to 0.6285, 0.2312, 0.1402: p = 0.65 keeps two of them, p = 0.6 one. Without k the first has
    0.5484, and p = 0.6 keeps two."""
    assert_close_to(frequencies(top_k=3, top_p=0.65), [math.e / (1 + math.e), 1 / (1 + math.e), 0, 0, 0, 0])
    assert_close_to(frequencies(top_k=3, top_p=0.6), [1.0, 0, 0, 0, 0, 0])
    assert_close_to(frequencies(top_p=0.6), [math.e / (1 + math.e), 1 / (1 + math.e), 0, 0, 0, 0])


def test_greedy_takes_the_likeliest_and_the_lowest_id_of_equals():
    """Temperature 0; ties by id."""
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, 0.0, -1.0, -5.0]])
    assert sample(logits, rows([1, 2], temperature=0.0, vocabulary=4), at(0)).tolist() == [1, 0]


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_ids():
    """Ten equal logits, k = 3: ids 0, 1, 2 only, each a third of the time."""
    number = 9000
    drawn = sample(torch.zeros(number, 10), rows(range(number), top_k=3, vocabulary=10), at(0))
    counts = torch.bincount(drawn, minlength=10)
    assert counts[3:].sum() == 0
    assert ((counts[:3] / number - 1 / 3).abs() < 5 * math.sqrt(2 / 9 / number)).all()


def test_rows_follow_their_own_rules():
    """Greedy, top-k 2 and free rows side by side equal the same rows alone."""
    rules = [Sampling(0.0, 1.0, 0, 8), Sampling(1.0, 1.0, 2, 8), Sampling(2.0, 1.0, 0, 8), Sampling(1.0, 0.5, 0, 8)]
    seeds = [11, 12, 13, 14]
    mixed = sample(LOGITS.expand(4, -1), SamplingRows.of(seeds, rules, 6, CPU), at(5))
    alone = [
        sample(LOGITS[None], SamplingRows.of([s], [r], 6, CPU), at(5)).item() for s, r in zip(seeds, rules, strict=True)
    ]
    assert mixed.tolist() == alone


def test_a_row_draws_the_same_in_any_batch_and_row():
    """Order and neighbours don't matter; seed and position do."""
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    all_rows = rows(range(50), vocabulary=40)
    drawn = sample(logits, all_rows, at(2))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:17]
    assert torch.equal(sample(logits[order], all_rows.select(order), at(2)), drawn[order])
    assert not torch.equal(sample(logits, all_rows, at(3)), drawn)
    assert not torch.equal(sample(logits, rows(range(100, 150), vocabulary=40), at(2)), drawn)


def test_impossible_ids_are_never_drawn_however_the_filters_stand():
    """-inf logits keep probability 0 even when k reaches beyond the possible ids."""
    logits = torch.full((2000, 30), -math.inf)
    logits[:, 7] = -50.0
    for rule in ({"top_k": 20}, {}, {"top_p": 0.95}, {"temperature": 5.0}):
        assert set(sample(logits, rows(range(2000), vocabulary=30, **rule), at(0)).tolist()) == {7}


def test_uniforms_are_uniform_and_uncorrelated():
    """Chi-square over 64 cells and correlations between neighbouring seeds, positions and ids, five sigma."""
    seeds, ids = torch.arange(400)[:, None], torch.arange(250)[None]
    values = {
        "ids": uniform(seeds, at(0), ids),
        "next seed": uniform(seeds + 1, at(0), ids),
        "next position": uniform(seeds, at(1), ids),
        "next id": uniform(seeds, at(0), ids + 1),
    }
    number = 400 * 250
    for name, value in values.items():
        counts = torch.histc(value.float(), 64, 0, 1)
        chi_square = ((counts - number / 64) ** 2 / (number / 64)).sum()
        assert abs(chi_square - 63) < 5 * math.sqrt(2 * 63), name
        assert value.min() > 0
        assert value.max() < 1
        if name != "ids":
            pair = torch.corrcoef(torch.stack([values["ids"].flatten(), value.flatten()]))[0, 1]
            assert abs(pair) < 5 / math.sqrt(number), name


def test_uniforms_do_not_confuse_their_counters():
    """(seed 1, position 0) and (seed 0, position 1) are different draws; large seeds are fine."""
    ids = torch.arange(8)
    first, second = (uniform(torch.tensor([s]), at(p), ids) for s, p in ((1, 0), (0, 1)))
    assert not torch.equal(first, second)
    assert torch.isfinite(gumbel(torch.tensor([2**63 - 1]), at(10**6), ids)).all()


def test_uniforms_follow_the_published_hash():
    """splitmix64 in plain integers; locked, as another hash would make resumed runs draw differently."""
    word = 2**64 - 1
    increment = 0x9E3779B97F4A7C15

    def mix(state):
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & word
        return state ^ (state >> 31)

    for seed in (0, 42, 2**62 + 5, 2**63 - 1):
        for position, token in ((0, 0), (7, 1), (16_000, 151_935)):
            state = mix((mix((seed + (position + 1) * increment) & word) + (token + 1) * increment) & word)
            expected = ((state >> 11) + 0.5) / 2**53
            assert uniform(torch.tensor([seed]), at(position), torch.tensor([token])).item() == expected
    assert uniform(torch.tensor([42]), at(7), torch.tensor([1])).item() == 0.9977114120962203


def test_chosen_logprobs_ignore_temperature_and_filters():
    """ln(exp(1) / 13.4737) of the whole softmax."""
    total = math.log(sum(math.exp(x) for x in LOGITS[:5].tolist()))
    assert chosen_logprobs(LOGITS[None], torch.tensor([1])).item() == pytest.approx(1 - total, abs=1e-6)


@pytest.mark.gpu
def test_the_same_logits_give_the_same_tokens_on_a_gpu():
    """Draws from the same logits agree between devices."""
    logits = torch.randn(512, 5000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16).float()
    rule = [Sampling(1.0, 0.95, 20, 8), Sampling(0.7, 0.8, 0, 8)] * 256
    seeds = list(range(512))
    on_cpu = sample(logits, SamplingRows.of(seeds, rule, 5000, CPU), at(4))
    gpu = torch.device("cuda")
    on_gpu = sample(logits.to(gpu), SamplingRows.of(seeds, rule, 5000, gpu), at(4).to(gpu))
    assert torch.equal(on_gpu.cpu(), on_cpu)
