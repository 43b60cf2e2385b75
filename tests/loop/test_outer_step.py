"""The outer loop on the real tiny model: metrics, own parts, guards, the best checkpoint, resume in every mode."""

import functools
import shutil

import pytest
import torch
from loop_factory import small_config, tiny_backbone

from trinity_vlm.assembly import assemble
from trinity_vlm.checkpoint import load_checkpoint
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.errors import RunDirectoryError, TrainingError
from trinity_vlm.loop import evolve, outer_step
from trinity_vlm.recording import Silent
from trinity_vlm.recovery import load_adapters, restore
from trinity_vlm.rewards import questioner_rewards, solver_rewards
from trinity_vlm.rundir import Evaluation, RunDirectory, best_checkpoint, latest_checkpoint
from trinity_vlm.rundir.checkpoints import BEST_NAME, checkpoint_name
from trinity_vlm.types import POLICY, VERIFIER, QuestionerReward, Role, SolverReward

NO_EVALUATION = "evaluation.source=null"
TIMINGS = ("seconds/", "memory/")


@pytest.fixture(scope="module", autouse=True)
def single_thread():
    """Small kernels: a second thread costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def steps_of(config, count):
    """The results of the first outer steps, with the system closed again."""
    with assemble(config) as system:
        system.serve(0)
        return [outer_step(system, step) for step in range(count)]


@pytest.fixture(scope="module")
def two_steps():
    return steps_of(small_config(), 2)


def test_challenge_is_selection_rate_times_challenge_of_the_selected(two_steps):
    """The identity of A.5, on what a real run reports and recounted from its episodes."""
    assert any(r.metrics["chal"] > 0 for r in two_steps), "no step challenged its Solver; choose another seed"
    for result in two_steps:
        metrics = result.metrics
        assert metrics["chal"] == pytest.approx(metrics["p_sel"] * metrics["chal_selected"], abs=1e-12)
        episodes = [item.episode for item in result.scored]
        candidates = sum(len(e.candidates) for e in episodes)
        assert metrics["p_sel"] == sum(e.selected is not None for e in episodes) / candidates
        failures = [
            sum(1 - s.correctness.correct for s in formatted) / len(formatted)
            for e in episodes
            if (formatted := [s for s in e.solutions if s.format_valid])
        ]
        assert metrics["chal"] == pytest.approx(sum(failures) / candidates)


def test_rewards_and_advantages_of_a_real_step_are_the_papers(two_steps):
    """What was trained on is Eqs. (1) and (2) of the very episodes that are written, centred within each group."""
    config = small_config().rewards
    for result in two_steps:
        for item in result.scored:
            assert item.questioner_rewards == questioner_rewards(item.episode, config)
            assert item.solver_rewards == solver_rewards(item.episode, config)
        groups = {}
        for rollout in result.rollouts:
            groups.setdefault((rollout.image_uid, rollout.role), []).append(rollout.advantage)
        full = [values for values in groups.values() if len(values) == 2 and values != [-0.5, -0.5]]
        assert full
        assert all(sum(values) == pytest.approx(0, abs=1e-6) for values in full)


def own_questioner(episode, config):
    return tuple(QuestionerReward(1, 0.0, 0.0, 0.0, 0.0, 100.0 + c.index) for c in episode.candidates)


def own_solver(episode, config):
    return tuple(SolverReward(1, 0, 0.0, 200.0 + s.index) for s in episode.solutions)


def own_advantages(rewards):
    """Keeps the second of a group only, with its reward as its advantage."""
    return tuple(reward if slot == 1 else None for slot, reward in enumerate(rewards))


class OwnEngine(TransformersEngine):
    """Remembers which calls it was asked."""

    def __init__(self, backbone, config):
        super().__init__(backbone, config.engine.max_batch_sequences, cuda_graphs=False)
        self.asked = []
        self.served = []

    async def generate(self, request):
        self.asked.append(request.call)
        return await super().generate(request)

    def load_adapter(self, name, version, state):
        self.served.append((name, version))
        super().load_adapter(name, version, state)


def test_own_rewards_advantages_and_engine_are_used():
    module = "test_outer_step"
    config = small_config(
        f"rewards.questioner={module}:own_questioner",
        f"rewards.solver={module}:own_solver",
        f"rewards.advantages={module}:own_advantages",
        f"engine.kind={module}:OwnEngine",
    )
    with assemble(config) as system:
        assert type(system.engine).__name__ == "OwnEngine"
        system.serve(0)
        result = outer_step(system, 0)
        assert system.engine.asked.count("propose") == 2 * 2
        assert system.engine.served == [(POLICY, 0), (VERIFIER, 0), (POLICY, 1), (VERIFIER, 1)]
    assert [[r.total for r in item.questioner_rewards] for item in result.scored] == [[100.0, 101.0]] * 2
    assert {r.total for item in result.scored for r in item.solver_rewards} == {200.0, 201.0}
    assert {(r.role, r.slot, r.advantage) for r in result.rollouts} == {
        (Role.QUESTIONER, 1, 101.0),
        (Role.SOLVER, 1, 201.0),
    }
    assert result.metrics["trained_rollouts"] == len(result.rollouts)


def test_a_model_that_ignores_pixels_never_starts(monkeypatch, tmp_path):
    """Features of zeros, whatever the picture: the run stops before step 1 and writes no metrics line."""
    family = type(tiny_backbone()._inner)
    original = family.get_image_features

    @functools.wraps(original)
    def blind(*args, **kwargs):
        out = original(*args, **kwargs)
        out.pooler_output = tuple(torch.zeros_like(t) for t in out.pooler_output)
        if getattr(out, "deepstack_features", None):
            out.deepstack_features = [
                torch.zeros_like(layer) if torch.is_tensor(layer) else [torch.zeros_like(t) for t in layer]
                for layer in out.deepstack_features
            ]
        return out

    monkeypatch.setattr(family, "get_image_features", blind)
    config = small_config()
    with RunDirectory.create(tmp_path / "run", config) as run:
        with pytest.raises(TrainingError, match="not looking at its input"):
            evolve(config, run)
        assert run.read_metrics() == []
        assert run.episode_steps() == []


def test_the_best_checkpoint_is_named_by_held_out_accuracy_and_named_again_when_lost(tmp_path, monkeypatch):
    """Accuracies 1/8, 6/8, 3/8: step 2 is kept beyond keep_last=1, and found again after a kill before naming it."""
    correct = iter([2, 1, 6, 3])

    def scripted(problems, cast, config):
        num = next(correct)
        return Evaluation(tuple(i < num for i in range(8)), (True,) * 8, ("",) * 8)

    monkeypatch.setattr("trinity_vlm.recording.evaluate_solver", scripted)
    config = small_config("steps=3", "evaluation.every=1", "checkpoint.keep_last=1", "images.per_step=1")
    with RunDirectory.create(tmp_path / "run", config) as run:
        evolve(config, run)
        root = run.checkpoints_path
        assert best_checkpoint(root).name == checkpoint_name(2)
        assert sorted(p.name for p in root.glob("step-*")) == [checkpoint_name(2), checkpoint_name(3)]
        (root / BEST_NAME).unlink()
        assert best_checkpoint(root) is None
        evolve(config, run)
        assert best_checkpoint(root).name == checkpoint_name(2)
        assert [row["eval/accuracy"] for row in run.read_metrics()] == [0.25, 0.125, 0.75, 0.375]


class Snapshot(Silent):
    """Copies the run directory while step 2 is being recorded: what a kill at that instant would leave."""

    def __init__(self, run, target):
        self.run, self.target = run, target

    def step(self, step, total, metrics):
        if step == 2:
            shutil.copytree(self.run.path, self.target)


def killed_and_untouched(config, folder):
    """A run of two steps, and its copy resumed after a kill within step 2: (untouched, resumed)."""
    with RunDirectory.create(folder / "untouched", config) as untouched:
        evolve(config, untouched, Snapshot(untouched, folder / "killed"))
    assert latest_checkpoint(folder / "killed" / "checkpoints").name == checkpoint_name(1)
    with RunDirectory.resume(folder / "killed", config) as killed:
        evolve(config, killed)
    return untouched, killed


def final_tensors(run, step=2):
    return load_checkpoint(run.checkpoints_path / checkpoint_name(step)).tensors


def plain_metrics(run):
    return [{k: v for k, v in row.items() if not k.startswith(TIMINGS)} for row in run.read_metrics()]


def assert_same_bits(left, right):
    assert plain_metrics(left) == plain_metrics(right)
    a, b = final_tensors(left), final_tensors(right)
    assert a.keys() == b.keys()
    for group, tensors in a.items():
        assert tensors.keys() == b[group].keys()
        assert all(torch.equal(tensor, b[group][name]) for name, tensor in tensors.items()), group


def policy_deltas(run, step):
    """The merged weight deltas s B A of the policy after ``step``, per layer."""
    backbone = tiny_backbone(rank=run.config.lora.rank)
    backbone.load_adapter_state(POLICY, final_tensors(run, step)[POLICY])
    return {name: factors.product().detach() for name, factors in backbone.factors(POLICY).items()}


def ema_deltas(run):
    """The Verifier's merged weight deltas at the end, per layer."""
    state = final_tensors(run)["ema"]
    names = sorted({key.rpartition(".")[0] for key in state})
    if f"{names[0]}.delta" in state:
        return {name: state[f"{name}.delta"] for name in names}
    return {name: state[f"{name}.left"] @ state[f"{name}.right"] for name in names}


def largest(deltas):
    return max(float(d.abs().max()) for d in deltas.values())


def largest_gap(left, right):
    return largest({name: left[name] - right[name] for name in left})


@pytest.mark.parametrize("kind", ["none", "dense", "frozen", "factored"])
def test_each_verifier_average_follows_its_rule_and_resumes_to_the_same_bits(kind, tmp_path):
    """After two steps with alpha = 0.5: none is P2, frozen 0, dense and factored P1 / 4 + P2 / 2."""
    config = small_config(f"ema.kind={kind}", "ema.alpha=0.5", NO_EVALUATION)
    untouched, killed = killed_and_untouched(config, tmp_path)
    assert_same_bits(untouched, killed)
    first, second = policy_deltas(untouched, 1), policy_deltas(untouched, 2)
    mixed = {name: first[name] / 4 + second[name] / 2 for name in first}
    expected = {"none": second, "frozen": {n: torch.zeros_like(d) for n, d in first.items()}}.get(kind, mixed)
    assert largest(second) > 1e-5
    assert largest_gap(ema_deltas(untouched), expected) < 1e-3 * largest(second)


def test_alternating_roles_resume_to_the_same_bits(tmp_path):
    """Step 1 trains the Solver's rollouts, step 2 the Questioner's, also when step 2 is a resumed one."""
    untouched, killed = killed_and_untouched(
        small_config("seed=1", "update.schedule=alternating", NO_EVALUATION), tmp_path
    )
    assert_same_bits(untouched, killed)
    first, second = killed.read_metrics()
    assert first["trained_rollouts"] == first["retained/solver"] > 0
    assert second["trained_rollouts"] == second["retained/questioner"] > 0


def test_several_updates_per_step_resume_to_the_same_bits(tmp_path):
    """The second update of a step is off-policy: its ratio is not 1 and optimizer steps are counted twice."""
    untouched, killed = killed_and_untouched(small_config("update.updates_per_step=2", NO_EVALUATION), tmp_path)
    assert_same_bits(untouched, killed)
    assert [row["updates"] for row in killed.read_metrics()] == [2, 2]
    assert any(row["ratio_max"] != 1.0 for row in killed.read_metrics())
    steps = [t for name, t in final_tensors(killed)["optimizer"].items() if name.endswith("/step")]
    assert {float(t) for t in steps} == {4.0}


def test_a_run_does_not_go_on_with_other_base_weights(tmp_path):
    """Adapters of one model on another are refused by name, in a resume and in play; an adapter's own move is not."""
    config = small_config(NO_EVALUATION, "steps=1")
    with RunDirectory.create(tmp_path / "run", config) as run, assemble(config) as system:
        evolve(config, run, Silent())
        assert restore(system, run) == load_adapters(system.backbone, run) == 1
        frozen = next(p for name, p in system.backbone.model.named_parameters() if name.endswith("embed_tokens.weight"))
        with torch.no_grad():
            frozen[0, :4] += 1
        for load in (lambda: restore(system, run), lambda: load_adapters(system.backbone, run)):
            with pytest.raises(RunDirectoryError, match="other base weights than model"):
                load()
