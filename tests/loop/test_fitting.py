"""What a run needs of a machine, and when it is refused for want of it."""

import importlib

import pytest

from trinity_vlm import fitting, machine
from trinity_vlm.cli import doctoring
from trinity_vlm.config import load_config
from trinity_vlm.errors import TrainingError
from trinity_vlm.machine import Gpu
from trinity_vlm.model_shapes import known_shape


@pytest.fixture(autouse=True)
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_training_is_refused_only_far_beyond_the_gpu(monkeypatch):
    """More than 15 % over: 43.0 GiB with the least cache are too much for 30 GiB, and tried on 38."""
    config = load_config("qwen3-vl-8b", ["engine.kind=vllm"])
    monkeypatch.setattr(fitting, "current_gpu", lambda: Gpu("Imagined", 139.8, 30.0))
    with pytest.raises(TrainingError, match=r"needs about \d+ GiB.*base weights 16.3.*30 of 140 GiB free.*doctor"):
        fitting.check_plan(config)
    for memory in (38.0, 139.8):
        monkeypatch.setattr(fitting, "current_gpu", lambda memory=memory: Gpu("Imagined", 139.8, memory))
        fitting.check_plan(config)


def test_training_is_refused_with_a_cache_that_holds_no_sequence(monkeypatch):
    """vLLM would refuse it after minutes of loading; sizes that hold one are tried."""
    monkeypatch.setattr(fitting, "current_gpu", lambda: Gpu("Imagined", 139.8, 139.8))
    small = load_config("qwen3-vl-8b", ["engine.kind=vllm", "engine.vllm.kv_cache_gib=2"])
    with pytest.raises(
        TrainingError,
        match=r"kv_cache_gib=2 .*model.context=20480.*2.82 GiB.*What fits: engine.vllm.kv_cache_gib=40.5 or model.cont",
    ):
        fitting.check_plan(small)
    fitting.check_plan(load_config("qwen3-vl-8b", ["engine.kind=vllm", "engine.vllm.kv_cache_gib=2.82"]))


@pytest.mark.parametrize(
    ("overrides", "gpu_gib", "host_gib", "refusal"),
    [
        ((), None, 32.0, "32.7 GiB in float32, this machine, without a GPU"),
        ((), None, 33.0, None),
        (("model.dtype=bfloat16",), None, 16.0, "16.3 GiB in bfloat16, this machine, without a GPU"),
        (("model.dtype=bfloat16",), None, 17.0, None),
        ((), 16.0, 999.0, "16.3 GiB in bfloat16, Imagined has 16.0 GiB"),
        ((), 17.0, 1.0, None),
        (("model.device=cpu",), 80.0, 32.0, "32.7 GiB in float32, this machine, without a GPU"),
        (("model.path=nobody/nothing",), None, 1.0, None),
        (("lora.targets=[qkv]",), None, 999.0, None),
    ],
)
def test_weights_that_no_memory_here_can_hold_are_refused(monkeypatch, overrides, gpu_gib, host_gib, refusal):
    """8.77 G parameters of 4 or 2 bytes against the whole device, whatever others hold of it; unknown sizes pass."""
    gpu = None if gpu_gib is None else Gpu("Imagined", gpu_gib, 0.5)
    monkeypatch.setattr(fitting, "current_gpu", lambda: gpu)
    monkeypatch.setattr(fitting, "host_capacity_gib", lambda: host_gib)
    config = load_config("qwen3-vl-8b", overrides)
    if refusal is None:
        fitting.check_capacity(config)
        return
    with pytest.raises(
        TrainingError, match=f"^model.path='Qwen/Qwen3-VL-8B-Instruct': its weights alone take {refusal}"
    ):
        fitting.check_capacity(config)


def test_a_containers_limit_is_its_memory(monkeypatch, tmp_path):
    """With all swap; "max" and no file at all are no limit."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    swap = machine.psutil.swap_memory().total / machine.GIB
    whole = machine.host_capacity_gib()
    assert whole == machine.psutil.virtual_memory().total / machine.GIB + swap
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.host_capacity_gib() == whole
    (tmp_path / "memory.max").write_text(f"{2**29}\n")
    assert machine.host_capacity_gib() == 0.5 + swap


def test_a_run_of_many_workers_is_planned_for_one_of_them(monkeypatch):
    """A cache of an eighth of the step; and what is too little for 256 images' features is enough for one's."""
    monkeypatch.setattr(fitting, "current_gpu", lambda: Gpu("Imagined", 139.8, 139.8))
    config = load_config("qwen3-vl-8b", ["engine.kind=vllm"])
    assert fitting.with_planned_cache(config, 8).engine.vllm.kv_cache_gib == 40.5 / 8
    wide = ["engine.kind=vllm", "engine.vllm.share_weights=false", "steps=1", "images.per_step=256"]
    config = load_config("qwen3-vl-8b", wide)
    shape = known_shape(config.model.path, config.lora.targets)
    alone, shared = (fitting.plan_memory(config, shape, 1.0, workers=n).total_gib for n in (1, 256))
    between = (alone + shared) / 2 / fitting.REFUSED_ABOVE
    monkeypatch.setattr(fitting, "current_gpu", lambda: Gpu("Imagined", 139.8, between))
    fitting.check_plan(config, 256)
    with pytest.raises(TrainingError, match="What fits"):
        fitting.check_plan(config)


def test_the_cache_of_a_run_is_the_users_or_the_plans(monkeypatch):
    monkeypatch.setattr(fitting, "current_gpu", lambda: Gpu("Imagined", 139.8, 139.8))

    def cache(*overrides):
        return fitting.with_planned_cache(load_config("qwen3-vl-8b", overrides)).engine.vllm.kv_cache_gib

    assert cache("engine.kind=vllm") == 40.5, "what a typical step holds"
    assert cache("engine.kind=vllm", "engine.vllm.kv_cache_gib=7") == 7
    assert cache("engine.kind=vllm", "model.path=nobody/nothing") is None
    assert cache() is None, "nothing of this card is vLLM's"
    fitting.check_plan(load_config("qwen3-vl-8b", ["engine.kind=vllm", "model.path=nobody/nothing"]))


def test_nothing_is_planned_without_a_gpu(monkeypatch):
    monkeypatch.setattr(fitting, "current_gpu", lambda: None)
    config = load_config("qwen3-vl-8b", ["engine.kind=vllm"])
    fitting.check_plan(config)
    assert fitting.with_planned_cache(config) == config
    assert doctoring.IMAGINED_GPU_GIB == 80


def test_a_mere_folder_is_no_package(monkeypatch, tmp_path):
    """W&B makes one of its own name where it runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "made_up_tracker").mkdir()
    assert not machine.found(("made_up_tracker",))
    (tmp_path / "made_up_tracker" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert machine.found(("made_up_tracker", "json"))
