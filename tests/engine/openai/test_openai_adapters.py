"""Adapters reach every server under a name that fixes their content, and no answer ever mixes versions."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path

import peft
import pytest
import torch
from openai_server import eventually

from trinity_vlm.engine.adapter_files import peft_files
from trinity_vlm.engine.openai.adapters import AdapterShelf, digest
from trinity_vlm.errors import ConfigError, EngineError

LAYER = "base_model.model.layers.0.q_proj"


def policy_request(ask, text="hello", **changes):
    return ask(text, adapter="policy", **changes)


def product(tensors, layer):
    return tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"]


def test_files_add_exactly_what_the_adapter_adds():
    """Layers of rank 1 and 3 under alpha 6: scalings 6 and 2, folded in; servers see rank 3 and scaling 1."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for layer, rank in (("a.q_proj", 1), ("b.up_proj", 3)):
        state[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(rank, 4, generator=generator)
        state[f"base_model.model.{layer}.lora_B.weight"] = torch.randn(5, rank, generator=generator)
    tensors, text = peft_files("policy", state, alpha=6.0)
    config = json.loads(text)
    assert config["lora_alpha"] / config["r"] == 1.0
    assert config["target_modules"] == ["q_proj", "up_proj"]
    assert {tuple(t.shape) for n, t in tensors.items() if "lora_A" in n} == {(3, 4)}
    assert {tuple(t.shape) for n, t in tensors.items() if "lora_B" in n} == {(5, 3)}
    for layer, scaling in (("base_model.model.a.q_proj", 6.0), ("base_model.model.b.up_proj", 2.0)):
        torch.testing.assert_close(product(tensors, layer), scaling * product(state, layer))


def test_peft_itself_reads_the_directory(lora, tmp_path):
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": torch.nn.Linear(3, 5, bias=False)})])

        def forward(self, x):
            return self.layers[0]["q_proj"](x)

    shelf = AdapterShelf(str(tmp_path), "engine.servers")
    saved = shelf.put("policy", 1, lora(0.5), alpha=4.0)
    plain = Layers()
    before = plain(torch.ones(1, 3))
    model = peft.PeftModel.from_pretrained(plain, saved.path)
    # B A = 2 * 0.25 = 0.5 per entry, scaling 4 / 2 = 2, three inputs of 1: 3.0
    torch.testing.assert_close(model(torch.ones(1, 3)) - before, torch.full((1, 5), 3.0))


@pytest.mark.parametrize("broken", ["missing", "foreign", "empty"])
def test_a_state_without_pairs_is_refused(lora, broken):
    state = {} if broken == "empty" else lora(1.0)
    if broken == "missing":
        del state[f"{LAYER}.lora_B.weight"]
    if broken == "foreign":
        state["base_model.model.norm.weight"] = torch.ones(3)
    with pytest.raises(EngineError, match="expected lora_A and lora_B of every layer"):
        peft_files("policy", state, 1.0)


def test_the_name_follows_the_content(lora):
    """A resumed run that reaches step 12 on another path gets another name for its version 12."""
    assert digest(lora(1.0)) == digest(lora(1.0))
    assert digest(lora(1.0)) != digest(lora(2.0))
    renamed = {name.replace("q_proj", "k_proj"): tensor for name, tensor in lora(1.0).items()}
    assert digest(renamed) != digest(lora(1.0))


def test_an_unwritable_folder_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"engine.servers.adapter_dir=.*can't write there"):
        AdapterShelf(str(tmp_path / "nowhere"), "engine.servers")


def test_an_update_replaces_the_adapter_on_every_server(world, ask, play, lora, tmp_path):
    first, second = world.server(), world.server()
    engine = world.policy_engine(first, second)
    engine.load_adapter("policy", 1, lora(1.0))
    engine.load_adapter("verifier", 1, lora(3.0))
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    engine.load_adapter("policy", 2, lora(2.0))
    for server in (first, second):
        assert sorted(name.rpartition("-")[0] for name in server.adapters) == ["policy-v2", "verifier-v1"]
    folders = [p.name for p in next(tmp_path.iterdir()).iterdir() if p.is_dir()]
    assert sorted(folders) == sorted(first.adapters)
    text = play(engine, [policy_request(ask)])[0][0].text
    assert text.startswith("by policy-v2-")
    assert first.weights[text.removeprefix("by ")] == 2.0 * 6 + 2 * 2.0 * 10  # A as it is, B times alpha / rank = 2


def test_a_server_that_comes_back_gets_the_current_adapters_first(world, ask, play, lora):
    """Its new process knows none; until it has them it is asked nothing."""
    first, second = world.server(), world.server()
    engine = world.policy_engine(first, second)
    engine.load_adapter("policy", 1, lora(1.0))
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    first.kill()
    eventually(lambda: not engine._pool.servers[0].ready)
    engine.load_adapter("policy", 2, lora(2.0))
    first.log.clear()
    first.start()
    eventually(lambda: engine._pool.servers[0].ready)
    assert [name.rpartition("-")[0] for name in first.adapters] == ["policy-v2"]
    play(engine, [policy_request(ask, f"r{i}") for i in range(4)])
    assert first.log.index("POST /v1/load_lora_adapter") < first.log.index("POST /v1/chat/completions")
    assert {body["model"] for body in first.bodies} == {next(iter(first.adapters))}


def test_a_server_that_lost_its_adapters_unnoticed_gets_them_again(world, ask, play, lora):
    """It was restarted between two health checks: the 404 for the adapter's name is its fault, not the request's."""
    only = world.server()
    engine = world.policy_engine(only, probe_every=60.0)
    engine.load_adapter("policy", 1, lora(1.0))
    only.kill()
    only.start()
    assert play(engine, [policy_request(ask)])[0][0].text.startswith("by policy-v1-")
    assert engine.counters["resent"] >= 1


def test_versions_never_mix_under_load(world, ask, play, lora):
    """Many rounds of load and generate, with a server dying and coming back: every answer is of the current version."""
    first, second = world.server(), world.server()
    engine = world.policy_engine(first, second)
    for version in range(1, 9):
        engine.load_adapter("policy", version, lora(float(version)))
        if version == 3:
            (killer := threading.Timer(0.003, first.kill)).start()
        if version == 6:
            killer.join()
            first.start()
        answers = play(engine, [policy_request(ask, f"{version}.{i}") for i in range(16)])
        assert {a.text.rpartition("-")[0] for (a,) in answers} == {f"by policy-v{version}"}
    assert not engine.counters["busy"]


def test_an_adapter_that_a_server_has_already_is_not_loaded_again(world, lora):
    """Workers of one run share servers: the second finds the first one's adapter, by name and content."""
    only = world.server()
    one, two = world.policy_engine(only), world.policy_engine(only)
    one.load_adapter("policy", 1, lora(1.0))
    two.load_adapter("policy", 1, lora(1.0))
    assert only.log.count("POST /v1/load_lora_adapter") == 1


def test_an_adapter_whose_files_are_gone_is_loaded_again(world, ask, play, lora, tmp_path):
    """A killed run leaves its names on the servers, but not its files: a request for such a name would end vLLM."""
    only = world.server()
    engine = world.policy_engine(only)
    (saved,) = [AdapterShelf(str(tmp_path), "another").put("policy", 1, lora(1.0), 4.0)]
    only.adapters[saved.served_name] = str(tmp_path / "gone")
    engine.load_adapter("policy", 1, lora(1.0))
    assert play(engine, [policy_request(ask)])[0][0].text == f"by {saved.served_name}"
    assert not only.sick


def test_closing_leaves_the_servers_as_they_were(world, lora):
    first, second, gone = world.server(), world.server(), world.server()
    engine = world.policy_engine(first, second, gone)
    engine.load_adapter("policy", 1, lora(1.0))
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    gone.kill()
    engine.close()
    assert first.adapters == second.adapters == {}


def test_closing_waits_for_hung_servers_together_and_not_for_long(world, lora):
    """Three servers that say nothing cost one probe_timeout, not three times the time of an adapter call."""
    servers = [world.server() for _ in range(3)]
    engine = world.policy_engine(*servers, probe_timeout=1.0, probe_every=60.0)
    engine.load_adapter("policy", 1, lora(1.0))
    eventually(lambda: all(s.ready for s in engine._pool.servers))
    for server in servers:
        server.sick = "hang"
    start = time.monotonic()
    engine.close()
    assert 1.0 <= time.monotonic() - start < 2.9


def test_a_refused_adapter_is_an_error_with_the_servers_words(world, lora):
    only = world.server()
    engine = world.policy_engine(only)
    engine.load_adapter("policy", 1, lora(1.0))
    only.runtime_lora = False
    with pytest.raises(EngineError, match=r"adapter policy-v2-\w+ from .*status 404"):
        engine.load_adapter("policy", 2, lora(2.0))


def test_adapters_are_asked_for_only_after_they_were_loaded(world, ask, play, lora):
    engine = world.policy_engine(world.server())
    with pytest.raises(EngineError, match="unknown adapter 'policy'; loaded: none"):
        play(engine, [policy_request(ask)])
    with pytest.raises(EngineError, match="unknown adapter 'third'; the backbone has policy, verifier"):
        engine.load_adapter("third", 1, lora(1.0))


def test_load_adapter_works_inside_a_running_event_loop(world, ask, lora):
    engine = world.policy_engine(world.server())

    async def run():
        engine.load_adapter("policy", 1, lora(1.0))
        return await engine.generate(policy_request(ask))

    assert asyncio.run(run())[0].text.startswith("by policy-v1-")


def test_what_a_killed_run_left_is_removed_and_what_a_living_one_holds_is_not(lora, tmp_path):
    """The kernel drops a killed process's lock; its folder is what remains."""
    living = AdapterShelf(str(tmp_path), "engine.servers")
    living.put("policy", 1, lora(1.0), 4.0)
    own = living._folder.path
    left = tmp_path / own.name.replace(own.name[-8:], "leftover")
    shutil.copytree(own, left)
    another = AdapterShelf(str(tmp_path), "engine.servers")
    assert not left.exists()
    assert Path(living.current["policy"].path).is_dir()
    another.close()
    living.close()
    assert not list(tmp_path.iterdir())


def test_closing_removes_the_files(world, lora, tmp_path):
    engine = world.policy_engine(world.server())
    engine.load_adapter("policy", 1, lora(1.0))
    assert list(Path(tmp_path).iterdir())
    engine.close()
    assert not list(Path(tmp_path).iterdir())
