"""``trinity-vlm images``: look at an image source before training on it."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trinity_vlm.cli.playing import Overrides
from trinity_vlm.config import ModelConfig, load_config
from trinity_vlm.errors import ImageSourceError, ModelLoadError
from trinity_vlm.images import GridSize, open_source
from trinity_vlm.images.audit import MAX_EXAMPLES, ImageAudit, Size, audit

MOST_COMMON = 8


def images(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="whatever images.source takes: folder, glob, hub id")],
    preset: Annotated[
        str, typer.Option("--preset", help="preset or .yaml file with the limits and the model")
    ] = "tiny",
    settings: Overrides = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="look at this many at random; for sources too large to read whole")
    ] = None,
) -> None:
    """Decode the images of a source as training would: how many are good, why others are bad, and their sizes.

    Limits (images.*) and the sizes that images become (model.min_pixels, model.max_pixels) are the preset's.

        trinity-vlm images photos/
        trinity-vlm images 'shards/*.parquet' --preset qwen3-vl-8b --sample 1000
        trinity-vlm images photos/ --set images.min_side=64

    Exits with 2 when a run would refuse the source: no image is good, or more than images.max_skip_rate are bad.
    """
    config = load_config(preset, settings or [])
    config = config.model_copy(update={"images": config.images.model_copy(update={"source": source})})
    console = Console()
    import trinity_vlm.environments  # noqa: F401  registers its schemes of images.source

    opened = open_source(config.images)
    grid = _grid(config.model, console)
    with console.status("opening the source") as status:
        report = audit(
            opened,
            config.images,
            grid,
            sample,
            lambda r: status.update(f"images checked: {r.num_checked}, bad: {r.reasons.total()}"),
        )
    show_audit(report, grid, console)
    num_bad, limit = report.reasons.total(), config.images.max_skip_rate
    if report.num_usable == 0 or num_bad > limit * report.num_checked:
        raise ImageSourceError(
            f"images.source={source!r}: {num_bad} of {report.num_checked} images can't be used; a run stops above "
            f"images.max_skip_rate={limit:g}. Repair or remove them, or relax the images.* limit that the reason names"
        )


def show_audit(report: ImageAudit, grid: GridSize | None, console: Console) -> None:
    """Print what was found."""
    console.print(f"images checked: {report.num_checked}, good: {report.num_usable}, bad: {report.reasons.total()}")
    for reason, count in report.reasons.most_common():
        console.print(f"  {count} {reason}", highlight=False)
    for uid, reason in report.examples:
        console.print(f"  [dim]{escape(uid)}: {reason}[/]", highlight=False, soft_wrap=True)
    if report.reasons.total() > MAX_EXAMPLES:
        console.print(f"  [dim]... and {report.reasons.total() - MAX_EXAMPLES} more[/]", highlight=False)
    if report.num_usable:
        console.print(_sizes("size in the source", report.stored))
        if grid is not None:
            console.print(_sizes("size for the model", report.resized, grid))


def _sizes(title: str, sizes: Counter[Size], grid: GridSize | None = None) -> Table:
    table = Table(title, "images", *(["tokens each"] if grid else []), title_justify="left")
    for (width, height), count in sizes.most_common(MOST_COMMON):
        tokens = [f"{width * height // grid.unit**2}"] if grid else []
        table.add_row(f"{width}x{height}", str(count), *tokens)
    rest = len(sizes) - MOST_COMMON
    if rest > 0:
        others = sizes.total() - sum(count for _, count in sizes.most_common(MOST_COMMON))
        table.add_row(f"{rest} other sizes", str(others))
    return table


def _grid(config: ModelConfig, console: Console) -> GridSize | None:
    """The grid of the model's processor; without one only a note, since the images can be checked all the same."""
    from trinity_vlm.backbone.loading import load_processor
    from trinity_vlm.sizing import pixel_grid

    try:
        return pixel_grid(load_processor(config), config)
    except ModelLoadError as error:
        console.print(
            f"sizes for the model are not shown: {escape(str(error).splitlines()[0])}", style="yellow", soft_wrap=True
        )
        return None
