"""Whether servers speak with the trainer's adapters, asked of real models behind two HTTP servers."""

import dataclasses

import pytest
import torch
from loop_factory import small_config
from model_server import ModelServer

from trinity_vlm.assembly import assemble, serve_adapters
from trinity_vlm.config import RolesConfig
from trinity_vlm.engine.parity import Gap
from trinity_vlm.errors import TrainingError
from trinity_vlm.loop import evolve
from trinity_vlm.preflight import check_that_the_engine_agrees, check_that_the_engine_still_agrees
from trinity_vlm.recording import Silent
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.types import POLICY, VERIFIER
from trinity_vlm.workers import Workers

STEP = {"engine_gap": 1e-5, "engine_gap_max": 1e-4, "completion_tokens/questioner": 3, "completion_tokens/solver": 4}


@pytest.fixture(scope="module")
def servers():
    with ModelServer() as first, ModelServer() as second:
        yield first, second


@pytest.fixture(scope="module")
def system(servers, tmp_path_factory):
    """A run over the servers, both of whose adapters have learnt something."""
    urls = ", ".join(f"'{server.url}'" for server in servers)
    folder = tmp_path_factory.mktemp("adapters")
    over = f"engine.servers={{urls: [{urls}], model: base, adapter_dir: {folder}}}"
    with assemble(small_config("evaluation.source=null", "engine.kind=openai", over)) as system:
        for seed, name in enumerate((POLICY, VERIFIER)):
            torch.manual_seed(seed)
            state = system.backbone.adapter_state(name)
            system.backbone.load_adapter_state(name, {k: 0.3 * torch.randn_like(v) for k, v in state.items()})
        serve_adapters(system.engine, system.backbone, 0)
        yield system


@pytest.fixture
def deaf(servers):
    """Make one of the servers answer from the base where an adapter is asked for; undone afterwards."""
    yield lambda name, server: setattr(servers[server], "deaf", name)
    for server in servers:
        server.deaf = None


def checks(system):
    """Both checks, by name."""
    return {
        "before step 1": lambda: check_that_the_engine_agrees(system, Silent()),
        "after a step": lambda: check_that_the_engine_still_agrees(system, STEP),
    }


def test_servers_that_speak_with_both_adapters_pass(system, servers):
    """Every server is asked for both before step 1, and for the Verifier after a step."""
    for check in checks(system).values():
        for server in servers:
            server.bodies.clear()
        check()
        asked = [{body["model"].partition("-")[0] for body in server.bodies} for server in servers]
        assert asked[0] == asked[1]
        assert VERIFIER in asked[0]


def test_what_was_found_after_a_step_is_told(system):
    """The gap of the Verifier's log-probabilities, which no rollout shows, and how long asking took."""
    found = checks(system)["after a step"]()
    assert set(found) == {"verifier_gap", "verifier_gap_max", "seconds/parity"}
    assert 0 < found["verifier_gap"] <= found["verifier_gap_max"] < 1e-3
    assert found["seconds/parity"] > 0


def test_a_run_writes_it_with_the_steps_metrics(servers, tmp_path):
    """Two steps over both servers, as a user runs them."""
    urls = ", ".join(f"'{server.url}'" for server in servers)
    over = f"engine.servers={{urls: [{urls}], model: base, adapter_dir: {tmp_path}}}"
    config = small_config("evaluation.source=null", "engine.kind=openai", over, "steps=2")
    with RunDirectory.create(tmp_path / "run", config) as run:
        evolve(config, run)
        rows = run.read_metrics()
    assert len(rows) == 2
    for row in rows:
        assert 0 < row["verifier_gap"] <= row["verifier_gap_max"] < 1e-3
        assert row["seconds/parity"] > 0


@dataclasses.dataclass(frozen=True)
class WithAnother(Workers):
    """Two workers, of which this process is one and the other found what it is given."""

    other: dict[str, Gap] = dataclasses.field(default_factory=dict)

    def gather(self, value):
        return [value, self.other]


def test_what_another_worker_found_counts_for_all(system):
    """The largest gap of all is the step's, and one that is too large stops this worker too, told by its rank."""
    for mean in (2e-3, 0.2):
        workers = WithAnother(rank=0, world=2, other={"text": Gap(mean, 0.5, 128)})
        shared = dataclasses.replace(system, workers=workers)
        if mean < 5e-3:
            found = check_that_the_engine_still_agrees(shared, STEP)
            assert (found["verifier_gap"], found["verifier_gap_max"]) == (2e-3, 0.5)
        else:
            with pytest.raises(TrainingError, match=r"worker 1's text prompts: mean 0\.2"):
                check_that_the_engine_still_agrees(shared, STEP)


@pytest.mark.parametrize("when", ["before step 1", "after a step"])
@pytest.mark.parametrize("server", [0, 1])
def test_a_verifier_that_one_server_ignores_stops_the_run(system, deaf, when, server):
    """The policy is as it should be: only the Verifier's own check can tell."""
    deaf(VERIFIER, server)
    with pytest.raises(TrainingError, match=r"tokens of the verifier .*another adapter version"):
        checks(system)[when]()


def test_a_policy_that_a_server_ignores_is_told_as_such(system, deaf):
    deaf(POLICY, 0)
    with pytest.raises(TrainingError, match="tokens of the policy"):
        checks(system)["before step 1"]()


def test_another_model_as_verifier_has_no_parity(system, servers, deaf):
    """Where roles.verifier_engine plays the Verifier, nothing is asked under its name."""
    deaf(VERIFIER, 0)
    verifier = {"kind": "openai", "urls": [servers[0].url], "model": "base"}
    roles = RolesConfig(**(system.config.roles.model_dump() | {"verifier_engine": verifier}))
    foreign = dataclasses.replace(system, config=system.config.model_copy(update={"roles": roles}))
    for server in servers:
        server.bodies.clear()
    for check in checks(foreign).values():
        check()
    assert not any(body["model"].startswith(VERIFIER) for server in servers for body in server.bodies)
