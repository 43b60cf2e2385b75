"""``trinity-vlm play`` and ``trinity-vlm solve``: look at one image without training."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from trinity_vlm.config import Config, apply_overrides, build_config, load_config
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.types import Candidate, Episode, ImageRecord, ScoredEpisode, Solution

if TYPE_CHECKING:
    from trinity_vlm.assembly import Players

RunOption = Annotated[Path | None, typer.Option("--run", help="use what this run learnt, and its settings")]
PresetOption = Annotated[str, typer.Option("--preset", help="preset or .yaml file, when no --run is given")]
ImageArgument = Annotated[Path, typer.Argument(metavar="IMAGE", help="an image file")]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a setting to change")]


def play(
    image: ImageArgument,
    run: RunOption = None,
    preset: PresetOption = "tiny",
    settings: Overrides = None,
    save: Annotated[Path | None, typer.Option("--save", help="write the episode to this .parquet file")] = None,
) -> None:
    """Play one episode on an image and print it: questions, verdicts, solutions, rewards. Nothing is trained.

    trinity-vlm play photo.jpg
    trinity-vlm play photo.jpg --run runs/demo --save episode.parquet
    """
    from trinity_vlm.episode import play_episode
    from trinity_vlm.extensions import advantage_rule, score

    players, config, record = _open(image, run, preset, settings)
    with closing(players.cast):
        episode = asyncio.run(play_episode(record, 0, players.cast))
    scored = score(episode, config.rewards)
    show_episode(scored, Console())
    if save is not None:
        from trinity_vlm.advantages import collect_rollouts
        from trinity_vlm.rundir import write_episode_file

        side = config.images.thumbnail_side if config.images.thumbnails == "on" else None
        write_episode_file(save, [scored], collect_rollouts([scored], advantage_rule(config.rewards)), side)
        Console().print(f"episode written to {save}")


def solve(
    image: ImageArgument,
    question: Annotated[str, typer.Argument(help="a question about the image")],
    run: RunOption = None,
    preset: PresetOption = "tiny",
    settings: Overrides = None,
    greedy: Annotated[bool, typer.Option(help="--no-greedy samples as in training")] = True,
) -> None:
    """Answer a question about an image with the (trained) Solver; prints its reasoning and its boxed answer.

    Exits with 1 when the answer is malformed (no box, no closed reasoning).

    trinity-vlm solve chart.png "Which bar is the highest?" --run runs/demo
    """
    from trinity_vlm.engine.protocol import GenerationRequest, Sampling
    from trinity_vlm.types import POLICY, CallType

    players, config, record = _open(image, run, preset, settings)
    cast, sampling = players.cast, config.roles.policy_sampling
    temperature = 0.0 if greedy else sampling.temperature
    request = GenerationRequest(
        prompt=cast.solver.prompt(record, question),
        adapter=POLICY,
        sampling=Sampling(temperature, sampling.top_p, sampling.top_k, config.roles.policy_tokens),
        seed=config.seed,
        call=CallType.SOLVE,
        order_key=(record.uid,),
    )
    with closing(cast):
        (completion,) = asyncio.run(cast.engine.generate(request))
    parsed = cast.solver.parse(completion)
    console = Console()
    if parsed.format_valid:
        console.print(Panel(escape(parsed.reasoning or ""), title="reasoning", title_align="left"))
        console.print(f"[bold]answer:[/] {escape(parsed.answer or '')}", highlight=False)
    else:
        console.print(Panel(escape(completion.text), title=f"malformed: {parsed.error}", title_align="left"))
    if not parsed.format_valid:
        raise typer.Exit(1)


def _open(
    image: Path, run: Path | None, preset: str, settings: list[str] | None
) -> tuple[Players, Config, ImageRecord]:
    """Players, configuration and the image as the model sees it; a bad one is refused before the weights load."""
    from trinity_vlm.assembly import open_players, serve_adapters
    from trinity_vlm.images.single import read_image
    from trinity_vlm.recovery import load_adapters
    from trinity_vlm.sizing import pixel_grid

    config = _settings(run, preset, settings or [])
    read_image(image, config.images, None)
    players = open_players(config)
    record = read_image(image, config.images, pixel_grid(players.backbone.processor, config.model))
    version = 0 if run is None else load_adapters(players.backbone, RunDirectory.open(run))
    serve_adapters(players.cast.engine, players.backbone, version)
    return players, config, record


def _settings(run: Path | None, preset: str, overrides: list[str]) -> Config:
    if run is None:
        return load_config(preset, overrides)
    values = RunDirectory.open(run).config.model_dump(mode="json")
    apply_overrides(values, overrides)
    return build_config(values)


def show_episode(scored: ScoredEpisode, console: Console) -> None:
    """Print an episode as a person reads it."""
    episode = scored.episode
    console.rule(f"[bold]{escape(episode.image.uid)}")
    for candidate, reward in zip(episode.candidates, scored.questioner_rewards, strict=True):
        mark = "[bold green]selected[/]" if candidate.index == episode.selected else ""
        console.print(f"[bold]candidate {candidate.index}[/] {mark} R_Q = {reward.total:.3f}", highlight=False)
        console.print(_candidate_text(candidate), highlight=False)
    if episode.selected is None:
        console.print("no candidate passed the Verifier: the episode ends with Questioner rollouts only")
    for solution, solver_reward in zip(episode.solutions, scored.solver_rewards, strict=True):
        console.print(f"[bold]solution {solution.index}[/] R_S = {solver_reward.total:.3f}", highlight=False)
        console.print(_solution_text(solution), highlight=False)
    _show_dispute(episode, console)


def _candidate_text(candidate: Candidate) -> str:
    if not candidate.format_valid:
        return f"  malformed ({candidate.format_error}): {escape(candidate.completion.text[:300])}"
    verdict = candidate.screening
    lines = [f"  Q: {escape(candidate.question or '')}", f"  A: {escape(candidate.answer or '')}"]
    if verdict is not None and verdict.parsed:
        lines.append(f"  Verifier: fact_q {verdict.fact_q}, corr_a {verdict.corr_a}, difficulty {verdict.difficulty}")
        lines.append(f"  [dim]{escape(verdict.justification)}[/]")
    else:
        lines.append("  Verifier: unparsed")
    return "\n".join(lines)


def _solution_text(solution: Solution) -> str:
    if not solution.format_valid:
        return f"  malformed ({solution.format_error}): {escape(solution.completion.text[:300])}"
    lines = [f"  [dim]{escape(solution.reasoning or '')}[/]", f"  answer: {escape(solution.answer or '')}"]
    if solution.correctness is not None:
        lines.append(f"  correct {solution.correctness.correct} (decided by {solution.correctness.tier})")
    if solution.reasoning_verdict is not None:
        lines.append(f"  reasoning score {solution.reasoning_verdict.score}")
    return "\n".join(lines)


def _show_dispute(episode: Episode, console: Console) -> None:
    dispute = episode.dispute
    if dispute is None:
        return
    console.print(
        f"[bold]dispute[/] reference {escape(dispute.reference)!r} against majority "
        f"{escape(dispute.majority_answer)!r}: {dispute.winner} wins"
        + (" (no verdict could be read)" if dispute.adopted_without_verdict else ""),
        highlight=False,
    )
