"""Trackers: refused with the extra's name when missing; the real ones where they are installed."""

import importlib.util
import math
import sys

import pytest
from rundir_helpers import make_config

from trinity_vlm.config import TrackingConfig
from trinity_vlm.errors import TrainingError
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.tracking import open_trackers

NAMES = ("tensorboard", "wandb", "trackio")


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "run", make_config()) as run:
        yield run


def test_no_tracker_is_opened_unless_asked(run):
    """The default sends metrics nowhere."""
    assert open_trackers(TrackingConfig(), run) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_names_its_extra(run, name, monkeypatch):
    """The error gives the key and the command to install the extra, for each tracker."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        TrainingError, match=rf"tracking\.trackers names {name}: not installed.*pip install 'trinity-vlm\[{name}\]'"
    ):
        open_trackers(TrackingConfig(trackers=(name,)), run)


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is an optional extra")


def log_resume_log(run, name):
    """Steps 1 to 3, then a resume from step 2 that plays step 3 again and adds step 4."""
    config = TrackingConfig(trackers=(name,), project="test")
    for steps, keep in (((1, 2, 3), 0), ((3, 4), 2)):
        run.truncate_after(keep)
        (tracker,) = open_trackers(config, run)
        for step in steps:
            values = {"fact": step / 10 + (0.05 if keep else 0), "absent": math.nan}
            run.append_metrics(step, values)
            tracker.log(step, values)
        tracker.close()


@needs("tensorboard")
def test_tensorboard_shows_each_step_once_after_a_resume(run):
    """Points after the checkpoint are replaced by those of the resumed run; NaN is not a point."""
    log_resume_log(run, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run.path / "events"))
    events.Reload()
    points = [(e.step, round(e.value, 3)) for e in events.Scalars("fact")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.35), (4, 0.45)]
    assert events.Tags()["scalars"] == ["fact"]


@needs("wandb")
def test_wandb_logs_offline(run, monkeypatch):
    """A run under the run directory's own id; without a network it stays in the run directory."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_resume_log(run, "wandb")
    assert list(run.path.glob(f"wandb/offline-run-*-{run.run_id}"))


@needs("trackio")
def test_trackio_logs_to_its_local_store(run, monkeypatch, tmp_path):
    """Steps arrive in trackio's store under one run name over a resume."""
    import trackio

    log_resume_log(run, "trackio")
    assert len([r for r in trackio.Api().runs("test") if run.run_id in r.name]) == 1
