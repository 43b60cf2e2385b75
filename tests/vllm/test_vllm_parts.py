"""The vLLM engine's parts that need no vLLM: adapter directories, versions, the ban in the logits, a missing vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from loop_factory import picture, tiny_backbone
from safetensors.torch import load_file

from trinity_vlm.config import ModelConfig, load_config
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.engine.vllm.adapters import AdapterFolder, delta_size
from trinity_vlm.engine.vllm.engine import VllmEngine
from trinity_vlm.engine.vllm.library import (
    ServedAdapters,
    engine_arguments,
    kernel_options,
    only_device,
    served_adapters,
    served_rank,
)
from trinity_vlm.engine.vllm.requests import check_expansion, cut_behind, make_job
from trinity_vlm.engine.vllm.versions import AdapterVersions
from trinity_vlm.engine.vllm.worker import ban_in_logits
from trinity_vlm.engine_settings import VllmConfig
from trinity_vlm.errors import ConfigError, EngineError
from trinity_vlm.memory_plan import NUM_ADAPTERS, plan_memory
from trinity_vlm.model_shapes import known_shape
from trinity_vlm.types import CallType, Message, Prompt

A, B = "base_model.model.layers.{}.lora_A.weight", "base_model.model.layers.{}.lora_B.weight"


@pytest.fixture(scope="module")
def backbone():
    return tiny_backbone()


def lora_state(ranks=(2, 3), out=4, inside=5, seed=0):
    """Layers 0, 1, ... of the given ranks."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, rank in enumerate(ranks):
        state[A.format(layer)] = torch.randn(rank, inside, generator=generator)
        state[B.format(layer)] = torch.randn(out, rank, generator=generator)
    return state


def request(text="How many?", image=None, **changes):
    settings = {"sampling": Sampling(1.0, 1.0, 0, 8), "seed": 1, "call": CallType.SCREEN, "order_key": ("a", 0)}
    prompt = Prompt((Message("user", text, image),), "<think>\n")
    return GenerationRequest(prompt=prompt, adapter=None, **(settings | changes))


def test_delta_size_bounds_the_largest_layer():
    """It is at least the root mean square of every layer's delta, and zero for a fresh adapter."""
    state = lora_state()
    rms = [(6.0 / r * state[B.format(i)] @ state[A.format(i)]).square().mean().sqrt() for i, r in ((0, 2), (1, 3))]
    assert delta_size(state, 6.0) >= max(rms)
    assert delta_size({k: v * ("lora_A" in k) for k, v in state.items()}, 6.0) == 0.0


def test_every_write_is_a_new_directory_that_peft_can_read(tmp_path):
    """The same version written twice does not share a path; dtype and config are what was asked for."""
    folder = AdapterFolder(tmp_path)
    first, second = (folder.write("policy-v1", lora_state(), 6.0, torch.bfloat16) for _ in range(2))
    assert first != second
    config = json.loads((first / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 3, ["0", "1"])
    assert {t.dtype for t in load_file(first / "adapter_model.safetensors").values()} == {torch.bfloat16}
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_directories_of_killed_runs_are_removed_and_those_of_living_ones_are_not(tmp_path):
    """A SIGKILL leaves memory occupied on a RAM disk; the next run frees it."""
    code = (
        "import sys, os, signal; from pathlib import Path; from trinity_vlm.engine.vllm.adapters import AdapterFolder\n"
        "kept = AdapterFolder(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    (abandoned,) = tmp_path.iterdir()
    living = AdapterFolder(tmp_path)
    other = AdapterFolder(tmp_path)
    assert not abandoned.exists()
    assert living.path.exists()
    assert other.path.exists()


OWNER = """
import os, subprocess, sys, time
from pathlib import Path
from trinity_vlm.engine.vllm.adapters import AdapterFolder
folder = AdapterFolder(Path(sys.argv[1]))
subprocess.Popen([sys.executable, "-c", *sys.argv[2:], str(folder.lock), str(os.getpid())])
time.sleep(60)
"""
CORE = """
import os, subprocess, sys, time
print(os.getpid(), flush=True)
subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
time.sleep(60)
"""
WORKER = """
import os, sys
from pathlib import Path
from trinity_vlm.engine.vllm.worker import end_with
print(os.getpid(), flush=True)
end_with(Path(sys.argv[1]), int(sys.argv[2]))
"""


def test_vllms_processes_end_with_a_killed_parent(tmp_path):
    """Owner, engine core and worker as three processes: the owner is killed, the other two follow at once."""
    command = [sys.executable, "-c", OWNER, str(tmp_path), CORE, WORKER]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        children = [int(owner.stdout.readline()) for _ in range(2)]
        time.sleep(0.5)
        assert all(map(psutil.pid_exists, children))
    finally:
        owner.kill()
    owner.wait()
    gone, alive = psutil.wait_procs([psutil.Process(p) for p in children if psutil.pid_exists(p)], timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE], (gone, alive)


class FakeLlm:
    """Records what vLLM would be told. ``broken``: names whose load fails."""

    def __init__(self, broken=()):
        self.loaded, self.log, self.broken = set(), [], broken

    async def add_lora(self, handle):
        await asyncio.sleep(0)
        if handle.lora_name.startswith(self.broken):
            raise RuntimeError("no such file")
        self.loaded.add(handle.lora_int_id)
        self.log.append(f"+{handle.lora_int_id}")
        return True

    async def remove_lora(self, number):
        await asyncio.sleep(0)
        self.loaded.discard(number)
        self.log.append(f"-{number}")


async def accept(handle):
    """A check that finds nothing."""


def versions_of(llm):
    return AdapterVersions(llm, lambda **fields: SimpleNamespace(**fields))


def test_an_old_version_goes_when_its_last_request_ends(tmp_path):
    """A request under way keeps its version; the next one gets the new version; never more than two are loaded."""

    async def play():
        llm = FakeLlm()
        versions = versions_of(llm)
        folders = [tmp_path / str(i) for i in range(3)]
        for folder in folders:
            folder.mkdir()
        await versions.replace("policy", 1, folders[0], accept)
        async with versions.use("policy") as old:
            await versions.replace("policy", 2, folders[1], accept)
            third = asyncio.create_task(versions.replace("policy", 3, folders[2], accept))
            await asyncio.sleep(0.01)
            assert llm.log == ["+1", "+2"]
            assert not third.done()
            async with versions.use("policy") as new:
                assert (old.lora_int_id, new.lora_int_id) == (1, 2)
                assert old.lora_name != new.lora_name
                assert old.lora_path != new.lora_path
        await third
        assert llm.log == ["+1", "+2", "-1", "+3", "-2"]
        assert [f.exists() for f in folders] == [False, False, True]

    asyncio.run(play())


def test_versions_that_become_free_together_all_go(tmp_path):
    """Two requests end in the same turn of the loop: each tidies up, neither trips over the other."""

    async def hold(versions, name, done):
        async with versions.use(name):
            await done.wait()

    async def play():
        llm = FakeLlm()
        versions, done = versions_of(llm), asyncio.Event()
        for name in ("policy", "verifier"):
            await versions.replace(name, 1, tmp_path / name, accept)
        holders = [asyncio.create_task(hold(versions, name, done)) for name in ("policy", "verifier")]
        await asyncio.sleep(0)
        for name in ("policy", "verifier"):
            await versions.replace(name, 2, tmp_path / f"{name}2", accept)
        done.set()
        await asyncio.gather(*holders)
        assert llm.loaded == {3, 4}
        assert sorted(llm.log[-2:]) == ["-1", "-2"]

    asyncio.run(play())


def test_a_failed_load_or_check_leaves_the_version_before_it(tmp_path):
    """The directory of the failed one is gone, requests go on with the old one."""

    async def reject(handle):
        raise EngineError("no effect")

    async def play():
        llm = FakeLlm(broken=("bad",))
        versions = versions_of(llm)
        await versions.replace("policy", 1, tmp_path / "1", accept)
        for name, check in (("policy", reject), ("bad", accept)):
            folder = tmp_path / name
            folder.mkdir()
            with pytest.raises(EngineError, match=r"no effect|can't load adapter 'bad' version 2: no such file"):
                await versions.replace(name, 2, folder, check)
            assert not folder.exists()
        async with versions.use("policy") as handle:
            assert handle.lora_int_id == 1
        with pytest.raises(EngineError, match="unknown adapter 'bad'; loaded: policy"):
            async with versions.use("bad"):
                pass
        assert llm.loaded == {1}

    asyncio.run(play())


class LogitsProcessor(torch.nn.Module):
    """Named as vLLM's."""

    def forward(self, values):
        return values


def test_banned_ids_are_out_of_the_logits_in_every_maker():
    """Whatever the logits hold there, and None of other ranks passes; no maker means nothing was hooked."""
    model = torch.nn.ModuleDict({"head": LogitsProcessor(), "other": torch.nn.Identity()})
    assert ban_in_logits(model, [2, 0]) == 1
    assert model["head"](torch.tensor([[9.0, 1.0, 99.0]])).tolist() == [[float("-inf"), 1.0, float("-inf")]]
    assert model["head"](None) is None
    assert model["other"](torch.ones(1)).tolist() == [1.0]
    assert ban_in_logits(model["other"], [0]) == 0


def test_the_prompt_goes_in_with_one_mark_per_image(backbone):
    """16 image tokens in the trainer's ids, one in vLLM's; a text prompt goes in as it is."""
    job = make_job(backbone, request(image=picture(1)))
    mark = backbone.tokenizer.convert_tokens_to_ids(backbone.processor.image_token)
    assert job.encoded.input_ids.count(mark) > 1
    assert job.unexpanded.count(mark) == 1
    assert [i for i in job.encoded.input_ids if i != mark] == [i for i in job.unexpanded if i != mark]
    text = make_job(backbone, request())
    assert text.unexpanded == text.encoded.input_ids
    assert set(text.vllm_prompt()) == {"prompt_token_ids"}
    with pytest.raises(EngineError, match="ask for one or the other"):
        make_job(backbone, request(json_schema={"type": "object"}, want_logprobs=True))


def test_a_prompt_read_differently_is_refused(backbone):
    """The message names the image, both lengths and where they part."""
    job = make_job(backbone, request(image=picture(1)))
    ids = job.encoded.input_ids
    check_expansion(ids, list(ids), job)
    with pytest.raises(EngineError, match=rf"{len(ids) + 1} and {len(ids)} tokens, .*difference at 3 .*128x128"):
        check_expansion(ids, [*ids[:3], 7, *ids[3:]], job)


def test_what_was_written_beyond_the_marker_is_left_to_the_schema(backbone):
    """A last token that reaches beyond the marker is cut; white space behind it stays."""
    encode = lambda text: backbone.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    decode = backbone.tokenizer.decode
    exact = encode("so 3</think>")
    assert cut_behind(backbone, exact, "</think>") == exact
    ids = encode("the red circle")
    piece = decode(ids[-1:])
    marker = "the red" + piece[:3]
    assert decode(cut_behind(backbone, ids, marker)) == marker


def test_the_rank_that_holds_all_adapters():
    """The verifier's is twice the policy's; a dense average is refused with what to lower."""
    allowed = (1, 8, 16, 32, 64)
    assert served_rank({"policy": 4, "verifier": 8}, allowed) == 8
    assert served_rank({"policy": 9}, allowed) == 16
    with pytest.raises(ConfigError, match=r"policy 32, verifier 256.*up to 64; lower lora.rank or ema.rank"):
        served_rank({"policy": 32, "verifier": 256}, allowed)


def test_room_is_made_for_the_adapted_layers_alone():
    """Of the largest rank in any layer of any adapter; embeddings and output layer get none."""
    a, b = "base_model.model.model.layers.0.{}.lora_A.weight", "base_model.model.model.layers.0.{}.lora_B.weight"
    shapes = {
        "policy": {a.format("mlp.up_proj"): (4, 9), b.format("mlp.up_proj"): (8, 4)},
        "verifier": {a.format("self_attn.q_proj"): (12, 9), b.format("self_attn.q_proj"): (99, 12)},
    }
    assert served_adapters(shapes, (1, 8, 16)) == ServedAdapters(2, 16, frozenset({"up_proj", "q_proj"}))


def test_vllm_starts_with_the_trainers_model_dtype_pixels_and_context(backbone):
    """And with an empty adapter slot on a CPU: two versions of one adapter in three slots."""
    model = ModelConfig(path="tiny", min_pixels=4096, max_pixels=8192)
    served = ServedAdapters(1, 16, frozenset({"q_proj", "k_proj"}))
    arguments = engine_arguments(backbone, model, VllmConfig(kv_cache_gib=0.25), 8, served)
    assert arguments["dtype"] == "float32"
    assert arguments["max_model_len"] == backbone.context
    assert arguments["mm_processor_kwargs"] == {"size": {"shortest_edge": 4096, "longest_edge": 8192}}
    assert arguments["kv_cache_memory_bytes"] == 2**28
    assert (arguments["max_loras"], arguments["max_cpu_loras"], arguments["max_lora_rank"]) == (3, 3, 16)
    assert arguments["lora_target_modules"] == ["k_proj", "q_proj"]
    assert not [name for name in engine_arguments(backbone, model, VllmConfig(), 8, None) if "lora" in name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_starts_with_what_the_memory_plan_counts(backbone, device):
    """The cache of a CPU, the adapters, the tokens of one pass: each as the plan of the same run has it."""
    config = load_config("qwen3-vl-8b", ["engine.kind=vllm", "engine.max_batch_sequences=64"])
    served = ServedAdapters(NUM_ADAPTERS, 64, frozenset({"q_proj"}))
    where = {"device": torch.device(device), "dtype": torch.bfloat16, "context": config.model.context}
    there = SimpleNamespace(processor=backbone.processor, **where)
    arguments = engine_arguments(there, config.model, VllmConfig(), 64, served)
    shape = known_shape(config.model.path, config.lora.targets)
    parts = {part.name: part for part in plan_memory(config, shape, 139.8, on_gpu=device == "cuda").parts}
    assert parts["vLLM's adapter slots"].note == f"{arguments['max_loras']} of rank 64"
    per_token = (4 * 4096 + 2 * 12_288 + 4 * 4096) * (2 if device == "cuda" else 4)
    work = arguments["max_num_batched_tokens"] * per_token + 64 * 151_936 * 16
    assert parts["vLLM's work"].gib == pytest.approx(work / 2**30)
    if device == "cpu":
        assert arguments["kv_cache_memory_bytes"] == parts["key-value cache"].gib * 2**30
        assert arguments["block_size"] == 32


def test_only_this_gpu_is_seen_by_new_processes(monkeypatch):
    """The second of the visible ones; afterwards nothing has changed. A CPU has nothing to hide."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with only_device(torch.device("cuda", 1)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"
    with only_device(torch.device("cpu")):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_measured_kernel_options_are_used_on_the_gpu_they_were_measured_on(monkeypatch, tmp_path):
    """And nowhere else: vLLM would warn about missing files."""
    monkeypatch.setattr("trinity_vlm.engine.vllm.library._KERNELS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    gpu = torch.device("cuda", 0)
    assert kernel_options(gpu) == {}
    (tmp_path / "NVIDIA_H100_80GB_HBM3_SHRINK.json").touch()
    assert kernel_options(gpu) == {}
    (tmp_path / "NVIDIA_H200_SHRINK.json").touch()
    assert kernel_options(gpu) == {"VLLM_TUNED_CONFIG_FOLDER": str(tmp_path)}
    assert kernel_options(torch.device("cpu")) == {}


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_a_missing_vllm_is_named_with_what_to_install(backbone):
    """Before anything is started."""
    with pytest.raises(EngineError, match=r"pip install -e '\.\[vllm\]'.*engine.kind=transformers"):
        VllmEngine(backbone, ModelConfig(path="tiny"), VllmConfig(), 8)
