"""Held-out accuracy of the Solver on problems with known answers: never part of training, only of judging it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trinity_vlm.config import EvaluationConfig, ImagesConfig
from trinity_vlm.engine.protocol import GenerationRequest, Sampling
from trinity_vlm.environments import open_environment
from trinity_vlm.episode import Cast
from trinity_vlm.errors import ConfigError
from trinity_vlm.images import GridSize, load_image
from trinity_vlm.images.single import read_image
from trinity_vlm.rundir import Evaluation
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import POLICY, CallType, ImageRecord

PROBLEM_SEED = 20_260_000


@dataclass(frozen=True, slots=True)
class Problem:
    """One question about one image with its true answer; ``kind`` groups results, for example a question type."""

    image: ImageRecord
    question: str
    answer: str
    kind: str = ""


def load_problems(config: EvaluationConfig, grid: GridSize | None = None) -> list[Problem]:
    """The held-out problems named by ``evaluation.source``: always the same ones for the same configuration.

    grid: the training images' own, so that the Solver is examined on pixels sized as those it learns from
    Raises ConfigError when the source is unknown or a line of a jsonl file is not {image, question, answer}.
    """
    if config.source is None:
        return []
    scheme, separator, split = config.source.partition(":")
    if separator and not Path(config.source).exists():
        environment, images = open_environment(scheme), ImagesConfig(source=config.source)
        return [
            Problem(ImageRecord(p.uid, load_image(p.image, images, grid), config.source), p.question, p.answer, p.type)
            for p in environment.problems(split, config.problems, PROBLEM_SEED)
        ]
    problems = list(itertools.islice(_read_jsonl(Path(config.source), grid), config.problems))
    if not problems:
        raise ConfigError(f"evaluation.source={config.source!r}: the file holds no problem")
    return problems


def evaluate_solver(problems: Sequence[Problem], cast: Cast, config: EvaluationConfig) -> Evaluation:
    """Ask the policy's Solver every problem once and grade by the rule tiers only (an ambiguous answer is wrong)."""
    return asyncio.run(_evaluate(problems, cast, config))


async def _evaluate(problems: Sequence[Problem], cast: Cast, config: EvaluationConfig) -> Evaluation:
    policy = cast.config.policy_sampling
    sampling = Sampling(0.0 if config.greedy else policy.temperature, policy.top_p, policy.top_k, config.tokens)

    async def solve(index: int, problem: Problem) -> tuple[bool, bool]:
        (completion,) = await cast.engine.generate(
            GenerationRequest(
                prompt=cast.solver.prompt(problem.image, problem.question),
                adapter=POLICY,
                sampling=sampling,
                seed=derive_seed(PROBLEM_SEED, problem.image.uid, index),
                call=CallType.SOLVE,
                order_key=(problem.image.uid, CallType.SOLVE, index, 0),
            )
        )
        parsed = cast.solver.parse(completion)
        if not parsed.format_valid or parsed.answer is None:
            return False, False
        return cast.matcher.match(problem.answer, parsed.answer, question=problem.question).status == "match", True

    outcomes = await asyncio.gather(*(solve(i, p) for i, p in enumerate(problems)))
    return Evaluation(
        tuple(correct for correct, _ in outcomes),
        tuple(formatted for _, formatted in outcomes),
        tuple(p.kind for p in problems),
    )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"evaluation.source={str(path)!r}: not UTF-8 text ({error}); expected .jsonl") from None


def _read_jsonl(path: Path, grid: GridSize | None) -> Iterator[Problem]:
    if not path.is_file():
        raise ConfigError(
            f"evaluation.source={str(path)!r}: no such file; expected 'microcosm:SPLIT' or a .jsonl file of "
            "image (path), question, answer"
        )
    images = ImagesConfig(source=str(path))
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            image, question, answer = path.parent / row["image"], str(row["question"]), str(row["answer"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number}: expected image, question and answer, got {error!r}") from None
        yield Problem(read_image(image, images, grid), question, answer)
