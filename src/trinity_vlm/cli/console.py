"""How a run looks in a terminal: plain lines that also read well in a log file, and tables."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table

from trinity_vlm.cli.invocation import as_typed
from trinity_vlm.config import Config
from trinity_vlm.roles import PromptSet
from trinity_vlm.rundir import Evaluation
from trinity_vlm.statistics import Interval, paired_change

COLUMNS = {
    "fmt_q": "candidate questions in the form asked for",
    "fact": "candidates grounded in their image; half where the reference is wrong",
    "diff": "difficulty of the candidates, as the Verifier rates it",
    "p_sel": "candidates selected to be solved: at most one of each image's",
    "chal": "solutions of a selected one that miss its reference; 0 for others",
    "fmt_s": "solutions in the form asked for",
    "correct": "solutions that meet the loop's own reference, be it right or not",
    "reason": "reasoning of well-formed solutions, as the Verifier scores it",
}
"""Metrics of a step's line, as ``metrics`` defines them, in a user's words."""
OTHER_COLUMNS = {
    "kept q/s": "Questioner's and Solver's completions that the update learns from",
    "s/step": "seconds of this step",
    "left": "time to the last step, at the mean pace of the last 20",
}
HEADER_EVERY = 20


class ConsoleReporter:
    """Tells the terminal: a line a step with the names of Figure 2, evaluations with intervals, time left.

    held_out: where the problems of evaluations come from
    """

    def __init__(self, console: Console, held_out: str | None = None) -> None:
        self.console = console
        self._on = f" on {held_out}" if held_out else ""
        self.evaluations: dict[int, Evaluation] = {}
        self._lines = 0
        self._seconds: list[float] = []

    def note(self, text: str) -> None:
        self.console.print(as_typed(text), style="dim", highlight=False, markup=False, soft_wrap=True)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        if self._lines % HEADER_EVERY == 0:
            if self._lines == 0:
                self.console.print(legend())
            names = "".join(f"{name:>9}" for name in COLUMNS)
            self.console.print(
                f"{'step':>9}{names}{'kept q/s':>10}{'s/step':>8}{'left':>8}", style="bold", soft_wrap=True
            )
        self._lines += 1
        self._seconds = [*self._seconds[-19:], metrics["seconds/step"]]
        left = sum(self._seconds) / len(self._seconds) * (total - step)
        values = "".join(f"{metrics[key]:>9.3f}" if key in metrics else f"{'-':>9}" for key in COLUMNS)
        kept = f"{metrics['retained/questioner']:.0f}/{metrics['retained/solver']:.0f}"
        self.console.print(
            f"{step:>4}/{total:<4}{values}{kept:>10}{metrics['seconds/step']:>8.1f}{duration(left):>8}",
            highlight=False,
            soft_wrap=True,
        )

    def evaluated(self, step: int, evaluation: Evaluation) -> None:
        self.evaluations[step] = evaluation
        accuracy = evaluation.accuracy
        text = (
            f"held-out Solver accuracy{self._on} after {step} steps: {percent(accuracy)} "
            f"(n = {len(evaluation.correct)}, well-formed {100 * evaluation.format_rate:.1f} %)"
        )
        first = min(self.evaluations)
        if first < step and comparable(self.evaluations[first], evaluation):
            change = paired_change(self.evaluations[first].correct, evaluation.correct)
            text += f"; change since step {first}: {points(change)}"
        self.console.print(text, style="bold cyan", highlight=False, soft_wrap=True)


def legend() -> Table:
    """What the columns of a step's line are."""
    table = Table.grid(padding=(0, 2))
    table.add_row("step", "outer steps done; fmt_q to reason are means of one step, from 0 to 1")
    for name, meaning in (COLUMNS | OTHER_COLUMNS).items():
        table.add_row(name, meaning)
    table.columns[0].style, table.columns[1].style = "bold", "dim"
    return table


def comparable(first: Evaluation, second: Evaluation) -> bool:
    """Whether two evaluations were of the same problems, as far as their numbers and kinds tell."""
    return len(first.correct) > 1 and first.kinds == second.kinds


def percent(interval: Interval) -> str:
    """For example ``64.2 % [61.2, 67.1]``: a proportion with its 95 % interval."""
    return f"{100 * interval.value:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def points(interval: Interval) -> str:
    """For example ``+3.1 points [+1.0, +5.2]``: a change of percentages with its 95 % interval."""
    return f"{100 * interval.value:+.1f} points [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"


def duration(seconds: float) -> str:
    """For example ``42s``, ``5m07s`` or ``3h12m``."""
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02}s"
    return f"{total // 3600}h{total % 3600 // 60:02}m"


def plan(config: Config) -> Table:
    """What a run is about to do, with ceilings of calls and tokens; the measured pace follows with the first step."""
    roles, steps, per_step = config.roles, config.steps, config.images.per_step
    g, k = roles.candidates, roles.solutions
    policy_calls = per_step * (g + k)
    verifier_calls = per_step * (g + 2 * k + int(roles.disputes))
    ceiling = policy_calls * roles.policy_tokens + verifier_calls * roles.verifier_tokens
    table = Table(title="plan", show_header=False, title_justify="left")
    table.add_row("model", config.model.path)
    table.add_row("images", str(config.images.source))
    table.add_row("prompts", PromptSet.load(roles.prompts).describe())
    table.add_row("outer steps", f"{steps} x {per_step} images, G = {g}, K = {k}")
    table.add_row("policy completions", f"at most {policy_calls * steps:,}")
    table.add_row("Verifier calls", f"at most {verifier_calls * steps:,} (retries aside)")
    table.add_row("generated tokens", f"at most {ceiling * steps:,}; real completions are far shorter")
    table.add_row("update", f"{config.update.schedule}, lr {config.update.lr:g}, LoRA rank {config.lora.rank}")
    table.add_row("Verifier", f"EMA {config.ema.kind}, alpha {config.ema.alpha}")
    return table


def timestamp() -> str:
    """For names of run directories."""
    return time.strftime("%Y%m%d-%H%M%S")
