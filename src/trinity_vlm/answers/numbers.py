"""A recursive-descent reader of numerals over floats: no eval, no algebra system, every size capped.

Reads signed decimals, thousands groups, ``3e8``, ``3*10^8``, ``3 x 10^8``, powers, roots, pi, fractions and mixed
numbers. Refuses what only looks like arithmetic: ``10-20`` (a range), ``1/2/2020`` (a date), ``3*4`` (a size), ``007``.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPONENT = 400.0
MAX_NESTING = 20

_LITERAL = re.compile(
    r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9,])|[1-9][0-9]{0,2}(?: [0-9]{3})+(?![0-9,/]| ?/)|[0-9]+)(?:\.[0-9]+)?"
    r"(?:[eE][+-]?[0-9]+(?![0-9A-Za-z.]))?|\.[0-9]+(?:[eE][+-]?[0-9]+(?![0-9A-Za-z.]))?"
)
_MIXED_TAIL = re.compile(r"\s+([0-9]+)\s*/\s*([0-9]+)(?![0-9.,/])")
_LETTER_TIMES = re.compile(r"\s*[xX]\s*(?=10\s*\^)")
_PI = re.compile(r"pi(?![A-Za-z])")
_DECIMAL = re.compile(
    r"[+-]?\s*([0-9][0-9, ]*)?(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+)|\s*[*xX]\s*10\s*\^\s*\(?([+-]?[0-9]+)\)?)?"
)
_RATIONAL = re.compile(r"([+-]?)\s*\(?\s*(?:([0-9]+)\s+)?([+-]?[0-9]+)(?:\s*/\s*([0-9]+)|\.0+)?\s*\)?")


@dataclass(frozen=True, slots=True)
class Number:
    """One numeral.

    value: finite float
    exact: written without rounding: integers, fractions, roots, pi; not decimals or powers of ten as a factor
    fraction: the exact rational value of an integer, fraction or mixed number; None otherwise
    step: the unit of the last digit shown by a plain decimal, ``0.01`` for ``3.14``; None for expressions
    digits: significant digits shown by a plain decimal, else 0
    has_pi: pi occurs
    """

    value: float
    exact: bool
    fraction: Fraction | None = None
    step: float | None = None
    digits: int = 0
    has_pi: bool = False


class _NotANumberError(Exception):
    """The text stops being a numeral here."""


def read_number(text: str, start: int = 0) -> tuple[Number, int] | None:
    """The longest numeral that begins at ``start`` and the index after it; None when there is none."""
    parser = _Parser(text, start)
    try:
        value = parser.sum(0)
    except (_NotANumberError, OverflowError, ZeroDivisionError, ValueError):
        return None
    if not math.isfinite(value) or (parser.arithmetic and not parser.irrational):
        return None
    source = text[start : parser.position].strip()
    step, digits = _shown_precision(source)
    fraction = _rational(source)
    exact = not parser.rounded or (fraction is not None and fraction.denominator == 1)
    return Number(value, exact, fraction, step, digits, parser.has_pi), parser.position


def parse_number(text: str) -> Number | None:
    """The numeral that ``text`` is completely, or None."""
    result = read_number(text)
    return result[0] if result and not text[result[1] :].strip() else None


def _shown_precision(source: str) -> tuple[float | None, int]:
    match = _DECIMAL.fullmatch(source)
    if not match or not (match[1] or match[2]):
        return None, 0
    whole, decimals = re.sub(r"[, ]", "", match[1] or ""), match[2] or ""
    exponent = int(match[3] or match[4] or 0) - len(decimals)
    return 10.0**exponent if -300 < exponent < 300 else None, len((whole + decimals).lstrip("0"))


def _rational(source: str) -> Fraction | None:
    match = _RATIONAL.fullmatch(re.sub(r"(?<=[0-9])[, ](?=[0-9]{3}(?![0-9/]))", "", source))
    if not match or (match[2] and not match[4]):
        return None
    value = Fraction(int(match[3]), int(match[4] or 1)) + int(match[2] or 0)
    return -value if match[1] == "-" else value


class _Parser:
    """Grammar, lowest precedence first: sum, term, signed power, atom. Depth 0 is outside every parenthesis."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position
        self.irrational = 0
        self.has_pi = False
        self.rounded = False
        self.arithmetic = False
        self.power_of_ten = False

    def _peek(self) -> str:
        text, i = self.text, self.position
        while i < len(text) and text[i] == " ":
            i += 1
        self.position = i
        return text[i] if i < len(text) else ""

    def sum(self, depth: int) -> float:
        total = self.term(depth)
        while True:
            mark = self.position
            operator = self._peek()
            if operator not in ("+", "-"):
                self.position = mark
                return total
            self.position += 1
            try:
                right = self.term(depth)
            except _NotANumberError:
                self.position = mark
                return total
            self.arithmetic |= depth == 0
            total = total + right if operator == "+" else total - right

    def term(self, depth: int) -> float:
        value, roots, divisions = self.factor(depth), self.irrational, 0
        left_is_ten = self.power_of_ten
        while True:
            mark, before = self.position, self.irrational
            operator = self._operator()
            if not operator:
                self.position = mark
                return value
            try:
                right = self.factor(depth)
            except _NotANumberError:
                self.position = mark
                return value
            if operator == "implicit" and not self.irrational:
                self.position, self.irrational = mark, before
                return value
            divisions += operator == "/"
            if operator == "*" and (self.power_of_ten or left_is_ten):
                self.rounded = True
            elif depth == 0 and (divisions > 1 or operator == "*") and not (roots or self.irrational):
                self.arithmetic = True
            left_is_ten = False
            value = value / right if operator == "/" else value * right

    def _operator(self) -> str:
        if match := _LETTER_TIMES.match(self.text, self.position):
            self.position = match.end()
            return "*"
        char = self._peek()
        if char and char in "*/":
            self.position += 1
            return char
        if char == "(" or self.text.startswith("sqrt(", self.position) or _PI.match(self.text, self.position):
            return "implicit"
        return ""

    def factor(self, depth: int) -> float:
        if depth > MAX_NESTING:
            raise _NotANumberError
        sign = self._peek()
        if sign and sign in "+-":
            self.position += 1
            if self._peek() in ("+", "-"):
                raise _NotANumberError
            return self.factor(depth) if sign == "+" else -self.factor(depth)
        start = self.position
        base = self.atom(depth)
        literal_ten = self.text[start : self.position] == "10"
        self.power_of_ten = False
        if self._peek() != "^":
            return base
        self.position += 1
        exponent = self.factor(depth + 1)
        if abs(exponent) > MAX_EXPONENT:
            raise _NotANumberError
        self.power_of_ten = literal_ten
        return math.pow(base, exponent)

    def atom(self, depth: int) -> float:
        char = self._peek()
        if char == "(" or self.text.startswith("sqrt(", self.position):
            root = char == "s"
            self.position += 5 if root else 1
            value = self.sum(depth + 1)
            if self._peek() != ")":
                raise _NotANumberError
            self.position += 1
            self.irrational += root
            return math.sqrt(value) if root else value
        if match := _PI.match(self.text, self.position):
            self.position = match.end()
            self.irrational += 1
            self.has_pi = True
            return math.pi
        match = _LITERAL.match(self.text, self.position)
        if match is None or re.match(r"0[0-9]{2}", match[0]):
            raise _NotANumberError
        self.position = match.end()
        return self._mixed(match[0])

    def _mixed(self, literal: str) -> float:
        """A literal, with the proper fraction behind an integer: ``2 1/2``."""
        self.rounded |= not literal.replace(",", "").replace(" ", "").isdigit()
        value = float(literal.replace(",", "").replace(" ", ""))
        if value == 0 and re.search(r"[1-9]", re.split("[eE]", literal)[0]):
            raise _NotANumberError
        tail = _MIXED_TAIL.match(self.text, self.position) if literal.isdigit() else None
        if tail is None:
            return value
        top, bottom = int(tail[1]), int(tail[2])
        if not 0 < top < bottom:
            raise _NotANumberError
        self.position = tail.end()
        return value + top / bottom
