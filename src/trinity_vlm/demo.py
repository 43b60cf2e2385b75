"""The demonstration: the embedded VLM teaches itself on procedural images, then meets ordinary photos.

Images of the microcosm carry no labels into the loop, but their scenes are known, so that afterwards every belief of
the run can be compared with the truth. On photos nothing is known: they show that any folder works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from trinity_vlm.config import Config, load_config
from trinity_vlm.environments import open_environment
from trinity_vlm.rundir import Evaluation, RunDirectory
from trinity_vlm.statistics import Interval, paired_change

SHORT_STEPS = 40
LONG_STEPS = 200
PHOTO_STEPS = 3
WINDOW = 10

CURVES: tuple[tuple[str, str], ...] = (
    ("fmt_q", "Questioner format"),
    ("fact", "factuality R_fact"),
    ("diff", "difficulty R_diff (Verifier)"),
    ("p_sel", "selection rate p_sel"),
    ("chal", "challenge R_chal"),
    ("chal_selected", "challenge, selected only"),
    ("fmt_s", "Solver format"),
    ("correct", "correctness R_correct (self-judged)"),
    ("reason", "reasoning R_reason"),
    ("response_length/solver", "tokens per solution"),
)
TRUTHS: tuple[tuple[str, str], ...] = (
    ("truth/grounded", "candidates grounded"),
    ("truth/right", "candidates with a right answer"),
    ("truth/pass_precision", "Verifier precision: right among passed"),
    ("truth/pass_recall", "Verifier recall: passed among right"),
    ("truth/reference_right", "selected references right"),
    ("truth/solver_right", "solutions really right"),
    ("truth/label_agreement", "R_correct agrees with the truth"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the summary: a metric's mean over the first and the last steps of the run."""

    name: str
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What the demonstration reports, whatever it is."""

    steps: int
    window: int
    curves: tuple[Row, ...]
    truths: tuple[Row, ...]
    before: Interval | None
    after: Interval | None
    change: Interval | None
    problems: int


def demo_config(steps: int, overrides: Sequence[str] = ()) -> Config:
    """The tiny preset for ``steps`` outer steps on unlabeled microcosm images."""
    return load_config("tiny", [f"steps={steps}", *overrides])


def photo_config(folder: Path, overrides: Sequence[str] = ()) -> Config:
    """A few steps on ordinary pictures, with no evaluation: nothing is known about them."""
    return load_config(
        "tiny",
        [*overrides, f"steps={PHOTO_STEPS}", f"images.source={folder}", "images.per_step=4", "evaluation.source=null"],
    )


def photo_folder() -> Path:
    """The public-domain pictures inside the package."""
    return Path(str(resources.files("trinity_vlm.tiny") / "pictures"))


def save_picture(run: RunDirectory) -> Path:
    """Write a microcosm picture that no run trains on beside the figure: the embedded model knows no other kind."""
    path = run.path / "picture.png"
    open_environment("microcosm").image("evolve-heldout", 0)[1].save(path)
    return path


def summarise(run: RunDirectory) -> Summary:
    """Windows of the curves and the paired change of held-out accuracy, from what the run wrote."""
    rows = [row for row in run.read_metrics() if row["step"] > 0]
    window = max(1, min(WINDOW, len(rows) // 2))
    evaluations = run.read_evaluations()
    first, last = evaluations.get(0), evaluations.get(run.config.steps)
    return Summary(
        steps=len(rows),
        window=window,
        curves=_rows(rows, window, CURVES),
        truths=_rows(rows, window, TRUTHS),
        before=first.accuracy if first else None,
        after=last.accuracy if last else None,
        change=_change(first, last),
        problems=len(first.correct) if first else 0,
    )


def _change(first: Evaluation | None, last: Evaluation | None) -> Interval | None:
    if first is None or last is None or len(first.correct) != len(last.correct) or len(first.correct) < 2:
        return None
    return paired_change(first.correct, last.correct)


def _rows(rows: Sequence[Mapping[str, float]], window: int, names: Sequence[tuple[str, str]]) -> tuple[Row, ...]:
    found = []
    for key, name in names:
        values = [row[key] for row in rows if key in row]
        if values:
            found.append(Row(name, _mean(values[:window]), _mean(values[-window:])))
    return tuple(found)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
