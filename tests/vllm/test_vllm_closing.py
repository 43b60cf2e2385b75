"""The order in which an engine lets go of vLLM, against a stand-in for it: no engine is needed to get it wrong."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from trinity_vlm.engine.background import BackgroundLoop
from trinity_vlm.engine.vllm.adapters import AdapterFolder
from trinity_vlm.engine.vllm.closing import Resources, close_all, close_from_any_thread
from trinity_vlm.errors import EngineError


class StandIn:
    """Listens to its process in a task, as AsyncLLM does; whoever listens while that ends reports an error."""

    def __init__(self, fails=False):
        self.background = BackgroundLoop("test")
        self.output_handler = self.background.call(self._listen())
        self.listened_to_its_end = None
        self.fails = fails

    async def _listen(self):
        return asyncio.create_task(asyncio.sleep(3600))

    def shutdown(self):
        self.listened_to_its_end = not self.output_handler.done()
        if self.fails:
            raise OSError("no such process")


def test_nobody_listens_to_vllm_when_it_is_shut_down():
    llm = StandIn()
    close_all(Resources(llm, llm.background, AdapterFolder()))
    assert llm.listened_to_its_end is False


def test_an_engine_that_was_never_asked_has_no_listener():
    background, ended = BackgroundLoop("test"), []
    llm = SimpleNamespace(output_handler=None, shutdown=lambda: ended.append(True))
    close_all(Resources(llm, background, AdapterFolder()))
    llm.shutdown()
    assert ended == [True]


def test_files_go_even_when_vllm_fails_to_end():
    llm, folder = StandIn(fails=True), AdapterFolder()
    assert folder.path.exists()
    with pytest.raises(OSError, match="no such process"):
        close_all(Resources(llm, llm.background, folder))
    assert not folder.path.exists()


def test_vllm_ends_even_when_its_event_loop_is_gone():
    llm = StandIn()
    llm.background.close()
    llm.output_handler = asyncio.Future(loop=asyncio.new_event_loop())
    with pytest.raises(EngineError, match="closed"):
        close_all(Resources(llm, llm.background, AdapterFolder()))
    assert llm.listened_to_its_end is not None


@pytest.mark.parametrize("where", ["the loop's own thread", "another thread"])
def test_the_garbage_collector_may_call_from_any_thread(where):
    """vLLM's thread can't wait for its own work: there the end comes in a thread of its own."""
    llm, folder, called = StandIn(), AdapterFolder(), threading.Event()

    def collected():
        close_from_any_thread(Resources(llm, llm.background, folder))
        called.set()

    if where == "another thread":
        collected()
    else:
        llm.background._loop.call_soon_threadsafe(collected)
    assert called.wait(10)
    for thread in threading.enumerate():
        if thread.name == "vllm-closing":
            thread.join(10)
    assert llm.listened_to_its_end is False
    assert not folder.path.exists()
