"""The engine as episodes use it: whole episodes over servers, routing by role, what is refused before and at start."""

import asyncio
import json
import logging
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
from openai_server import CONTEXT, END_ID, Tokens, conversation, eventually, ids
from PIL import Image
from pydantic import ValidationError

from trinity_vlm.answers import Matcher
from trinity_vlm.config import MatcherConfig, RolesConfig
from trinity_vlm.engine.openai import ServersConfig, VerifierEngineConfig, check_servers
from trinity_vlm.engine.protocol import Engine, Sampling
from trinity_vlm.engine.routed import RoutedEngine
from trinity_vlm.engine.scripted import ScriptedEngine
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.episode import Cast
from trinity_vlm.errors import ConfigError, EngineError
from trinity_vlm.loop import play_episodes
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import POLICY, VERIFIER, CallType, ImageRecord, Message, Prompt, Tier

IMAGES = [ImageRecord(f"{i}.png", Image.new("RGB", (32, 32), (i, 0, 0))) for i in range(6)]
CONFIG = RolesConfig(prompts="short", policy_tokens=500, verifier_tokens=500)


def make_cast(engine):
    prompts = PromptSet.load("short")
    roles = Questioner(prompts, CONFIG), Solver(prompts, CONFIG), Verifier(prompts, CONFIG)
    return Cast(*roles, Matcher(MatcherConfig(symbolic=False)), engine, CONFIG, 7)


def play_with(engine, images=IMAGES):
    """Episodes of several images at once, as a step plays them."""
    cast = make_cast(engine)
    with cast.matcher:
        return asyncio.run(play_episodes(images, 1, cast, itself))


async def itself(episode):
    """Episodes as they are, without rewards or an update."""
    return episode


def model_of_an_episode():
    """A script that answers every call of an episode, told apart by their system texts.

    The policy proposes "3" and solves 3, 4, 4, 4; so equal answers are settled by rule and each image has a dispute.
    """
    cast = make_cast(None)
    image, verifier = IMAGES[0], cast.verifier
    prompts = {
        CallType.PROPOSE: cast.questioner.prompt(image),
        CallType.SOLVE: cast.solver.prompt(image, "q"),
        CallType.SCREEN: verifier.screening_prompt(image, "q", "a"),
        CallType.REASON: verifier.reasoning_prompt(image, "q", "r"),
        CallType.DISPUTE: verifier.dispute_prompt(image, "q", "a", "b", "r"),
    }
    calls = {prompt.messages[0].text: call for call, prompt in prompts.items()}
    assert len(calls) == len(prompts)
    answers = {
        CallType.PROPOSE: ['looking</think>\n{"question": "How many red dots are shown?", "answer": "3"}'],
        CallType.SCREEN: ['{"justification": "seen", "fact_q": 1, "corr_a": 1, "difficulty": 0.7}'],
        CallType.REASON: ['{"justification": "fine", "reasoning_score": 0.5}'],
        CallType.DISPUTE: ['I solve.</think>\n{"correct_answer": "majority", "justification": "mine"}'],
    }
    solving = (derive_seed(cast.run_seed, 1, image.uid, CallType.SOLVE, 0, 0) for image in IMAGES)
    first_solutions = {derive_seed(seed, 0) >> 10 for seed in solving}

    def script(body):
        call = calls[body["messages"][0]["content"]]
        if call is not CallType.SOLVE:
            return answers[call]
        return [f"I count.</think>\n<answer>\\boxed{{{3 if body['seed'] in first_solutions else 4}}}</answer>"]

    return script


def test_an_engine_is_what_the_protocol_says(world):
    engine = world.engine(world.server())
    assert isinstance(engine, Engine)
    assert isinstance(RoutedEngine(engine, {}), Engine)


def test_episodes_survive_the_death_of_one_of_two_servers(world, lora):
    """Killed in the middle of a step: every episode is whole, and the same as without the death."""
    script = model_of_an_episode()
    first, second = world.server(script), world.server(script)
    engine = world.policy_engine(first, second)
    for name in (POLICY, VERIFIER):
        engine.load_adapter(name, 1, lora(1.0))
    undisturbed = play_with(engine)
    before = len(first.bodies)

    def kill_in_the_middle():
        eventually(lambda: len(first.bodies) > before + 10)
        first.kill()

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    episodes = play_with(engine)
    killer.join()
    assert episodes == undisturbed
    assert engine.counters["ejections"] == 1
    assert len(second.answered) > 20
    (solution,) = {s.correctness.tier for e in episodes for s in e.solutions[1:]}
    assert solution is Tier.RULE
    assert all(e.dispute.overturned and e.reference == "4" for e in episodes)


def test_policy_completions_hold_what_the_trainer_needs(world, ask, play, lora):
    """Ids of prompt and completion as the server saw them, the end-of-turn id and one log-probability per token."""
    server = world.server(lambda body: ["two dots"] * body["n"])
    engine = world.policy_engine(server)
    engine.load_adapter("policy", 1, lora(1.0))
    prompt = Prompt((Message("user", "how many?", IMAGES[0]),), "<think>\n")
    (completions,) = play(engine, [ask(prompt=prompt, adapter="policy", n=3, want_logprobs=True)])
    assert len(completions) == 3
    assert completions[0].prompt_token_ids == ids("user:#how many?\nassistant:<think>\n")
    assert completions[0].token_ids == (*ids("two dots"), END_ID)
    assert completions[0].logprobs == (-0.5,) * 9
    assert (completions[0].text, completions[0].finish_reason) == ("two dots", "stop")
    assert server.bodies[0]["stop_token_ids"] == [END_ID]
    assert server.bodies[0]["logit_bias"] == {"7": -100.0}


def test_greedy_samples_are_the_same_completion(world, ask, play):
    engine = world.engine(world.server())
    (completions,) = play(engine, [ask(n=3, sampling=Sampling(0.0, 1.0, 0, 9))])
    assert len(completions) == 3
    assert len(set(completions)) == 1


def test_budgets_are_what_the_context_leaves(world, ask, play, lora):
    """A policy never gets more tokens than the trainer's own context holds; none at all is an empty completion."""
    server = world.server(lambda body: ["x" * 100] * body["n"])
    engine = world.policy_engine(server)
    engine._backbone.context = 200
    engine.load_adapter("policy", 1, lora(1.0))
    around = len("system:be brief\nuser:\nassistant:")
    (short,), (none,) = play(
        engine, [ask("y" * (200 - around - 8), adapter="policy"), ask("y" * (200 - around), adapter="policy")]
    )
    assert (len(short.token_ids), short.finish_reason) == (8, "length")
    assert (none.token_ids, none.finish_reason, len(none.prompt_token_ids)) == ((), "length", 200)
    assert len(server.bodies) == 1


def test_a_prompt_too_long_for_the_server_is_an_empty_completion(world, ask, play):
    engine = world.engine(world.server())
    ((completion,),) = play(engine, [ask("y" * CONTEXT)])
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", (), "length")


@pytest.mark.parametrize("difference", ["template", "no_ids"])
def test_a_server_that_reads_prompts_otherwise_is_refused(world, ask, play, lora, difference):
    server = world.server(token_ids=difference != "no_ids")
    engine = world.policy_engine(server)
    engine.load_adapter("policy", 1, lora(1.0))
    if difference == "template":
        engine._backbone.render = lambda prompt: Tokens().render(prompt).replace("brief", "short")
    with pytest.raises(EngineError, match=r"other tokens than the trainer .*the first difference at"):
        play(engine, [ask(adapter="policy")])


def test_a_prefix_that_the_template_writes_itself_is_not_sent_twice(world, ask, play, lora):
    class Opens(Tokens):
        def render(self, prompt):
            return super().render(replace(prompt, assistant_prefix="<think>\n"))

    server = world.server()
    engine = world.policy_engine(server)
    engine._backbone = Opens()
    engine.load_adapter("policy", 1, lora(1.0))
    prompt = Prompt((Message("user", "q"),), "<think>\n")
    with pytest.raises(EngineError):  # this server's template does not open it: seen by the ids
        play(engine, [ask(prompt=prompt, adapter="policy")])
    assert conversation(server.bodies[0]).endswith("\nassistant:")


@pytest.mark.parametrize(
    ("settings", "sent"), [({}, True), ({"prefix": "omit"}, False), ({"dialect": "openai"}, False)]
)
def test_a_foreign_verifiers_prefix_is_a_setting(world, ask, play, settings, sent):
    server = world.server()
    engine = world.engine(server, **settings)
    play(engine, [ask(prompt=Prompt((Message("user", "q"),), "<think>\n"), adapter="verifier")])
    assert (server.bodies[0]["messages"][-1]["role"] == "assistant") == sent
    assert server.bodies[0]["model"] == "base"


def test_a_verifier_may_be_another_model(world):
    """Verifier calls leave, with a schema; the policy and its adapter stay; the average is not sent anywhere."""
    server = world.server(model_of_an_episode(), model="stronger", token_ids=False)
    own = ScriptedEngine(
        {
            CallType.PROPOSE: ['looking</think>\n{"question": "How many red dots?", "answer": "3"}'],
            CallType.SOLVE: ["I count.</think>\n<answer>\\boxed{3}</answer>"],
        }
    )
    engine = RoutedEngine(own, {VERIFIER: world.engine(server, model="stronger")})
    for name in (POLICY, VERIFIER):
        engine.load_adapter(name, 1, {})
    (episode,) = play_with(engine, IMAGES[:1])
    assert own.loaded == [(POLICY, 1)]
    assert {request.adapter for request in own.requests} == {POLICY}
    assert len(server.answered) == 4 + 4  # screening of 4 candidates, reasoning of 4 solutions
    assert all(body["response_format"]["type"] == "structural_tag" for body in server.bodies)
    assert episode.solutions[0].reasoning_verdict.score == 0.5
    screened = [call for call in episode.calls if call.call is CallType.SCREEN]
    assert all(call.prompt_tokens > 0 and call.completion_tokens > 0 for call in screened)


@pytest.mark.parametrize(
    ("settings", "kind"), [({}, "structural_tag"), ({"prefix": "omit"}, None), ({"dialect": "openai"}, None)]
)
def test_a_schema_never_binds_thinking_that_only_the_server_knows(world, ask, play, settings, kind):
    """It would bind the first token; without it, the parser and its retries decide."""
    server = world.server()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    play(world.engine(server, **settings), [ask(json_schema=schema, schema_after="</think>")])
    assert server.bodies[0].get("response_format", {}).get("type") == kind


def test_a_batching_engine_and_servers_wait_for_each_other(world, ask, players):
    """Episodes that alternate between both finish, and the batching engine still batches across them."""
    verifier = world.engine(world.server())
    engine = RoutedEngine(TransformersEngine(players, 8, cuda_graphs=False), {VERIFIER: verifier})
    sampling = Sampling(1.0, 0.95, 20, 4)

    async def episode(i):
        with engine.episode():
            (first,) = await engine.generate(ask(f"a{i}", adapter=POLICY, sampling=sampling, seed=i))
            verdicts = await asyncio.gather(*(engine.generate(ask(f"v{i}.{j}", adapter=VERIFIER)) for j in range(i)))
            (last,) = await engine.generate(ask(f"b{i}", adapter=POLICY, sampling=sampling, seed=i))
        return first.token_ids, len(verdicts), last.token_ids

    async def together(numbers):
        return await asyncio.gather(*map(episode, numbers))

    assert asyncio.run(together(range(4))) == [asyncio.run(together([i]))[0] for i in range(4)]


def test_an_episode_is_one_of_every_engine():
    """A batching engine counts on it."""

    class Counting(ScriptedEngine):
        held = 0

        @contextmanager
        def episode(self):
            self.held += 1
            yield
            self.held -= 1

    own, other = Counting({}), Counting({})
    with RoutedEngine(own, {VERIFIER: other}).episode():
        assert (own.held, other.held) == (1, 1)
    assert (own.held, other.held) == (0, 0)


def test_closing_and_counting_reach_every_engine_that_can(world):
    server = world.server()
    verifier = world.engine(server)
    engine = RoutedEngine(ScriptedEngine({}), {VERIFIER: verifier})
    assert engine.counters["verifier/resent"] == 0
    engine.close()
    assert verifier._background._loop.is_closed()


def test_requests_without_an_adapter_go_to_the_default(ask, play):
    own, other = ScriptedEngine(lambda request: ["own"]), ScriptedEngine(lambda request: ["other"])
    engine = RoutedEngine(own, {VERIFIER: other})
    answers = play(engine, [ask(), ask(adapter=POLICY), ask(adapter=VERIFIER)])
    assert [a.text for (a,) in answers] == ["own", "own", "other"]


def test_the_key_reaches_the_server_and_nothing_else(world, ask, play, monkeypatch, caplog):
    """Not even when a server repeats it in its error."""
    secret = "sk-very-secret"
    monkeypatch.setenv("TRINITY_TEST_KEY", secret)
    caplog.set_level(logging.DEBUG)
    server = world.server()
    server.faults = [500]
    server.chat = lambda body: (401, {"error": {"message": f"Incorrect API key provided: {secret}"}})
    engine = world.engine(server, api_key_env="TRINITY_TEST_KEY")
    with pytest.raises(EngineError, match="TRINITY_TEST_KEY") as caught:
        play(engine, [ask()])
    assert "***" in str(caught.value)
    assert set(server.keys) == {f"Bearer {secret}"}
    states = json.dumps([s.last_error for s in engine._pool.servers]) + repr(engine._config)
    assert secret not in str(caught.value) + caplog.text + states


def test_the_key_is_cut_out_of_a_list_of_models_too(world, ask, play, monkeypatch):
    """A proxy may answer with the headers it got."""
    monkeypatch.setenv("TRINITY_TEST_KEY", "sk-very-secret")
    server = world.server()
    server.models = lambda: (200, {"error": "Bearer sk-very-secret"})
    engine = world.engine(server, api_key_env="TRINITY_TEST_KEY", give_up_after=0.1)
    with pytest.raises(EngineError, match=r"/v1/models answered .*\*\*\*") as caught:
        play(engine, [ask()])
    assert "secret" not in str(caught.value)


def test_an_unset_key_is_an_error_at_start(world, monkeypatch):
    monkeypatch.delenv("TRINITY_TEST_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"roles.verifier_engine.api_key_env='TRINITY_TEST_KEY'.* not set"):
        world.engine(world.server(), api_key_env="TRINITY_TEST_KEY")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": []}, "at least 1 item"),
        ({"urls": ["127.0.0.1:8000"]}, "http://host:port"),
        ({"urls": ["http://user:secret@host"]}, "without user, password"),
        ({"urls": ["http://host/v1?key=secret"]}, "without user, password"),
        ({"urls": ["http://host:1", "http://host:1/v1/"]}, "listed twice"),
        ({"api_key_env": "sk-live-secret"}, "name of an environment variable"),
        ({"timeout": 0}, "greater than 0"),
        ({"retries": 3}, "Extra inputs"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message) as caught:
        ServersConfig(**{"urls": ["http://host"], "model": "m", **settings})
    assert "secret" not in "".join(e["msg"] for e in caught.value.errors())


def test_urls_may_end_in_v1():
    config = VerifierEngineConfig(kind="openai", urls=["http://a:1/v1", "http://b/proxy/v1/", "http://c"], model="m")
    assert config.roots == ("http://a:1", "http://b/proxy", "http://c")


def test_a_server_that_can_play_passes_the_check(world):
    policy, verifier, gone = world.server(), world.server(token_ids=False, runtime_lora=False), world.server()
    gone.kill()
    check_servers(world.config(policy, gone), "engine.servers", context=CONTEXT)
    check_servers(world.config(verifier), "roles.verifier_engine")


@pytest.mark.parametrize(
    ("server", "settings", "context", "message"),
    [
        ({}, {"model": "other"}, None, r"serves base, but KEY.model is 'other'"),
        ({"token_ids": False}, {}, 9, "returns no token ids"),
        ({"runtime_lora": False}, {}, 9, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({}, {}, CONTEXT + 1, rf"start it with --max-model-len {CONTEXT + 1}"),
        ({}, {"dialect": "openai"}, 9, r"KEY.dialect='openai'"),
    ],
)
def test_a_server_that_never_can_is_refused_before_a_model_is_loaded(world, server, settings, context, message):
    with pytest.raises(ConfigError, match=message):
        check_servers(world.config(world.server(**server), **settings), "KEY", context)


def test_no_server_at_all_is_refused_before_a_model_is_loaded(world):
    gone, sick = world.server(), world.server()
    gone.kill()
    sick.sick = "hang"
    with pytest.raises(ConfigError, match=r"KEY.urls: no server answers: .*ConnectError.*no answer within"):
        check_servers(world.config(gone, sick, probe_timeout=0.05), "KEY")
