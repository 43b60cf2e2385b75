"""The memory plan: hand-worked sizes of the 8B and 7B presets, and what it says of cards that are too small."""

from functools import cache

import pytest

from trinity_vlm.config import load_config
from trinity_vlm.errors import ConfigError
from trinity_vlm.memory_demand import GIB, Demand
from trinity_vlm.memory_plan import USABLE, Verdict, plan_memory, planned_kv_gib
from trinity_vlm.model_shapes import known_shape

QWEN3, QWEN2_5 = "qwen3-vl-8b", "qwen2.5-vl-7b"
CARDS = (24, 48, 80, 139.8)


@cache
def demand(preset=QWEN3, *overrides):
    config = load_config(preset, ["engine.kind=vllm", *overrides])
    return Demand(config, known_shape(config.model.path, config.lora.targets))


def plan(memory_gib, *overrides, preset=QWEN3, **where):
    found = demand(preset, *overrides)
    return plan_memory(found.config, found.shape, memory_gib, **where)


def part(planned, name):
    return next(p.gib for p in planned.parts if p.name == name)


def test_weights_cache_and_adapter_of_the_8b_model():
    """36 layers of 8192 + 2 * 5120 + 8192 + 3 * 16384 = 75,776 in + out; 2 * 36 * 8 * 128 values a token."""
    found = demand()
    assert 75_776 * 36 * 32 == found.shape.adapter_parameters(32) == 87_293_952
    assert found.cache_need().bytes_per_token == 147_456
    planned = plan(80)
    assert part(planned, "base weights") == pytest.approx(17_534_247_392 / GIB) == pytest.approx(16.33, abs=0.005)
    assert part(planned, "policy adapter") == pytest.approx(87_293_952 * (4 + 4 + 8) / GIB)
    assert part(planned, "Verifier") == pytest.approx(2 * 87_293_952 * (4 + 4) / GIB), "rank 64, adapter and average"
    assert part(planned, "vLLM's adapter slots") == pytest.approx(3 * 64 * 75_776 * 36 * 2 / GIB)


def test_weights_cache_and_adapter_of_the_7b_model():
    """28 layers of 7168 + 2 * 4096 + 7168 + 3 * 22528 = 90,112 in + out; 2 * 28 * 4 * 128 values a token."""
    found = demand(QWEN2_5)
    assert 90_112 * 28 * 32 == found.shape.adapter_parameters(32) == 80_740_352
    assert found.cache_need().bytes_per_token == 57_344
    assert found.shape.image_tokens(1024 * 28 * 28) == 1024


def test_the_cache_that_a_step_of_the_8b_preset_needs():
    """16 images x 4 sequences of 1,024 image + 512 text + 12,288 tokens; a quarter: 3,072."""
    need = demand().cache_need()
    assert need.worst == 64 * 13_824 * 147_456 / GIB == 121.5
    assert need.typical == 64 * 4_608 * 147_456 / GIB == 40.5
    assert need.one_sequence == (20_480 + 16) * 147_456 / GIB, "and vLLM's null block"


@pytest.mark.parametrize(("context", "on_gpu", "tokens"), [
    (20_480, True, 20_480 + 16), (20_481, True, 20_496 + 16), (20_496, True, 20_496 + 16),
    (20_481, False, 20_512 + 32),
])  # fmt: skip
def test_one_sequence_takes_whole_blocks_and_the_null_block(context, on_gpu, tokens):
    """Of 16 tokens on a GPU, of 32 on a CPU, where keys and values are float32."""
    found = demand(QWEN3, f"model.context={context}")
    need = Demand(found.config, found.shape, on_gpu).cache_need()
    assert need.one_sequence == tokens * 147_456 * (1 if on_gpu else 2) / GIB


def test_a_steps_sequences_take_whole_blocks_each():
    """1,024 image + 512 text + 13 tokens: 97 blocks of 16."""
    need = demand(QWEN3, "roles.policy_tokens=13", "roles.verifier_tokens=13").cache_need()
    assert need.worst == 64 * 97 * 16 * 147_456 / GIB


def test_workers_share_the_images_of_a_step():
    """16 images on 8 workers are 2 each: 8 sequences, an eighth of the step's cache and of one step's features."""
    found = demand(QWEN3, "steps=1")
    one, eighth = (Demand(found.config, found.shape, workers=workers) for workers in (1, 8))
    assert (one.num_images, eighth.num_images) == (16, 2)
    assert eighth.num_sequences == 2 * 4
    assert eighth.cache_need().typical == one.cache_need().typical / 8
    assert planned_kv_gib(found.config, found.shape, 139.8, workers=8) == 40.5 / 8
    alone, shared = plan(139.8, "steps=1"), plan(139.8, "steps=1", workers=8)
    assert part(shared, "key-value cache") == 40.5 / 8
    assert part(shared, "image features") == pytest.approx(part(alone, "image features") / 8)
    assert part(shared, "base weights") == part(alone, "base weights")
    assert plan(80, workers=8).verdict is Verdict.FITS, "alone it is tight"
    assert Demand(found.config, found.shape, workers=3).num_images == 6, "the one that has most"


def test_advice_to_workers_is_a_multiple_of_them():
    """Of 21 images for 3 workers 9 are 3 each; 10 would need as little cache as fits here, and can't be shared."""
    assert plan(55.4, "images.per_step=21", workers=3).verdict is Verdict.TIGHT
    assert plan(55.4, "images.per_step=10", workers=3).verdict is Verdict.FITS
    assert "images.per_step=9" in plan(55.4, "images.per_step=21", workers=3).advice


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_several_workers_on_gpus_keep_room_for_nccl(kind):
    """32 channels x 4 neighbours x 10 MiB; one worker, and workers on a CPU, sum without it."""
    overrides = (f"engine.kind={kind}",)
    assert part(plan(80, *overrides, workers=2), "NCCL's buffers") == 32 * 4 * 10 / 1024
    for where in ({"workers": 1}, {"workers": 2, "on_gpu": False}):
        assert not any("NCCL" in p.name for p in plan(80, *overrides, **where).parts)


def test_a_cpu_has_the_slots_and_batches_that_vllm_gets_there():
    """Each of two adapters with a version before it and an empty slot; whole prompts of up to model.context."""
    parts = {p.name: p for p in plan(500, on_gpu=False).parts}
    assert parts["vLLM's adapter slots"].note == "5 of rank 64"
    assert parts["key-value cache"].gib == 1.0
    longer = plan(500, "model.context=40960", on_gpu=False)
    assert part(longer, "vLLM's work") > parts["vLLM's work"].gib
    assert part(plan(139.8, "model.context=40960"), "vLLM's work") == part(plan(139.8), "vLLM's work")


def test_activations_of_the_longest_micro_batch():
    """Recomputed: 36 inputs of 4096 and 2 layers of 6 x 4096 + 4 x 4096 + 5 x 1024 + 2 x 12288; 3 GiB of logits."""
    layer = 6 * 4096 + 4 * 4096 + 5 * 1024 + 2 * 12_288
    recomputed = (36 * 4096 + 2 * layer) * 16_384 * 2 / GIB
    assert part(plan(139.8), "activations") == pytest.approx(recomputed + 3) == pytest.approx(11.8125, abs=0.005)
    kept = 38 * layer * 16_384 * 2 / GIB
    assert part(plan(139.8, "update.gradient_checkpointing=off"), "activations") == pytest.approx(kept + 3)
    assert part(plan(139.8, "update.compile_layers=false"), "activations") > recomputed + 3


def test_weights_are_there_once_or_twice():
    """Shared they are loaded twice for a moment, in place of activations that come later."""
    shared, own = plan(139.8), plan(139.8, "engine.vllm.share_weights=false")
    assert part(own, "base weights") == 2 * part(shared, "base weights")
    later = part(shared, "activations") + part(shared, "image features")
    assert part(shared, "start-up") == pytest.approx(part(shared, "base weights") - later)
    assert not any(p.name == "start-up" for p in own.parts)
    swapped = plan(139.8, "engine.layout=paper")
    assert part(swapped, "base weights") == part(own, "base weights"), "weights that are swapped can't be shared"
    assert part(swapped, "vLLM's adapter slots") == 0


def test_servers_take_nothing_of_this_card():
    servers = plan(139.8, "engine.kind=openai", "engine.servers={urls: [http://localhost:1], model: m}")
    assert not any("vLLM" in p.name or "cache" in p.name for p in servers.parts if p.name != "image features")
    assert servers.verdict is Verdict.FITS


@pytest.mark.parametrize("preset", [QWEN3, QWEN2_5])
@pytest.mark.parametrize("memory", [48, 80])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("engine.vllm.share_weights=false",),
        ("engine.vllm.kv_cache_gib=60",),
        ("engine.vllm.kv_cache_gib=1",),
        ("update.gradient_checkpointing=off",),
        ("engine.kind=transformers",),
        ("engine.kind=transformers", "update.tokens_per_microbatch=65536"),
    ],
)
def test_advice_does_what_it_says(preset, memory, overrides):
    """Every alternative, pasted as overrides, gives a better verdict; what fits is given none."""
    order = list(Verdict)
    planned = plan(memory, *overrides, preset=preset)
    assert (planned.verdict is Verdict.TOO_LARGE) or planned.total_gib <= USABLE * memory + 1e-6
    assert not (planned.verdict is Verdict.FITS and planned.advice)
    for settings in planned.advice:
        better = plan(memory, *overrides, *settings.split(), preset=preset).verdict
        assert order.index(better) < order.index(planned.verdict), settings


def test_a_large_card_fits_and_a_small_one_does_not():
    assert plan(139.8).verdict is Verdict.FITS
    assert plan(80).verdict is Verdict.TIGHT, "35.8 GiB of cache, a typical step holds 40.5"
    small = plan(24)
    assert small.verdict is Verdict.TOO_LARGE
    assert small.advice == ()


def test_advice_combines_the_fewest_and_mildest_settings():
    """Neither setting alone brings two copies of the weights and kept activations onto 50 GiB."""
    overrides = ("engine.vllm.share_weights=false", "update.gradient_checkpointing=off")
    assert plan(50, *overrides).advice == ("engine.vllm.share_weights=true update.gradient_checkpointing=auto",)


@pytest.mark.parametrize("memory", [31, 36, 40, 45, 49])
def test_advice_combines_only_what_is_needed(memory):
    """Each setting left out, the rest does not fit; so none is there that a more felt one has made superfluous."""
    overrides = ("engine.kind=transformers", "update.gradient_checkpointing=off")
    (advice,) = plan(memory, *overrides).advice
    settings = advice.split()
    assert settings[0] == "update.gradient_checkpointing=auto", "the least felt stays"
    for left_out in settings:
        rest = [setting for setting in settings if setting != left_out]
        assert plan(memory, *overrides, *rest).verdict is Verdict.TOO_LARGE, left_out


def test_a_cache_too_small_for_one_sequence_is_too_small():
    """vLLM refuses to start with it, however much room there is; 20,480 tokens alone, 2.8125 GiB, lack a block."""
    for size in (2, 2.8125):
        planned = plan(139.8, f"engine.vllm.kv_cache_gib={size}")
        assert planned.verdict is Verdict.TOO_LARGE
        assert planned.missing_cache_gib == pytest.approx(20_496 * 147_456 / GIB - size)
        assert planned.excess_gib == 0
        assert any(setting.startswith("engine.vllm.kv_cache_gib=") for setting in planned.advice)
    enough = plan(139.8, "engine.vllm.kv_cache_gib=2.82")
    assert (enough.verdict, enough.missing_cache_gib) == (Verdict.TIGHT, 0)


@pytest.mark.parametrize(("memory", "where"), [(45.32, {}), (200, {"on_gpu": False})])
def test_advice_for_a_small_cache_holds_a_sequence(memory, where):
    """Also where hardly more is left than its 2.815 GiB, and on a CPU, where the unset size is 1 GiB."""
    overrides = () if where else ("engine.vllm.kv_cache_gib=2",)
    planned = plan(memory, *overrides, **where)
    assert planned.missing_cache_gib > 0
    (size,) = (setting for setting in planned.advice if setting.startswith("engine.vllm.kv_cache_gib="))
    assert plan(memory, size, **where).missing_cache_gib == 0


def test_the_cache_takes_what_is_left_and_no_more_than_it_can_use():
    found = demand()
    need = found.cache_need()
    sizes = [planned_kv_gib(found.config, found.shape, memory) for memory in CARDS]
    assert sizes == sorted(sizes)
    assert sizes[0] == need.one_sequence, "vLLM needs one sequence in any case"
    assert sizes[-1] == need.typical
    planned = plan(80)
    assert planned.total_gib == pytest.approx(planned.budget_gib), "in between nothing is left over"


def test_shorter_completions_smaller_images_and_fewer_images_need_less_cache():
    for less in ("roles.policy_tokens=6144", "model.max_pixels=524288", "images.per_step=8"):
        assert demand(QWEN3, less).cache_need().worst < demand().cache_need().worst


def test_the_update_holds_at_least_its_longest_row():
    """1,024 image + 512 text + 12,288 tokens do not get shorter by a smaller micro-batch."""
    assert demand(QWEN3, "update.tokens_per_microbatch=1024").microbatch_tokens == 13_824
    assert demand().microbatch_tokens == 16_384


def test_a_known_model_has_only_its_own_layers():
    assert known_shape("Qwen/Qwen3-VL-8B-Instruct", ("q_proj", "v_proj")).adapter_parameters(1) == 36 * (8192 + 5120)
    with pytest.raises(ConfigError, match=r"lora.targets='qkv'.*q_proj"):
        known_shape("Qwen/Qwen3-VL-8B-Instruct", "qkv")
    assert known_shape("some/other", "all-linear") is None


def test_the_dense_average_counts_whole_matrices():
    """q_proj of 4096 x 4096 has an adapter of rank 4096: 2 x 4096^2."""
    found = demand(QWEN3, "lora.targets=[q_proj]", "ema.kind=dense")
    assert found.shape.adapter_parameters(found.verifier_rank) == 36 * 2 * 4096**2


def test_the_transformers_engine_keeps_float32_inputs_of_adapters():
    """There the update multiplies with adapters as generation does, in float32, and keeps such copies."""
    in_process = plan(139.8, "engine.kind=transformers", "update.gradient_checkpointing=off")
    assert part(in_process, "activations") > part(plan(139.8, "update.gradient_checkpointing=off"), "activations")
