"""The checks before step 1, on a real system whose engine is said to have a model of its own."""

import dataclasses

import pytest
from loop_factory import small_config

from trinity_vlm.assembly import assemble
from trinity_vlm.errors import TrainingError
from trinity_vlm.preflight import check_that_the_engine_agrees, check_that_the_engine_still_agrees
from trinity_vlm.recording import Silent


class Notes(Silent):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


class Shifted:
    """The engine, with every log-probability of prompts with images off by ``by`` nat."""

    def __init__(self, inner, by):
        self.inner, self.by = inner, by

    async def generate(self, request):
        by = self.by if request.prompt.image else 0.0
        return [
            dataclasses.replace(c, logprobs=tuple(value + by for value in c.logprobs))
            for c in await self.inner.generate(request)
        ]


@pytest.fixture(scope="module")
def system():
    with assemble(small_config("evaluation.source=null")) as system:
        system.serve(0)
        engine = system.config.engine.model_copy(update={"kind": "vllm"})
        yield dataclasses.replace(system, config=system.config.model_copy(update={"engine": engine}))


def test_an_engine_that_agrees_is_noted(system):
    """Both kinds of prompts are compared under both adapters, and the gaps are told."""
    reporter = Notes()
    check_that_the_engine_agrees(system, reporter)
    assert [note.partition(":")[0] for note in reporter.notes] == ["parity check, policy", "parity check, verifier"]
    assert all("with image prompts" in note and "with text prompts" in note for note in reporter.notes)


def test_an_engine_that_disagrees_stops_the_run(system):
    """A tenth of a nat on images only, as a wrongly sized image would give, is told as what it is."""
    wrong = dataclasses.replace(system, engine=Shifted(system.engine, 0.1))
    with pytest.raises(TrainingError, match="resized, cropped or rounded"):
        check_that_the_engine_agrees(wrong, Silent())


def test_the_shared_model_needs_no_such_check(system):
    """The transformers engine speaks with the trainer's own modules: nothing is generated."""
    own = dataclasses.replace(system, config=small_config("evaluation.source=null"), engine=None)
    reporter = Notes()
    check_that_the_engine_agrees(own, reporter)
    assert reporter.notes == []


def test_a_step_whose_rollouts_disagree_stops_the_run(system):
    """An adapter that a server ignores shows in the first step after an update; the shared model is never asked."""
    step = {"engine_gap": 0.2, "engine_gap_max": 1.0, "completion_tokens/questioner": 3, "completion_tokens/solver": 4}
    with pytest.raises(TrainingError, match="over 7 tokens"):
        check_that_the_engine_still_agrees(system, step)
    check_that_the_engine_still_agrees(system, step | {"engine_gap": 1e-4})
    check_that_the_engine_still_agrees(dataclasses.replace(system, config=small_config()), step)
