"""The paper's layout: what it calls in which order, what it swaps, and that it changes nothing but the order."""

import asyncio
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import tiny_families
import torch
from PIL import Image

from trinity_vlm.answers import Matcher
from trinity_vlm.config import MatcherConfig, RolesConfig
from trinity_vlm.engine.paper_layout import PaperLayoutEngine
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.scripted import ScriptedEngine
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.episode import Cast, play_episode
from trinity_vlm.errors import EngineError
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.types import POLICY, VERIFIER, CallType, ImageRecord, Message, Prompt

SCRIPT = {
    CallType.PROPOSE: ['I look.</think>\n{"question": "How many red dots are shown?", "answer": "blue dot"}'],
    CallType.SCREEN: [json.dumps({"justification": "seen", "fact_q": 1, "corr_a": 1, "difficulty": 0.7})],
    CallType.SOLVE: ["I count.</think>\n<answer>\\boxed{an azure mark}</answer>"],
    CallType.EQUIVALENCE: ['{"match": 0}'],
    CallType.REASON: [json.dumps({"justification": "fine", "reasoning_score": 0.5})],
    CallType.DISPUTE: ['I see.</think>\n{"correct_answer": "ref", "justification": "mine"}'],
}
"""Every episode proposes, screens, solves, grades by model and disputes."""


class Journal:
    """An engine that answers from a script after some passes of the event loop, and notes what happens when."""

    def __init__(self, script=SCRIPT, passes=lambda request: 1):
        self.inner = ScriptedEngine(script)
        self.events = []
        self.passes = passes

    def swap(self, name):
        self.events.append(("swap", name))

    def episode(self):
        return nullcontext()

    async def generate(self, request):
        key = (str(request.call), request.order_key[0])
        self.events.append(("start", *key))
        assert request.adapter is None
        for _ in range(self.passes(request)):
            await asyncio.sleep(0)
        self.events.append(("end", *key))
        return await self.inner.generate(request)

    def load_adapter(self, name, version, state):
        self.inner.load_adapter(name, version, state)

    def close(self):
        self.inner.close()

    def kinds(self):
        """The order of swaps and of kinds of calls, runs of equal ones taken together."""
        names = [event[1] for event in self.events if event[0] != "end"]
        return [name for name, before in zip(names, [None, *names], strict=False) if name != before]

    def most_in_flight(self, call):
        running = most = 0
        for what, name, *_ in self.events:
            running += (name == call) * {"start": 1, "end": -1}.get(what, 0)
            most = max(most, running)
        return most


def first_image_is_slow(request):
    return 200 if request.order_key[0] == "0.png" else 1


def play(engine, count=2, **settings):
    """Episodes of ``count`` images over an engine, all at once."""
    config = RolesConfig(prompts="short", candidates=2, solutions=2, **settings)
    prompts = PromptSet.load("short")
    images = [ImageRecord(f"{i}.png", Image.new("RGB", (64, 64), (40 * i, 0, 0))) for i in range(count)]

    async def all_at_once(cast):
        return await asyncio.gather(*(play_episode(image, 1, cast) for image in images))

    with Matcher(MatcherConfig(symbolic=False)) as matcher:
        roles = Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config)
        return asyncio.run(all_at_once(Cast(*roles, matcher, engine, config, 7)))


def test_two_images_make_six_phases_and_four_swaps():
    """Policy asks, Verifier screens, policy solves, Verifier compares, scores and settles: one swap per change."""
    journal = Journal()
    engine = PaperLayoutEngine(journal, journal.swap)
    play(engine)
    expected = [POLICY, "propose", VERIFIER, "screen", POLICY, "solve", VERIFIER, "equivalence", "reason", "dispute"]
    assert journal.kinds() == expected
    assert (engine.swaps, engine.phases) == (4, 6)
    assert engine.counters == {"swaps": 4, "phases": 6}


def test_a_second_step_swaps_again_after_its_adapters_were_loaded():
    """The Verifier's weights that the engine ended with are outdated once an update has been served."""
    journal = Journal()
    engine = PaperLayoutEngine(journal, journal.swap)
    request = plain_request(VERIFIER)
    asyncio.run(engine.generate(request))
    asyncio.run(engine.generate(request))
    assert engine.swaps == 1
    engine.load_adapter(VERIFIER, 2, {})
    assert journal.inner.loaded == [(VERIFIER, 2)]
    asyncio.run(engine.generate(request))
    assert engine.swaps == 2


def test_no_call_of_a_phase_starts_before_the_last_of_the_phase_before_it_has_ended():
    """An image whose proposals come late holds up every other image."""
    journal = Journal(passes=first_image_is_slow)
    play(PaperLayoutEngine(journal, journal.swap), count=3)
    names = [event[1] for event in journal.events]
    ends = [i for i, event in enumerate(journal.events) if event[:2] == ("end", "propose")]
    assert len(ends) == 3 * 2
    assert max(ends) < names.index("screen")


def test_an_episode_that_takes_its_time_holds_up_the_others():
    """One that lives but does not wait may still ask for something of this phase."""
    journal = Journal()
    engine = PaperLayoutEngine(journal, journal.swap)

    async def ask(key, pause):
        with engine.episode():
            for _ in range(pause):
                await asyncio.sleep(0)
            return await engine.generate(plain_request(POLICY, key))

    async def both():
        return await asyncio.gather(ask("quick", 0), ask("slow", 100))

    asyncio.run(both())
    assert engine.phases == 1


def test_without_the_layout_a_fast_image_overtakes():
    """The journal would show a barrier that is not there."""
    journal = Journal(passes=first_image_is_slow)
    play(AnyAdapter(journal), count=3)
    names = [event[1] for event in journal.events]
    last_proposal = max(i for i, event in enumerate(journal.events) if event[:2] == ("end", "propose"))
    assert names.index("solve") < last_proposal


def test_a_retry_is_finished_before_the_next_kind_begins():
    """One image's screening is unparsed and asked again: the other image's Solver waits for it."""
    unparsed = iter([True])

    def script(request):
        if request.call is CallType.SCREEN and request.order_key[0] == "0.png" and next(unparsed, False):
            return ["no verdict"]
        return SCRIPT[request.call] * request.n

    journal = Journal(script)
    play(PaperLayoutEngine(journal, journal.swap), verifier_retries=1)
    screens = [i for i, event in enumerate(journal.events) if event[1] == "screen"]
    assert len(screens) == 2 * 5
    assert max(screens) < [event[1] for event in journal.events].index("solve")


@pytest.mark.parametrize(("sub_batch", "most"), [(None, 6), (4, 4), (2, 2), (1, 1)])
def test_a_sub_batch_of_prompts_ends_before_the_next_begins(sub_batch, most):
    """Three images have six candidates to screen, but only three prompts to solve, each with both samples."""
    journal = Journal(passes=lambda request: 50)
    play(PaperLayoutEngine(journal, journal.swap, sub_batch), count=3)
    assert journal.most_in_flight("screen") == most
    assert journal.most_in_flight("solve") == min(most, 3) * 2


def test_sub_batches_do_not_overlap_by_a_fast_member():
    """The second of two waits for the slower of the first two."""
    journal = Journal(passes=first_image_is_slow)
    play(PaperLayoutEngine(journal, journal.swap, 2), count=3)
    proposals = [event for event in journal.events if event[1] == "propose"]
    images = ["0.png"] * 2, ["1.png"] * 2, ["2.png"] * 2
    first, second, third = (
        Counter((what, "propose", uid) for uid in pair for what in ("start", "end")) for pair in images
    )
    assert Counter(proposals[:8]) == first + second
    assert Counter(proposals[8:]) == third


def test_an_engine_that_fails_fails_its_caller_and_not_the_next_step():
    """The layout does not hang on a failure, and serves again afterwards."""

    def script(request):
        raise EngineError("dead")

    journal = Journal(script)
    engine = PaperLayoutEngine(journal, journal.swap)
    with pytest.raises(EngineError, match="dead"):
        play(engine)
    journal.inner = ScriptedEngine(SCRIPT)
    assert len(play(engine)) == 2


def test_a_swap_that_fails_is_tried_again_for_the_next_phase():
    """What the engine holds after a failed swap is unknown."""
    journal, failing = Journal(), iter([True])

    def swap(name):
        if next(failing, False):
            raise EngineError("no room")
        journal.swap(name)

    engine = PaperLayoutEngine(journal, swap)
    with pytest.raises(EngineError, match="no room"):
        play(engine)
    assert engine.swaps == 0
    play(engine)
    assert engine.swaps == 4


def test_the_bare_base_model_is_refused():
    """Otherwise the request would meet whichever adapter's weights the engine holds."""
    journal = Journal()
    with pytest.raises(EngineError, match="without adapter"):
        asyncio.run(PaperLayoutEngine(journal, journal.swap).generate(plain_request(None)))
    assert journal.events == []


def test_a_cancelled_caller_is_not_served():
    """A request whose caller has gone waits no longer and causes no swap; the others are answered."""
    journal = Journal()
    engine = PaperLayoutEngine(journal, journal.swap)

    async def both():
        gone = asyncio.create_task(engine.generate(plain_request(VERIFIER, "gone")))
        await asyncio.sleep(0)
        gone.cancel()
        return await engine.generate(plain_request(POLICY, "stays"))

    assert len(asyncio.run(both())) == 1
    assert [event for event in journal.events if event[0] == "start"] == [("start", "solve", "stays")]
    assert engine.swaps == 1


def test_completions_are_those_of_the_adapters_on_the_real_tiny_model(engine_model_directory):
    """Merged weights in turn or two adapters side by side: in float32 the same tokens from the same seeds."""
    backbone = tiny_families.load(engine_model_directory)
    backbone.add_adapter(VERIFIER, 6, 6.0)
    tiny_families.randomize(backbone, POLICY, 1)
    tiny_families.randomize(backbone, VERIFIER, 2)
    requests = [real_request(i, adapter) for i in range(2) for adapter in (POLICY, VERIFIER)]
    expected = asyncio.run(together(TransformersEngine(backbone, 64, False), requests))
    merged = MergedWeights(backbone)
    engine = PaperLayoutEngine(TransformersEngine(backbone, 64, False), merged.swap, 1)
    found = asyncio.run(together(engine, requests))
    assert engine.swaps == 2
    for left, right in zip(expected, found, strict=True):
        assert [c.token_ids for c in left] == [c.token_ids for c in right]
        assert [c.logprobs for c in left] == [pytest.approx(c.logprobs, abs=1e-4) for c in right]
    merged.restore()
    base = asyncio.run(together(TransformersEngine(backbone, 64, False), [real_request(0, None)]))
    assert base[0] != expected[0]


class AnyAdapter:
    """The journal as an engine that needs no swaps, without any layout around it."""

    def __init__(self, journal):
        self._journal = journal

    def episode(self):
        return nullcontext()

    async def generate(self, request):
        return await self._journal.generate(replace(request, adapter=None))


class MergedWeights:
    """Swaps an adapter's delta into the base layers of a backbone."""

    def __init__(self, backbone):
        self._backbone = backbone
        modules = dict(backbone.model.named_modules())
        self._layers = {}
        for name in backbone.factors(POLICY):
            (layer,) = [m.base_layer for key, m in modules.items() if key.endswith(name) and hasattr(m, "base_layer")]
            self._layers[name] = (layer, layer.weight.detach().clone())

    @torch.no_grad()
    def swap(self, adapter):
        for name, delta in self._backbone.factors(adapter).items():
            layer, start = self._layers[name]
            layer.weight.copy_(start + delta.left @ delta.right)

    @torch.no_grad()
    def restore(self):
        for layer, start in self._layers.values():
            layer.weight.copy_(start)


async def together(engine, requests):
    """Each request from an episode of its own."""

    async def one(request):
        with engine.episode():
            return await engine.generate(request)

    return await asyncio.gather(*map(one, requests))


def real_request(index, adapter):
    image = ImageRecord(str(index), Image.new("RGB", (64, 64), (90 * index, 10, 60)))
    prompt = Prompt((Message("user", "How many red circles?", image),), "<think>\n")
    call = CallType.SCREEN if adapter == VERIFIER else CallType.PROPOSE
    sampling = Sampling(1.0, 0.95, 20, 12)
    return GenerationRequest(prompt, adapter, sampling, index, call, (str(index), call), n=2, want_logprobs=True)


def plain_request(adapter, key="a"):
    prompt = Prompt((Message("user", "How many?"),))
    call = CallType.SOLVE if adapter == POLICY else CallType.SCREEN
    return GenerationRequest(prompt, adapter, Sampling(1.0, 1.0, 0, 8), 0, call, (key, call))


def test_scripted_completions_are_passed_through():
    """Nothing is lost or reordered on the way."""
    journal = Journal({CallType.SOLVE: ["one", "two"]})
    engine = PaperLayoutEngine(journal, journal.swap)

    async def both():
        return await asyncio.gather(
            engine.generate(plain_request(POLICY, "b")), engine.generate(plain_request(POLICY, "a"))
        )

    answers = asyncio.run(both())
    assert [c.text for answer in answers for c in answer] == ["two", "one"], "requests are served by their keys"
