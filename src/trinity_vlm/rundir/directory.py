"""The run directory: everything needed to resume, look at and publish a run.

    RUN/
      manifest.json      format version, run id, prompt digest, config hash; written last when a run is created
      config.yaml        the fully resolved configuration
      environment.json   versions and hardware of every session, oldest first
      metrics.jsonl      one object a step
      episodes/          step-000123.parquet: everything said and decided in that step
      evaluations/       step-000120.parquet: held-out outcomes, one row per problem
      checkpoints/       see trinity_vlm.rundir.checkpoints
      run.lock           held by the one process that trains

Steps count from 1; step 0 stands for the state before training. Readers need no lock and may look at a live run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import yaml

from trinity_vlm.config import Config, build_config, dump_config
from trinity_vlm.errors import ConfigError, RunDirectoryError
from trinity_vlm.rundir import manifest as manifests
from trinity_vlm.rundir.atomic import disk_errors, free_space, names_path, remove_temporaries, replace_file, sync_folder
from trinity_vlm.rundir.checkpoints import checkpoint_name, discard_after, list_checkpoints
from trinity_vlm.rundir.config_changes import (
    CHANGEABLE,
    RESOURCES,
    check_resumable,
    config_hash,
    hash_values,
    with_changes,
    without_retired,
)
from trinity_vlm.rundir.environment import describe_environment
from trinity_vlm.rundir.episode_table import build_episode_table
from trinity_vlm.rundir.evaluations import Evaluation, evaluation_from_table, evaluation_table
from trinity_vlm.rundir.lock import RunLock
from trinity_vlm.rundir.metrics_log import MetricsLog
from trinity_vlm.rundir.strict_json import JSON, dumps, loads
from trinity_vlm.rundir.tables import read_table, write_table
from trinity_vlm.types import Rollout, ScoredEpisode

CONFIG_NAME = "config.yaml"
ENVIRONMENT_NAME = "environment.json"
LOCK_NAME = "run.lock"
EPISODES, EVALUATIONS, CHECKPOINTS = "episodes", "evaluations", "checkpoints"
_NEW_FILES = (manifests.MANIFEST_NAME, CONFIG_NAME, ENVIRONMENT_NAME)
_NEW_FOLDERS = (EPISODES, EVALUATIONS, CHECKPOINTS)
"""All that ``create`` makes beside the lock."""
_STEP_FILE = re.compile(r"step-(\d{6,})\.parquet")


class RunDirectory:
    """One run on disk. Make it with ``create``, ``resume`` (both writable, locked) or ``open`` (reading only)."""

    def __init__(self, path: Path, manifest: manifests.RunManifest, lock: RunLock | None) -> None:
        self.path = path
        self.manifest = manifest
        self._made_folder = False
        self._lock = lock
        self._metrics = MetricsLog(path / "metrics.jsonl")

    @classmethod
    def create(cls, path: str | Path, config: Config, *, prompt_digest: str = "") -> RunDirectory:
        """Start a new run at ``path``, which must not exist, be empty, or hold only a start that was killed.

        Raises RunDirectoryError when a run or anything else is there, or when the disk refuses a write.
        """
        path = Path(path)
        with _named_as_run_dir(path):
            _refuse_occupied(path)
            made_folder = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            lock = RunLock(path / LOCK_NAME)
            try:
                _refuse_occupied(path)
                for folder in _NEW_FOLDERS:
                    (path / folder).mkdir(exist_ok=True)
                replace_file(path / CONFIG_NAME, dump_config(config).encode())
                _add_session(path)
                manifest = manifests.new_manifest(config_hash(config), prompt_digest)
                manifests.write_manifest(path, manifest)
                sync_folder(path.parent)
            except BaseException:
                lock.release()
                raise
        run = cls(path, manifest, lock)
        run._made_folder = made_folder
        return run

    @staticmethod
    def check_free(path: str | Path) -> None:
        """Raise RunDirectoryError when ``create`` would refuse ``path``, for its name or what is there."""
        path = Path(path)
        with _named_as_run_dir(path):
            _refuse_occupied(path)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        """Open a run to read it, live or finished.

        Raises RunDirectoryError when it is missing, foreign, damaged or of a newer format.
        """
        return cls(Path(path), manifests.read_manifest(Path(path)), lock=None)

    @classmethod
    def resume(cls, path: str | Path, config: Config | None = None, *, prompt_digest: str = "") -> RunDirectory:
        """Open a run to go on writing; follow it by ``truncate_after`` with the step of the checkpoint in use.

        config: settings asked for, None for the run's own; CHANGEABLE keys are stored, any other difference raises
        Raises RunDirectoryError as ``open`` does, when another process holds the run, when config.yaml was edited,
        and when a fixed setting or the prompts changed, naming the key and both values.
        """
        path = Path(path)
        manifest = manifests.read_manifest(path)
        with disk_errors(path):
            lock = RunLock(path / LOCK_NAME)
            try:
                run = cls(path, manifest, lock)
                run._check_prompts(prompt_digest)
                run._adopt_config(config)
                for folder in (path, path / EPISODES, path / EVALUATIONS, path / CHECKPOINTS):
                    remove_temporaries(folder)
                _add_session(path)
            except BaseException:
                lock.release()
                raise
        return run

    @property
    def checkpoints_path(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def run_id(self) -> str:
        return self.manifest.run_id

    @property
    def writable(self) -> bool:
        return self._lock is not None and self._lock.held

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever recorded: no metrics, episode or checkpoint, nor anything that is not the run's."""
        found = {str(entry.relative_to(self.path)) for entry in self.path.rglob("*")}
        return found <= {*_NEW_FILES, *_NEW_FOLDERS, LOCK_NAME}

    def discard(self) -> bool:
        """Undo ``create``, of an empty run; whether the run is gone.

        Only what was made goes: a folder that was there before stays, and so does what somebody puts into it meanwhile.
        The manifest first, without which the rest counts as a start that was killed, and may be used again; the lock
        last, so that nobody else starts meanwhile.
        """
        files = [(self.path / name).unlink for name in _NEW_FILES]
        folders = [(self.path / name).rmdir for name in _NEW_FOLDERS]
        for remove in (*files, *folders, (self.path / LOCK_NAME).unlink, *[self.path.rmdir] * self._made_folder):
            with suppress(OSError):
                remove()
        return not (self.path / manifests.MANIFEST_NAME).exists()

    @cached_property
    def config(self) -> Config:
        """The run's configuration. Raises RunDirectoryError when this version can't read it."""
        try:
            return build_config(without_retired(self._config_values()))
        except ConfigError as error:
            raise RunDirectoryError(f"{self.path / CONFIG_NAME} is not readable by this version: {error}") from error

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add the one line of ``step``; steps ascend. On the disk when this returns; NaN and infinities become null.

        Raises RunDirectoryError for a step that is not after the last, a full disk, or a run opened for reading.
        """
        self._require_writable()
        self._metrics.append(step, values)

    def read_metrics(self) -> list[dict[str, float]]:
        """One mapping per step, ascending, ``"step"`` among its keys; null comes back as NaN."""
        return self._metrics.read()

    def episode_table(self, scored: Sequence[ScoredEpisode], rollouts: Sequence[Rollout]) -> pa.Table:
        """Episodes as they are stored: of their pixels there are thumbnails at most. Needs no lock.

        Raises RunDirectoryError for a rollout of no episode.
        """
        images = self.config.images
        side = images.thumbnail_side if images.thumbnails == "on" else None
        return build_episode_table(scored, rollouts, side)

    def write_episodes(self, step: int, parts: Sequence[pa.Table]) -> Path:
        """Write all episodes of ``step``, the ``episode_table`` of each worker, in one file.

        Raises RunDirectoryError for a full disk, or a run opened for reading.
        """
        self._require_writable()
        return self._write_table(EPISODES, step, pa.concat_tables(parts))

    def episode_steps(self) -> list[int]:
        """Steps with an episode file, ascending."""
        return self._steps_in(EPISODES)

    def read_episodes(self, step: int) -> pa.Table:
        """The episodes of ``step``, columns as EPISODE_SCHEMA. Raises RunDirectoryError when missing or damaged."""
        return self._read_table(EPISODES, step)

    def write_evaluation(self, step: int, evaluation: Evaluation) -> Path:
        """Keep the outcome of every held-out problem. Raises RunDirectoryError as ``write_episodes`` does."""
        self._require_writable()
        return self._write_table(EVALUATIONS, step, evaluation_table(evaluation))

    def read_evaluations(self) -> dict[int, Evaluation]:
        """Every evaluation by step, ascending. Raises RunDirectoryError when a file is damaged."""
        return {
            step: evaluation_from_table(self._read_table(EVALUATIONS, step)) for step in self._steps_in(EVALUATIONS)
        }

    def truncate_after(self, step: int) -> None:
        """Make the run as it was when the checkpoint of ``step`` was saved: later metrics lines, a torn last line,
        later episodes, evaluations and (damaged or abandoned) checkpoints go. 0 goes back to before training.

        Raises CheckpointError, before anything is dropped, when an intact later checkpoint is named as best.
        """
        self._require_writable()
        with disk_errors(self.path):
            discard_after(self.checkpoints_path, step)
            self._metrics.truncate_after(step)
            for folder in (EPISODES, EVALUATIONS):
                for later in self._steps_in(folder):
                    if later > step:
                        self._step_file(folder, later).unlink()
                sync_folder(self.path / folder)

    def sessions(self) -> list[dict[str, JSON]]:
        """The environment of each session, oldest first: the start and every resume."""
        return _read_sessions(self.path)

    def close(self) -> None:
        """Release the lock; the run stays readable."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_writable(self) -> None:
        if not self.writable:
            raise RunDirectoryError(f"{self.path} is open for reading only; use create or resume to write")

    def _step_file(self, folder: str, step: int) -> Path:
        return self.path / folder / f"{checkpoint_name(step)}.parquet"

    def _steps_in(self, folder: str) -> list[int]:
        matches = (_STEP_FILE.fullmatch(path.name) for path in (self.path / folder).glob("step-*.parquet"))
        return sorted(int(match[1]) for match in matches if match)

    def _write_table(self, folder: str, step: int, table: pa.Table) -> Path:
        path = self._step_file(folder, step)
        write_table(path, table)
        return path

    def _read_table(self, folder: str, step: int) -> pa.Table:
        path = self._step_file(folder, step)
        if path.is_file():
            return read_table(path)
        steps = self._steps_in(folder)
        found = f"steps {steps[0]} to {steps[-1]} ({len(steps)} files)" if steps else "none"
        raise RunDirectoryError(f"{path}: no {folder} of step {step}; this run has {found}")

    def _config_values(self) -> dict[str, Any]:
        path = self.path / CONFIG_NAME
        try:
            values = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise RunDirectoryError(f"{path}: {error}; restore it from a copy") from error
        if not isinstance(values, dict):
            raise RunDirectoryError(f"{path}: expected keys with values; restore it from a copy")
        return values

    def _check_prompts(self, prompt_digest: str) -> None:
        before = self.manifest.prompt_digest
        if before and prompt_digest and before != prompt_digest:
            raise RunDirectoryError(
                f"{self.path}: the prompts changed since the run was started (prompt digest {before}, "
                f"now {prompt_digest}); restore the templates or the package version, or start a new run"
            )

    def _adopt_config(self, requested: Config | None) -> None:
        """Store changeable settings that differ; the values of all others stay as they were written at the start."""
        values = self._config_values()
        self._update_hash(values)
        if hash_values(values) != self.manifest.config_hash:
            raise RunDirectoryError(
                f"{self.path / CONFIG_NAME} was edited in a setting that can't change during a run; restore it "
                f"(only {', '.join(CHANGEABLE)} may change), or start a new run"
            )
        if requested is None:
            return
        check_resumable(self.config, requested)
        done = max((step for step, _ in list_checkpoints(self.checkpoints_path)), default=0)
        if requested.steps < done:
            raise RunDirectoryError(
                f"steps={requested.steps}: {self.path} has done {done} already; give that many or more, or a new run"
            )
        if requested != self.config:
            values = with_changes(values, requested.model_dump(mode="json"))
            replace_file(self.path / CONFIG_NAME, yaml.safe_dump(values, sort_keys=False).encode())
            del self.config

    def _update_hash(self, values: Mapping[str, Any]) -> None:
        """Of an unedited run of an earlier version, which counted more settings as fixed, store today's hash."""
        if hash_values(values, also_fixed=RESOURCES) == self.manifest.config_hash:
            self.manifest = replace(self.manifest, config_hash=hash_values(values))
            manifests.write_manifest(self.path, self.manifest)


@contextmanager
def _named_as_run_dir(path: Path) -> Iterator[None]:
    """Like ``disk_errors``, for a folder that the user chose by ``run_dir``."""
    try:
        with names_path(path):
            yield
    except OSError as error:
        raise RunDirectoryError(
            f"run_dir={path}: can't be written: {error.filename}: {error.strerror or error}; "
            f"{free_space(path.absolute().parent)} on that disk; choose another run_dir"
        ) from error


def _refuse_occupied(path: Path) -> None:
    """A folder with run.lock but no manifest is what a killed ``create`` leaves; it may be used again."""
    if not path.exists():
        return
    if not path.is_dir():
        raise RunDirectoryError(f"{path} is a file; choose another run_dir")
    if (path / manifests.MANIFEST_NAME).exists():
        manifests.read_manifest(path)
        raise RunDirectoryError(f"{path} already holds a run: `trinity-vlm resume {path}`, or choose another run_dir")
    if any(path.iterdir()) and not (path / LOCK_NAME).exists():
        raise RunDirectoryError(f"{path} is not empty and not a run directory; choose another run_dir")


def _add_session(path: Path) -> None:
    sessions: list[JSON] = [*_read_sessions(path), describe_environment()]
    replace_file(path / ENVIRONMENT_NAME, dumps(sessions, indent=1).encode())


def _read_sessions(path: Path) -> list[dict[str, JSON]]:
    file = path / ENVIRONMENT_NAME
    try:
        values = loads(file.read_bytes()) if file.exists() else []
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{file}: damaged: {error}; delete it") from error
    if not isinstance(values, list):
        raise RunDirectoryError(f"{file}: expected a list of sessions; delete it")
    return [session for session in values if isinstance(session, dict)]
