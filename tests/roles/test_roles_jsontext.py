"""The tolerant JSON extractor."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_vlm.roles.jsontext import MAX_CHARS, json_objects

# Without backslashes and control characters: "\\bA" on the page is LaTeX for this extractor, whatever its writer meant.
PLAIN_TEXT = st.text(st.characters(exclude_characters="\\", exclude_categories=("Cs", "Cc")))
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | PLAIN_TEXT
OBJECTS = st.dictionaries(st.text("abc{}\"' ", max_size=4), SCALARS | st.lists(SCALARS, max_size=2), max_size=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"match": 1}', [{"match": 1}]),
        ('Sure:\n```json\n{"match": 1}\n```\nDone.', [{"match": 1}]),
        ('{"a": {"b": [1, {"c": "}"}]}}', [{"a": {"b": [1, {"c": "}"}]}}]),
        ('{"a": 1} and {"a": 2}', [{"a": 1}, {"a": 2}]),
        ("{}", [{}]),
        ('the set {1, 2} then {"a": 1}', [{"a": 1}]),
        (r'so \boxed{3}, i.e. \frac{1}{2} {"a": 1}', [{"a": 1}]),
        ('{"a": "two\nlines"}', [{"a": "two\nlines"}]),
        ('[{"a": 1}]', [{"a": 1}]),
        ("no object", []),
        ('{"a": 1', []),
        ("{'a': 1}", []),
        ('{"a": 1,}', []),
    ],
)
def test_objects_are_found_in_fences_prose_and_nesting(text, expected):
    """Locks what counts as a top-level object, and that Python dicts and trailing commas do not."""
    assert json_objects(text) == expected


@pytest.mark.parametrize(
    "text",
    ['{"A} or {"match": 1}', '{"match": 0\n{"match": 1}', '{"match": "0\n{"match": 1}', '{"match": x} {"match": 1}'],
)
def test_a_broken_object_does_not_swallow_the_next(text):
    """A draft that breaks off, in or outside a string, leaves the final object readable."""
    assert json_objects(text) == [{"match": 1}]


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\\frac{1}{2}", r"\frac{1}{2}"),
        (r"\beta \bar{x} \boxed", r"\beta \bar{x} \boxed"),
        (r"\theta \times \text{m} \tan", r"\theta \times \text{m} \tan"),
        (r"\neq \nu \rho \right)", r"\neq \nu \rho \right)"),
        (r"\alpha \sqrt{2} \( \, \% \{", r"\alpha \sqrt{2} \( \, \% \{"),
        (r"\underline{x} \upsilon", r"\underline{x} \upsilon"),
        (r"it\'s", "it's"),
        (r"line\nThe next\ttab\r\n", "line\nThe next\ttab\r\n"),
        (r"\u00e9 \ud83d\ude00 \/ \"", 'é 😀 / "'),
        (r"lone \ud800 \udc00", "lone � �"),
        (r"\b, \f.", "\x08, \x0c."),
    ],
)
def test_latex_survives_and_json_escapes_keep_their_meaning(literal, value):
    """Locks the repair of backslashes; lone surrogates, which no tokenizer or parquet file takes, are replaced."""
    assert json_objects('{"a": "' + literal + '"}') == [{"a": value}]


@pytest.mark.parametrize(
    "command",
    [
        *("nabla", "ne", "neg", "neq", "newline", "ngeq", "nleq", "nmid", "not", "notin", "nparallel", "nu", "nsim"),
        *(
            "rangle",
            "rceil",
            "rfloor",
            "rho",
            "right",
            "rightarrow",
            "rm",
            "root",
            "rvert",
            "rightleftharpoons",
            "ncong",
        ),
        *(
            "tan",
            "tanh",
            "tau",
            "text",
            "textbf",
            "textit",
            "textrm",
            "tfrac",
            "therefore",
            "theta",
            "tilde",
            "times",
            "to",
        ),
        *("top", "triangle", "triangleq", "thickapprox", "textstyle", "beta", "binom", "frac", "forall", "phi", "sqrt"),
    ],
)
def test_every_latex_command_is_kept_but_only_as_a_whole_word(command):
    """\\neq is a relation; \\nequal is a line feed and the word "equal" (commands in b, f or no escape always win)."""
    assert json_objects('{"a": "x \\' + command + ' y"}') == [{"a": f"x \\{command} y"}]
    if command[0] in "nrt":
        escape = {"n": "\n", "r": "\r", "t": "\t"}[command[0]]
        assert json_objects('{"a": "x\\' + command + 'zz"}') == [{"a": f"x{escape}{command[1:]}zz"}]


def test_ambiguous_objects_are_left_out():
    """A key given twice has no single value; NaN and infinity are not JSON numbers."""
    assert json_objects('{"a": 0, "a": 1}') == []
    assert json_objects('{"a": NaN, "b": -Infinity}') == [{"a": None, "b": None}]


def test_what_lies_beyond_the_cap_is_not_read():
    """Locks the length cap."""
    assert json_objects(" " * MAX_CHARS + '{"a": 1}') == []


@given(OBJECTS, OBJECTS, st.text("ab \n`.,:", max_size=20))
def test_dumped_objects_are_read_back(first, second, prose):
    """Whatever json.dumps writes is found again, in order, whatever harmless prose stands around it."""
    text = f"{prose}{json.dumps(first)}{prose}{json.dumps(second, ensure_ascii=False)}{prose}"
    assert json_objects(text) == [first, second]


@given(st.text() | st.text('{}[]":,\\ufnab01 \n', max_size=60))
def test_nothing_is_ever_raised(text):
    """Random and JSON-like text: dictionaries or nothing."""
    assert all(isinstance(found, dict) for found in json_objects(text))


@pytest.mark.parametrize(
    "unit",
    [
        '{"a":',
        '{"a":x',
        '{"',
        "{",
        '{"a":"',
        "\\",
        "{ ",
        '{"a":[[',
        '{"a":{"b":1,}',
        '{"a" {',
        '{"a":' + "9" * 5000,
        "\\u",
    ],
)
def test_adversarial_text_stays_cheap(unit):
    """Repeated openings, faults and escapes up to the cap take a moment, not minutes (quadratic scanning would)."""
    start = time.process_time()
    json_objects(unit * (MAX_CHARS // len(unit)))
    assert time.process_time() - start < 5.0


def test_time_is_linear_in_the_number_of_faults():
    """Four times the text takes about four times as long, not sixteen."""

    def seconds(chars: int) -> float:
        def once() -> float:
            start = time.process_time()
            json_objects('{"' * (chars // 2))
            return time.process_time() - start

        return min(once() for _ in range(3))

    assert seconds(MAX_CHARS) < 8 * seconds(MAX_CHARS // 4)
