"""Sharing and writing weights without vLLM: the same worker code over a model that holds them as vLLM does, rows of
q, k, v and of gate, up stacked, vocabulary padded, the vision tower under another name."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from loop_factory import tiny_backbone
from torch import nn

from trinity_vlm.engine.vllm.adapters import deltas
from trinity_vlm.engine.vllm.sharing import (
    Region,
    SharedWeights,
    export_tensors,
    import_tensors,
    match_regions,
    named_weights,
    plain_name,
    shared_buffer,
)
from trinity_vlm.engine.vllm.swapping import WeightWriter, _fitting
from trinity_vlm.engine.vllm.worker import WorkerExtension
from trinity_vlm.errors import EngineError
from trinity_vlm.types import POLICY

LAYER = "model.language_model.layers.0."
THERE = "language_model.model.layers.0."
CPU = torch.device("cpu")


@pytest.fixture
def backbone():
    return tiny_backbone()


def as_vllm_holds(weights):
    """The weights as a module with vLLM's names and stacks."""
    held = {}
    for name, weight in weights.items():
        found = name.replace("model.language_model.", "language_model.model.").replace("model.visual.", "visual.")
        stack = None
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            for part in parts:
                if f".{part}." in found:
                    stack = found.replace(f".{part}.", f".{whole}.base_layer.")
        if "embed_tokens" in name:
            weight = torch.cat([weight, torch.zeros(64, weight.shape[1])])
        if "patch_embed" in name and weight.ndim == 5:
            weight = weight.flatten(1)
        key = stack or found
        held[key] = torch.cat([held[key], weight]) if key in held else weight.clone()
    root = nn.Module()
    for name, weight in held.items():
        *path, last = name.split(".")
        module = root
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, nn.Module())
            module = getattr(module, step)
        module.register_parameter(last, nn.Parameter(weight, requires_grad=False))
    return root


def worker_over(model):
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    return worker


def calling(worker):
    """vLLM's collective_rpc, for one worker."""

    async def call(method, args=()):
        return [getattr(worker, method)(*pickle.loads(pickle.dumps(args)))]

    return call


def test_regions_by_hand():
    """k stands behind q, up behind gate; biases too; padding and flattening fit; other widths and strangers do not."""
    trainer = {
        LAYER + "self_attn.q_proj.weight": (8, 4),
        LAYER + "self_attn.k_proj.weight": (2, 4),
        LAYER + "self_attn.v_proj.weight": (2, 4),
        LAYER + "self_attn.k_proj.bias": (2,),
        LAYER + "self_attn.q_proj.bias": (8,),
        LAYER + "mlp.up_proj.weight": (6, 4),
        LAYER + "mlp.gate_proj.weight": (6, 4),
        LAYER + "mlp.down_proj.weight": (4, 6),
        "model.language_model.embed_tokens.weight": (10, 4),
        "lm_head.weight": (10, 4),
        "model.visual.patch_embed.proj.weight": (3, 2, 5),
        "model.visual.blocks.0.attn.qkv.weight": (9, 3),
        "model.visual.other.weight": (9, 3),
    }
    engine = {
        THERE + "self_attn.qkv_proj.weight": (12, 4),
        THERE + "self_attn.qkv_proj.bias": (12,),
        THERE + "mlp.gate_up_proj.weight": (12, 4),
        THERE + "mlp.down_proj.weight": (0,),
        "language_model.model.embed_tokens.weight": (16, 4),
        "language_model.lm_head.weight": (16, 4),
        "visual.patch_embed.proj.weight": (3, 10),
        "visual.blocks.0.attn.qkv.weight": (9, 4),
    }
    assert match_regions(trainer, engine) == {
        LAYER + "self_attn.q_proj.weight": Region(THERE + "self_attn.qkv_proj.weight", 0, 8),
        LAYER + "self_attn.k_proj.weight": Region(THERE + "self_attn.qkv_proj.weight", 8, 2),
        LAYER + "self_attn.v_proj.weight": Region(THERE + "self_attn.qkv_proj.weight", 10, 2),
        LAYER + "self_attn.k_proj.bias": Region(THERE + "self_attn.qkv_proj.bias", 8, 2),
        LAYER + "self_attn.q_proj.bias": Region(THERE + "self_attn.qkv_proj.bias", 0, 8),
        LAYER + "mlp.up_proj.weight": Region(THERE + "mlp.gate_up_proj.weight", 6, 6),
        LAYER + "mlp.gate_proj.weight": Region(THERE + "mlp.gate_up_proj.weight", 0, 6),
        "model.language_model.embed_tokens.weight": Region("language_model.model.embed_tokens.weight", 0, 10),
        "lm_head.weight": Region("language_model.lm_head.weight", 0, 10),
        "model.visual.patch_embed.proj.weight": Region("visual.patch_embed.proj.weight", 0, 3),
    }


def test_names_without_what_adapters_add():
    """On both sides: PEFT's prefix here, wrapped layers here and there."""
    assert plain_name(f"base_model.model.{LAYER}mlp.up_proj.base_layer.weight") == LAYER + "mlp.up_proj.weight"
    assert plain_name(THERE + "mlp.gate_up_proj.base_layer.weight") == THERE + "mlp.gate_up_proj.weight"


def test_frozen_weights_become_views_and_the_model_computes_the_same(backbone):
    """All of them but one, of which one bit differs: that one stays; adapters are not touched."""
    whole = as_vllm_holds(named_weights(backbone.model))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = backbone.model(input_ids=ids).logits
        spoilt = dict(whole.named_parameters())[THERE + "self_attn.qkv_proj.base_layer.weight"]
        spoilt[5, 5] = torch.nextafter(spoilt[5, 5], torch.tensor(9.0))
    own = named_weights(backbone.model)[LAYER + "self_attn.q_proj.weight"].clone()
    trained = {name: p.data_ptr() for name, p in backbone.trainable_parameters()}
    shared = SharedWeights(backbone.model, named_weights(whole))
    total = sum(p.nbytes for n, p in backbone.model.named_parameters() if not p.requires_grad and ".lora_" not in n)
    assert shared.report.kept == own.nbytes
    assert shared.report.shared == total - own.nbytes
    assert shared.report.kept_example == LAYER + "self_attn.q_proj.weight"
    assert {name: p.data_ptr() for name, p in backbone.trainable_parameters()} == trained
    with torch.no_grad():
        assert torch.equal(backbone.model(input_ids=ids).logits, before)
        embeddings = dict(whole.named_parameters())["language_model.model.embed_tokens.weight"]
        embeddings[3] += 1
        assert not torch.equal(backbone.model(input_ids=ids).logits, before)
        embeddings[3] -= 1
    views = [p for p in backbone.model.parameters() if p.data_ptr() in {w.data_ptr() for w in whole.parameters()}]
    assert len(views) > 20


def test_views_are_copies_again_before_vllm_goes(backbone):
    """Afterwards nothing of vLLM's is read; with vLLM dead the parameters are empty and using them fails."""
    ids = torch.arange(20)[None]
    with torch.no_grad():
        before = backbone.model(input_ids=ids).logits
        whole = as_vllm_holds(named_weights(backbone.model))
        shared = SharedWeights(backbone.model, named_weights(whole))
        shared.take_back(alive=True)
        for weight in whole.parameters():
            weight.fill_(float("nan"))
        shared.settle()
        assert torch.equal(backbone.model(input_ids=ids).logits, before)
        dead = SharedWeights(backbone.model, named_weights(as_vllm_holds(named_weights(backbone.model))))
        dead.take_back(alive=False)
        dead.settle()
        with pytest.raises((RuntimeError, IndexError, AssertionError)):
            backbone.model(input_ids=ids)


CHILD = """
import sys, torch
from trinity_vlm.engine.vllm.sharing import import_tensors
buffer = import_tensors(bytes.fromhex(sys.stdin.readline()), torch.device("cpu"))["buffer"]
assert buffer.tolist() == [1.0, 2.0, 3.0]
buffer[1] = 5
"""


def test_another_process_sees_the_same_buffer(tmp_path):
    """What it writes is read here."""
    buffer, handle = shared_buffer(3, torch.bfloat16, CPU, tmp_path)
    buffer.copy_(torch.tensor([1.0, 2.0, 3.0]))
    subprocess.run([sys.executable, "-c", CHILD], input=handle.hex(), text=True, check=True)
    assert buffer.tolist() == [1.0, 5.0, 3.0]


def test_weights_on_a_cpu_travel_as_copies():
    """Bit for bit, and apart from each other."""
    tensor = torch.tensor([[1.0, float("nan")]])[:, 1:]
    again = import_tensors(export_tensors({"a": tensor}), CPU)["a"]
    assert again.view(torch.int32).tolist() == tensor.contiguous().view(torch.int32).tolist()
    again.fill_(0)
    assert tensor.isnan().all()


def test_written_weights_are_base_plus_adapter(backbone, monkeypatch, tmp_path):
    """Every language-model weight through a buffer that holds only some of them, none of the vision tower."""
    monkeypatch.setattr("trinity_vlm.engine.vllm.swapping._BUFFER_BYTES", 1)
    generator = torch.Generator().manual_seed(1)
    state = {k: torch.randn(v.shape, generator=generator) for k, v in backbone.adapter_state(POLICY).items()}
    backbone.load_adapter_state(POLICY, state)
    held = as_vllm_holds({name: torch.full_like(w, -1.0) for name, w in named_weights(backbone.model).items()})
    worker = worker_over(held)
    alpha = float(backbone.model.peft_config[POLICY].lora_alpha)

    async def write():
        writer = await WeightWriter.open(calling(worker), backbone.model, tmp_path)
        await writer.write(deltas(state, alpha))

    asyncio.run(write())
    expected = dict(named_weights(backbone.model))
    for layer, factor in backbone.factors(POLICY).items():
        expected[f"{layer}.weight"] = expected[f"{layer}.weight"] + factor.product()
    found = named_weights(held)
    for name, weight in named_weights(as_vllm_holds(expected)).items():
        rows = slice(0, -64) if "embed_tokens" in name else slice(None)
        if name.startswith("visual."):
            assert (found[name][rows] == -1).all()
        else:
            assert torch.allclose(found[name][rows], weight[rows], atol=1e-5), name


def test_weights_in_a_layout_of_vllms_own_are_refused(backbone, tmp_path):
    """Nothing is written then."""
    weights = {n: w for n, w in named_weights(backbone.model).items() if "down_proj" not in n}
    with pytest.raises(EngineError, match=r"layout of its own, for example .*down_proj.weight; .* adapters can"):
        asyncio.run(WeightWriter.open(calling(worker_over(as_vllm_holds(weights))), backbone.model, tmp_path))


def test_groups_fit_the_buffer():
    """In order, none lost, none above the room."""
    assert list(_fitting({"a": 3, "b": 3, "c": 1, "d": 7, "e": 1}, 7)) == [["a", "b", "c"], ["d"], ["e"]]
    assert list(_fitting({}, 7)) == []
