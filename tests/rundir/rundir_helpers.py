"""Hand-made episodes, a small configuration, and processes that die or run out of disk at a chosen system call."""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable

from PIL import Image

from trinity_vlm.config import Config, build_config
from trinity_vlm.types import (
    CallRecord,
    CallType,
    Candidate,
    Completion,
    CorrectnessVerdict,
    Dispute,
    Episode,
    ImageRecord,
    Prompt,
    QuestionerReward,
    ReasoningVerdict,
    Role,
    Rollout,
    ScoredEpisode,
    ScreeningVerdict,
    Solution,
    SolverReward,
    Tier,
)

WRITING_CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "truncate")
SPACE_TAKING_CALLS = ("write", "fsync", "rename", "replace", "mkdir")


def make_config(**changes) -> Config:
    values = {"model": {"path": "tiny"}, "images": {"source": "photos"}} | changes
    return build_config(values)


def completion(text: str, *ids: int, finish: str = "stop") -> Completion:
    return Completion(prompt_token_ids=(1, 2, 3), token_ids=ids, text=text, finish_reason=finish)


def make_scored(uid: str = "a.png", step: int = 1, token: int = 10) -> ScoredEpisode:
    """Two candidates (the second malformed), two solutions (the second malformed), an adopted dispute, two calls."""
    prompt = Prompt(())
    question = Candidate(
        0, prompt, completion('{"question": "How many?"}', token, 11), True, None, "How many?", "2",
        ScreeningVerdict(True, 1, 1, 0.7, "three dots", '{"fact_q": 1}'),
    )  # fmt: skip
    malformed = Candidate(1, prompt, completion("dots", 12, finish="length"), False, "no_json", None, None)
    right = Solution(
        0, prompt, completion("three", 20, 21, 22), True, None, "I count three.", "3",
        CorrectnessVerdict(1, Tier.UNPARSED, "equivalence", "3 is 3"),
        CorrectnessVerdict(0, Tier.NUMERIC_GUARD, "numbers"),
        ReasoningVerdict(True, 0.5, "fine", "{}"),
    )  # fmt: skip
    broken = Solution(1, prompt, completion("", 23), False, "no_box", None, None)
    episode = Episode(
        step, ImageRecord(uid, Image.new("RGB", (64, 32), (250, 20, 20)), f"/home/someone/{uid}"),
        (question, malformed), 0, (right, broken),
        Dispute("2", "3", (0,), "majority", True, 3, "", "I can't tell"), "3",
        (CallRecord(CallType.PROPOSE, 3, 2, False, True), CallRecord(CallType.SCREEN, 5, 4, False, False)),
    )  # fmt: skip
    return ScoredEpisode(
        episode,
        (QuestionerReward(1, 0.5, 0.7, 0.0, 0.35, 0.0525), QuestionerReward(0, 0.0, 0.0, 0.0, 0.0, -0.5)),
        (SolverReward(1, 1, 0.5, 0.85), SolverReward(0, 0, 0.0, 0.0)),
    )


def make_rollouts(scored: ScoredEpisode) -> list[Rollout]:
    """The first candidate and the first solution of an episode, with advantages 1.0 and -0.5."""
    uid, question, solution = scored.episode.image.uid, scored.episode.candidates[0], scored.episode.solutions[0]
    return [
        Rollout(Role.QUESTIONER, uid, 0, question.prompt, question.completion, 0.0525, 1.0),
        Rollout(Role.SOLVER, uid, 0, solution.prompt, solution.completion, 0.85, -0.5),
    ]


def run_in_child(action: Callable[[], None], before: Callable[[], None] = lambda: None) -> int:
    """Run ``action`` in a forked child; returns its exit status, negative for a signal. Never returns in the child."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            before()
            action()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at_call(number: int) -> Callable[[], None]:
    """Patch this process so that its ``number``-th writing system call is its last; a write gets half-way."""

    def act(name: str, original: Callable, *args, **kwargs) -> None:
        if name == "write":
            original(args[0], bytes(args[1])[: len(args[1]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    return lambda: intercept_call(number, act, setattr)


def full_disk_at_call(number: int, patch: Callable[..., None]) -> None:
    """From its ``number``-th on, every call that may need space fails with ENOSPC; a write half-way."""

    def act(name: str, original: Callable, *args, **kwargs) -> None:
        if name == "write":
            original(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    intercept_call(number, act, patch, SPACE_TAKING_CALLS)


def intercept_call(number: int, act: Callable, patch: Callable[..., None], names: tuple = WRITING_CALLS) -> None:
    seen = 0

    def wrap(name: str, original: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen >= number:
                act(name, original, *args, **kwargs)
            return original(*args, **kwargs)

        return wrapped

    for name in names:
        patch(os, name, wrap(name, getattr(os, name)))
