"""``trinity-vlm warmup``: the supervised format warm-up before self-evolution."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trinity_vlm.cli.training import Overrides
from trinity_vlm.config import load_config
from trinity_vlm.errors import UserError


def warmup(
    preset: Annotated[str, typer.Argument(metavar="PRESET|CONFIG.yaml", help="names the model and the prompts")],
    data: Annotated[
        Path,
        typer.Option("--data", help=".jsonl or .parquet of image, question, reference, reasoning (about 300 rows)"),
    ],
    out: Annotated[Path, typer.Option("--out", help="folder for the warmed-up model")],
    settings: Overrides = None,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    lr: Annotated[float, typer.Option(min=0.0)] = 2e-5,
) -> None:
    """Teach a backbone the Solver's form from a few hundred solved questions (the paper's A.1; defaults are its own).

    This is supervised: it is for the form, and must be told when comparing with the untouched model.

        trinity-vlm warmup qwen3-vl-8b --data solved.jsonl --out warmed
        trinity-vlm train qwen3-vl-8b model.path=warmed images.source=my_folder/
    """
    from trinity_vlm.supervised.display import progress_bar
    from trinity_vlm.warmup import WarmupSettings, run_warmup

    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another --out")
    config = load_config(preset, settings or [])
    chosen = WarmupSettings(epochs=epochs, batch_size=batch_size, lr=lr)
    console = Console()
    with progress_bar(console) as show:
        report = run_warmup(data, config.model, config.roles, out, chosen, show)
    left_out = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items()) or "none"
    console.print(f"{report.num_examples} examples used, left out: {left_out}; model written to {out}", soft_wrap=True)
