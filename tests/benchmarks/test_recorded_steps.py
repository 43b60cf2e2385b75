"""What `outer_step.py` plays to a model with random weights: forced lengths, recorded texts, plans of steps."""

import asyncio
import logging
import statistics
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import outer_step
import pytest
import torch
from _iterations import Iteration, Iterations
from _recorded import Lengths, Tape, prose
from PIL import Image

from trinity_vlm.advantages import collect_rollouts
from trinity_vlm.answers import Matcher
from trinity_vlm.config import MatcherConfig, RewardsConfig, RolesConfig
from trinity_vlm.engine.scripted import scripted_completion
from trinity_vlm.episode import Cast
from trinity_vlm.extensions import score
from trinity_vlm.loop import play_episodes
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.types import CallType, ImageRecord, Role

TAIL = Lengths(dict.fromkeys(CallType, 1000), tail=True)


def test_lengths_without_a_tail_are_the_means():
    assert {
        Lengths({CallType.SOLVE: 7}).draw(CallType.SOLVE, turn, 0, 0, i) for turn in range(9) for i in range(4)
    } == {7}


def test_tails_keep_the_mean_and_end_at_four_times_it():
    """A log-normal of sigma 0.7 has a standard deviation of 0.8 means: that of 4,000 draws' mean is 1.3 %. What its
    limit cuts off is 1.2 % of the mean."""
    drawn = [TAIL.draw(CallType.SOLVE, turn, 0, 0, i) for turn in range(1000) for i in range(4)]
    assert statistics.mean(drawn) == pytest.approx(988, rel=0.04)
    assert max(drawn) == 4000
    assert statistics.median(drawn) == pytest.approx(1000 * 2.718281828 ** (-0.245), rel=0.05)


def test_a_step_draws_what_every_other_step_draws_and_every_sample_its_own():
    which = [(call, turn, slot) for call in CallType for turn in range(3) for slot in range(4)]
    first, second = ([TAIL.draw(call, turn, slot, 0, 0) for call, turn, slot in which] for _ in range(2))
    assert first == second
    assert len(set(first)) > len(first) / 2


def test_prose_has_about_as_many_tokens_as_asked_and_another_text_for_every_seed():
    """The last sentence is left out; the mean sentence has 11 words."""
    texts = [prose(seed, 400, lambda text: len(text.split())) for seed in range(20)]
    assert len(set(texts)) == 20
    assert statistics.mean(len(text.split()) for text in texts) == pytest.approx(395, abs=15)


class Forced:
    """Generates as many tokens as it is asked for, of no meaning, and counts who asked."""

    def __init__(self, lengths):
        self.tape = Tape(lambda text: len(text.split()))
        self.tape.begin(lengths)
        self.schemas = []

    def episode(self):
        return nullcontext()

    async def generate(self, request):
        return await self.tape.play(self._generate, request)

    async def _generate(self, request):
        self.schemas.append(request.json_schema)
        return [scripted_completion("#" * (request.sampling.max_tokens - 1), (1, 2, 3), request.want_logprobs)]


@pytest.fixture(scope="module", params=["paper", "short"])
def step(request):
    """Sixteen images through the product's own episodes: of a measurement, and of a rehearsal."""
    config, prompts = RolesConfig(prompts=request.param), PromptSet.load(request.param)
    engine = Forced(outer_step.forced_lengths("fixed", 0.1))
    images = [ImageRecord(f"{i}.png", Image.new("RGB", (64, 64), (i, i, i))) for i in range(16)]

    async def kept(episode):
        return episode

    with Matcher(MatcherConfig(symbolic=False)) as matcher:
        roles = Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config)
        episodes = asyncio.run(play_episodes(images, 1, Cast(*roles, matcher, engine, config, 0), kept))
    return episodes, engine


def test_every_recorded_text_is_understood(step):
    """Every candidate is valid and selected from, every verdict parses, every solution is well-formed."""
    episodes, engine = step
    assert all(episode.selected == 1 for episode in episodes)
    assert all(call.parsed for episode in episodes for call in episode.calls)
    assert engine.schemas
    assert set(engine.schemas) == {None}


def test_every_path_of_a_step_runs(step):
    """A quarter of the images dispute, half of them need the Verifier to compare words; every rollout is retained."""
    episodes, engine = step
    asked = Counter(sample.call for sample in engine.tape.samples)
    expected = {CallType.PROPOSE: 64, CallType.SCREEN: 64, CallType.SOLVE: 64, CallType.REASON: 64}
    assert asked == expected | {CallType.EQUIVALENCE: 16, CallType.DISPUTE: 4}
    assert Counter(e.dispute.overturned for e in episodes if e.dispute is not None) == {True: 2, False: 2}
    rollouts = collect_rollouts([score(episode, RewardsConfig()) for episode in episodes])
    assert Counter(rollout.role for rollout in rollouts) == {Role.QUESTIONER: 64, Role.SOLVER: 64}


def test_samples_have_the_lengths_they_were_told(step):
    _, engine = step
    lengths = {(sample.call, sample.tokens) for sample in engine.tape.samples}
    verdicts = {(call, 51) for call in (CallType.SCREEN, CallType.EQUIVALENCE, CallType.REASON, CallType.DISPUTE)}
    assert lengths == verdicts | {(CallType.PROPOSE, 102), (CallType.SOLVE, 205)}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fixed", ("fixed", None, None, 16)),
        ("tail/on", ("tail", "on", None, 16)),
        ("double/off#2@3", ("double", "off", 2, 3)),
        ("fixed@1", ("fixed", None, None, 1)),
    ],
)
def test_a_plan_reads_as_documented(text, expected):
    found = outer_step.Planned.read(text, 16)
    assert (found.kind, found.overlap, found.sub_batch, found.images) == expected


@pytest.mark.parametrize("text", ["", "fixed@", "fixed@1/off", "tail/auto", "long", "fixed#@1"])
def test_a_wrong_plan_names_what_it_takes(text):
    with pytest.raises(SystemExit, match=r"#SUB_BATCH, @IMAGES behind"):
        outer_step.Planned.read(text, 16)


def test_a_step_of_fewer_images_is_scaled_but_for_what_stays():
    """(10 - 2 of swaps and EMA) times 16 / 4, and these 2 again."""
    row = {"seconds/step": 10.0, "seconds/swaps": 1.5, "seconds/ema": 0.5}
    assert outer_step.scaled(row, 4) == 34.0


def vllm_line(at, new, prompt_tokens, sequences, elapsed):
    """A record as vLLM 0.26 makes it; 0.32 has one argument more behind these."""
    line = (
        "%sIteration(%d): %d context requests, %d context tokens, %d generation requests, %d generation tokens, "
        "iteration elapsed time: %.2f ms%s, GPU KV cache usage: %.1f%%%s"
    )
    arguments = ("Engine 000: ", 7, new, prompt_tokens, sequences, sequences, elapsed, "", 0.5, "")
    record = logging.LogRecord("vllm", logging.INFO, "", 0, line, arguments, None)
    record.created = at
    assert record.getMessage().startswith(f"Engine 000: Iteration(7): {new} context requests")
    return record


def test_iterations_are_read_from_the_line_that_vllm_logs(monkeypatch):
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    iterations = Iterations()
    iterations.emit(vllm_line(100.0, 2, 700, 60, 8.25))
    iterations.emit(logging.LogRecord("vllm", logging.INFO, "", 0, "Engine %d: idle", (0,), None))
    assert iterations.found == [Iteration(at=100.0, prompt_tokens=700, sequences=60, waited=0.00825)]


def test_an_iteration_lasts_from_the_outputs_before_it_but_for_pauses(monkeypatch):
    """Outputs at 100, 101, 103 s go on with sequences. At 153 s two new ones come after a pause: vLLM waited 500 ms.
    What came before 100 s, or at 200 s after the window's end, counts for nothing."""
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    iterations = Iterations()
    lines = [(99.0, 1, 9, 0, 9.0), (100.0, 0, 0, 3, 250.0), (101.0, 0, 0, 4, 250.0), (103.0, 0, 0, 4, 1000.0)]
    lines += [(153.0, 2, 700, 0, 500.0), (154.0, 0, 0, 60, 900.0), (156.0, 3, 700, 60, 1000.0), (200.0, 0, 0, 5, 1.0)]
    for line in lines:
        iterations.emit(vllm_line(*line))
    assert iterations.between(99.5, 199.5) == {
        "iterations/with_prompts": {"seconds": 2.5, "count": 2, "median_ms": 1250.0, "mean_ms": 1250.0, "waited": 0.6},
        "iterations/decode_1_to_4": {"seconds": 4.0, "count": 3, "median_ms": 1000.0, "mean_ms": 1333.33}
        | {"waited": 0.375},
        "iterations/decode_33_to_64": {"seconds": 1.0, "count": 1, "median_ms": 1000.0, "mean_ms": 1000.0}
        | {"waited": 0.9},
        "iterations/uncovered": 0.925,
    }
    assert iterations.between(104, 114) == {"iterations/uncovered": 1.0}


def test_what_a_step_compiled_is_counted():
    """A function compiles once: at its first call."""
    torch._dynamo.reset()
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=True)
    rises = []
    for rows in (3, 4, 5):
        before = outer_step._hidden_costs()
        double(torch.ones(rows))
        after = outer_step._hidden_costs()
        rises.append({name: after[name] - before[name] for name in after})
    torch._dynamo.reset()
    assert [rise["graphs"] for rise in rises] == [1, 0, 0]
    assert rises[0]["compile_seconds"] > 0
    assert rises[1]["compile_seconds"] == rises[2]["compile_seconds"] == 0


def test_a_plan_changes_only_what_it_says():
    """``arrange`` sets overlap and images for the step; a plan that says nothing leaves the run's own setting."""
    config = outer_step.load_config("tiny")
    system = SimpleNamespace(config=None, engine=None)
    outer_step.Planned.read("tail/off@2", 16).arrange(system, config)
    assert (system.config.update.overlap, system.config.images.per_step) == ("off", 2)
    outer_step.Planned.read("tail", 16).arrange(system, config)
    assert system.config.update.overlap == config.update.overlap == "auto"
