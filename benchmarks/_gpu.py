"""Memory and utilisation of a GPU over time, polled in a thread."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

EVERY_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Reading:
    """``at`` in ``perf_counter`` seconds, memory of the whole GPU in GiB, utilisation (time with a kernel) 0..1."""

    at: float
    memory: float
    utilisation: float


class GpuWatch:
    """Polls until the block is left; without a GPU it reads nothing."""

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._read = _reader()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> GpuWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def between(self, start: float, end: float) -> dict[str, float]:
        """Peak memory and mean utilisation from ``start`` to ``end``; empty without readings."""
        readings = [r for r in self.readings if start <= r.at <= end]
        if not readings:
            return {}
        return {
            "gpu_peak_gib": max(r.memory for r in readings),
            "gpu_utilisation": sum(r.utilisation for r in readings) / len(readings),
        }

    def _poll(self) -> None:
        while self._read is not None and not self._stop.wait(EVERY_SECONDS):
            memory, utilisation = self._read()
            self.readings.append(Reading(time.perf_counter(), memory, utilisation))


def _reader() -> Callable[[], tuple[float, float]] | None:
    """NVML where a binding is installed (vLLM brings one), else nvidia-smi, else None."""
    device = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or 0)
    for name in ("pynvml", "vllm.third_party.pynvml"):
        try:
            nvml = __import__(name, fromlist=["nvmlInit"])
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByIndex(device)
        except Exception:
            continue
        return lambda: (
            nvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30,
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        )
    try:
        _nvidia_smi(device)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return None
    return lambda: _nvidia_smi(device)


def _nvidia_smi(device: int) -> tuple[float, float]:
    query = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used,utilization.gpu", "--format=csv,noheader,nounits"]
    memory, utilisation = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
    return float(memory) / 1024, float(utilisation) / 100
