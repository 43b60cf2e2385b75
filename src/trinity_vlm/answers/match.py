"""Do two short answers say the same? Rules first, then a numeric guard, and what is left is for a model (A.3).

tier 1  match       equal keys, same option, numbers within the tolerance, converted units, elements, symbolic equality
tier 2  mismatch    both are completely one quantity and no reading agrees; or two different options of one question
tier 3  ambiguous   everything else, never a guess
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

from trinity_vlm.answers.keys import case_matters, same_keys
from trinity_vlm.answers.normalise import MAX_ANSWER_CHARS, Normal, normalise
from trinity_vlm.answers.options import options_of_question, resolve, same_letters_without_options
from trinity_vlm.answers.quantity import (
    Status,
    Tolerance,
    compare_multipart_ratios,
    compare_quantities,
    parse_quantity,
)
from trinity_vlm.answers.sequences import parse_sequence, same_sequence
from trinity_vlm.answers.symbolic import SymbolicComparer, SymbolicCounters, SymbolicPool, symbolic_pair
from trinity_vlm.config import MatcherConfig

MAX_ELEMENT_DEPTH = 3
MAX_QUESTION_CHARS = 4000
_TIER: dict[Status, Literal[1, 2, 3]] = {"match": 1, "mismatch": 2, "ambiguous": 3}


@dataclass(frozen=True, slots=True)
class MatchResult:
    """status with the tier and the rule that decided it, and both answers as the rules saw them."""

    status: Status
    tier: Literal[1, 2, 3]
    rule: str
    ref_norm: str
    pred_norm: str

    @property
    def is_match(self) -> bool:
        return self.status == "match"


@dataclass(frozen=True, slots=True)
class _Rules:
    """What every rule needs besides the two answers."""

    tolerance: Tolerance
    question: str | None
    symbolic: SymbolicComparer | None


_Verdict = tuple[Status, str]


def match(
    ref: str,
    pred: str,
    *,
    question: str | None = None,
    options: Sequence[str] | None = None,
    rel: float = 0.01,
    integer_exact: bool = True,
    symbolic: SymbolicComparer | None = None,
) -> MatchResult:
    """Compare a prediction with a reference answer; pure but for ``symbolic``, never raises on any text.

    rel: numbers match within ``rel * |ref|``; when ref is exactly 0, within 1e-9
    integer_exact: unequal exact values (integers, fractions) within the tolerance are ambiguous instead
    question: settles which unit a bare number has, and what ``3:30`` is
    options: texts of a multiple-choice question in order; letters and texts then name the same options
    symbolic: a SymbolicPool; without one, expressions that only algebra can compare stay ambiguous
    """
    if not ref.strip() or not pred.strip():
        return _result("mismatch", "empty", ref[:MAX_ANSWER_CHARS].strip(), pred[:MAX_ANSWER_CHARS].strip())
    if len(ref) > MAX_ANSWER_CHARS or len(pred) > MAX_ANSWER_CHARS:
        same = ref.strip() == pred.strip()
        status: Status = "match" if same else "ambiguous"
        return _result(status, "identical" if same else "too_long", ref[:MAX_ANSWER_CHARS], pred[:MAX_ANSWER_CHARS])
    rules = _Rules(Tolerance(rel, integer_exact), question[:MAX_QUESTION_CHARS] if question else None, symbolic)
    left, right = normalise(ref), normalise(pred)
    verdict = _match_options(left, right, options, rules) or _match_normal(left, right, rules)
    return _result(*verdict, left.text, right.text)


def _result(status: Status, rule: str, ref_norm: str, pred_norm: str) -> MatchResult:
    return MatchResult(status, _TIER[status], rule, ref_norm, pred_norm)


def _match_options(ref: Normal, pred: Normal, options: Sequence[str] | None, rules: _Rules) -> _Verdict | None:
    """Compare as choices of one question; None when that says nothing about the pair."""
    if ref.raw == pred.raw:
        return "match", "identical"
    known = tuple(options) if options else options_of_question(rules.question) if rules.question else ()
    if len(known) < 2:
        return None

    def same(option: str, answer: str) -> bool:
        return _match_normal(normalise(option), normalise(answer), rules)[0] == "match"

    left, right = (resolve(side.raw, known, same) for side in (ref, pred))
    if left and right:
        return ("match", "option") if left == right else ("mismatch", "option")
    named, other = (left, pred) if left else (right, ref)
    if named is None or len(named) != 1:
        return None
    option = normalise(known[ord(next(iter(named))) - ord("A")])
    status, rule = _match_normal(*((option, other) if left else (other, option)), rules)
    return status, f"option_text_{rule}"


def _match_normal(ref: Normal, pred: Normal, rules: _Rules, depth: int = 0) -> _Verdict:
    """All rules that need no options, most specific first."""
    if verdict := _match_surface(ref, pred):
        return verdict
    left, right = parse_quantity(ref.text, rules.question), parse_quantity(pred.text, rules.question)
    if left and right:
        return compare_quantities(left, right, rules.tolerance, rules.question)
    if compare_multipart_ratios(ref.text, pred.text, rules.tolerance):
        return "match", "multipart_ratio"
    quantity = left or right
    unit_in_other_case = quantity and not quantity.label and ref.text.lower() == pred.text.lower()
    if unit_in_other_case or case_matters(ref.text, pred.text):
        return "ambiguous", "case"
    if rule := same_keys(ref.text, pred.text):
        return "match", rule
    if quantity:
        return _match_algebra(ref, pred, rules)
    return _match_structure(ref, pred, rules, depth)


def _match_surface(ref: Normal, pred: Normal) -> _Verdict | None:
    """What the spelling alone settles; None when it settles nothing."""
    if ref.raw == pred.raw:
        return "match", "identical"
    if not ref.text or not pred.text:
        return "mismatch", "empty"
    if ref.symbol and pred.symbol and ref.symbol != pred.symbol:
        return "ambiguous", "different_symbols"
    if ref.text == pred.text:
        return "match", "text"
    return ("match", "option_letter") if same_letters_without_options(ref.text, pred.text) else None


def _match_structure(ref: Normal, pred: Normal, rules: _Rules, depth: int) -> _Verdict:
    """Element by element when both are sequences, else algebra."""
    left, right = parse_sequence(ref.text), parse_sequence(pred.text)
    if not (left and right) or depth >= MAX_ELEMENT_DEPTH:
        return _match_algebra(ref, pred, rules)

    def same(a: str, b: str) -> bool:
        return _match_normal(normalise(a), normalise(b), rules, depth + 1)[0] == "match"

    return ("match", "elements") if same_sequence(left, right, same) else ("ambiguous", "elements")


def _match_algebra(ref: Normal, pred: Normal, rules: _Rules) -> _Verdict:
    if rules.symbolic is None:
        return "ambiguous", "undecided"
    one_equation = ("=" in ref.text) != ("=" in pred.text)
    pair = symbolic_pair(ref.equation, pred.equation) if one_equation else symbolic_pair(ref.text, pred.text)
    if pair and rules.symbolic(*pair):
        return "match", "symbolic"
    return "ambiguous", "undecided"


class AnswerMatcher(Protocol):
    """What graders and groupers need of a matcher."""

    def match(
        self, ref: str, pred: str, question: str | None = None, options: Sequence[str] | None = None
    ) -> MatchResult: ...


class Matcher:
    """``match`` with a run's settings, a symbolic pool that starts when first needed, and a cache of results.

    Synchronous and safe from any thread. A context manager; ``close`` ends the worker processes.
    """

    CACHE_SIZE = 8192

    def __init__(self, config: MatcherConfig) -> None:
        self._config = config
        self._pool = SymbolicPool(deadline=config.symbolic_deadline) if config.symbolic else None
        self._cache: OrderedDict[tuple[str, str, str | None, tuple[str, ...]], MatchResult] = OrderedDict()
        self._lock = threading.Lock()

    def match(
        self, ref: str, pred: str, question: str | None = None, options: Sequence[str] | None = None
    ) -> MatchResult:
        """As the function ``match``. Raises TrinityError when the symbolic step is needed after ``close``."""
        key = (ref, pred, question, tuple(options or ()))
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        given_up = self.counters.timeouts + self.counters.failures
        result = match(
            ref,
            pred,
            question=question,
            options=options,
            rel=self._config.relative_tolerance,
            integer_exact=self._config.integer_exact,
            symbolic=self._pool,
        )
        settled = given_up == self.counters.timeouts + self.counters.failures
        if settled and len(ref) + len(pred) + len(question or "") <= 4 * MAX_ANSWER_CHARS:
            with self._lock:
                self._cache[key] = result
                if len(self._cache) > self.CACHE_SIZE:
                    self._cache.popitem(last=False)
        return result

    @property
    def counters(self) -> SymbolicCounters:
        """Symbolic calls, timeouts and failures so far."""
        return self._pool.counters if self._pool else SymbolicCounters()

    def close(self) -> None:
        """End the worker processes; safe to call twice."""
        if self._pool:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def group_equivalent(answers: Sequence[str], matcher: AnswerMatcher, question: str | None = None) -> list[list[int]]:
    """Indices of equivalent answers, clusters and members in order of first appearance.

    An answer joins the first cluster whose first member it matches by rule (tier 1), so the grouping is a partition
    although tolerance is not transitive: 100, 100.8, 101.6 gives [[0, 1], [2]].
    """
    clusters: list[list[int]] = []
    for index, answer in enumerate(answers):
        for cluster in clusters:
            if matcher.match(answers[cluster[0]], answer, question).is_match:
                cluster.append(index)
                break
        else:
            clusters.append([index])
    return clusters
