"""JSON objects in model text: fenced or between prose, with LaTeX backslashes that JSON would misread."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_CHARS = 100_000
MAX_INTEGER_DIGITS = 300
# JSONDecodeError counts lines from the start of its text: cutting off what is done keeps many errors linear.
_CUT_EVERY = 4_096

_OBJECT_START = re.compile(r'\{(?=\s*["}])')
_ESCAPE = re.compile(
    r"\\(?:(?P<pair>u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})"
    r"|(?P<unicode>u[0-9a-fA-F]{4})"
    r'|(?P<plain>["\\/])'
    r"|(?P<word>[A-Za-z]+)"
    r"|(?P<apostrophe>')"
    r"|)"
)
# LaTeX commands that begin like the JSON escapes for line feed, carriage return and tab. Commands in b and f need no
# list: no model means a backspace or a form feed right before a letter.
_LATEX_IN_NRT = re.compile(
    r"nabla|neq?|neg|newline|ngeq|nleq|nmid|not|notin|nparallel|nu|nsim|ncong"
    r"|rangle|rceil|rfloor|rho|right|rightarrow|rightleftharpoons|rm|root|rvert"
    r"|tanh?|tau|text|textbf|textit|textrm|textstyle|tfrac|therefore|theta|thickapprox|tilde|times|to|top|triangleq?"
)


def json_objects(text: str) -> list[dict[str, Any]]:
    """Every top-level JSON object in the first ``MAX_CHARS`` characters of ``text``, in order.

    Code fences and prose around objects are skipped, line breaks inside strings are accepted, and backslashes that
    are LaTeX rather than JSON escapes are kept (``"\\frac{1}{2}"``). An object that gives a key twice is ambiguous
    and left out; NaN and infinities become None; after a broken object the search goes on behind the fault.
    Time is linear in the text; nothing is ever raised.
    """
    text = _keep_latex(text[:MAX_CHARS])
    found: list[dict[str, Any]] = []
    position = 0
    while start := _OBJECT_START.search(text, position):
        try:
            value, position = _DECODER.raw_decode(text, start.start())
        except json.JSONDecodeError as error:
            position = _resume_position(text, start.start(), error.pos)
            if position > _CUT_EVERY:
                text, position = text[position:], 0
        except RecursionError:
            break
        else:
            if value is not None:
                found.append(value)
    return found


def _resume_position(text: str, start: int, fault: int) -> int:
    """Where to look for the next object after one at ``start`` broke at ``fault``.

    The string before the fault may have run into the next object: in ``{"a} or {"match": 1}`` the quote that closes
    ``"a} or {"`` belongs to ``"match"``. Then that object's brace stands right before the quote.
    """
    brace = text.rfind("{", start + 1, fault)
    if brace > start and text[brace + 1 : fault].strip() == '"':
        return brace
    return max(fault, start + 1)


def _keep_latex(text: str) -> str:
    """Double every backslash that is not a JSON escape, or is one only by accident (``\\frac``, ``\\theta``)."""
    return _ESCAPE.sub(_repaired_escape, text)


def _repaired_escape(match: re.Match[str]) -> str:
    escape, word = match.group(), match["word"]
    if match["lone"]:
        return "\\ufffd"
    if match["apostrophe"]:
        return "'"
    if word:
        is_json = word in ("b", "f") or (word[0] in "nrt" and not _LATEX_IN_NRT.fullmatch(word))
    else:
        is_json = bool(match["pair"] or match["unicode"] or match["plain"])
    return escape if is_json else "\\" + escape


def _object_or_none(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    value = dict(pairs)
    return value if len(value) == len(pairs) else None


def _bounded_integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else float(digits)


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object_or_none, parse_constant=lambda _: None, parse_int=_bounded_integer, strict=False
)
