"""What a run leaves behind: one metrics line, one episode file and, when due, an evaluation and a checkpoint a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from trinity_vlm.assembly import System
from trinity_vlm.evaluation import evaluate_solver, load_problems
from trinity_vlm.recovery import save
from trinity_vlm.rundir import Evaluation, RunDirectory, mark_best
from trinity_vlm.rundir.checkpoints import checkpoint_name
from trinity_vlm.tracking import open_trackers
from trinity_vlm.types import Rollout, ScoredEpisode


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one outer step of this worker produced, before anything is written; metrics are over all workers."""

    scored: tuple[ScoredEpisode, ...]
    rollouts: tuple[Rollout, ...]
    metrics: dict[str, float]


class Reporter(Protocol):
    """Who is told about progress: the terminal, a test, nobody. ``step`` counts finished outer steps."""

    def note(self, text: str) -> None: ...

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None: ...

    def evaluated(self, step: int, evaluation: Evaluation) -> None: ...


class Silent:
    """A reporter that tells nobody."""

    def note(self, text: str) -> None:
        del text

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        del step, total, metrics

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        del step, evaluation


class Recorder:
    """Writes the run directory; every worker calls it, the main one writes. Steps count from 1 here.

    The order within a step makes a kill harmless: episodes, evaluation, then the metrics line, then the checkpoint
    that counts them in. Whatever was written after the last checkpoint is dropped on resume and written again.
    """

    def __init__(self, system: System, run: RunDirectory, reporter: Reporter) -> None:
        self.system = system
        self.run = run
        self.reporter = reporter
        self.problems = load_problems(system.config.evaluation, system.stream.grid)
        self.trackers = open_trackers(system.config.tracking, run) if system.workers.is_main else []
        rows = run.read_metrics()
        self.has_start = bool(rows)
        evaluated = [row for row in rows if row["step"] > 0 and "eval/accuracy" in row]
        best = max(evaluated, key=lambda row: row["eval/accuracy"], default=None)
        self.best = best["eval/accuracy"] if best else 0.0
        if system.workers.is_main:
            if best:
                self._name_best(int(best["step"]))
            for step, evaluation in run.read_evaluations().items():
                reporter.evaluated(step, evaluation)

    def record_start(self) -> None:
        """The Solver's accuracy before any training, as step 0."""
        if self.system.workers.is_main and not self.has_start and (metrics := self._evaluate(0)):
            self.run.append_metrics(0, metrics)

    def record(self, step: int, result: StepResult) -> None:
        """Write everything of a finished step; raises CheckpointError or RunDirectoryError when the disk refuses."""
        config, workers = self.system.config, self.system.workers
        tables = workers.gather_to_main(self.run.episode_table(result.scored, result.rollouts))
        improved = False
        if workers.is_main:
            self.run.write_episodes(step, tables)
            evaluation = self._evaluate(step) if self._due(step) else {}
            improved = evaluation.get("eval/accuracy", 0.0) > self.best
            self.best = max(self.best, evaluation.get("eval/accuracy", 0.0))
            metrics = result.metrics | evaluation
            self.run.append_metrics(step, metrics)
            for tracker in self.trackers:
                tracker.log(step, metrics)
            self.reporter.step(step, config.steps, metrics)
            if metrics.get("ema/max_error", 0.0) > config.ema.error_bound:
                self.reporter.note(
                    f"step {step}: the Verifier's low-rank average lost {metrics['ema/max_error']:.2g} of its change "
                    f"(ema.error_bound={config.ema.error_bound:g}); a higher ema.rank keeps more"
                )
        improved = workers.gather(improved)[0]
        if improved or step % config.checkpoint.every == 0 or step == config.steps:
            save(self.system, self.run, step)
        if improved and workers.is_main:
            self._name_best(step)

    def close(self) -> None:
        """Flush and close the trackers."""
        for tracker in self.trackers:
            tracker.close()

    def _name_best(self, step: int) -> None:
        """Also on resume: a kill between saving the best checkpoint and naming it must not lose the name."""
        if (self.run.checkpoints_path / checkpoint_name(step)).is_dir():
            mark_best(self.run.checkpoints_path, step)

    def _due(self, step: int) -> bool:
        every = self.system.config.evaluation.every
        return step == self.system.config.steps or (every > 0 and step % every == 0)

    def _evaluate(self, step: int) -> dict[str, float]:
        if not self.problems:
            return {}
        evaluation = evaluate_solver(self.problems, self.system.cast, self.system.config.evaluation)
        self.run.write_evaluation(step, evaluation)
        self.reporter.evaluated(step, evaluation)
        accuracy = evaluation.accuracy
        return {
            "eval/accuracy": accuracy.value,
            "eval/accuracy_low": accuracy.low,
            "eval/accuracy_high": accuracy.high,
            "eval/format": evaluation.format_rate,
        }
