"""Episodes as a typed table: one row per episode, everything that was said and decided nested inside it.

Images appear as their uid and, unless switched off, a JPEG thumbnail; never as paths.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict

import pyarrow as pa

from trinity_vlm.config import FORMAT_VERSION
from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.types import (
    Candidate,
    Completion,
    Dispute,
    ImageRecord,
    QuestionerReward,
    Role,
    Rollout,
    ScoredEpisode,
    Solution,
    SolverReward,
)

_COMPLETION_FIELDS = [
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("prompt_tokens", pa.int32()),
    ("completion_tokens", pa.int32()),
]
_FORMAT_FIELDS = [("index", pa.int32()), ("format_valid", pa.bool_()), ("format_error", pa.string())]
_SCREENING = pa.struct(
    [
        ("parsed", pa.bool_()),
        ("fact_q", pa.int8()),
        ("corr_a", pa.int8()),
        ("difficulty", pa.float64()),
        ("justification", pa.string()),
        ("raw", pa.string()),
    ]
)
_CORRECTNESS = pa.struct([("correct", pa.int8()), ("tier", pa.string()), ("rule", pa.string()), ("raw", pa.string())])
_REASONING = pa.struct(
    [("parsed", pa.bool_()), ("score", pa.float64()), ("justification", pa.string()), ("raw", pa.string())]
)
_QUESTIONER_REWARD = pa.struct(
    [("fmt", pa.int8()), *((name, pa.float64()) for name in ("fact", "diff", "chal", "diff_discounted", "total"))]
)
_SOLVER_REWARD = pa.struct(
    [("fmt", pa.int8()), ("correct", pa.int8()), ("reason", pa.float64()), ("total", pa.float64())]
)
_CANDIDATE = pa.struct(
    [
        *_FORMAT_FIELDS,
        *_COMPLETION_FIELDS,
        ("question", pa.string()),
        ("answer", pa.string()),
        ("screening", _SCREENING),
        ("reward", _QUESTIONER_REWARD),
        ("advantage", pa.float64()),
    ]
)
_SOLUTION = pa.struct(
    [
        *_FORMAT_FIELDS,
        *_COMPLETION_FIELDS,
        ("reasoning", pa.string()),
        ("answer", pa.string()),
        ("correctness", _CORRECTNESS),
        ("correctness_before_dispute", _CORRECTNESS),
        ("reasoning_verdict", _REASONING),
        ("reward", _SOLVER_REWARD),
        ("advantage", pa.float64()),
    ]
)
_DISPUTE = pa.struct(
    [
        ("reference", pa.string()),
        ("majority_answer", pa.string()),
        ("member_indices", pa.list_(pa.int32())),
        ("winner", pa.string()),
        ("adopted_without_verdict", pa.bool_()),
        ("attempts", pa.int32()),
        ("justification", pa.string()),
        ("raw", pa.string()),
    ]
)
_CALL = pa.struct(
    [
        ("call", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("truncated", pa.bool_()),
        ("parsed", pa.bool_()),
    ]
)

EPISODE_SCHEMA = pa.schema(
    [
        pa.field("step", pa.int32(), nullable=False),
        pa.field("image_uid", pa.string(), nullable=False),
        pa.field("image_width", pa.int32()),
        pa.field("image_height", pa.int32()),
        pa.field("thumbnail", pa.binary()),
        pa.field("selected", pa.int32()),
        pa.field("reference", pa.string()),
        pa.field("corr_a_revoked", pa.bool_()),
        pa.field("candidates", pa.list_(_CANDIDATE)),
        pa.field("solutions", pa.list_(_SOLUTION)),
        pa.field("dispute", _DISPUTE),
        pa.field("calls", pa.list_(_CALL)),
    ],
    metadata={"trinity_vlm.format_version": str(FORMAT_VERSION)},
)
"""``advantage`` is null for completions that were not retained as rollouts; ``selected`` indexes ``candidates``."""


def build_episode_table(
    scored: Sequence[ScoredEpisode], rollouts: Sequence[Rollout], thumbnail_side: int | None
) -> pa.Table:
    """Rows in the order of ``scored``, columns as EPISODE_SCHEMA.

    rollouts: what was retained for training; each must be a completion of one of the episodes
    thumbnail_side: longest side of thumbnails in pixels; None stores no pixel at all
    Raises RunDirectoryError for a rollout that belongs to no episode.
    """
    advantages = _Advantages(rollouts)
    rows = [_episode_row(item, advantages, thumbnail_side) for item in scored]
    advantages.check_all_taken()
    return pa.Table.from_pylist(rows, schema=EPISODE_SCHEMA)


def encode_thumbnail(image: ImageRecord, side: int) -> bytes:
    """JPEG bytes of the image, shrunk so that its longest side is at most ``side`` pixels."""
    small = image.pixels.copy()
    small.thumbnail((side, side))
    buffer = io.BytesIO()
    small.convert("RGB").save(buffer, format="JPEG", quality=85)
    return buffer.getvalue()


class _Advantages:
    """Finds the advantage of each completion again.

    A small image folder may bring one image twice in a step: the token ids tell its episodes apart, and equal
    completions are served in order.
    """

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self._waiting: dict[tuple[Role, str, int, tuple[int, ...]], list[float]] = {}
        for r in rollouts:
            self._waiting.setdefault((r.role, r.image_uid, r.slot, r.completion.token_ids), []).append(r.advantage)

    def take(self, role: Role, uid: str, slot: int, completion: Completion) -> float | None:
        waiting = self._waiting.get((role, uid, slot, completion.token_ids))
        return waiting.pop(0) if waiting else None

    def check_all_taken(self) -> None:
        for (role, uid, slot, _), waiting in self._waiting.items():
            if waiting:
                raise RunDirectoryError(
                    f"the rollout {role} {slot} of image {uid!r} belongs to no episode of this step"
                )


def _episode_row(item: ScoredEpisode, advantages: _Advantages, thumbnail_side: int | None) -> dict[str, object]:
    episode = item.episode
    uid = episode.image.uid
    return {
        "step": episode.step,
        "image_uid": uid,
        "image_width": episode.image.pixels.width,
        "image_height": episode.image.pixels.height,
        "thumbnail": None if thumbnail_side is None else encode_thumbnail(episode.image, thumbnail_side),
        "selected": episode.selected,
        "reference": episode.reference,
        "corr_a_revoked": episode.corr_a_revoked,
        "candidates": [
            _candidate_row(candidate, reward, advantages.take(Role.QUESTIONER, uid, slot, candidate.completion))
            for slot, (candidate, reward) in enumerate(zip(episode.candidates, item.questioner_rewards, strict=True))
        ],
        "solutions": [
            _solution_row(solution, reward, advantages.take(Role.SOLVER, uid, slot, solution.completion))
            for slot, (solution, reward) in enumerate(zip(episode.solutions, item.solver_rewards, strict=True))
        ],
        "dispute": None if episode.dispute is None else _dispute_row(episode.dispute),
        "calls": [asdict(call) for call in episode.calls],
    }


def _candidate_row(candidate: Candidate, reward: QuestionerReward, advantage: float | None) -> dict[str, object]:
    return {
        **_completion_row(candidate),
        "question": candidate.question,
        "answer": candidate.answer,
        "screening": None if candidate.screening is None else asdict(candidate.screening),
        "reward": asdict(reward),
        "advantage": advantage,
    }


def _solution_row(solution: Solution, reward: SolverReward, advantage: float | None) -> dict[str, object]:
    verdicts = ("correctness", "correctness_before_dispute", "reasoning_verdict")
    return {
        **_completion_row(solution),
        "reasoning": solution.reasoning,
        "answer": solution.answer,
        **{name: None if (v := getattr(solution, name)) is None else asdict(v) for name in verdicts},
        "reward": asdict(reward),
        "advantage": advantage,
    }


def _completion_row(item: Candidate | Solution) -> dict[str, object]:
    return {
        "index": item.index,
        "format_valid": item.format_valid,
        "format_error": item.format_error,
        "text": item.completion.text,
        "finish_reason": item.completion.finish_reason,
        "prompt_tokens": len(item.completion.prompt_token_ids),
        "completion_tokens": len(item.completion.token_ids),
    }


def _dispute_row(dispute: Dispute) -> dict[str, object]:
    return {**asdict(dispute), "member_indices": list(dispute.member_indices)}
