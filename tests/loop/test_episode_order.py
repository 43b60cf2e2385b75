"""Nothing in an episode waits for more than it needs, and nothing depends on what ends first."""

import asyncio
import gc
import json
import random
from contextlib import nullcontext

import pytest
from PIL import Image

from trinity_vlm.answers import Matcher
from trinity_vlm.config import MatcherConfig, RolesConfig
from trinity_vlm.engine.scripted import ScriptedEngine
from trinity_vlm.episode import Cast, play_episode
from trinity_vlm.errors import EngineError
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.types import CallType, ImageRecord

IMAGE = ImageRecord("a.png", Image.new("RGB", (64, 64), "white"))
ANSWERS = ("a quartet", "4", "4.0", "4")
SCORES = (0.0, 0.25, 0.5, 1.0)


def text(request):
    """What a slot of a call says, whenever it is asked: three of four solutions dispute the reference."""
    slot, attempt = request.order_key[2:]
    match request.call:
        case CallType.PROPOSE:
            valid = f'look</think>\n{{"question": "How many dots, try {slot}?", "answer": "3"}}'
            return "no thinking block" if slot == 2 else valid
        case CallType.SCREEN:
            difficulty = (0.4, 0.7, 0.4, 0.7)[slot]
            unread = slot == 1 and attempt == 0
            verdict = {"justification": f"{slot}", "fact_q": 1, "corr_a": int(slot < 3), "difficulty": difficulty}
            return "mumble" if unread else json.dumps(verdict)
        case CallType.SOLVE:
            return f"count {slot}</think>\n<answer>\\boxed{{{ANSWERS[slot]}}}</answer>"
        case CallType.EQUIVALENCE:
            return json.dumps({"match": int(slot >= len(ANSWERS))})
        case CallType.REASON:
            return json.dumps({"justification": f"{slot}", "reasoning_score": SCORES[slot]})
        case CallType.DISPUTE:
            return 'I solve it.</think>\n{"correct_answer": "majority", "justification": "mine"}'


class PacedEngine(ScriptedEngine):
    """Takes as many passes of the event loop over a request as it is told, and notes when each begins and ends."""

    def __init__(self, passes):
        super().__init__(lambda request: [text(request)])
        self.passes = passes
        self.events = []

    def episode(self):
        return nullcontext()

    async def generate(self, request):
        name = (str(request.call), request.order_key[2])
        self.events.append(("start", *name))
        for _ in range(self.passes(request)):
            await asyncio.sleep(0)
        self.events.append(("end", *name))
        return await super().generate(request)

    def before(self, first, second):
        return self.events.index(first) < self.events.index(second)


def play(passes, **settings):
    config, prompts = RolesConfig(prompts="short", verifier_retries=1, **settings), PromptSet.load("short")
    engine = PacedEngine(passes)
    with Matcher(MatcherConfig(symbolic=False)) as matcher:
        roles = Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config)
        return asyncio.run(play_episode(IMAGE, 5, Cast(*roles, matcher, engine, config, 7))), engine


def slow(call, slot):
    return lambda request: 300 if (request.call, request.order_key[2]) == (call, slot) else 3


def test_a_candidate_is_screened_while_another_is_still_being_proposed():
    _, engine = play(slow(CallType.PROPOSE, 3))
    for quick in (0, 1):
        assert engine.before(("end", "screen", quick), ("end", "propose", 3))
    assert engine.before(("end", "screen", 3), ("start", "solve", 0))


def test_a_solution_is_compared_and_scored_while_another_is_still_being_solved():
    _, engine = play(slow(CallType.SOLVE, 3))
    assert engine.before(("end", "equivalence", 0), ("end", "solve", 3))
    for quick in (0, 1, 2):
        assert engine.before(("end", "reason", quick), ("end", "solve", 3))


def test_a_dispute_does_not_wait_for_the_scores_of_reasoning():
    """It needs every solution's correctness, and nothing else."""
    episode, engine = play(slow(CallType.REASON, 1))
    assert engine.before(("end", "dispute", 0), ("end", "reason", 1))
    assert engine.before(("end", "equivalence", 0), ("start", "dispute", 0))
    assert episode.solutions[1].reasoning_verdict.score == 0.25


@pytest.mark.parametrize("scope", ["all", "correct"])
def test_an_episode_is_the_same_whatever_ends_first(scope):
    """Candidates, verdicts, dispute and the log of calls, also with retries and a reference that is overturned."""
    expected, _ = play(lambda request: 1, reason_scope=scope)
    assert expected.selected == 1
    assert expected.dispute.overturned
    assert [s.correctness_before_dispute.correct for s in expected.solutions] == [0, 0, 0, 0]
    assert [s.correctness.correct for s in expected.solutions] == [1, 1, 1, 1]
    asked = [call.call for call in expected.calls]
    assert asked == sorted(asked, key=list(CallType).index)
    assert len(asked) == 4 + 4 + 4 + 2 + 4 + 1
    orders = set()
    for seed in range(20):
        pace = random.Random(seed)
        episode, engine = play(lambda request, pace=pace: pace.randrange(40), reason_scope=scope)
        assert episode == expected
        orders.add(tuple(engine.events))
    assert len(orders) == 20


def test_the_samples_of_a_call_share_its_seed_and_differ_in_their_number():
    """So that a sample draws the same noise, asked for alone or together with the others."""
    _, engine = play(lambda request: 1)
    for call in (CallType.PROPOSE, CallType.SOLVE):
        requests = [r for r in engine.requests if r.call is call]
        assert len({r.seed for r in requests}) == 1
        assert sorted((r.first, r.n, r.order_key[2]) for r in requests) == [(i, 1, i) for i in range(4)]


class FailingEngine(PacedEngine):
    """Fails at one request."""

    def __init__(self, passes, call, slot):
        super().__init__(passes)
        self.fails = call, slot

    async def generate(self, request):
        completions = await super().generate(request)
        if (request.call, request.order_key[2]) == self.fails:
            raise EngineError("dead")
        return completions


async def ended_with(engine, error, cancel_after=None):
    """Play an episode that ends with this error; what is still running or asked afterwards."""
    config, prompts = RolesConfig(prompts="short", verifier_retries=1), PromptSet.load("short")
    with Matcher(MatcherConfig(symbolic=False)) as matcher:
        roles = Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config)
        playing = asyncio.create_task(play_episode(IMAGE, 5, Cast(*roles, matcher, engine, config, 7)))
        for _ in range(cancel_after or 0):
            await asyncio.sleep(0)
        if cancel_after is not None:
            playing.cancel()
        with pytest.raises(error):
            await playing
        running, asked = len(asyncio.all_tasks()) - 1, len(engine.events)
        for _ in range(400):
            await asyncio.sleep(0)
        return running, len(engine.events) - asked


@pytest.mark.parametrize(
    ("call", "slot"),
    [
        (CallType.PROPOSE, 1),
        (CallType.SCREEN, 0),
        (CallType.SOLVE, 2),
        (CallType.EQUIVALENCE, 0),
        (CallType.REASON, 1),
        (CallType.DISPUTE, 0),
    ],
)
def test_a_failure_ends_the_whole_episode_as_it_was(call, slot):
    """Its siblings are cancelled, and nothing is asked for once the error was raised."""
    for seed in range(5):
        pace = random.Random(seed)
        engine = FailingEngine(lambda request, pace=pace: pace.randrange(40), call, slot)
        assert asyncio.run(ended_with(engine, EngineError)) == (0, 0)


@pytest.mark.filterwarnings("error")
def test_a_cancelled_episode_leaves_nothing_behind():
    """At any moment: no task, no request, no coroutine that nobody awaited."""
    for passes in range(30):
        engine = PacedEngine(lambda request: 3)
        assert asyncio.run(ended_with(engine, asyncio.CancelledError, cancel_after=passes)) == (0, 0)
    gc.collect()
