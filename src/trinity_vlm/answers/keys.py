"""Comparison keys: what may differ between two spellings of the same answer without changing it.

Dropped: case, blanks (except between digits), thousands commas, subscript marks, explicit multiplication, an article
in front of a phrase, punctuation of prose. Kept: everything that can change the meaning, such as the comma of ``1,2``,
the caret of ``10^3`` and the hyphen of ``a-b``.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from trinity_vlm.answers.plain import FUNCTIONS, LOWER_GREEK, word_set
from trinity_vlm.answers.units import parse_unit
from trinity_vlm.answers.words import words_to_digits

MATHS_WORDS = FUNCTIONS | frozenset(LOWER_GREEK.values()) | {"sqrt"}

_PROSE = re.compile(r"(?:[^\W\d_]|[\s,.;:!?&'\"-])+")
_LETTERS = re.compile(r"[^\W\d_]+")
_ARTICLE = re.compile(r"(?:the|an?)\s+(?=[^\W\d_]{2})", re.IGNORECASE)
_NOT_AN_ARTICLE = re.compile(r"A\s+(?:positive|negative|minor|major|flat|sharp)\b", re.IGNORECASE)
_THOUSANDS_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_LOOSE_BLANK = re.compile(r"(?<![0-9]) | (?![0-9])")
_SIZE = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=[0-9])|(?<=[0-9A-Za-z]) [xX*] (?=[0-9])")
_FRACTION_FACTOR = re.compile(r"(?<![\w)^/.])\(?([0-9]+/[0-9]+)(?:\) ?| )(?=[A-Za-z])")
_ION = re.compile(r"(?<=[a-z0-9)\]])\^(?=[0-9]*[+-]$)")
_GENOTYPE = re.compile(r"(?:([a-z])\1){1,4}")
_TIMES = re.compile(r"(?<=[0-9A-Za-z)])\*(?=[A-Za-z])|(?<=[0-9)])\*(?=\()")
_ELEMENTS = word_set(
    "H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb Sr Y "
    "Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu Hf Ta W Re "
    "Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr"
)
_ACRONYM = re.compile(r"(?:[A-Z]\.)+[A-Z]")
_FORMULA_PART = re.compile(r"[A-Z][a-z]?|[0-9]+|[()\[\]^+-]")


@dataclass(frozen=True, slots=True)
class Keys:
    """strict: the key itself; ion: without the caret of a charge at the end; phrase: two keys of prose, or ()."""

    strict: str
    ion: str
    phrase: tuple[str, ...]


def keys_of(text: str) -> Keys:
    """Keys of a normalised text."""
    phrase = _phrase_keys(text) if is_prose(text) else ()
    strict = _strict(text)
    return Keys(strict, _ION.sub("", strict), phrase)


def same_keys(ref: str, pred: str) -> str | None:
    """The rule by which two normalised texts are the same answer, or None."""
    left, right = keys_of(ref), keys_of(pred)
    if left.strict and left.strict == right.strict:
        return "key"
    one_caretless = ("^" in ref) != ("^" in pred) and "_" not in (pred if "^" in ref else ref)
    if left.ion == right.ion and one_caretless and _formula(ref) and _formula(pred):
        return "ion"
    if any(a and a == b for a, b in zip(left.phrase, right.phrase, strict=False)):
        return "phrase"
    return None


def is_prose(text: str) -> bool:
    """Only words and punctuation, with at least one word of three letters that is not a mathematical name."""
    if not _PROSE.fullmatch(text):
        return False
    words = [w.lower() for w in _LETTERS.findall(text)]
    return any(_is_word(w) for w in words) and not any(w in MATHS_WORDS or _is_applied_function(w) for w in words)


def _is_word(word: str) -> bool:
    return (len(word) >= 3 and word not in MATHS_WORDS) or not word.isascii()


def _is_applied_function(word: str) -> bool:
    return any(word.startswith(f) and len(word) == len(f) + 1 for f in ("sin", "cos", "tan", "log"))


def _phrase_keys(text: str) -> tuple[str, ...]:
    """One key keeps commas and joins hyphens, the other the reverse: ``blue-green`` is not ``blue, green``."""
    text = re.sub(r"\s*&\s*", " and ", _drop_article(text)).lower()
    text = re.sub(r"(?<=\w)'(?=\w)|[.!?\"]", "", text)
    text = words_to_digits(text)
    text = re.sub(r"(?<=[a-z])[\u0300-\u036f]+", "", unicodedata.normalize("NFD", text))
    joined = re.sub(r"(?<=\w)-(?=\w{3})|(?<=\w\w)-(?=\w\w)", "", text)
    return tuple(re.sub(r"\s+", "", t) for t in (joined, re.sub(r"[,;:]", " ", text)))


def _drop_article(text: str) -> str:
    match = None if _NOT_AN_ARTICLE.match(text) else _ARTICLE.match(text)
    return text[match.end() :] if match else text


def _strict(text: str) -> str:
    if any(_is_word(w.lower()) for w in _LETTERS.findall(text)):
        text = words_to_digits(_drop_article(text))
        text = re.sub(r",\s+", " ", text)
    if _ACRONYM.fullmatch(text):
        text = text.replace(".", "")
    text = _THOUSANDS_COMMA.sub("", _FRACTION_FACTOR.sub(r"(\1)", text))
    text = _SIZE.sub("*", text).replace("△", "triangle ").replace("∠", "angle ")
    text = text.removeprefix("+").replace("_", "").replace("$", "")
    text = _LOOSE_BLANK.sub("", text)
    return _TIMES.sub("", text).lower()


def case_matters(ref: str, pred: str) -> bool:
    """Equal but for case, and case carries meaning: formulas (Co, CO), units (mW, MW), genotypes, symbols."""
    if ref == pred or ref.lower() != pred.lower() or ref.lower() in ("no", "in"):
        return False
    formulas = _formula(ref), _formula(pred)
    if formulas[0] and formulas[1] and formulas[0] != formulas[1]:
        return True
    if _GENOTYPE.fullmatch(ref.lower()) or re.findall(r"\^([A-Za-z])", ref) != re.findall(r"\^([A-Za-z])", pred):
        return True
    if not is_prose(ref) and any(c.islower() and c.upper() in text for text in (ref, pred) for c in text):
        return True
    units = parse_unit(ref), parse_unit(pred)
    return units[0] != units[1] and (None not in units or len(ref) <= 2)


def _formula(text: str) -> tuple[str, ...]:
    """Parts of a chemical formula, or () when it is none."""
    compact = text.replace("_", "").replace(" ", "")
    parts = tuple(_FORMULA_PART.findall(compact))
    valid = "".join(parts) == compact and all(p in _ELEMENTS for p in parts if p[0].isalpha())
    return parts if valid else ()
