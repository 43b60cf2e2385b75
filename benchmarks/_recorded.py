"""Forced lengths and recorded texts around a real engine, for models with random weights.

The engine generates as many tokens as a call is meant to have; tokens and log-probabilities stay as they are, so that
the update trains on what was sampled. Only the text is exchanged for a recorded, well-formed one of the call's kind,
since random weights write nothing that parses. Images take four turns:

    turn 0   numeric answer, 3 of 4 solutions right, by rule
    turn 2   numeric answer, 3 of 4 solutions agree on another one: a dispute, won by either side in turn
    turn 1,3 answer in words: two solutions by rule, two need the Verifier (one matches)

Every image has a sound and correct candidate of difficulty 0.7 at slot 1, three lesser ones, and mixed reasoning
scores, so that all rollouts of both roles are retained. A solution's thinking has about as many tokens as were
generated: it returns in the prompts of reasoning and dispute calls.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trinity_vlm.engine.protocol import GenerationRequest
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import POLICY, VERIFIER, CallType, Completion

Generate = Callable[[GenerationRequest], Awaitable[list[Completion]]]

TAIL_SIGMA = 0.7
TAIL_LIMIT = 4.0
PARITY_KEY = "parity"
# vLLM's CPU build can't resume a seeded request whose prompt was taken in parts (0.32: a CPU generator has no offset).
WHOLE_PROMPTS = {"enable_chunked_prefill": False}

_WORDS = ("blue circle", "azure disc", "red square", "blue circle")
_RIGHT = ("12", "12", "15", "12")
_DISPUTED = ("15", "15", "15", "12")
_SCREENINGS = ((1, 1, 0.4), (1, 1, 0.7), (1, 0, 0.7), (0, 0, 0.4))
_REASONING = (1.0, 0.5, 0.25, 0.5)
_PARTS = (
    ("The left", "The upper", "Each marked", "The innermost", "Every second", "One outer"),
    ("panel", "curve", "tile", "strand", "figure", "column", "corner"),
    ("meets", "lies above", "is folded onto", "crosses", "borders", "hides"),
    ("the dashed line", "its mirror image", "the shaded region", "a neighbour", "the third mark", "the frame"),
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Completion lengths in tokens: of a kind's own, or drawn log-normally with that mean, at most 4 times it."""

    means: Mapping[CallType, int]
    tail: bool = False

    def draw(self, call: CallType, *which: int) -> int:
        """Of one sample; ``which`` are numbers that tell it from others of its kind, the same in every step."""
        mean = self.means[call]
        if not self.tail:
            return mean
        generator = random.Random(derive_seed("length", call, *which))
        return max(1, round(mean * min(generator.lognormvariate(-(TAIL_SIGMA**2) / 2, TAIL_SIGMA), TAIL_LIMIT)))


@dataclass(frozen=True, slots=True)
class Sample:
    """One generated completion: when it was asked for and came back (``perf_counter`` seconds), and its tokens."""

    call: CallType
    adapter: str
    image: str
    has_image: bool
    start: float
    end: float
    prompt_ids: tuple[int, ...]
    tokens: int


class Tape:
    """Asks an engine for forced lengths, exchanges the texts and keeps a record of every sample.

    count: number of tokens of a text, as the model's tokenizer sees it
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self.samples: list[Sample] = []
        self._lengths = Lengths(dict.fromkeys(CallType, 1))
        self._count = count
        self._turns: dict[str, int] = {}

    def begin(self, lengths: Lengths) -> None:
        """A new step: its images take their turns from the first on."""
        self._lengths = lengths
        self.samples = []
        self._turns = {}

    async def play(self, generate: Generate, request: GenerationRequest) -> list[Completion]:
        """The request's completions, of forced lengths and with recorded texts."""
        turn = self._turns.setdefault(str(request.order_key[0]), len(self._turns))
        slot, attempt = (int(part) for part in request.order_key[2:4])
        numbers = range(request.first, request.first + request.n)
        lengths = [self._lengths.draw(request.call, turn, slot - request.first, attempt, i) for i in numbers]
        single = [replace(request, n=1, first=i, json_schema=None, schema_after=None) for i in numbers]
        parts = await asyncio.gather(*map(self._timed, [generate] * request.n, single, lengths))
        samples = [sample for part in parts for sample in part]
        return [
            replace(sample, text=self._text(request, turn, i, length), finish_reason="stop")
            for i, length, sample in zip(numbers, lengths, samples, strict=True)
        ]

    async def _timed(self, generate: Generate, request: GenerationRequest, length: int) -> list[Completion]:
        start = time.perf_counter()
        completions = await generate(replace(request, sampling=replace(request.sampling, max_tokens=length)))
        end, image = time.perf_counter(), str(request.order_key[0])
        adapter = POLICY if request.call in (CallType.PROPOSE, CallType.SOLVE) else VERIFIER
        self.samples += [
            Sample(
                call=request.call,
                adapter=adapter,
                image=image,
                has_image=request.prompt.image is not None,
                start=start,
                end=end,
                prompt_ids=completion.prompt_token_ids,
                tokens=len(completion.token_ids),
            )
            for completion in completions
        ]
        return completions

    def _text(self, request: GenerationRequest, turn: int, index: int, length: int) -> str:
        """What a trained model might have written. ``order_key`` is (image, call, slot, attempt)."""
        slot = int(request.order_key[2])
        match request.call:
            case CallType.PROPOSE:
                return _proposal(turn, index)
            case CallType.SCREEN:
                fact, correct, difficulty = _SCREENINGS[slot % 4]
                return _json(justification="Premises seen.", fact_q=fact, corr_a=correct, difficulty=difficulty)
            case CallType.SOLVE:
                thinking = prose(derive_seed(request.seed, index), length - 24, self._count)
                return f"{thinking}</think>\n<answer>\n\\boxed{{{_answers(turn)[index % 4]}}}\n</answer>"
            case CallType.EQUIVALENCE:
                return _json(match=int(slot % 4 == 1))
            case CallType.REASON:
                return _json(justification="none; none; steps left out", reasoning_score=_REASONING[slot % 4])
            case CallType.DISPUTE:
                winner = "majority" if turn % 8 == 2 else "ref"
                return f"{prose(request.seed, 64, self._count)}</think>\n" + _json(
                    correct_answer=winner, justification="own count"
                )


def recorded(engine: type[Any], overrides: Mapping[str, Any] | None = None) -> type[Any]:
    """A subclass of an engine whose ``generate`` goes through a tape; checks of the engine itself pass unchanged.

    overrides: more arguments of vLLM's, see ``VllmEngine``
    """

    class Recorded(engine):
        tape: Tape

        def __init__(self, backbone: Any, *args: Any, **kwargs: Any) -> None:
            if engine.__name__ == "VllmEngine":
                on_cpu = backbone.device.type == "cpu"
                whole = WHOLE_PROMPTS | {"max_num_batched_tokens": backbone.context} if on_cpu else {}
                kwargs["overrides"] = {**whole, **(overrides or {})}
            super().__init__(backbone, *args, **kwargs)
            tokenizer = backbone.tokenizer
            type(self).tape = Tape(lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))

        async def generate(self, request: GenerationRequest) -> list[Completion]:
            if request.order_key[0] == PARITY_KEY:
                return await super().generate(request)
            return await self.tape.play(super().generate, request)

    Recorded.__name__ = f"Recorded{engine.__name__}"
    return Recorded


def prose(seed: int, tokens: int, count: Callable[[str], int]) -> str:
    """Made-up reasoning of about ``tokens`` tokens, another one for every seed."""
    generator = random.Random(seed)

    def sentences(number: int) -> str:
        return " ".join(
            " ".join(generator.choice(part) for part in _PARTS) + f" at {generator.randint(1, 99)}."
            for _ in range(number)
        )

    sample = sentences(20)
    return sentences(max(1, math.floor(20 * tokens / count(sample))))


def _proposal(turn: int, slot: int) -> str:
    question = f"Which part of the figure shown touches mark {slot + 1} after {turn + 2} folds along its dashed lines?"
    answer = _answers(turn)[0] if turn % 4 != 2 else "12"
    return f"I look for a hidden state.</think>\n{json.dumps({'question': question, 'answer': answer})}"


def _answers(turn: int) -> tuple[str, ...]:
    """The four boxed answers; the reference is "12" or "blue circle"."""
    return (_RIGHT, _WORDS, _DISPUTED, _WORDS)[turn % 4]


def _json(**values: object) -> str:
    return json.dumps(values)
