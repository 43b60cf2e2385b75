"""From an answer as a model writes it to the forms that rules compare. The order of the steps matters.

Vulgar fractions and superscripts are rewritten before NFKC, which would turn ``3½`` into 31/2 and ``10²³`` into 1023.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache

from trinity_vlm.answers.plain import LOWER_GREEK, THIN_SPACE, UPPER_GREEK, closing_bracket, matching_braces, to_plain
from trinity_vlm.answers.words import words_to_digits

MAX_ANSWER_CHARS = 1000

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱ", "0123456789+-=()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙᵢⱼₘₖ", "0123456789+-=()aeoxnijmk", strict=True))
_SUPERSCRIPT_RUN = re.compile(f"[{''.join(_SUPERSCRIPTS)}]+")
_SUBSCRIPT_RUN = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad\ufe0e\ufe0f"))
_BEFORE_NFKC = str.maketrans(
    {"º": "°", "˚": "°", "…": "...", "′": "'", "″": '"', "‴": "'''"} | dict.fromkeys("\u00a0\u202f\u2007", THIN_SPACE)
)
_AFTER_NFKC = str.maketrans(
    dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63", "-")
    | dict.fromkeys("×·∙⋅•∗✕✖", "*")
    | dict.fromkeys("÷∕⁄", "/")
    | dict.fromkeys("‘’ʼ", "'")
    | dict.fromkeys("“”„", '"')
    | {"∶": ":", "、": ", ", "。": ".", "⟶": "→", "⇒": "→", "≲": "≤", "≃": "≈", "∼": "≈", "⩽": "≤", "⩾": "≥"}
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_WRAPPING = (
    ("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"),
    ('"', '"'), ("'", "'"), ("“", "”"), ("‘", "’"),
)  # fmt: skip
_SPELLINGS = (
    (re.compile(r">="), "≥"),
    (re.compile(r"<="), "≤"),
    (re.compile(r"!="), "≠"),
    (re.compile(r"[-=]+>"), "→"),
    (re.compile(r"\*\*(?=\S)"), "^"),
    (re.compile(r"(?<![A-Za-z])sqrt\s*([0-9]+(?:\.[0-9]+)?|pi\b)"), r"sqrt(\1)"),
    (re.compile(r"(?<![A-Za-z])sqrt\s+\("), "sqrt("),
    (re.compile(r"\binfinity\b", re.IGNORECASE), "∞"),
)
_LEADING_ANSWER = re.compile(r"^(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|[:=])\s*(?=\S)", re.IGNORECASE)
_APPROXIMATION_SIGN = re.compile(r"^[≈~]\s*(?=\S)")
_APPROXIMATION_WORD = re.compile(r"^(?:about|approximately|approx\.?|roughly|around)\s+(?=\S)", re.IGNORECASE)
_NUMERAL_START = re.compile(r"[-+]?\s*(?:[$€£¥₹]\s*)?[-+]?(?:\.?[0-9]|sqrt\(|pi\b)")
_SYMBOL = re.compile(
    r"^((?:Δ\s?)?(?:[A-Za-z]|pH|(?:"
    + "|".join(LOWER_GREEK.values())
    + ")|["
    + "".join(UPPER_GREEK.values())
    + r"]|∠\s?\w{1,3})"
    r"(?:_\w+|_\([^()]*\)|[0-9]|'{1,2})?(?:\([A-Za-z]\))?)\s*(?:=|≈|∈)\s*(?=\S)"
)
_THOUSANDS = re.compile(rf"(?<=[0-9]){THIN_SPACE}(?=[0-9]{{3}}(?![0-9]))")


@dataclass(frozen=True, slots=True)
class Normal:
    """A normalised answer.

    raw: as given, stripped
    text: one plain spelling, case kept; what the parsers read. ``"2\\pi r"`` gives ``"2pi r"``
    symbol: the single symbol of ``symbol = text``, taken off ``text``; None when there was none
    equation: ``text`` with that symbol still on
    """

    raw: str
    text: str
    symbol: str | None
    equation: str


def normalise(answer: str) -> Normal:
    """Rewrite one answer of at most MAX_ANSWER_CHARS characters (longer ones are cut)."""
    return _normalise(answer.strip()[:MAX_ANSWER_CHARS])


@lru_cache(maxsize=2048)
def _normalise(raw: str) -> Normal:
    text = _unwrap(raw.translate(_INVISIBLE))
    text = _SUPERSCRIPT_RUN.sub(lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    text = _VULGAR.sub(_spell_vulgar, text).translate(_BEFORE_NFKC)
    text = unicodedata.normalize("NFKC", text.replace(THIN_SPACE, "\ue000")).replace("\ue000", THIN_SPACE)
    text = to_plain(text.translate(_AFTER_NFKC))
    text = _THOUSANDS.sub("", text)
    text = " ".join(text.replace(THIN_SPACE, " ").split())
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return _strip_frame(raw, text)


def _unwrap(text: str) -> str:
    """Take the last balanced box, then maths delimiters, emphasis and quotes around the whole, repeatedly."""
    for _ in range(4):
        before = text
        text = _last_box(text).strip()
        for left, right in _WRAPPING:
            inner = text[len(left) : len(text) - len(right)]
            if len(inner) > 0 and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner.strip()
        if text == before:
            break
    dollars = re.findall(r"(?<!\\)\$", text)
    return re.sub(r"(?<!\\)\$", "", text).strip() if len(dollars) % 2 == 0 and dollars else text


def _last_box(text: str) -> str:
    if "\\boxed" not in text and "\\fbox" not in text:
        return text
    close = matching_braces(text)
    spans = [(m.end(), close[m.end()]) for m in _BOX.finditer(text) if m.end() in close]
    return text[spans[-1][0] + 1 : spans[-1][1]] if spans else text


def _spell_vulgar(match: re.Match[str]) -> str:
    fraction = unicodedata.normalize("NFKC", match[0]).replace("⁄", "/")
    before = match.string[match.start() - 1] if match.start() else ""
    return f" {fraction}" if before.isdigit() else fraction


def _strip_frame(raw: str, text: str) -> Normal:
    text = _LEADING_ANSWER.sub("", text)
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    text = _strip_approximation(text)
    symbol: str | None = None
    equation = text
    if (match := _SYMBOL.match(text)) and not re.search(r"[=≤≥<>≠]", text[match.end() :]):
        symbol, text = re.sub(r"[_\s()]", "", match[1]), _strip_approximation(text[match.end() :])
    return Normal(raw, strip_parentheses(text), symbol, equation)


def _strip_approximation(text: str) -> str:
    """Drop a leading sign or word of approximation; the word only in front of a numeral (not ``around the world``)."""
    text = _APPROXIMATION_SIGN.sub("", text)
    match = _APPROXIMATION_WORD.match(text)
    return text[match.end() :] if match and _NUMERAL_START.match(words_to_digits(text[match.end() :])) else text


def strip_parentheses(text: str) -> str:
    """Drop parentheses around the whole text, unless they hold a tuple: ``(x+1)`` gives ``x+1``, ``(1,2)`` stays."""
    while text.startswith("(") and text.endswith(")") and "," not in text and ";" not in text:
        inner = text[1:-1].strip()
        if not inner or closing_bracket(text) != len(text) - 1:
            break
        text = inner
    return text
