"""The command line: ``trinity-vlm COMMAND --help`` teaches each command.

Exit codes: 0 done, 1 a failure of the run (its last checkpoint stays usable) or a machine that can't run it,
2 something for you to fix in the command line, the settings or the files that they name, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that wait actively between the short kernels of a small model cost several times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich.console import Console
from rich.markup import escape

from trinity_vlm import __version__
from trinity_vlm.cli import demonstrating, doctoring, exporting, keys, looking, playing, training, warming
from trinity_vlm.cli.invocation import as_typed, invocation
from trinity_vlm.errors import TrinityError, UserError

EXIT_FAILURE, EXIT_USER, EXIT_INTERRUPT = 1, 2, 130

app = typer.Typer(
    name="trinity-vlm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Self-evolving vision-language models: one VLM asks, solves and verifies, and learns from unlabeled images.",
    epilog=f"Start with:  {escape(invocation())} demo    "
    f"Then:  {escape(invocation())} train tiny images.source=MY_FOLDER steps=20",
)
app.command("demo")(demonstrating.demo)
app.command("train")(training.train)
app.command("resume")(training.resume)
app.command("play")(playing.play)
app.command("solve")(playing.solve)
app.command("images")(looking.images)
app.command("warmup")(warming.warmup)
app.command("export")(exporting.export)
app.command("keys")(keys.keys)
app.command("doctor")(doctoring.doctor)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="print the version and stop"),
    verbose: bool = typer.Option(False, "--verbose", "-v", help="show library warnings and log messages"),
) -> None:
    if version:
        typer.echo(f"trinity-vlm {__version__}")
        raise typer.Exit
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s"
    )
    if not verbose:
        warnings.simplefilter("ignore", FutureWarning)
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()


def run() -> None:
    """Entry point: turns deliberate errors into a text and an exit code."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run one command line; returns its exit code."""
    console = Console(stderr=True)
    try:
        app(args=arguments, prog_name=invocation())
    except SystemExit as done:
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        if code == EXIT_INTERRUPT:
            console.print("interrupted", highlight=False)
        return code
    except UserError as error:
        console.print(f"[bold red]error:[/] {escape(as_typed(str(error)))}", highlight=False, soft_wrap=True)
        return EXIT_USER
    except TrinityError as error:
        console.print(f"[bold red]failed:[/] {escape(as_typed(str(error)))}", highlight=False, soft_wrap=True)
        return EXIT_FAILURE
    return 0
