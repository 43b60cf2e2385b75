"""``trinity-vlm export``: what a run learnt, for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from trinity_vlm.cli.adapter_card import write_card
from trinity_vlm.errors import UserError
from trinity_vlm.rundir import RunDirectory, export_pairs


class What(StrEnum):
    """What `export` can write."""

    ADAPTER = "adapter"
    MERGED = "merged"
    PAIRS = "pairs"


def export(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="folder (adapter, merged) or .parquet file (pairs) to write")
    ],
    what: Annotated[
        What, typer.Option(help="adapter: PEFT; merged: a whole model; pairs: verified questions and answers")
    ] = What.ADAPTER,
    images: Annotated[bool, typer.Option("--images", help="pairs: include thumbnails")] = False,
) -> None:
    """Write the trained Solver, or the verified question-answer pairs, of a run.

    The best checkpoint by held-out accuracy is used, else the latest.

        trinity-vlm export runs/demo --out adapter
        trinity-vlm export runs/demo --what merged --out solver
        trinity-vlm export runs/demo --what pairs --out pairs.parquet

    An adapter's README.md says what it comes from and how peft and vLLM load
    it. A merged model loads in transformers and vLLM; where its family also
    takes videos (Qwen-VL), AutoProcessor needs torchvision, AutoImageProcessor
    and AutoTokenizer do not. Pairs: datasets.load_dataset("parquet", ...).
    """
    if images and what is not What.PAIRS:
        raise UserError("--images goes with --what pairs only: an adapter or a model holds no pictures")
    if out.exists() and (out.is_file() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another --out")
    run = RunDirectory.open(path)
    console = Console()
    if what is What.PAIRS:
        count = export_pairs(run, out, images=images)
        console.print(f"{count} verified question-answer pairs written to {out}")
        return
    from trinity_vlm.assembly import open_backbone
    from trinity_vlm.backbone.export import needs_torchvision, save_adapter, save_merged
    from trinity_vlm.recovery import load_adapters
    from trinity_vlm.types import POLICY

    backbone = open_backbone(run.config)[0]
    step = load_adapters(backbone, run)
    if what is What.ADAPTER:
        save_adapter(backbone, POLICY, out)
        write_card(out, run, step)
        console.print(f"PEFT adapter of step {step} written to {out}")
        return
    report = save_merged(backbone.factors(POLICY), run.config.model, out)
    console.print(
        f"merged model of step {step} written to {out}; the learnt change is {report.relative_size:.2%} of the "
        f"weights' norm and {report.survived:.1%} of it survives the rounding to the model's dtype"
    )
    if report.survived < 0.9:
        console.print("much of the change is lost in rounding: prefer --what adapter", style="yellow")
    if needs_torchvision(out):
        console.print(
            "AutoProcessor can't load it in this environment: its video part needs torchvision. For images and text "
            "AutoImageProcessor and AutoTokenizer do without",
            style="yellow",
        )
