"""Quantities: one numeral with an optional unit, percent sign, scale word or ratio, and how two of them compare.

Only complete readings count. ``group 4``, ``3 apples``, ``1990s``, ``at least 5`` and ``10-20`` are no quantities.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from trinity_vlm.answers.numbers import Number, parse_number, read_number
from trinity_vlm.answers.units import Unit, is_generic, lookup, parse_unit, unit_asked_for, units_of
from trinity_vlm.answers.words import SCALES, words_to_digits

Status = Literal["match", "mismatch", "ambiguous"]
ZERO_FLOOR = 1e-9
SAME = 1e-12

_MONEY = re.compile(r"([+-]?)\s*(US\$|\$|€|£|¥|₹|USD|EUR|GBP|JPY|CNY|RMB|INR|Rs\.?)\s*(?=[-+]?[0-9.])")
_SCALE = re.compile(r"(dozen|hundred|thousand|million|billion|trillion)\b|(bn|mn|[kKmMbBT])\b")
_SCALE_WORDS = {"dozen": 12.0, "hundred": 100.0} | {word: float(value) for word, value in SCALES.items()}
_SCALE_LETTERS = {"k": 1e3, "K": 1e3, "m": 1e6, "M": 1e6, "mn": 1e6, "b": 1e9, "B": 1e9, "bn": 1e9, "T": 1e12}
_PERCENT = re.compile(r"%|percent|per cent|pct\.?", re.IGNORECASE)
_RATIO = re.compile(r"\s*(:|to\b)\s*")
_CLOCK = re.compile(r"[0-2]?[0-9]:[0-5][0-9]")
_LABEL = re.compile(r"[0-9]{1,2}[ACFHKd]|[2-9]0s")
_NOT_A_QUANTITY = re.compile(r"[0-9]{3}0s|[(\[{].*,.*")
_NO_RATIO = re.compile(r"\b(?:time|clock|o'clock|score)\b", re.IGNORECASE)
_RATIO_ASKED = re.compile(r"\b(?:ratio|proportion|odds|scale)\b", re.IGNORECASE)
_SCALE_ASKED = re.compile(r"\b(?:thousand|million|billion|trillion)s?\b", re.IGNORECASE)
_PERCENT_ASKED = re.compile(r"%|\bpercent|\bper cent", re.IGNORECASE)
_THOUSANDFOLD = (1e3, 1e6, 1e9, 1e12, 1e-3, 1e-6, 1e-9, 1e-12)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """rel: accepted distance as a share of the reference; integer_exact: exact values must agree exactly."""

    rel: float
    integer_exact: bool


@dataclass(frozen=True, slots=True)
class Quantity:
    """A complete reading.

    number: the numeral, a/b for the ratio ``a:b``, scale words multiplied in
    unit: None when none is written (``units`` counts as none)
    scale: 1e6 for ``5 million``, else 1
    separator: ``":"`` or ``"to"`` of a ratio, else ""
    clock: also readable as a time of day, ``10:30``
    label: also readable as a label or a decade, ``4A``, ``3d``, ``90s``
    """

    number: Number
    unit: Unit | None = None
    percent: bool = False
    scale: float = 1.0
    separator: str = ""
    clock: bool = False
    label: bool = False

    @property
    def value(self) -> float:
        return self.number.value


def parse_quantity(text: str, question: str | None = None) -> Quantity | None:
    """Read the whole normalised ``text`` as a quantity, or return None."""
    text = words_to_digits(text)
    if _NOT_A_QUANTITY.fullmatch(text):
        return None
    money = _MONEY.match(text)
    if money:
        text = money[1] + text[money.end() :]
    currency = lookup(money[2].rstrip(".")) if money else None
    result = read_number(text)
    if result is None:
        return None
    number, rest = result[0], text[result[1] :].strip()
    if rest and not money and _PERCENT.fullmatch(rest):
        return Quantity(number, percent=True)
    if rest and not money and (separator := _RATIO.match(text, result[1])):
        return _ratio(text, number, separator, question)
    scale, rest = _scale(rest, currency)
    if scale != 1:
        number = replace(number, value=number.value * scale, fraction=_times(number.fraction, scale), step=None)
    if not rest or (is_generic(rest) and not money):
        return Quantity(number, currency, scale=scale)
    unit = parse_unit(rest)
    if unit is None or (currency and currency != unit):
        return None
    return Quantity(number, unit, scale=scale, label=_LABEL.fullmatch(text) is not None)


def _scale(rest: str, currency: Unit | None) -> tuple[float, str]:
    """A scale word at the front of ``rest``; a bare letter counts only behind an amount of money."""
    match = _SCALE.match(rest)
    if match is None or (match[2] and not currency):
        return 1.0, rest
    value = _SCALE_WORDS[match[1]] if match[1] else _SCALE_LETTERS[match[2]]
    return value, rest[match.end() :].strip()


def _times(fraction: Fraction | None, scale: float) -> Fraction | None:
    return None if fraction is None else fraction * int(scale)


def _ratio(text: str, left: Number, separator: re.Match[str], question: str | None) -> Quantity | None:
    right = parse_number(text[separator.end() :])
    if right is None or right.value == 0 or (question and _NO_RATIO.search(question)):
        return None
    fraction = left.fraction / right.fraction if left.fraction is not None and right.fraction else None
    number = Number(left.value / right.value, left.exact and right.exact, fraction)
    return Quantity(number, separator=separator[1], clock=_CLOCK.fullmatch(text) is not None)


def compare_quantities(
    ref: Quantity, pred: Quantity, tolerance: Tolerance, question: str | None = None
) -> tuple[Status, str]:
    """Status and rule of two complete readings."""
    if ref.unit and pred.unit:
        return _compare_units(ref, pred, ref.unit, pred.unit, tolerance)
    if (ref.percent and pred.unit) or (ref.unit and pred.percent):
        return "ambiguous", "percent_against_unit"
    if (ref.separator and pred.unit) or (ref.unit and pred.separator):
        return "ambiguous", "ratio_against_unit"
    if ref.unit or pred.unit:
        return _compare_one_unit(ref, pred, tolerance, question)
    if ref.separator or pred.separator:
        return _compare_ratios(ref, pred, tolerance, question)
    if ref.percent != pred.percent:
        return _compare_percent(ref, pred, tolerance), "percent"
    status = decide(ref.number, pred.number, tolerance)
    if status == "mismatch" and _scale_word_missing(ref, pred):
        return "ambiguous", "scale_word_missing"
    if status == "mismatch" and _implied_scale(ref.number, pred.number, tolerance, question):
        return "ambiguous", "implied_scale"
    return status, "number"


def _implied_scale(ref: Number, pred: Number, tolerance: Tolerance, question: str | None) -> bool:
    """Bare numbers that a scale only named in the question, or radians against degrees, would make equal."""
    if not ref.value or not pred.value:
        return False
    scales: list[float] = []
    if ref.has_pi != pred.has_pi:
        scales += [180 / math.pi, math.pi / 180]
    if question and _SCALE_ASKED.search(question):
        scales += _THOUSANDFOLD
    if question and _PERCENT_ASKED.search(question):
        scales += [100.0, 0.01]
    return any(abs(ref.value / pred.value - scale) <= tolerance.rel * scale for scale in scales)


def decide(ref: Number, pred: Number, tolerance: Tolerance) -> Status:
    """Compare two numerals; an exact form and its rounding, 1/3 and 0.33, are never a mismatch."""
    distance = abs(ref.value - pred.value)
    if ref.fraction is not None and pred.fraction is not None:
        equal = ref.fraction == pred.fraction
    else:
        equal = distance <= SAME * abs(ref.value)
    if equal:
        return "match"
    within = distance <= (ZERO_FLOOR if ref.value == 0 else tolerance.rel * abs(ref.value) * (1 + 1e-9))
    if within:
        return "ambiguous" if tolerance.integer_exact and ref.exact and pred.exact else "match"
    rounded = any(a.exact and not b.exact and _is_rounding(a, b) for a, b in ((ref, pred), (pred, ref)))
    return "ambiguous" if rounded else "mismatch"


def _is_rounding(whole: Number, shown: Number) -> bool:
    """``shown`` is ``whole`` rounded or cut to the digits shown, of which there are at least two."""
    if shown.step is None or shown.digits < 2:
        return False
    excess = abs(whole.value) - abs(shown.value)
    slack = 1e-9 * abs(shown.value)
    return whole.value * shown.value > 0 and -shown.step / 2 - slack <= excess < shown.step


def _compare_units(
    ref: Quantity, pred: Quantity, ref_unit: Unit, pred_unit: Unit, tolerance: Tolerance
) -> tuple[Status, str]:
    if ref_unit.dimension != pred_unit.dimension:
        return "ambiguous", "unit_dimension"
    if ref_unit == pred_unit:
        return decide(_cents(ref), _cents(pred), tolerance), "number_with_unit"
    back, forth = _converted(ref.number, ref_unit, pred_unit), _converted(pred.number, pred_unit, ref_unit)
    status = decide(ref.number, forth, tolerance)
    if status == "match" and ref_unit.temperature and decide(back, pred.number, tolerance) != "match":
        return "ambiguous", "unit_rounding"
    if status == "mismatch":
        explained = ref_unit.temperature and _temperatures_may_agree(ref, pred, back, ref_unit, pred_unit, tolerance)
        if explained or _is_rounding(forth, ref.number) or _is_rounding(back, pred.number):
            return "ambiguous", "unit_rounding"
    return status, "unit_conversion"


def _temperatures_may_agree(
    ref: Quantity, pred: Quantity, back: Number, ref_unit: Unit, pred_unit: Unit, tolerance: Tolerance
) -> bool:
    """Near each other on the other scale (0 °C, 273 K), or equal as differences (5 °C, 5 K)."""
    as_difference = ref_unit.factor == pred_unit.factor and decide(ref.number, pred.number, tolerance) == "match"
    return as_difference or decide(back, pred.number, tolerance) != "mismatch"


def _converted(number: Number, unit: Unit, target: Unit) -> Number:
    """``number`` in ``target`` units; still exact only where one unit is a whole multiple of the other."""
    ratio = max(unit.factor / target.factor, target.factor / unit.factor)
    whole = abs(ratio - round(ratio)) <= 1e-9 * ratio and unit.offset == target.offset
    return Number(unit.convert(number.value, target), number.exact and whole)


def _cents(quantity: Quantity) -> Number:
    """Amounts of money in whole cents are exact: 19.99 is not 20."""
    number = quantity.number
    if quantity.unit and quantity.unit.is_currency and quantity.scale == 1 and (number.step or 0) >= 0.0099:
        return replace(number, exact=True)
    return number


def _compare_one_unit(ref: Quantity, pred: Quantity, tolerance: Tolerance, question: str | None) -> tuple[Status, str]:
    """A missing unit is ignored; it is never held against a value that some unit or scale would explain."""
    named, bare, unit = (ref, pred, ref.unit) if ref.unit else (pred, ref, pred.unit)
    assert unit is not None
    status = decide(_cents(ref), _cents(pred), tolerance)
    asked = unit_asked_for(question, unit.dimension) if question else None
    if asked is not None and asked != unit:
        filled = replace(bare, unit=asked)
        with_asked, rule = compare_quantities(*((ref, filled) if ref.unit else (filled, pred)), tolerance)
        return (with_asked if with_asked == "match" or status != "match" else "ambiguous"), f"asked_{rule}"
    if status == "match":
        return ("ambiguous", "label") if named.label else ("match", "unit_missing")
    if status == "mismatch" and _explained(named, bare, unit, tolerance):
        return "ambiguous", "unit_missing"
    return status, "unit_missing"


def _explained(named: Quantity, bare: Quantity, unit: Unit, tolerance: Tolerance) -> bool:
    """Some other unit of the dimension, or thousands, millions ..., would make the two equal."""
    if ("rad", 1) in unit.dimension and bare.number.has_pi:
        return True
    loose = Tolerance(tolerance.rel, False)
    ratios = (bare.value / named.value,) if named.value else ()
    if any(abs(ratio - power) <= tolerance.rel * power for ratio in ratios for power in _THOUSANDFOLD):
        return True
    return any(
        decide(_converted(named.number, unit, u), bare.number, loose) != "mismatch" for u in units_of(unit.dimension)
    )


def _compare_ratios(ref: Quantity, pred: Quantity, tolerance: Tolerance, question: str | None) -> tuple[Status, str]:
    both = bool(ref.separator and pred.separator)
    if ref.percent or pred.percent:
        return _compare_percent(ref, pred, tolerance), "ratio"
    status = decide(ref.number, pred.number, tolerance)
    if both and ref.clock and pred.clock:
        return "ambiguous", "clock"
    if both and ref.separator == pred.separator == "to" and not (question and _RATIO_ASKED.search(question)):
        return "ambiguous", "range_or_ratio"
    if not both and (ref.clock or pred.clock) and status == "mismatch":
        return "ambiguous", "clock"
    return status, "ratio"


def _compare_percent(ref: Quantity, pred: Quantity, tolerance: Tolerance) -> Status:
    """One side carries the percent sign: p % stands for p/100 and for p."""
    found: set[Status] = set()
    for scale in (Fraction(1, 100), Fraction(1)):
        left, right = (_scaled(q.number, scale) if q.percent else q.number for q in (ref, pred))
        found.add(decide(left, right, tolerance))
    return "match" if "match" in found else "ambiguous" if "ambiguous" in found else "mismatch"


def _scaled(number: Number, scale: Fraction) -> Number:
    """A percentage as a plain number; whole percents count as rounded unless they make an integer."""
    fraction = None if number.fraction is None else number.fraction * scale
    step = None if number.step is None else number.step * float(scale)
    exact = fraction is not None and fraction.denominator == 1
    return replace(number, value=number.value * float(scale), fraction=fraction, step=step, exact=exact)


def _scale_word_missing(ref: Quantity, pred: Quantity) -> bool:
    """``5 million`` against ``5``."""
    if (ref.scale == 1) == (pred.scale == 1):
        return False
    left, right = ref.value / ref.scale, pred.value / pred.scale
    return abs(left - right) <= SAME * abs(left)


def compare_multipart_ratios(ref: str, pred: str, tolerance: Tolerance) -> bool:
    """``1:2:3`` and ``2:4:6`` are proportional; False also when either is no ratio of three or more parts."""
    sides = [[parse_number(part) for part in words_to_digits(text).split(":")] for text in (ref, pred)]
    left, right = sides
    if len(left) < 3 or len(left) != len(right):
        return False
    numbers = [(a, b) for a, b in zip(left, right, strict=True) if a and b and a.value > 0 and b.value > 0]
    if len(numbers) < len(left):
        return False
    first_left, first_right = numbers[0]
    return all(
        decide(_quotient(a, first_left), _quotient(b, first_right), tolerance) == "match" for a, b in numbers[1:]
    )


def _quotient(a: Number, b: Number) -> Number:
    fraction = a.fraction / b.fraction if a.fraction is not None and b.fraction else None
    return Number(a.value / b.value, a.exact and b.exact, fraction)
