"""The symbolic step: which pairs may go to math-verify, and the killable processes that run it.

math-verify reads words as products of letters, ``10-20`` as -10 and a date as a quotient, so a pair gets there only
when both sides are short expressions with an operator and without words. It may also hang or grow without bound
(``9^{9^9}``), and its own time limit works in a main thread only, so it runs in worker processes with a deadline and a
memory cap.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from queue import LifoQueue
from typing import Protocol

from trinity_vlm.answers.keys import MATHS_WORDS
from trinity_vlm.answers.numbers import parse_number
from trinity_vlm.answers.plain import FUNCTIONS, LOWER_GREEK, closing_bracket, word_set
from trinity_vlm.answers.worker_process import Outcome, WorkerProcess
from trinity_vlm.errors import TrinityError

MAX_EXPRESSION_CHARS = 200
MAX_EXPONENT = 100
MAX_NUMERAL_DIGITS = 15

_ALLOWED = re.compile(r"[0-9A-Za-z\s+\-*/^_().=<>≤≥|∞]+")
_OPERATOR = re.compile(r"[+\-*/^=<>≤≥]|sqrt\(")
_LETTERS = re.compile(r"[A-Za-z]+")
_ENGLISH = word_set("am an as at by do go if in is it me my no of on or pm so to up us we")
_CHAIN = re.compile(r"[A-Za-z0-9]{1,2}(?:\s*[-=]\s*[A-Za-z][A-Za-z0-9]?){2,}")
_INDEXED = re.compile(r"[A-Za-z][0-9]")
_DANGLING = re.compile(r"[+\-*/^=<>≤≥]$|^[*/^=]|\^[+\-](?![0-9A-Za-z(])|[+\-]{2}")
_SHORT_DENOMINATOR = re.compile(r"/\s*[0-9]+\s*[A-Za-z(]|/[^/()+=-]*/")
_POWER = re.compile(r"\^\s*(?:\(([^()]*)\)|([+-]?[0-9.]+|[A-Za-z]))")


class SymbolicComparer(Protocol):
    """Decides whether two LaTeX expressions are equal; None when it can't tell."""

    def __call__(self, ref_latex: str, pred_latex: str, /) -> bool | None: ...


def symbolic_pair(ref: str, pred: str) -> tuple[str, str] | None:
    """LaTeX of both normalised texts when the pair is fit for symbolic comparison, else None."""
    if not (_is_expression(ref) and _is_expression(pred)):
        return None
    for relation in ("=", "[<>≤≥]"):
        counts = len(re.findall(relation, ref)), len(re.findall(relation, pred))
        if counts[0] != counts[1] or counts[0] > 1:
            return None
    left, right = (_variables(text) for text in (ref, pred))
    if any(c.islower() and c.upper() in left | right for c in left | right):
        return None
    if "=" in ref and (left != right or any(_is_tautology(text) for text in (ref, pred))):
        return None
    if all(_is_arithmetic(text) for text in (ref, pred)):
        return None
    return to_latex(ref), to_latex(pred)


def _has_operator(text: str) -> bool:
    return bool(_OPERATOR.search(text)) or not FUNCTIONS.isdisjoint(_LETTERS.findall(text))


def _variables(text: str) -> set[str]:
    return {c for word in _LETTERS.findall(text) if word not in MATHS_WORDS for c in word}


def _is_tautology(equation: str) -> bool:
    left, _, right = equation.replace(" ", "").partition("=")
    return left == right


def _is_arithmetic(text: str) -> bool:
    return not _LETTERS.search(text)


def _is_expression(text: str) -> bool:
    if len(text) > MAX_EXPRESSION_CHARS or not _ALLOWED.fullmatch(text) or not _has_operator(text):
        return False
    if _CHAIN.fullmatch(text) or _INDEXED.search(text) or _DANGLING.search(text) or _SHORT_DENOMINATOR.search(text):
        return False
    if not _is_balanced(text) or re.search(rf"[0-9]{{{MAX_NUMERAL_DIGITS + 1},}}", text):
        return False
    if _is_arithmetic(text) and parse_number(text) is None:
        return False
    return all(_is_algebraic(word) for word in _LETTERS.findall(text)) and _powers_are_small(text)


def _is_balanced(text: str) -> bool:
    depth = 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            return False
    return depth == 0


def _is_algebraic(word: str) -> bool:
    """A product of at most two letters or a mathematical name; not ``AB`` (a segment) and not ``or``."""
    return word in MATHS_WORDS or (len(word) <= 2 and word not in _ENGLISH and not (len(word) == 2 and word.isupper()))


def _powers_are_small(text: str) -> bool:
    if text.count("^") != len(_POWER.findall(text)):
        return False
    for group, single in _POWER.findall(text):
        exponent = group or single
        if "^" in exponent or any(float(n) > MAX_EXPONENT for n in re.findall(r"[0-9]+", exponent)):
            return False
    return not re.search(r"\^\s*(?:\([^()]*\)|[+-]?[0-9.]+|[A-Za-z])\s*\^", text)


def to_latex(text: str) -> str:
    """LaTeX of a normalised expression: ``x^(2y)/sqrt(2)`` gives ``x^{2y}/\\sqrt{2}``."""
    text = _braced_roots(text)
    text = _POWER.sub(lambda m: f"^{{{m[1] or m[2]}}}", text)
    text = re.sub(r"_\s*([0-9A-Za-z]+)", r"_{\1}", text)
    names = sorted(MATHS_WORDS - {"sqrt"} | set(LOWER_GREEK.values()), key=len, reverse=True)
    text = re.sub(rf"(?<![A-Za-z\\])({'|'.join(names)})(?![A-Za-z])(?=(_?))", _command, text)
    for symbol, command in (("*", r"\cdot "), ("≤", r"\le "), ("≥", r"\ge "), ("∞", r"\infty ")):
        text = text.replace(symbol, command)
    return text


def _command(match: re.Match[str]) -> str:
    """``\\log_`` keeps its subscript close, other names end with a blank."""
    return f"\\{match[1]}" if match[2] else f"\\{match[1]} "


def _braced_roots(text: str) -> str:
    """``sqrt(..)`` with its matching parenthesis as ``\\sqrt{..}``, innermost last."""
    while (start := text.find("sqrt(")) >= 0:
        end = closing_bracket(text, start + 4)
        text = f"{text[:start]}\\sqr\0{{{text[start + 5 : end]}}}{text[end + 1 :]}"
    return text.replace("\\sqr\0", "\\sqrt")


@dataclass(frozen=True, slots=True)
class SymbolicCounters:
    """calls: comparisons sent to a worker; timeouts: killed at the deadline; failures: it died or raised."""

    calls: int = 0
    timeouts: int = 0
    failures: int = 0


class SymbolicPool:
    """Persistent worker processes, started when first needed; callable from any thread.

    A comparison that passes ``deadline`` seconds or ``memory_mb`` MiB of address space gives None, and its worker is
    replaced.
    """

    def __init__(self, workers: int = 2, deadline: float = 2.0, memory_mb: int = 1024) -> None:
        self._workers = [WorkerProcess(deadline, memory_mb) for _ in range(workers)]
        self._idle: LifoQueue[WorkerProcess] = LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._counts = {"calls": 0, "timeouts": 0, "failures": 0}
        self._closed = False

    def __call__(self, ref_latex: str, pred_latex: str, /) -> bool | None:
        """Whether both expressions are equal, each way round; None when undecided. Raises TrinityError once closed."""
        if self._closed:
            raise TrinityError("the symbolic pool is closed; build a new Matcher to compare further answers")
        worker = self._idle.get()
        try:
            outcome = worker.compare(ref_latex, pred_latex)
        finally:
            self._idle.put(worker)
        with self._lock:
            self._counts["calls"] += 1
            self._counts["timeouts"] += outcome is Outcome.TIMEOUT
            self._counts["failures"] += outcome is Outcome.FAILURE
        return outcome.verdict

    @property
    def counters(self) -> SymbolicCounters:
        with self._lock:
            return SymbolicCounters(**self._counts)

    def close(self) -> None:
        """End every worker; a comparison in flight returns None. Safe to call twice."""
        self._closed = True
        for worker in self._workers:
            worker.close()
