"""Checkpoints come back bit for bit; optimizer and generator state included."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity_vlm.checkpoint import (
    CheckpointState,
    load_checkpoint,
    load_optimizer,
    optimizer_tensors,
    save_checkpoint,
)
from trinity_vlm.errors import CheckpointError
from trinity_vlm.rundir.strict_json import loads

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> tuple:
    flat = tensor.contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), flat.view(torch.uint8).tolist() if flat.numel() else []


def roundtrip(root, tensors, meta=None, step=1):
    path = save_checkpoint(root, CheckpointState(step, tensors, meta or {}), keep_last=1, keep_every=0)
    return load_checkpoint(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_returns_bit_for_bit(tmp_path, dtype, shape):
    """Random bytes of every dtype, NaN payloads and negative zeros among them, survive unchanged."""
    count = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    loaded = roundtrip(tmp_path, {"policy": {"x": tensor}}).tensors["policy"]["x"]
    assert bits(loaded) == bits(tensor)


def test_groups_views_and_tied_tensors_are_kept_apart(tmp_path):
    """A transposed view, a slice, a tied weight and a parameter that requires gradients are stored by value."""
    base = torch.arange(12.0).reshape(3, 4)
    group = {"t": base.t(), "row": base[1], "tied": base, "again": base, "p": torch.nn.Parameter(base)}
    loaded = roundtrip(tmp_path, {"policy": group, "ema": {}}).tensors
    assert loaded["ema"] == {}
    assert {name: bits(t) for name, t in loaded["policy"].items()} == {n: bits(t.detach()) for n, t in group.items()}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30, deadline=None)
@given(meta=st.dictionaries(st.text(), json_values, max_size=4))
def test_meta_returns_equal(tmp_path_factory, meta):
    """Any JSON value comes back equal: floats to the last bit, big integers, any text."""
    assert roundtrip(tmp_path_factory.mktemp("meta"), {}, meta).meta == meta


@pytest.mark.parametrize("value", [float("nan"), float("inf"), (1, 2), {1: 2}, np.float32(1), torch.tensor(1), b"x"])
def test_meta_that_json_would_change_is_refused(tmp_path, value):
    """Tuples, non-string keys, NaN and foreign types would come back as something else, so they are named instead."""
    with pytest.raises(CheckpointError, match=r"\$\.deep\[0\]"):
        roundtrip(tmp_path, {}, {"deep": [value]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1'])
def test_json_outside_the_standard_is_not_read(text):
    """NaN literals, duplicate keys and cut texts raise ValueError."""
    with pytest.raises(ValueError, match=r".+"):
        loads(text)


@pytest.mark.parametrize("group", ["../evil", "a/b", ".tmp-x", ""])
def test_group_names_stay_inside_the_checkpoint(tmp_path, group):
    """A group name is a file name, never a path."""
    with pytest.raises(CheckpointError, match="file name"):
        roundtrip(tmp_path, {group: {}})


def make_training(seed=0, order=(0, 1, 2)):
    torch.manual_seed(seed)
    parameters = {f"layer.{i}": torch.nn.Parameter(torch.randn(3, i + 2)) for i in range(3)}
    names = [f"layer.{i}" for i in order]
    groups = [{"params": [parameters[n] for n in names[:2]]}, {"params": [parameters[names[2]]], "weight_decay": 0.0}]
    return parameters, torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1), names


def train(parameters, optimizer, steps, skip=()):
    for step in steps:
        optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        optimizer.zero_grad()
        for index, (name, parameter) in enumerate(parameters.items()):
            if name not in skip:
                parameter.grad = torch.sin(parameter.detach() * (index + 1) + step)
        optimizer.step()


def test_adamw_goes_on_bit_for_bit_after_a_checkpoint(tmp_path):
    """Three steps, a checkpoint and three more steps end in the same bits as six: moments and step counts included,
    for a parameter that got its first gradient late too."""
    parameters, optimizer, names = make_training()
    train(parameters, optimizer, range(2), skip=("layer.2",))
    train(parameters, optimizer, range(2, 3))
    tensors, meta = optimizer_tensors(optimizer, names)
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    state = roundtrip(tmp_path, {"optimizer": tensors, "policy": weights}, {"optimizer": meta})
    train(parameters, optimizer, range(3, 6))

    others, fresh, _ = make_training(seed=9)
    for name, parameter in others.items():
        parameter.data.copy_(state.tensors["policy"][name])
    load_optimizer(fresh, names, state.tensors["optimizer"], state.meta["optimizer"])
    assert [fresh.state[others[n]]["step"].item() for n in names] == [3.0, 3.0, 1.0]
    assert fresh.param_groups[0]["betas"] == (0.8, 0.95)
    assert fresh.param_groups[1]["weight_decay"] == 0.0
    train(others, fresh, range(3, 6))
    assert {n: bits(p.detach()) for n, p in others.items()} == {n: bits(p.detach()) for n, p in parameters.items()}


def test_optimizer_state_is_matched_by_name_not_by_position():
    """An optimizer built with its parameters in another order gets each parameter's own moments."""
    parameters, optimizer, names = make_training()
    train(parameters, optimizer, range(2))
    tensors, meta = optimizer_tensors(optimizer, names)
    others, shuffled, other_names = make_training(order=(1, 0, 2))
    load_optimizer(shuffled, other_names, tensors, meta)
    for name, parameter in others.items():
        assert torch.equal(shuffled.state[parameter]["exp_avg"], optimizer.state[parameters[name]]["exp_avg"])


def test_loaded_optimizer_owns_its_state():
    """Training on does not write into the tensors it was loaded from, and an untrained parameter stays stateless."""
    parameters, optimizer, names = make_training()
    train(parameters, optimizer, range(2), skip=("layer.1",))
    tensors, meta = optimizer_tensors(optimizer, names)
    frozen = {key: value.clone() for key, value in tensors.items()}
    others, fresh, _ = make_training()
    train(others, fresh, range(1))
    load_optimizer(fresh, names, frozen, meta)
    assert fresh.state[others["layer.1"]] == {}
    before = {key: value.clone() for key, value in frozen.items()}
    train(others, fresh, range(2, 4))
    assert all(torch.equal(frozen[key], before[key]) for key in before)


def test_another_optimizer_is_refused_before_anything_changes():
    """Other names, shapes, groups, classes or a wrong count of names raise and leave the optimizer alone."""
    parameters, optimizer, names = make_training()
    train(parameters, optimizer, range(1))
    tensors, meta = optimizer_tensors(optimizer, names)
    _, fresh, _ = make_training()
    bad_shape = tensors | {"layer.0/exp_avg": torch.zeros(7)}
    regrouped = torch.optim.AdamW([{"params": [parameters[n]]} for n in names])
    for attempt in (
        lambda: load_optimizer(fresh, ["layer.0", "layer.1", "other"], tensors, meta),
        lambda: load_optimizer(fresh, names, bad_shape, meta),
        lambda: load_optimizer(fresh, names, tensors | {"layer.9/exp_avg": torch.zeros(1)}, meta),
        lambda: load_optimizer(regrouped, names, tensors, meta),
        lambda: load_optimizer(torch.optim.SGD(list(parameters.values())), names, tensors, meta),
        lambda: optimizer_tensors(optimizer, names[:2]),
        lambda: optimizer_tensors(optimizer, ["layer.0"] * 3),
    ):
        with pytest.raises(CheckpointError):
            attempt()
    assert not fresh.state
