"""One image, one episode (Section 2, A.3): propose, screen, select, solve, grade, settle a dispute.

    image ──Questioner──▶ G candidates ──Verifier──▶ screened ──select──▶ (q*, a*)
                                                                            │
          rewards ◀── episode ◀──Verifier (grade, dispute)◀── K solutions ◀─Solver

``play_episode`` is one coroutine; a step runs one per image and the engine batches whatever waits. Nothing here
sleeps, polls or knows about batches, and nothing computes a reward: an episode records what happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from trinity_vlm.answers import Matcher, group_equivalent
from trinity_vlm.config import RolesConfig, SamplingConfig
from trinity_vlm.disputes import Consensus, find_consensus
from trinity_vlm.engine.protocol import Engine, GenerationRequest, Sampling
from trinity_vlm.roles import Questioner, Solver, Verifier
from trinity_vlm.seeds import derive_seed
from trinity_vlm.selection import select_candidate
from trinity_vlm.types import (
    POLICY,
    VERIFIER,
    CallRecord,
    CallType,
    Candidate,
    Completion,
    CorrectnessVerdict,
    Dispute,
    Episode,
    ImageRecord,
    Prompt,
    ReasoningVerdict,
    Solution,
    Tier,
)


class Verdict(Protocol):
    """What every Verifier parser returns: something that knows whether it was parsed."""

    @property
    def parsed(self) -> bool: ...


V = TypeVar("V", bound=Verdict)
T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays: the three roles, the matcher and the engine that speaks for them."""

    questioner: Questioner
    solver: Solver
    verifier: Verifier
    matcher: Matcher
    engine: Engine
    config: RolesConfig
    run_seed: int

    def close(self) -> None:
        """End the matcher's processes and whatever the engine holds (connections, threads, files)."""
        self.matcher.close()
        self.engine.close()


async def play_episode(image: ImageRecord, step: int, cast: Cast, occurrence: int = 0) -> Episode:
    """Play the whole episode of one image.

    ``occurrence`` counts earlier episodes of the same image in the same step, so that a small folder, met twice
    in one step, is asked different questions. Raises EngineError when the engine fails.
    """
    stage = _Stage(cast, image, step, occurrence)
    with cast.engine.episode():
        candidates = await stage.propose_and_screen()
        selected = select_candidate(candidates, stage.seed("select", 0, 0))
        if selected is None:
            return stage.close(candidates)
        chosen = candidates[selected]
        assert chosen.question is not None
        assert chosen.answer is not None
        solutions, dispute, reference = await stage.solve_and_grade(chosen.question, chosen.answer)
        return stage.close(candidates, selected, solutions, dispute, reference)


@dataclass(slots=True)
class _Stage:
    """The episode in progress: what each call needs to know, and the log of calls made, by call, slot and attempt."""

    cast: Cast
    image: ImageRecord
    step: int
    occurrence: int
    calls: dict[tuple[CallType, int, int], CallRecord] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.image.uid if self.occurrence == 0 else f"{self.image.uid}@{self.occurrence}"

    def seed(self, call: str, slot: int, attempt: int) -> int:
        return derive_seed(self.cast.run_seed, self.step, self.key, call, slot, attempt)

    def close(
        self,
        candidates: Sequence[Candidate],
        selected: int | None = None,
        solutions: Sequence[Solution] = (),
        dispute: Dispute | None = None,
        reference: str | None = None,
    ) -> Episode:
        position = {call: i for i, call in enumerate(CallType)}
        return Episode(
            step=self.step,
            image=self.image,
            candidates=tuple(candidates),
            selected=selected,
            solutions=tuple(solutions),
            dispute=dispute,
            reference=reference,
            calls=tuple(self.calls[key] for key in sorted(self.calls, key=lambda key: (position[key[0]], *key[1:]))),
        )

    async def propose_and_screen(self) -> list[Candidate]:
        """G Questioner completions, parsed (step 1), each screened as soon as it is there (step 2)."""
        prompt = self.cast.questioner.prompt(self.image)
        indices = range(self.cast.config.candidates)
        return await _together(self._candidate(prompt, index) for index in indices)

    async def _candidate(self, prompt: Prompt, index: int) -> Candidate:
        """One question with its answer, and the Verifier's screening if it is format-valid."""
        completion = await self._sample(CallType.PROPOSE, prompt, index)
        parsed = self.cast.questioner.parse(completion)
        self._record(CallType.PROPOSE, index, 0, completion, parsed.format_valid)
        candidate = Candidate(
            index, prompt, completion, parsed.format_valid, parsed.error, parsed.question, parsed.answer
        )
        if not candidate.format_valid:
            return candidate
        assert candidate.question is not None
        assert candidate.answer is not None
        verdict, _ = await self._ask(
            CallType.SCREEN,
            index,
            self.cast.verifier.screening_prompt(self.image, candidate.question, candidate.answer),
            self.cast.verifier.parse_screening,
        )
        return replace(candidate, screening=verdict)

    async def solve_and_grade(self, question: str, reference: str) -> tuple[list[Solution], Dispute | None, str]:
        """K solutions (step 4), each judged and scored as soon as it is there (steps 5 and 7), and their dispute with
        the reference as soon as all are judged (step 6); returns the reference that stands in the end."""
        prompt = self.cast.solver.prompt(self.image, question)
        scored_at_once = self.cast.config.reason_scope == "all"
        loop = asyncio.get_running_loop()
        coming: list[asyncio.Future[Solution]] = [loop.create_future() for _ in range(self.cast.config.solutions)]

        async def solve(index: int) -> ReasoningVerdict | None:
            solution = await self._solution(prompt, index)
            coming[index].set_result(solution)
            return await self._score(question, solution) if scored_at_once else None

        grading = self._grade(question, reference, coming)
        (graded, dispute, reference), scores = await _both(grading, _together(map(solve, range(len(coming)))))
        if not scored_at_once:
            correct = [s for s in graded if _is_correct(s)]
            verdicts = await _together(self._score(question, s) for s in correct)
            for solution, verdict in zip(correct, verdicts, strict=True):
                scores[solution.index] = verdict
        return [replace(s, reasoning_verdict=scores[s.index]) for s in graded], dispute, reference

    async def _solution(self, prompt: Prompt, index: int) -> Solution:
        """One Solver completion, parsed."""
        completion = await self._sample(CallType.SOLVE, prompt, index)
        parsed = self.cast.solver.parse(completion)
        self._record(CallType.SOLVE, index, 0, completion, parsed.format_valid)
        return Solution(index, prompt, completion, parsed.format_valid, parsed.error, parsed.reasoning, parsed.answer)

    async def _grade(
        self, question: str, reference: str, coming: Sequence[asyncio.Future[Solution]]
    ) -> tuple[list[Solution], Dispute | None, str]:
        """Correctness against the reference, and again if a dispute overturns it."""

        async def judged(solved: asyncio.Future[Solution]) -> Solution:
            solution = await solved
            return replace(solution, correctness=await self._judge(question, reference, solution, 0))

        graded = await _together(map(judged, coming))
        graded = [replace(s, correctness_before_dispute=s.correctness) for s in graded]
        dispute = await self._settle(question, reference, graded)
        if dispute is not None and dispute.overturned:
            reference = dispute.majority_answer
            verdicts = await _together(self._judge(question, reference, s, 1) for s in graded)
            graded = [replace(s, correctness=verdict) for s, verdict in zip(graded, verdicts, strict=True)]
        return graded, dispute, reference

    async def _judge(
        self, question: str, reference: str, solution: Solution, attempt: int
    ) -> CorrectnessVerdict | None:
        """R_correct of a formatted solution by the three tiers, rules first (A.3)."""
        if not solution.format_valid:
            return None
        assert solution.answer is not None
        result = self.cast.matcher.match(reference, solution.answer, question=question)
        if result.status == "match":
            return CorrectnessVerdict(1, Tier.RULE, result.rule)
        if result.status == "mismatch":
            return CorrectnessVerdict(0, Tier.NUMERIC_GUARD, result.rule)
        verdict, _ = await self._ask(
            CallType.EQUIVALENCE,
            solution.index + attempt * self.cast.config.solutions,
            self.cast.verifier.equivalence_prompt(question, reference, solution.answer),
            self.cast.verifier.parse_equivalence,
        )
        tier = Tier.MODEL if verdict.parsed else Tier.UNPARSED
        return CorrectnessVerdict(verdict.match if verdict.parsed else 0, tier, "equivalence", verdict.raw)

    async def _score(self, question: str, solution: Solution) -> ReasoningVerdict | None:
        """R_reason of a formatted solution (step 7)."""
        if not solution.format_valid:
            return None
        assert solution.reasoning is not None
        verdict, _ = await self._ask(
            CallType.REASON,
            solution.index,
            self.cast.verifier.reasoning_prompt(self.image, question, solution.reasoning),
            self.cast.verifier.parse_reasoning,
        )
        return verdict

    async def _settle(self, question: str, reference: str, solutions: Sequence[Solution]) -> Dispute | None:
        """Let the Verifier decide between a* and a strong consensus against it (step 6)."""
        consensus = self._consensus(question, solutions)
        if consensus is None:
            return None
        supporter = solutions[consensus.representative]
        assert supporter.answer is not None
        assert supporter.reasoning is not None
        verdict, attempts = await self._ask(
            CallType.DISPUTE,
            0,
            self.cast.verifier.dispute_prompt(self.image, question, reference, supporter.answer, supporter.reasoning),
            self.cast.verifier.parse_dispute,
        )
        return Dispute(
            reference=reference,
            majority_answer=supporter.answer,
            member_indices=consensus.members,
            winner=verdict.winner or "majority",
            adopted_without_verdict=not verdict.parsed,
            attempts=attempts,
            justification=verdict.justification,
            raw=verdict.raw,
        )

    def _consensus(self, question: str, solutions: Sequence[Solution]) -> Consensus | None:
        if not self.cast.config.disputes:
            return None
        formatted = [s for s in solutions if s.format_valid]
        groups = group_equivalent([s.answer or "" for s in formatted], self.cast.matcher, question)
        return find_consensus(
            [[formatted[i].index for i in group] for group in groups],
            correct={s.index: int(_is_correct(s)) for s in formatted},
            majority=self.cast.config.dispute_majority,
        )

    async def _sample(self, call: CallType, prompt: Prompt, index: int) -> Completion:
        """One of a call's policy completions; they are never constrained, since that would change the policy."""
        (completion,) = await self.cast.engine.generate(
            GenerationRequest(
                prompt=prompt,
                adapter=POLICY,
                sampling=_sampling(self.cast.config.policy_sampling, self.cast.config.policy_tokens),
                seed=self.seed(call, 0, 0),
                call=call,
                order_key=(self.key, call, index, 0),
                first=index,
                want_logprobs=True,
            )
        )
        return completion

    async def _ask(self, call: CallType, slot: int, prompt: Prompt, parse: Callable[[Completion], V]) -> tuple[V, int]:
        """One Verifier call with its retry budget; returns the last verdict and the number of attempts."""
        config = self.cast.config
        thinks = call is CallType.DISPUTE
        tries = 1 + (config.dispute_retries if thinks else config.verifier_retries)
        schema = self.cast.verifier.schemas[call] if config.structured_verdicts else None
        for attempt in range(tries):
            (completion,) = await self.cast.engine.generate(
                GenerationRequest(
                    prompt=prompt,
                    adapter=VERIFIER,
                    sampling=_sampling(
                        config.thinking_sampling if thinks else config.verifier_sampling, config.verifier_tokens
                    ),
                    seed=self.seed(call, slot, attempt),
                    call=call,
                    order_key=(self.key, call, slot, attempt),
                    json_schema=schema,
                    schema_after=self.cast.verifier.schema_after(call) if schema is not None else None,
                )
            )
            verdict = parse(completion)
            self._record(call, slot, attempt, completion, verdict.parsed)
            if verdict.parsed:
                break
        return verdict, attempt + 1

    def _record(self, call: CallType, slot: int, attempt: int, completion: Completion, parsed: bool) -> None:
        self.calls[call, slot, attempt] = CallRecord(
            call, len(completion.prompt_token_ids), len(completion.token_ids), completion.truncated, parsed
        )


def _sampling(config: SamplingConfig, max_tokens: int) -> Sampling:
    return Sampling(config.temperature, config.top_p, config.top_k, max_tokens)


def _is_correct(solution: Solution) -> bool:
    return solution.correctness is not None and solution.correctness.correct == 1


async def _both(first: Coroutine[None, None, T], second: Coroutine[None, None, U]) -> tuple[T, U]:
    """``_together`` of two different kinds of work."""
    results: list[Any] = await _together([first, second])
    return results[0], results[1]


async def _together(work: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Results in order. The first failure is raised as it was, after all others were cancelled and have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]
