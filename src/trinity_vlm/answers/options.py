"""Option letters of multiple choice: which options an answer names, by letter, by letters or by text."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

from trinity_vlm.answers.keys import same_keys
from trinity_vlm.answers.normalise import normalise

OPTION_LETTERS = "ABCDEFGH"

_LABEL = r"(?:(?i:options?|choices?|answers?)(?:\s*:\s*|\s+|(?=[(\[])))?"
_LETTER = r"[(\[]?([A-Z])[)\]]?"
_LONE = re.compile(rf"{_LABEL}[(\[]?\s?([A-Za-z])\s?[)\].:]{{0,2}}")
_WITH_TEXT = re.compile(rf"{_LABEL}(?:[(\[]([A-Z])[)\]]\s?[:.]?|([A-Z])\s?[):.])\s+(\S.*)", re.DOTALL)
_SEPARATED = re.compile(rf"{_LABEL}{_LETTER}(?:(?: ?[,;&] ?(?:and )?| and | ){_LETTER})+")
_QUESTION_OPTION = re.compile(r"(?:^|\n|\s)\(?([A-Z])[).:]\s+(.+?)(?=(?:\n|\s)\s*\(?[A-Z][).:]\s|\n|$)", re.DOTALL)


def lone_letter(text: str) -> str | None:
    """The upper-case letter when the whole text is ``X``, ``(X)``, ``X.``, ``X)`` or ``Option X``; any case of X."""
    match = _LONE.fullmatch(text.strip())
    return match[1].upper() if match else None


def letter_list(text: str) -> tuple[str, ...] | None:
    """Separated upper-case letters in order: ``A, C`` or ``(A) and (C)``; None for anything else."""
    text = text.strip()
    if not _SEPARATED.fullmatch(text):
        return None
    letters = tuple(re.findall(r"(?<![A-Za-z])[A-Z](?![A-Za-z])", text))
    return letters if len(letters) > 1 and len(set(letters)) == len(letters) else None


def resolve(answer: str, options: Sequence[str], same: Callable[[str, str], bool]) -> frozenset[str] | None:
    """Letters of the options that ``answer`` names, or None when it names none or could mean two.

    ``same(option, answer)`` tells whether an option text and an answer are the same by rule.
    """
    valid = string.ascii_uppercase[: len(options)]
    text = normalise(answer).text
    by_text = [letter for letter, option in zip(valid, options, strict=False) if _same_text(option, text)]
    letters = _letters(text, valid, options)
    if letters and by_text and frozenset(by_text) != letters:
        return None
    if letters:
        return letters
    if not by_text:
        by_text = [letter for letter, option in zip(valid, options, strict=False) if same(option, answer)]
    return frozenset(by_text) if len(by_text) == 1 else None


def _same_text(option: str, text: str) -> bool:
    plain = normalise(option).text
    return bool(plain) and (plain == text or same_keys(plain, text) is not None)


def _letters(text: str, valid: str, options: Sequence[str]) -> frozenset[str] | None:
    lone = lone_letter(text)
    if lone:
        return frozenset(lone) if lone in valid else None
    if match := _WITH_TEXT.fullmatch(text):
        letter, claimed = match[1] or match[2], match[3]
        others = [
            o for c, o in zip(valid, options, strict=False) if c != letter and _same_text(o, normalise(claimed).text)
        ]
        return frozenset(letter) if letter in valid and not others else None
    letters = letter_list(text)
    if letters is None and re.fullmatch(r"[A-Z]{2,}", text) and len(set(text)) == len(text):
        letters = tuple(text)
    return frozenset(letters) if letters and all(c in valid for c in letters) else None


def options_of_question(question: str) -> tuple[str, ...]:
    """Option texts that a question lists as ``A. ..``, ``(B) ..`` in alphabetical order; () for fewer than two."""
    found = [(m[1], m[2].strip()) for m in _QUESTION_OPTION.finditer(question)]
    start = next((i for i, (letter, _) in enumerate(found) if letter == "A"), None)
    if start is None:
        return ()
    run = found[start:]
    texts = [text for expected, (letter, text) in zip(string.ascii_uppercase, run, strict=False) if letter == expected]
    in_order = len(texts) == len(run)
    return tuple(texts) if in_order and len(texts) >= 2 else ()


def same_letters_without_options(ref: str, pred: str) -> bool:
    """Whether both are the same option letter, or the same letters in the same order, when no options are known.

    ``B`` and ``B) 12 cm`` agree; ``E`` and ``E. coli`` do not, since a full stop may abbreviate a name.
    """
    left, right = _named_letters(ref), _named_letters(pred)
    return left is not None and left == right and all(letter in OPTION_LETTERS for letter in left)


def _named_letters(text: str) -> tuple[str, ...] | None:
    lone = lone_letter(text)
    if lone:
        return (lone,)
    match = _WITH_TEXT.fullmatch(text)
    if match:
        letter, rest = match[1] or match[2], match[3]
        full_stop = not match[1] and text[text.index(letter) + 1 :].lstrip().startswith(".")
        return None if full_stop and not re.match(r"[-+$\\]?[0-9]", rest) else (letter,)
    return letter_list(text)
