"""Servers that die, hang, break or are full: every request is answered once, and a dead server comes back."""

import asyncio
import threading
import time
from collections import Counter

import pytest
from openai_server import eventually

from trinity_vlm.engine.openai.client import seconds_to_wait
from trinity_vlm.engine.openai.pool import Server, backoff, least_loaded
from trinity_vlm.errors import EngineError


def user_texts(bodies):
    return Counter(body["messages"][1]["content"] for body in bodies)


def test_backoff_doubles_up_to_its_limit():
    assert [backoff(n, 0.5, 30.0) for n in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff(10_000, 0.5, 30.0) == 30


def test_least_loaded_takes_the_idlest_usable_server():
    """Ejected, paused and full servers are never chosen; the first of equals is."""
    idle, busy, ejected, paused = (Server(name) for name in ("idle", "busy", "ejected", "paused"))
    idle.reserved, busy.reserved = 2, 5
    idle.ready = busy.ready = paused.ready = True
    paused.paused_until = 100.0
    everyone = [busy, ejected, paused, idle]
    assert least_loaded(everyone, 64, now=99.0) is idle
    assert least_loaded(everyone, 64, now=100.0) is paused
    assert least_loaded(everyone, 2, now=99.0) is None
    busy.reserved = 2
    assert least_loaded(everyone, 64, now=99.0) is busy


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("7", 7.0),
        ("0.5", 0.5),
        ("-3", 0.0),
        ("soon", None),
        ("nan", None),
        ("inf", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60.0),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(header, seconds):
    assert seconds_to_wait(header, now=40.0) == seconds


def test_requests_spread_over_servers_within_their_limit(world, ask, play):
    first, second = world.server(), world.server()
    engine = world.engine(first, second, max_in_flight=3)
    play(engine, [ask("warm up")])
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    first.gate.clear()
    second.gate.clear()

    def open_when_full():
        eventually(lambda: first.running == second.running == 3)
        first.gate.set()
        second.gate.set()

    threading.Thread(target=open_when_full).start()
    play(engine, [ask(f"r{i}") for i in range(12)])
    assert first.most_at_once == second.most_at_once == 3
    assert len(first.bodies) + len(second.bodies) == 13


def test_the_death_of_one_of_two_servers_loses_nothing(world, ask, play):
    """Killed with requests in flight: each is answered once, by the other server, with the same seed."""
    first, second = world.server(), world.server()
    engine = world.engine(first, second)
    play(engine, [ask("warm up")])
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    first.gate.clear()

    def kill_in_flight():
        eventually(lambda: first.running > 2)
        first.kill()

    killer = threading.Thread(target=kill_in_flight)
    killer.start()
    requests = [ask(f"r{i}", seed=i) for i in range(20)]
    answers = play(engine, requests)
    killer.join()
    assert [len(a) for a in answers] == [1] * 20
    answered = user_texts(first.answered + second.answered)
    assert all(answered[f"r{i}"] == 1 for i in range(20))
    resent = {b["messages"][1]["content"]: b["seed"] for b in first.bodies if b not in first.answered}
    assert len(resent) > 2
    assert all(b["seed"] == resent[text] for b in second.bodies if (text := b["messages"][1]["content"]) in resent)
    assert len(resent) <= engine.counters["resent"] <= 10  # it may have died before it read a request
    assert engine.counters["ejections"] == 1


def test_a_dead_server_is_readmitted_when_it_is_back(world, ask, play):
    first, second = world.server(), world.server()
    engine = world.engine(first, second)
    play(engine, [ask("warm up")])
    first.kill()
    eventually(lambda: not engine._pool.servers[0].ready)
    play(engine, [ask(f"r{i}") for i in range(4)])
    first.start()
    eventually(lambda: engine._pool.servers[0].ready)
    before = len(first.bodies)
    play(engine, [ask("again")])
    assert len(first.bodies) == before + 1
    assert engine.counters["readmissions"] == 1


def test_a_server_that_stops_answering_is_noticed_by_its_health(world, ask, play):
    """A hung process keeps its connections: long before the request's own deadline the watcher gives it up."""
    first, second = world.server(), world.server()
    engine = world.engine(first, second, timeout=600.0, probe_timeout=0.2)
    play(engine, [ask("warm up")])
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    first.always, first.sick = "hang", "hang"
    start = time.monotonic()
    assert len(play(engine, [ask(f"r{i}") for i in range(4)])) == 4
    assert time.monotonic() - start < 60.0
    assert len(first.bodies) > len(first.answered)


def test_a_request_that_takes_too_long_goes_to_another_server(world, ask, play):
    first, second = world.server(), world.server()
    engine = world.engine(first, second, timeout=0.3, max_retries=50)
    play(engine, [ask("warm up")])
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    first.faults = ["hang"]
    play(engine, [ask("slow")])
    assert user_texts(first.bodies)["slow"] >= 1
    assert user_texts(first.answered + second.answered)["slow"] == 1
    assert "no answer within 0.3 s" in [s.last_error for s in engine._pool.servers]


def test_the_echo_of_an_outage_is_not_a_second_one(world, ask, play):
    """One request fails at once, its neighbour only after the server was readmitted: one ejection, both answered."""
    only = world.server()
    only.faults = ["late", 500]
    engine = world.engine(only)

    def cut_after_readmission():
        eventually(lambda: engine.counters["readmissions"])
        only.late.set()

    threading.Thread(target=cut_after_readmission).start()
    assert len(play(engine, [ask("slow"), ask("broken")])) == 2
    assert engine.counters == {"resent": 2, "ejections": 1, "readmissions": 1, "busy": 0}


@pytest.mark.parametrize("fault", [500, 502, 503, 408, "garbage", "drop"])
def test_a_broken_answer_is_asked_for_again(world, ask, play, fault):
    only = world.server()
    only.faults = [fault]
    engine = world.engine(only)
    assert play(engine, [ask()])[0][0].text == "by base"
    assert engine.counters == {"resent": 1, "ejections": 1, "readmissions": 1, "busy": 0}


@pytest.mark.parametrize("fault", [(429, {"Retry-After": "0"}), (429, {}), (503, {"Retry-After": "0.01"})])
def test_a_busy_server_is_given_time_and_not_ejected(world, ask, play, fault):
    only = world.server()
    only.faults = [fault] * 9
    engine = world.engine(only, max_retries=0)
    assert play(engine, [ask()])[0][0].text == "by base"
    assert engine.counters == {"resent": 0, "ejections": 0, "readmissions": 0, "busy": 9}


def test_a_pause_sends_requests_elsewhere(world, ask, play):
    first, second = world.server(), world.server()
    engine = world.engine(first, second)
    play(engine, [ask("warm up")])
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    first.faults = [(429, {"Retry-After": "60"})]
    play(engine, [ask(f"r{i}") for i in range(6)])
    play(engine, [ask(f"s{i}") for i in range(6)])
    assert sum(user_texts(second.answered)[f"s{i}"] for i in range(6)) == 6


def test_a_request_that_breaks_every_server_ends_with_their_words(world, ask, play):
    first, second = world.server(), world.server()
    first.always = second.always = 500
    engine = world.engine(first, second, max_retries=3)
    with pytest.raises(EngineError) as caught:
        play(engine, [ask()])
    assert "4 attempts" in str(caught.value)
    assert f"{first.url}: status 500: told to answer 500" in str(caught.value)
    assert "trinity-vlm resume" in str(caught.value)


def test_no_server_for_too_long_is_an_error_that_names_them(world, ask, play):
    gone = world.server()
    gone.kill()
    engine = world.engine(gone, give_up_after=0.5)
    with pytest.raises(EngineError) as caught:
        play(engine, [ask()])
    assert gone.url in str(caught.value)
    assert "ConnectError" in str(caught.value)
    assert "roles.verifier_engine.give_up_after" in str(caught.value)


def test_a_server_that_is_always_busy_is_given_up_too(world, ask, play):
    only = world.server()
    only.always = (429, {"Retry-After": "0.01"})
    engine = world.engine(only, give_up_after=0.1)
    with pytest.raises(EngineError, match="no server was usable"):
        play(engine, [ask()])


def test_a_server_that_asks_for_no_time_is_not_stormed(world, ask, play):
    """With 0.01, 0.02, 0.04, 0.04 ... s between them, half a second holds some fifteen attempts."""
    only = world.server()
    only.always = (429, {"Retry-After": "0"})
    engine = world.engine(only, give_up_after=0.5)
    with pytest.raises(EngineError, match="no server was usable"):
        play(engine, [ask()])
    assert 3 <= len(only.bodies) <= 16


def test_requests_refused_together_are_one_refusal_to_the_backoff(world, ask, play):
    """Else a burst of 32 would wait for the longest time at once."""
    only = world.server()
    only.faults = [429] * 32
    engine = world.engine(only, backoff=0.05, backoff_max=60.0)
    only.gate.clear()

    def open_when_all_wait():
        eventually(lambda: only.running == 32)
        only.gate.set()

    threading.Thread(target=open_when_all_wait).start()
    start = time.monotonic()
    assert len(play(engine, [ask(f"r{i}") for i in range(32)])) == 32
    assert time.monotonic() - start < 30.0


def test_a_server_at_work_is_not_given_up_for_one_refusal(world, ask):
    """It is busy with one long request and refuses another for longer than give_up_after: both are answered."""
    release = threading.Event()

    def script(body):
        if body["messages"][1]["content"] == "long":
            release.wait(30)
        return ["done"]

    only = world.server(script)
    engine = world.engine(only, give_up_after=0.1)

    async def run():
        long = asyncio.create_task(engine.generate(ask("long")))
        while not only.running:
            await asyncio.sleep(0.002)
        only.faults = [(429, {"Retry-After": "0.4"})]
        answers = await engine.generate(ask("short"))
        release.set()
        return [*answers, *await long]

    assert [a.text for a in asyncio.run(run())] == ["done", "done"]
    assert engine.counters["busy"] == 1


def test_the_clock_starts_again_when_long_work_ends(world, ask):
    """An old refusal does not count against a server that worked until it died, and is back soon."""
    release = threading.Event()

    def script(body):
        if body["messages"][1]["content"] == "long":
            release.wait(30)
        return ["done"]

    only = world.server(script)
    engine = world.engine(only, give_up_after=1.0, probe_timeout=0.3, probe_every=60.0)

    async def run():
        await engine.generate(ask("warm up"))
        long = asyncio.create_task(engine.generate(ask("long")))
        while not only.running:
            await asyncio.sleep(0.002)
        only.faults = [(429, {"Retry-After": "60"})]
        short = asyncio.create_task(engine.generate(ask("short")))
        await asyncio.sleep(1.2)
        engine._pool.servers[0].paused_until = 0.0
        only.kill()
        release.set()
        await asyncio.sleep(0.1)
        only.start()
        return [*await short, *await long]

    assert [a.text for a in asyncio.run(run())] == ["done", "done"]


def test_an_error_that_nobody_expected_does_not_end_the_watch(world, ask, play):
    """A list of models that can't even be quoted: the server is tried again, and the error is kept for the message."""
    only = world.server()
    sound, only.models = only.models, lambda: (200, {"data": [{"id": 5}, {"id": "a"}]})
    engine = world.engine(only, give_up_after=0.2)
    with pytest.raises(EngineError, match=r"no server was usable.*TypeError: .*[1-9]\d* failures in a row"):
        play(engine, [ask()])
    only.models = sound
    eventually(lambda: engine._pool.servers[0].ready, seconds=5.0)
    assert play(engine, [ask()])[0][0].text == "by base"


def test_waiting_for_a_full_server_is_not_giving_up(world, ask, play):
    only = world.server()
    engine = world.engine(only, max_in_flight=1)
    play(engine, [ask("warm up")])
    engine._pool._config = world.config(only, max_in_flight=1, give_up_after=0.001)
    only.gate.clear()
    threading.Timer(0.05, only.gate.set).start()
    assert len(play(engine, [ask("a"), ask("b")])) == 2


def test_a_refused_request_is_not_sent_twice(world, ask, play):
    first, second = world.server(), world.server()
    first.always = second.always = 400
    engine = world.engine(first, second)
    with pytest.raises(EngineError, match=r"screen call was refused: http://127.0.0.1:.*status 400"):
        play(engine, [ask()])
    assert len(first.bodies) + len(second.bodies) == 1


def test_a_wrong_model_name_is_an_error_at_once(world, ask, play):
    engine = world.engine(world.server(), world.server(), model="other", give_up_after=60.0)
    with pytest.raises(EngineError, match=r"serves base, but roles.verifier_engine.model is 'other'"):
        play(engine, [ask()])


def test_a_cancelled_wait_leaves_no_request_behind(world, ask):
    """Cancelling an episode frees its place at the server and ejects nobody."""
    only = world.server()
    engine = world.engine(only, max_in_flight=1)

    async def run():
        only.gate.clear()
        waiting = asyncio.create_task(engine.generate(ask("given up")))
        while not only.running:
            await asyncio.sleep(0.002)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        only.gate.set()
        return await engine.generate(ask("next"))

    assert asyncio.run(run())[0].text == "by base"
    assert engine.counters["ejections"] == 0


def test_connections_outlive_the_event_loop_of_a_step(world, ask, play):
    """Each step of a run is an asyncio.run of its own."""
    only = world.server()
    engine = world.engine(only)
    for step in range(3):
        play(engine, [ask(f"step {step}")])
    assert engine.counters == {"resent": 0, "ejections": 0, "readmissions": 0, "busy": 0}
    engine.close()
    engine.close()
