"""Hand-worked readings of notation, numerals, number words, units and sequences."""

import math
from fractions import Fraction

import pytest

from trinity_vlm.answers.normalise import normalise
from trinity_vlm.answers.numbers import parse_number
from trinity_vlm.answers.quantity import parse_quantity
from trinity_vlm.answers.sequences import parse_sequence
from trinity_vlm.answers.symbolic import symbolic_pair, to_latex
from trinity_vlm.answers.units import parse_unit, unit_asked_for
from trinity_vlm.answers.words import words_to_digits


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"\boxed{\dfrac{3}{4}}", "3/4"), ("3½", "3 1/2"), ("10²³", "10^23"), (r"\frac{1}{2x}", "1/(2x)"),
        (r"\frac{1}{2}x", "(1/2)x"), (r"x^{2y}", "x^(2y)"), (r"x^{10}", "x^10"), (r"30^\circ", "30°"),
        (r"\{1,2\}", "{1,2}"),
        ("$5$", "5"), ("$5", "$5"), (r"1{,}234", "1,234"), (r"1\,234", "1234"), (r"\text{5 cm}", "5 cm"),
        ("x = 5", "5"),
        ("AB = CD", "AB = CD"), (r"\sqrt[3]{8}", "(8)^(1/3)"), (r"2\pi r", "2pi r"), ("≈ 5", "5"), ("about 5", "5"),
        ("around the world", "around the world"), (r"a \boxed{1} b \boxed{\text{x}_{2}} c", "x_2"), ("(x+1)", "x+1"),
        ("(1,2)", "(1,2)"), ("5 °C.", "5 °C"), ("wait...", "wait..."), (r"\Delta", "Δ"), (r"\delta", "delta"),
    ],
)  # fmt: skip
def test_plain_spelling(answer, text):
    """Superscripts and vulgar fractions survive NFKC, groups keep their meaning, frames fall."""
    assert normalise(answer).text == text


@pytest.mark.parametrize(
    "answer", [r"\boxed{\frac{1}{2}}", "3½ cm", r"\{1, 2\}", "x_1^{2y}", r"\vec{v}", "10⁻³", "f(x)=x²"]
)
def test_normalising_twice_changes_nothing(answer):
    once = normalise(answer).text
    assert normalise(once).text == once


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", 1234.5), ("1 234 567", 1234567.0), ("3e8", 3e8), ("3 x 10^-4", 3e-4), ("-2 1/2", -2.5),
        ("-2^2", -4.0),
        ("2sqrt(3)/3", 2 * math.sqrt(3) / 3), ("(1+sqrt(5))/2", (1 + math.sqrt(5)) / 2), ("2pi/3", 2 * math.pi / 3),
        ("2^3^2", 512.0), ("1+sqrt(2)", 1 + math.sqrt(2)), ("10^-3", 1e-3), ("(3+4)/2", 3.5), ("05", 5.0),
        ("sqrt(3^2+4^2)", 5.0),
    ],
)  # fmt: skip
def test_numerals(text, value):
    number = parse_number(text)
    assert number is not None
    assert number.value == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize(
    "text",
    [
        "", "10-20", "1/2/2020", "3*4", "2 3/2", "2(3)", "007", "1,23", "1.2.3", "5!", "1e999", "1e-999", "9^9^9^9",
        "1/0",
        "sqrt(-1)", "--5",
        "5-", "2+3", "10^9999", "0,123", "x", "5 apples", "(5", "nan", "inf", "infinity", "1_000", "0x10", "٣",
        "(-8)^(1/3)",
    ],
)  # fmt: skip
def test_not_numerals(text):
    """What only looks like a number, or has no finite real value, is refused."""
    assert parse_number(text) is None


def test_exactness_of_numerals():
    """Integers, fractions and mixed numbers carry their exact value; decimals and powers of ten do not."""
    assert parse_number("2 1/2").fraction == Fraction(5, 2)
    assert parse_number("5.00").exact
    assert parse_number("12345678901234567891").fraction == 12345678901234567891
    assert not parse_number("3.5").exact
    assert not parse_number("3*10^8").exact
    assert (parse_number("3.14e2").step, parse_number("3.14e2").digits) == (1.0, 3)


@pytest.mark.parametrize(
    ("text", "digits"),
    [
        ("two thirds", "2/3"), ("minus three", "-3"), ("twenty-one", "21"), ("one hundred and five", "105"),
        ("a half", "1/2"),
        ("two and a half", "2 1/2"), ("three hundred thousand", "300000"), ("five meters", "5 meters"),
        ("two dozen", "24"),
        ("one to two", "1 to 2"), ("twenty fifth", "20 fifth"), ("nineteen ninety", "19 90"), ("often", "often"),
        ("tent", "tent"),
        ("one million two hundred thousand", "1200000"), ("third", "third"), ("a cat", "a cat"),
        ("Someone", "Someone"),
    ],
)  # fmt: skip
def test_number_words(text, digits):
    assert words_to_digits(text) == digits


@pytest.mark.parametrize(
    ("text", "factor", "dimension"),
    [
        ("km/h", 1 / 3.6, {"m": 1, "s": -1}), ("J/(kg K)", 1.0, {"m": 2, "s": -2, "K": -1}), ("cm^3", 1e-6, {"m": 3}),
        ("square feet", 0.3048**2, {"m": 2}), ("mu m", 1e-6, {"m": 1}),
        ("kΩ", 1e3, {"kg": 1, "m": 2, "s": -3, "A": -2}),
        ("miles per hour", 0.44704, {"m": 1, "s": -1}), ("mW", 1e-3, {"kg": 1, "m": 2, "s": -3}),
        ("ms^-2", 1.0, {"m": 1, "s": -2}),
        ("MW", 1e6, {"kg": 1, "m": 2, "s": -3}), ("m/s/s", 1.0, {"m": 1, "s": -2}),
        ("N*m", 1.0, {"kg": 1, "m": 2, "s": -2}),
    ],
)  # fmt: skip
def test_units(text, factor, dimension):
    unit = parse_unit(text)
    assert unit is not None
    assert unit.factor == pytest.approx(factor, rel=1e-12)
    assert dict(unit.dimension) == dimension


@pytest.mark.parametrize(
    "text", ["apples", "pm", "a.m", "A.M.", "m/", "/s", "per", "GB", "of", "m apples", "()", "m)", "(m", "years old"]
)
def test_unknown_units(text):
    assert parse_unit(text) is None


def test_temperatures_convert_with_their_offset():
    celsius, fahrenheit = parse_unit("°C"), parse_unit("degrees Fahrenheit")
    assert celsius.convert(100.0, fahrenheit) == pytest.approx(212.0)
    assert fahrenheit.convert(-40.0, celsius) == pytest.approx(-40.0)


def test_unit_asked_for_must_be_the_only_one():
    metres = (("m", 1),)
    assert unit_asked_for("How long is it in centimeters?", metres) == parse_unit("cm")
    assert unit_asked_for("Convert 5 feet: how many meters, and in cm?", metres) is None
    assert unit_asked_for("How long is it?", metres) is None


@pytest.mark.parametrize(
    "text", ["group 4", "3 apples", "1990s", "at least 5", "10-20", "2020-01-05", "(1,234)", "5 to", "12:00"]
)
def test_partial_readings_are_no_quantities(text):
    assert parse_quantity(text) is None


def test_sequences():
    assert parse_sequence("[0, 1)").brackets == "[)"
    assert parse_sequence("(1,2), (3,4)").elements == ("(1,2)", "(3,4)")
    assert parse_sequence("1, 2 and 3").elements == ("1", "2", "3")
    assert parse_sequence("{5}").unordered
    assert parse_sequence("5") is None
    assert parse_sequence("1,,2") is None
    assert parse_sequence("1," * 500 + "1") is None


def test_latex_for_the_symbolic_step():
    assert to_latex("x^(2y)/sqrt(2)") == r"x^{2y}/\sqrt{2}"
    assert to_latex("sin(pi/6)*x_12") == r"\sin (\pi /6)\cdot x_{12}"


@pytest.mark.parametrize(
    "text",
    [
        "9^9^9+x",
        "x^(9^9)",
        "x!+1",
        "x^1000+1",
        "cat+dog",
        "10-20",
        "a/b/c",
        "A-B-C",
        "x" * 201 + "+1",
        "x+12345678901234567890",
        "(x+1",
    ],
)
def test_expressions_refused_before_the_symbolic_step(text):
    """Nested and huge powers, factorials, words, ranges, chains and long texts never reach a worker."""
    assert symbolic_pair(text, "x+1") is None
    assert symbolic_pair("x+1", text) is None
    assert symbolic_pair(text, text) is None
