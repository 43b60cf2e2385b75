"""Format rules of the Questioner (docs/algorithm.md, step 1)."""

import json
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roles_helpers import CONFIG, NO_PREFIX, PAPER, completion, thought

from trinity_vlm.roles import Questioner
from trinity_vlm.roles.questioner import CandidateError

QUESTIONER = Questioner(PAPER, CONFIG)
OPENS_ITSELF = Questioner(PAPER, NO_PREFIX)


def pair(question: object = "How many loops are shown?", answer: object = "3") -> str:
    return json.dumps({"question": question, "answer": answer})


MALFORMED = {
    "unclosed_thinking": [completion(pair()), completion("I think"), completion("")],
    "ambiguous_thinking": [
        completion(f"a <think> b </think> {pair()}"),
        completion(f"a </think> b </think> {pair()}"),
        completion(f"a </think> {pair()} <think> more"),
        completion(f"a </think><think>b</think>{pair()}"),
    ],
    "no_json": [
        thought("What is it? 3"),
        thought(""),
        thought('{"question": "q", "answer": '),
        thought("{'question': 'q', 'answer': 'a'}"),
        completion(f"{pair()}</think>"),
    ],
    "many_json": [thought(pair() + pair()), thought(f'{{"draft": 1}} {pair()}'), thought(f"[{pair()}, {pair()}]")],
    "missing_key": [thought('{"question": "q?"}'), thought('{"Question": "q?", "answer": "a"}'), thought("{}")],
    "not_string": [thought(pair(answer=3)), thought(pair(question=["q"])), thought(pair(answer=None))],
    "empty_question": [thought(pair("")), thought(pair(" \n")), thought(pair("<|im_end|></think>"))],
    "empty_answer": [thought(pair(answer="")), thought(pair(answer="<answer></answer>"))],
    "placeholder_question": [
        thought(pair(question)) for question in ("...", "your question", "<Your Question>", "N/A", "the question?", "…")
    ],
    "placeholder_answer": [
        thought(pair(answer=answer))
        for answer in ("...", "short answer", "Short answer.", "[answer]", "n/a", "N.A.", "___", "?", "<the answer>")
    ],
    "example_question": [
        thought(pair("Which tile completes the third column of the matrix shown?")),
        thought(pair("which tile completes the THIRD column  of the matrix shown")),
    ],
    "example_answer": [thought(pair(answer="striped hexagon")), thought(pair(answer="Blue fish."))],
    "long_answer": [thought(pair(answer="a b c d e f g h i j k")), thought(pair(answer="红" * 11))],
    "sentence_answer": [
        thought(pair(answer=answer))
        for answer in (
            "The red bar grows.",
            "It is larger",
            "there are 4",
            "The answer is 7",
            "Yes. It grows",
            "Is it the left one?",
            "左边的红色圆是。右",
        )
    ],
    "explained_answer": [
        thought(pair(answer=answer))
        for answer in (
            "4 because two overlap",
            "B, since it is taller",
            "left, thus 3",
            "5, which means odd",
            "2+2 => 4",
        )
    ],
}


@pytest.mark.parametrize(("error", "case"), [(error, case) for error, cases in MALFORMED.items() for case in cases])
def test_each_rule_has_its_own_slug(error, case):
    """Every violation of a format rule is refused under its stable name, without question or answer."""
    parsed = QUESTIONER.parse(case)
    assert (parsed.format_valid, parsed.error, parsed.question, parsed.answer) == (False, error, None, None)


@pytest.mark.parametrize("text", [f"x</think>{pair()}", "x</think>"])
def test_truncation_beats_every_other_rule(text):
    """A truncated completion is malformed even when the object is complete."""
    assert QUESTIONER.parse(completion(text, truncated=True)).error == "truncated"


@pytest.mark.parametrize("text", [f"look</think>{pair()}", pair()])
def test_without_a_prefix_the_model_must_open_the_block(text):
    """An empty roles.thinking_prefix asks the model for the opening tag."""
    assert OPENS_ITSELF.parse(completion(text)).error == "no_thinking"
    assert OPENS_ITSELF.parse(completion(f"<think>look</think>{pair()}")).format_valid


def test_the_table_covers_every_slug():
    """A new slug needs examples: all but the two tested apart stand in the table, each at least twice."""
    literals = [get_args(part) for part in get_args(CandidateError)]
    slugs = {slug for part in literals for slug in part}
    assert slugs == set(MALFORMED) | {"truncated", "no_thinking"}
    assert all(len(cases) >= 2 for cases in MALFORMED.values())


@pytest.mark.parametrize(
    ("text", "question", "answer"),
    [
        (pair(), "How many loops are shown?", "3"),
        (f"Here it is:\n```json\n{pair()}\n```", "How many loops are shown?", "3"),
        ('{"answer": "3", "level": 2, "question": "q?"}', "q?", "3"),
        (pair("Is <|image_pad|>A\nleft  of B?", " <think>yes "), "Is A left of B?", "yes"),
        (r'{"question": "What is $\theta$?", "answer": "\frac{1}{2}"}', r"What is $\theta$?", r"\frac{1}{2}"),
        (pair("A { B </think> C?"), "A { B C?", "3"),
    ],
)
def test_valid_candidates_are_read_clean(text, question, answer):
    """Fences, prose, further keys and LaTeX are fine; special tokens and line breaks are gone from both fields."""
    parsed = QUESTIONER.parse(thought(text))
    assert (parsed.format_valid, parsed.error, parsed.question, parsed.answer) == (True, None, question, answer)


def test_a_repeated_opening_tag_at_the_start_is_harmless():
    """Some models repeat the tag their prompt already holds: only one reading, so it is valid."""
    assert QUESTIONER.parse(completion(f"<think>\nlook</think>{pair()}")).format_valid


@pytest.mark.parametrize(
    "answer",
    [
        "3.5", "5 cm.", "Yes.", "E. coli", "10:30 a.m.", "St. Louis", "J. Smith et al.", "5! = 120", "n = 5!", "Na",
        "2, 4, 8, ...", "1. red 2. blue", "stable since 1995", "the part that is shaded", "pH < 7", "+", "-", "unknown",
        "a b c d e f g h i j", "approx. 5 sq. in.", "undefined", "questions", "7", "string", "40-50", "none",
    ],
)  # fmt: skip
def test_short_answers_that_only_look_like_sentences_or_placeholders_pass(answer):
    """Abbreviations, initials, factorials, decimals, symbols, sodium: legitimate answers the rules must not punish."""
    parsed = QUESTIONER.parse(thought(pair(answer=answer)))
    assert (parsed.error, parsed.answer) == (None, answer)


FRAGMENTS = st.sampled_from(
    [
        "</think>",
        "<think>",
        '{"question": ',
        '"answer": ',
        '"',
        "{",
        "}",
        ",",
        ":",
        "\\",
        "because ",
        "3",
        "q?",
        " ",
        "\n",
        ".",
    ]
)


@given(st.text(max_size=60) | st.lists(FRAGMENTS, max_size=25).map("".join), st.booleans())
def test_random_text_never_raises(text, closed):
    """Any text gives a verdict; an invalid one has a known slug."""
    parsed = QUESTIONER.parse(completion(f"x</think>{text}" if closed else text))
    assert parsed.format_valid is (parsed.error is None)
    assert parsed.error is None or parsed.error in MALFORMED


@given(st.text(max_size=30), st.text(max_size=30), st.sampled_from(["", "Well: ", "```\n"]))
def test_whatever_is_accepted_satisfies_the_contract(question, answer, lead):
    """Independent re-check of step 1 on accepted candidates."""
    parsed = QUESTIONER.parse(thought(lead + pair(question, answer)))
    if not parsed.format_valid:
        return
    for text in (parsed.question, parsed.answer):
        assert text == " ".join(text.split()) != ""
        assert not re.search(r"<\||<think>|</think>|<answer>|</answer>", text)
    assert 1 <= len(parsed.answer.split()) <= 10
    assert "because" not in parsed.answer.lower().split()
    assert QUESTIONER.parse(thought(pair(parsed.question, parsed.answer))) == parsed
