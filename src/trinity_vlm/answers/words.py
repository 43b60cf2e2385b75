"""Number words to digits: ``two thirds`` is 2/3, ``minus three`` is -3, ``twenty-one`` is 21."""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Za-z]+")
_SMALL = {
    word: value
    for value, word in enumerate(
        _WORD.findall(
            "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen"
        )
    )
}
_TENS = {
    word: 10 * n for n, word in enumerate(_WORD.findall("twenty thirty forty fifty sixty seventy eighty ninety"), 2)
}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_DENOMINATORS = {
    "half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4,
    "fifth": 5, "fifths": 5, "sixth": 6, "sixths": 6, "seventh": 7, "sevenths": 7, "eighth": 8, "eighths": 8,
    "ninth": 9, "ninths": 9, "tenth": 10, "tenths": 10,
}  # fmt: skip
_SIGNS = ("minus", "negative")
_STARTS = frozenset(_SMALL) | frozenset(_TENS) | {"a", "an", "half", *_SIGNS}
_GAP = re.compile(r"\s+|\s*-\s*")


def words_to_digits(text: str) -> str:
    """Replace each run of number words by digits; anything else, ordinals included, stays as it is."""
    out: list[str] = []
    position = 0
    for match in _WORD.finditer(text):
        if match.start() < position or match[0].lower() not in _STARTS:
            continue
        if match.start() and text[match.start() - 1] in "\\_^'":
            continue
        words, ends = _run(text, match.start())
        spelled, used = _spell(words)
        if used and not _continues(text, ends[used - 1]):
            out += [text[position : match.start()], spelled]
            position = ends[used - 1]
    return "".join(out) + text[position:] if out else text


def _continues(text: str, end: int) -> bool:
    return end < len(text) and (text[end].isalnum() or text[end] in "_'")


def _run(text: str, start: int) -> tuple[list[str], list[int]]:
    """The words from ``start`` on that only blanks or hyphens separate (at most 12), and where each ends."""
    words: list[str] = []
    ends: list[int] = []
    while len(words) < 12 and (match := _WORD.match(text, start)):
        words.append(match[0].lower())
        ends.append(match.end())
        gap = _GAP.match(text, match.end())
        if gap is None:
            break
        start = gap.end()
    return words, ends


def _spell(words: list[str]) -> tuple[str, int]:
    """Digits for the longest numeral at the front of ``words`` and how many words it takes; ("", 0) for none."""
    sign = 1 if words[0] in _SIGNS else 0
    prefix = "-" if sign else ""
    rest = words[sign:]
    if rest[:1] == ["half"] and rest[1:2] != ["a"]:
        return f"{prefix}1/2", sign + 1
    if len(rest) > 1 and rest[0] in ("a", "an"):
        if rest[1] in ("half", "third", "quarter"):
            return f"{prefix}1/{_DENOMINATORS[rest[1]]}", sign + 2
        if rest[1] in ("dozen", "hundred", *SCALES):
            rest = ["one", *rest[1:]]
    value, used = _cardinal(rest)
    if not used:
        return "", 0
    after = rest[used:]
    bottom = _DENOMINATORS.get(after[0]) if after and 0 < value < 20 else None
    if bottom and (value == 1) != after[0].endswith("s"):
        return f"{prefix}{value}/{bottom}", sign + used + 1
    if after[:3] in (["and", "a", "half"], ["and", "one", "half"]):
        return f"{prefix}{value} 1/2", sign + used + 3
    if after[:3] in (["and", "a", "quarter"], ["and", "one", "quarter"]):
        return f"{prefix}{value} 1/4", sign + used + 3
    return f"{prefix}{value}", sign + used


def _cardinal(words: list[str]) -> tuple[int, int]:
    """Value and length of the cardinal at the front of ``words``; length 0 when there is none."""
    total = group = used = 0
    limit = 10**15
    i = 0
    while i < len(words):
        value, length = _below_hundred(words[i:])
        if not length:
            break
        i += length
        if words[i : i + 1] == ["dozen"]:
            return total + value * 12, i + 1
        if words[i : i + 1] == ["hundred"] and value < 100:
            value *= 100
            i += 1
            joint = 1 if words[i : i + 1] == ["and"] else 0
            low, length = _below_hundred(words[i + joint :])
            if length:
                value, i = value + low, i + joint + length
        scale = SCALES.get(words[i]) if i < len(words) else None
        group, used = value * (scale or 1), i + (scale is not None)
        if group >= limit:
            return 0, 0
        total, limit, i = total + group, scale or 0, used
        if scale is None:
            break
    return total, used


def _below_hundred(words: list[str]) -> tuple[int, int]:
    if words and words[0] in _SMALL:
        return _SMALL[words[0]], 1
    if words and words[0] in _TENS:
        if len(words) > 1 and 1 <= _SMALL.get(words[1], 0) <= 9:
            return _TENS[words[0]] + _SMALL[words[1]], 2
        return _TENS[words[0]], 1
    return 0, 0
