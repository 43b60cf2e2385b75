"""What a checkpoint can do in every role, against exact truth: the real prompts, parsers, sampling and engine.

    python -m trinity_vlm.tiny.measure CHECKPOINT --splits base-heldout evolve-heldout --json report.json

Solver accuracy is greedy unless a name ends in ``_sampled``. Verifier calls run unconstrained, so that their format
validity is the model's own. Everything is fixed by the seeds: the same problems for every checkpoint.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trinity_vlm.backbone import Backbone
from trinity_vlm.config import RolesConfig, SamplingConfig, load_config
from trinity_vlm.engine.protocol import Engine, GenerationRequest, Sampling
from trinity_vlm.engine.transformers_engine import TransformersEngine
from trinity_vlm.environments.microcosm import SPLITS, Microcosm
from trinity_vlm.environments.microcosm.answers import same_answer
from trinity_vlm.environments.microcosm.catalogue import QUESTION_TYPES
from trinity_vlm.environments.protocol import Problem
from trinity_vlm.errors import ConfigError
from trinity_vlm.seeds import derive_seed
from trinity_vlm.tiny.curriculum import RolePrompts, tiny_roles
from trinity_vlm.tiny.demonstrations import Demonstration, DemonstrationMix, Group, demonstrations
from trinity_vlm.tiny.demonstrations.policy import is_glance
from trinity_vlm.types import CallType, Completion, ImageRecord, Prompt

MEASURE_SEED = 700_001
GREEDY = SamplingConfig(temperature=0.0, top_p=1.0, top_k=0)

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many problems, images with G candidates each, and demonstrations per Verifier call are measured."""

    problems: int = 1024
    images: int = 128
    candidates: int = 4
    screenings: int = 512
    judgements: int = 256


class Measurer:
    """Measures one model; ``engine`` and ``roles`` are those of an episode."""

    def __init__(self, engine: Engine, roles: RolesConfig, adapter: str | None = None) -> None:
        self._engine = engine
        self._roles = roles
        self._adapter = adapter
        self._prompts = RolePrompts(roles)
        self._world = Microcosm()

    def report(self, split: str, sizes: Sizes = Sizes()) -> Metrics:
        """All roles on a split, for example ``evolve-heldout`` or ``evolve-heldout@palette-0.4``."""
        return asyncio.run(self._report(split, sizes))

    def solver(self, split: str, problems: int, *, greedy: bool = True) -> Metrics:
        """The Solver alone: accuracy in all, without yes/no, per domain and difficulty, and format validity."""
        return asyncio.run(self._solver(split, problems, greedy))

    async def _report(self, split: str, sizes: Sizes) -> Metrics:
        parts = await asyncio.gather(
            self._solver(split, sizes.problems, True),
            self._solver(split, sizes.problems, False),
            self._questioner(split, sizes.images, sizes.candidates),
            self._screening(split, sizes.screenings),
            self._reasoning(split, sizes.judgements),
            self._equivalence(split, sizes.judgements),
            self._dispute(split, sizes.judgements),
        )
        return {name: value for part in parts for name, value in part.items()}

    async def _solver(self, split: str, count: int, greedy: bool) -> Metrics:
        problems = self._world.problems(split, count, MEASURE_SEED)
        prompts = [self._prompts.solver.prompt(ImageRecord(p.uid, p.image), p.question) for p in problems]
        sampling = GREEDY if greedy else self._roles.policy_sampling
        parsed = [
            self._prompts.solver.parse(c) for c in await self._ask(CallType.SOLVE, prompts, sampling, split, greedy)
        ]
        right = [same_answer(p.answer or "", problem.answer) for p, problem in zip(parsed, problems, strict=True)]
        glanced = [is_glance(p.reasoning or "") for p in parsed]
        if not greedy:
            return {
                "solver/accuracy_sampled": _mean(right),
                "solver/format_sampled": _mean(p.format_valid for p in parsed),
                "solver/glanced_sampled": _mean(glanced),
                "solver/accuracy_glanced": _mean(r for r, g in zip(right, glanced, strict=True) if g),
                "solver/accuracy_looked": _mean(r for r, g in zip(right, glanced, strict=True) if not g),
            }
        groups: dict[str, list[bool]] = defaultdict(list)
        for problem, correct in zip(problems, right, strict=True):
            for name in _solver_groups(problem):
                groups[name].append(correct)
        return {f"solver/{name}": _mean(values) for name, values in sorted(groups.items())} | {
            "solver/format": _mean(p.format_valid for p in parsed),
            "solver/glanced": _mean(glanced),
        }

    async def _questioner(self, split: str, images: int, candidates: int) -> Metrics:
        """The model's own pairs at its own sampling, judged by the truth, then screened by the model itself."""
        rows = [(index, slot) for index in range(images) for slot in range(candidates)]
        pictures = [self._world.image(split, 10_000_000 + index) for index in range(images)]
        records = [ImageRecord(*picture) for picture in pictures]
        prompts = [self._prompts.questioner.prompt(records[index]) for index, _ in rows]
        completions = await self._ask(CallType.PROPOSE, prompts, self._roles.policy_sampling, split)
        parsed = [self._prompts.questioner.parse(c) for c in completions]
        formed = [
            (records[i], p.question or "", p.answer or "")
            for (i, _), p in zip(rows, parsed, strict=True)
            if p.format_valid
        ]
        truths = [self._world.judge(self._world.scene_of(image.uid), q, a) for image, q, a in formed]
        screened = await self._ask(
            CallType.SCREEN,
            [self._prompts.verifier.screening_prompt(*pair) for pair in formed],
            self._roles.verifier_sampling,
            split,
            "own",
        )
        passed = [self._prompts.verifier.parse_screening(c).passed for c in screened]
        return {
            "questioner/format": _mean(p.format_valid for p in parsed),
            "questioner/parsable": _mean(t.parsable for t in truths),
            "questioner/grounded": _mean(t.grounded for t in truths),
            "questioner/right": _mean(t.right for t in truths),
            "questioner/distinct": len({(q, a) for _, q, a in formed}) / max(1, len(formed)),
            "questioner/passed": _mean(passed),
            "questioner/right_among_passed": _mean(t.right for t, p in zip(truths, passed, strict=True) if p),
            "questioner/passed_among_right": _mean(p for t, p in zip(truths, passed, strict=True) if t.right),
        }

    async def _screening(self, split: str, count: int) -> Metrics:
        demos, completions = await self._verify(CallType.SCREEN, split, count)
        found = [self._prompts.verifier.parse_screening(c) for c in completions]
        truth = [self._prompts.verifier.parse_screening(_written(d)) for d in demos]
        pairs = list(zip(found, truth, strict=True))
        return {
            "screen/format": _mean(f.parsed for f in found),
            "screen/fact_q": _mean(f.fact_q == t.fact_q for f, t in pairs),
            "screen/corr_a": _mean(f.corr_a == t.corr_a for f, t in pairs),
            "screen/corr_a_grounded": _mean(f.corr_a == t.corr_a for f, t in pairs if t.fact_q),
            "screen/difficulty": _mean(f.difficulty == t.difficulty for f, t in pairs if t.fact_q),
            "screen/pass_precision": _mean(t.passed for f, t in pairs if f.passed),
            "screen/pass_recall": _mean(f.passed for f, t in pairs if t.passed),
            "screen/ungrounded_passed": _mean(f.passed for f, t in pairs if not t.fact_q),
        }

    async def _reasoning(self, split: str, count: int) -> Metrics:
        demos, completions = await self._verify(CallType.REASON, split, count)
        found = [self._prompts.verifier.parse_reasoning(c) for c in completions]
        truth = [self._prompts.verifier.parse_reasoning(_written(d)) for d in demos]
        pairs = list(zip(found, truth, strict=True))
        return {
            "reason/format": _mean(f.parsed for f in found),
            "reason/exact": _mean(f.score == t.score for f, t in pairs),
            "reason/good_or_flawed": _mean((f.score == 1) == (t.score == 1) for f, t in pairs),
        }

    async def _equivalence(self, split: str, count: int) -> Metrics:
        demos, completions = await self._verify(CallType.EQUIVALENCE, split, count)
        found = [self._prompts.verifier.parse_equivalence(c) for c in completions]
        truth = [self._prompts.verifier.parse_equivalence(_written(d)) for d in demos]
        return {
            "equivalence/format": _mean(f.parsed for f in found),
            "equivalence/accuracy": _mean(f == t for f, t in zip(found, truth, strict=True)),
        }

    async def _dispute(self, split: str, count: int) -> Metrics:
        demos, completions = await self._verify(CallType.DISPUTE, split, count)
        found = [self._prompts.verifier.parse_dispute(c) for c in completions]
        truth = [self._prompts.verifier.parse_dispute(_written(d)) for d in demos]
        return {
            "dispute/format": _mean(f.parsed for f in found),
            "dispute/accuracy": _mean(f.winner == t.winner for f, t in zip(found, truth, strict=True)),
        }

    async def _verify(self, call: CallType, split: str, count: int) -> tuple[list[Demonstration], list[Completion]]:
        """Fresh demonstrations of one call on the split's images, and what the model answers."""
        demos = held_out_demonstrations(call, split, count)
        thinks = call is CallType.DISPUTE
        sampling = self._roles.thinking_sampling if thinks else self._roles.verifier_sampling
        return demos, await self._ask(call, [self._prompts.prompt(d) for d in demos], sampling, split)

    async def _ask(
        self, call: CallType, prompts: Sequence[Prompt], sampling: SamplingConfig, *key: str | int
    ) -> list[Completion]:
        is_policy = call in (CallType.PROPOSE, CallType.SOLVE)
        budget = self._roles.policy_tokens if is_policy else self._roles.verifier_tokens
        rule = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, budget)
        requests = [
            GenerationRequest(
                prompt, self._adapter, rule, derive_seed(MEASURE_SEED, call, *key, i), call, (call, *map(str, key), i)
            )
            for i, prompt in enumerate(prompts)
        ]
        return [c for (c,) in await asyncio.gather(*map(self._engine.generate, requests))]


def held_out_demonstrations(call: CallType, split: str, count: int) -> list[Demonstration]:
    """``count`` demonstrations of one call, one an image, in the split's style; seeds no training run uses."""
    name, _, style = split.partition("@")
    style = style or split_style(name)
    mix = DemonstrationMix((Group(1.0, ((call, 1.0),), ((style, 1.0),)),), per_image=1)
    return [d for index in range(count) for d in demonstrations(mix, MEASURE_SEED, index)]


def split_style(name: str) -> str:
    """The only style of a split; ConfigError for a split that mixes styles."""
    styles = SPLITS.get(name, ())
    if len(styles) != 1:
        raise ConfigError(f"split {name!r}: measured are splits of one style, such as base-heldout or evolve-heldout")
    return styles[0][0]


def measure_backbone(backbone: Backbone, roles: RolesConfig, max_batch_sequences: int | None = None) -> Measurer:
    """A measurer of the bare model, without adapters."""
    batch = max_batch_sequences or (2048 if backbone.device.type == "cuda" else 64)
    return Measurer(TransformersEngine(backbone, batch, cuda_graphs=False), roles)


def table(reports: Mapping[str, Metrics]) -> Table:
    """One row per metric, one column per split."""
    result = Table(title="role report")
    result.add_column("metric")
    for name in reports:
        result.add_column(name, justify="right")
    for metric in dict.fromkeys(name for report in reports.values() for name in report):
        result.add_row(metric, *(f"{report.get(metric, float('nan')):.3f}" for report in reports.values()))
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description="Measure a checkpoint in every role on the microcosm.")
    parser.add_argument("checkpoint", nargs="?", default="tiny", help="directory, or 'tiny' for the embedded one")
    parser.add_argument("--splits", nargs="+", default=["base-heldout", "evolve-heldout"], help="SPLIT or SPLIT@STYLE")
    parser.add_argument("--problems", type=int, default=Sizes().problems, help="Solver problems per split")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    given = parser.parse_args(arguments)
    model = load_config("tiny").model.model_copy(update={"path": given.checkpoint})
    measurer = measure_backbone(Backbone.load(model, None), tiny_roles())
    reports = {split: measurer.report(split, Sizes(problems=given.problems)) for split in given.splits}
    Console().print(table(reports))
    if given.json:
        given.json.write_text(json.dumps(reports, indent=1))


def _written(demonstration: Demonstration) -> Completion:
    return Completion((), (), demonstration.completion, "stop")


def _solver_groups(problem: Problem) -> tuple[str, ...]:
    """The averages a problem enters."""
    return (
        "accuracy",
        "yes_no" if problem.answer in ("yes", "no") else "no_yes_no",
        "charts" if QUESTION_TYPES[problem.type].charts else "shapes",
        f"difficulty_{problem.difficulty}",
    )


def _mean(values: Iterable[bool]) -> float:
    items = list(values)
    return sum(items) / len(items) if items else float("nan")


if __name__ == "__main__":
    main()
