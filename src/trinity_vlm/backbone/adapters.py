"""LoRA adapters of the language model: which layers, switching, factors in and out, state with PEFT keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trinity_vlm.config import LoraConfig
from trinity_vlm.ema import LowRank
from trinity_vlm.errors import ConfigError, EngineError
from trinity_vlm.types import POLICY

ALL_LINEAR = "all-linear"


def language_linears(base: Any) -> dict[str, nn.Linear]:
    """Linear layers of the language model by their full name: no embeddings, no head, nothing of the vision tower."""
    decoder = base.get_decoder()
    prefix = next(name for name, module in base.named_modules() if module is decoder)
    head = base.get_output_embeddings()
    return {
        f"{prefix}.{name}": module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }


def target_layers(base: Any, targets: str | tuple[str, ...]) -> list[str]:
    """Full names of the layers to adapt, in model order.

    Raises ConfigError for a name that matches no linear layer of the language model, listing those that would.
    """
    layers = language_linears(base)
    if targets == ALL_LINEAR:
        return list(layers)
    wanted = (targets,) if isinstance(targets, str) else targets
    for name in wanted:
        if not any(_matches(layer, name) for layer in layers):
            known = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
            raise ConfigError(
                f"lora.targets={name!r}: no linear layer of the language model has this name (vision modules are never "
                f"adapted); use {ALL_LINEAR!r} or some of {', '.join(known)}"
            )
    return [layer for layer in layers if any(_matches(layer, name) for name in wanted)]


def rms_norms(base: Any) -> list[Any]:
    """The language model's norms that compute x / rms(x) * weight, by the name of the Qwen family's class."""
    return [m for m in base.get_decoder().modules() if type(m).__name__.endswith("VLTextRMSNorm")]


def _matches(layer: str, name: str) -> bool:
    return layer == name or layer.endswith(f".{name}")


class Adapters:
    """The adapters of one model. The policy is active and trainable whenever no ``use`` block says otherwise.

    Adapter weights are float32 and stay unmerged: a low-rank step of 1e-5 is below the rounding of bfloat16 weights.
    """

    def __init__(self, base: Any, config: LoraConfig, seed: int) -> None:
        self._names = target_layers(base, config.targets)
        settings = self._settings(config.rank, config.alpha, config.dropout)
        with _seeded(seed):
            self.model = peft.get_peft_model(base, settings, adapter_name=POLICY)
        modules = dict(base.named_modules())
        self._layers: dict[str, Any] = {name: modules[name] for name in self._names}
        self._norms = rms_norms(base)
        self._active: str | None = POLICY
        self._check_trainable()

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return list(self.model.peft_config)

    def add(self, name: str, ranks: int | Mapping[str, int], alpha: float) -> None:
        """A further adapter that changes nothing yet; ``ranks`` may give each layer its own, by full name."""
        if name in self.names:
            raise EngineError(f"adapter {name!r} exists already")
        with _seeded(0):
            self.model.add_adapter(name, self._settings(ranks, alpha, 0.0))
        for layer in self._layers.values():
            layer.requires_grad_(False)
        self._activate(self._active)
        self._check_trainable()

    @contextmanager
    def use(self, name: str | None) -> Iterator[None]:
        """Run the block with this adapter (None: the bare base model). Raises EngineError for an unknown one."""
        if name is not None and name not in self.names:
            raise EngineError(f"unknown adapter {name!r}; loaded are {', '.join(self.names)}")
        before = self._active
        if name == before:
            yield
            return
        self._activate(name)
        try:
            yield
        finally:
            self._activate(before)

    @contextmanager
    def fused(self) -> Iterator[None]:
        """Within the block each adapted layer is one product with W + D, formed on the side in W's own precision, and
        each of the family's RMS norms one kernel instead of six.

        For decoding only: without gradients, adapters must not change inside. W itself is never touched, so nothing
        drifts; in bfloat16 the sum would lose most of D, so callers keep to float32.
        """
        name = self._active
        if name is None:
            yield
            return
        for module in self._layers.values():
            base, delta = module.get_base_layer(), module.get_delta_weight(name)
            weight = (base.weight.detach() + delta.detach()).t().contiguous().t()
            module.forward = partial(F.linear, weight=weight, bias=base.bias)
        for norm in self._norms:
            norm.forward = partial(
                F.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight, eps=norm.variance_epsilon
            )
        try:
            yield
        finally:
            for module in (*self._layers.values(), *self._norms):
                del module.forward

    def _activate(self, name: str | None) -> None:
        self._active = name
        for layer in self._layers.values():
            layer.enable_adapters(name is not None)
            if name is not None:
                layer.set_adapter([name], inference_mode=name != POLICY)

    def parameters(self, name: str) -> dict[str, nn.Parameter]:
        """``<layer>.lora_A.weight`` and ``<layer>.lora_B.weight`` by PEFT's saved names, in model order."""
        return {
            f"base_model.model.{layer}.{part}.weight": getattr(module, part)[name].weight
            for layer, module in self._layers.items()
            for part in ("lora_A", "lora_B")
        }

    def factors(self, name: str) -> dict[str, LowRank]:
        """Per layer the delta it adds to the weight, scaling folded into ``left``: left [out, R] @ right [R, in]."""
        return {
            layer: LowRank(
                left=module.lora_B[name].weight.detach() * module.scaling[name],
                right=module.lora_A[name].weight.detach(),
            )
            for layer, module in self._layers.items()
        }

    @torch.no_grad()
    def set_factors(self, name: str, factors: Mapping[str, LowRank]) -> None:
        """Make the adapter add exactly these deltas; ranks below the adapter's are filled with zeros.

        Raises EngineError for missing or foreign layers and for ranks above the adapter's.
        """
        _same_keys(f"factors of adapter {name!r}", self._layers, factors)
        for layer, module in self._layers.items():
            left, right = factors[layer].left, factors[layer].right
            rank = left.shape[1]
            if rank > module.r[name]:
                raise EngineError(f"{layer}: rank {rank} does not fit adapter {name!r} of rank {module.r[name]}")
            up, down = module.lora_B[name].weight.zero_(), module.lora_A[name].weight.zero_()
            up[:, :rank] = left.to(up) / module.scaling[name]
            down[:rank] = right.to(down)

    def state(self, name: str) -> dict[str, Tensor]:
        """Copies of the adapter's tensors on the CPU, under PEFT's saved names."""
        return {key: value.detach().to("cpu", copy=True) for key, value in self.parameters(name).items()}

    @torch.no_grad()
    def load_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Replace the adapter's tensors in place; raises EngineError naming missing, foreign or misshapen keys."""
        if name not in self.names:
            raise EngineError(f"unknown adapter {name!r}; loaded are {', '.join(self.names)}")
        parameters = self.parameters(name)
        _same_keys(f"state of adapter {name!r}", parameters, state)
        wrong = [k for k, p in parameters.items() if p.shape != state[k].shape]
        if wrong:
            raise EngineError(
                f"state of adapter {name!r}: {wrong[0]} has shape {tuple(state[wrong[0]].shape)}, "
                f"expected {tuple(parameters[wrong[0]].shape)} ({len(wrong)} such tensors)"
            )
        for key, parameter in parameters.items():
            parameter.copy_(state[key])

    def describe(self) -> str:
        """A table of what trains: layer kind, how many, rank, parameters."""
        counts = Counter(name.rsplit(".", 1)[-1] for name in self._names)
        sizes: Counter[str] = Counter()
        ranks = {}
        for name, module in self._layers.items():
            kind = name.rsplit(".", 1)[-1]
            sizes[kind] += sum(getattr(module, part)[POLICY].weight.numel() for part in ("lora_A", "lora_B"))
            ranks[kind] = module.r[POLICY]
        lines = [f"{'layer':<16}{'count':>7}{'rank':>6}{'parameters':>14}"]
        lines += [f"{kind:<16}{counts[kind]:>7}{ranks[kind]:>6}{sizes[kind]:>14,}" for kind in counts]
        return "\n".join([*lines, f"{'total':<16}{sum(counts.values()):>7}{'':>6}{sum(sizes.values()):>14,}"])

    def _settings(self, ranks: int | Mapping[str, int], alpha: float, dropout: float) -> peft.LoraConfig:
        pattern: dict[str, int] = {}
        if isinstance(ranks, Mapping):
            _same_keys("ranks", self._names, ranks)
            pattern = {re.escape(name): rank for name, rank in ranks.items()}
        return peft.LoraConfig(
            r=ranks if isinstance(ranks, int) else max(ranks.values()),
            lora_alpha=alpha,  # type: ignore[arg-type]
            lora_dropout=dropout,
            target_modules=list(self._names),
            rank_pattern=pattern,
        )

    def _check_trainable(self) -> None:
        """Exactly the policy's factors train, in float32; anything else is a fault of the adapter library."""
        expected = {id(p) for p in self.parameters(POLICY).values()}
        found = {id(p): p for p in self.model.parameters() if p.requires_grad}
        if set(found) != expected or any(p.dtype != torch.float32 for p in found.values()):
            raise AssertionError(
                f"{len(found)} trainable tensors found, expected the policy's {len(expected)} in float32"
            )


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The same initial factors in every process, whatever was drawn before; the global generator is left alone."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _same_keys(what: str, expected: Mapping[str, object] | list[str], found: Mapping[str, object]) -> None:
    missing, foreign = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or foreign:
        raise EngineError(
            f"{what}: {len(missing)} of {len(set(expected))} keys are missing (first: {missing[:3]}), "
            f"{len(foreign)} are foreign (first: {foreign[:3]})"
        )
