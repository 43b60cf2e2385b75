"""The end of an engine: what it holds, and the order in which that goes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from trinity_vlm.engine.background import BackgroundLoop
from trinity_vlm.engine.vllm.adapters import AdapterFolder
from trinity_vlm.engine.vllm.sharing import SharedWeights


@dataclass(slots=True)
class Resources:
    """What must be let go of when the engine goes. ``llm``: vLLM's AsyncLLM, whose tasks run on ``background``."""

    llm: Any
    background: BackgroundLoop
    folder: AdapterFolder
    shared: SharedWeights | None = None


def close_from_any_thread(resources: Resources) -> None:
    """``close_all``, in a thread of its own where the garbage collector calls from vLLM's: it can't wait for itself."""
    if resources.background.is_here:
        threading.Thread(target=close_all, args=(resources,), name="vllm-closing").start()
    else:
        close_all(resources)


def close_all(resources: Resources) -> None:
    """Weights that the trainer shares first, then vLLM, its event loop and its files, whatever fails on the way."""
    with ExitStack() as stack:
        stack.callback(resources.folder.close)
        stack.callback(resources.background.close)
        if resources.shared is not None:
            stack.callback(resources.shared.settle)
        stack.callback(_shut_down, resources.llm)
        stack.callback(_stop_listening, resources.llm, resources.background)
        if resources.shared is not None:
            resources.shared.take_back(alive=not resources.llm.errored)


def _stop_listening(llm: Any, background: BackgroundLoop) -> None:
    """Who listens to vLLM's process would report its death as an error."""
    if llm.output_handler is not None:
        background.call(_cancelled(llm.output_handler))


def _shut_down(llm: Any) -> None:
    llm.shutdown()
    llm.shutdown = lambda: None  # its __del__ would call it again, at a moment when the interpreter has nothing left


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
