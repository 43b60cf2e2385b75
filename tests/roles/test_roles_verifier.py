"""Verdict parsing and schemas of the four Verifier calls."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from roles_helpers import CONFIG, NO_PREFIX, PAPER, completion

from trinity_vlm.config import RolesConfig
from trinity_vlm.roles import Verifier
from trinity_vlm.roles.verifier import verdict_schemas
from trinity_vlm.types import CallType

VERIFIER = Verifier(PAPER, CONFIG)
GOOD = {
    CallType.SCREEN: {"justification": "j", "fact_q": 1, "corr_a": 1, "difficulty": 0.7},
    CallType.REASON: {"justification": "j", "reasoning_score": 0.5},
    CallType.EQUIVALENCE: {"match": 1},
    CallType.DISPUTE: {"correct_answer": "majority", "justification": "j"},
}
PARSERS = {
    CallType.SCREEN: VERIFIER.parse_screening,
    CallType.REASON: VERIFIER.parse_reasoning,
    CallType.EQUIVALENCE: VERIFIER.parse_equivalence,
    CallType.DISPUTE: VERIFIER.parse_dispute,
}
CALLS = list(GOOD)


def reply(call: CallType, value: object, **kwargs):
    text = value if isinstance(value, str) else json.dumps(value)
    return completion(f"my own solution</think>{text}" if call is CallType.DISPUTE else text, **kwargs)


def changed(call: CallType, **values: object) -> dict:
    return {**GOOD[call], **values}


@pytest.mark.parametrize(
    ("fact_q", "corr_a", "difficulty", "expected"),
    [(1, 1, 0.7, (1, 1, 0.7)), (1, 0, 0.1, (1, 0, 0.1)), (0, 0, 1.0, (0, 0, 1.0)), (0, 1, 0.4, (0, 0, 0.4))],
)
def test_screening_values_and_clamp(fact_q, corr_a, difficulty, expected):
    """corr_a = 1 without fact_q is a contradiction and is clamped to 0."""
    verdict = VERIFIER.parse_screening(
        reply(CallType.SCREEN, changed(CallType.SCREEN, fact_q=fact_q, corr_a=corr_a, difficulty=difficulty))
    )
    assert verdict.parsed
    assert (verdict.fact_q, verdict.corr_a, verdict.difficulty) == expected
    assert verdict.justification == "j"


@pytest.mark.parametrize(("score", "expected"), [(0, 0.0), (0.25, 0.25), (0.5, 0.5), (1.0, 1.0), ("0.250", 0.25)])
def test_reasoning_levels(score, expected):
    """All four levels, as number or text."""
    verdict = VERIFIER.parse_reasoning(reply(CallType.REASON, changed(CallType.REASON, reasoning_score=score)))
    assert (verdict.parsed, verdict.score, verdict.justification) == (True, expected, "j")


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1), (0, 0), (1.0, 1), ("1", 1), ("1.0", 1), (" 0 ", 0), ("1.", 1), ("01", 1)]
)
def test_equivalence_accepts_every_unambiguous_one_and_zero(value, expected):
    """1, 1.0 and "1" are one value; the verdict is an int."""
    verdict = VERIFIER.parse_equivalence(reply(CallType.EQUIVALENCE, {"match": value}))
    assert (verdict.parsed, verdict.match, type(verdict.match)) == (True, expected, int)


@pytest.mark.parametrize(("value", "winner"), [("ref", "ref"), ("majority", "majority"), (" Majority\n", "majority")])
def test_dispute_winner(value, winner):
    """Case and white space aside, only the two names count."""
    verdict = VERIFIER.parse_dispute(reply(CallType.DISPUTE, changed(CallType.DISPUTE, correct_answer=value)))
    assert (verdict.parsed, verdict.winner, verdict.justification) == (True, winner, "j")


OUTSIDE = [True, False, None, 2, -1, 0.5001, "high", "", "1/2", "1 0", "1_0", "٣", "nan", "1e0", [1], {"x": 1}, 10**400]
DECIDING = {
    CallType.SCREEN: ("fact_q", "corr_a", "difficulty"),
    CallType.REASON: ("reasoning_score",),
    CallType.EQUIVALENCE: ("match",),
    CallType.DISPUTE: ("correct_answer",),
}


@pytest.mark.parametrize(("call", "key"), [(call, key) for call, keys in DECIDING.items() for key in keys])
@pytest.mark.parametrize("value", OUTSIDE, ids=repr)
def test_values_outside_the_set_are_unparsed(call, key, value):
    """Booleans, other numbers, words and containers are never read as a grade."""
    assert not PARSERS[call](reply(call, changed(call, **{key: value}))).parsed


@pytest.mark.parametrize("call", CALLS)
def test_every_key_is_required_and_a_justification_is_text(call):
    """A missing key, or a justification that is no string, leaves the verdict unparsed."""
    for key in GOOD[call]:
        partial = {k: v for k, v in GOOD[call].items() if k != key}
        assert not PARSERS[call](reply(call, partial)).parsed
    if "justification" in GOOD[call]:
        assert not PARSERS[call](reply(call, changed(call, justification=["j"]))).parsed


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", ["", "fact_q is 1", "{}", "null", "[]", "1", '{"match": 1', "```json\n```"])
def test_text_without_a_verdict_is_unparsed_and_scores_nothing(call, text):
    """Unparsed verdicts carry zeros (or no winner), so that they never pass by accident."""
    verdict = PARSERS[call](reply(call, text))
    assert not verdict.parsed
    values = (getattr(verdict, name, 0) for name in ("fact_q", "corr_a", "difficulty", "score", "match", "winner"))
    assert not any(values)


@pytest.mark.parametrize("call", CALLS)
def test_two_verdicts_are_ambiguous_but_other_objects_are_not(call):
    """A second complete verdict leaves none; an unrelated object beside the verdict does not matter."""
    text = json.dumps(GOOD[call])
    assert not PARSERS[call](reply(call, text + text)).parsed
    assert PARSERS[call](reply(call, f'{{"note": 1}} Verdict:\n```json\n{text}\n```')).parsed


@pytest.mark.parametrize("call", CALLS)
def test_a_complete_object_counts_even_when_truncated(call):
    """What follows the object can't change it; half an object is none."""
    assert PARSERS[call](reply(call, json.dumps(GOOD[call]) + " and so", truncated=True)).parsed
    assert not PARSERS[call](reply(call, json.dumps(GOOD[call])[:-1], truncated=True)).parsed


@pytest.mark.parametrize("call", [c for c in CALLS if c is not CallType.DISPUTE])
def test_direct_calls_skip_a_thinking_block_the_model_adds(call):
    """Drafts inside the block are not the verdict; an unclosed block holds none; a template may open the tag."""
    text = json.dumps(GOOD[call])
    assert PARSERS[call](completion(f"<think>draft {text}</think>{text}")).parsed
    assert PARSERS[call](completion(f"draft {text}</think>{text}")).parsed
    assert not PARSERS[call](completion(f"<think>draft {text}")).parsed


def test_dispute_needs_its_own_solution_first():
    """The verdict counts only behind a closed thinking block, with the prefix in the prompt or opened by the model."""
    text = json.dumps(GOOD[CallType.DISPUTE])
    assert not VERIFIER.parse_dispute(completion(text)).parsed
    assert VERIFIER.parse_dispute(completion(f"draft {text} <think> again</think>\n{text}")).parsed
    opens_itself = Verifier(PAPER, NO_PREFIX)
    assert opens_itself.parse_dispute(completion(f"<think>x</think>{text}")).parsed
    assert not opens_itself.parse_dispute(completion(f"x</think>{text}")).parsed
    assert not opens_itself.parse_dispute(completion(text)).parsed


def test_raw_text_is_kept_parsed_or_not():
    """The episode log can show what the Verifier really wrote."""
    assert VERIFIER.parse_screening(completion("nonsense")).raw == "nonsense"
    assert VERIFIER.parse_reasoning(completion("nonsense")).raw == "nonsense"


def test_key_order_and_closedness_of_the_schemas():
    """Justification first where the grades follow from it; after the thinking, the dispute's decision leads."""
    keys = {call: list(schema["properties"]) for call, schema in VERIFIER.schemas.items()}
    assert keys == {
        CallType.SCREEN: ["justification", "fact_q", "corr_a", "difficulty"],
        CallType.REASON: ["justification", "reasoning_score"],
        CallType.EQUIVALENCE: ["match"],
        CallType.DISPUTE: ["correct_answer", "justification"],
    }
    for schema in VERIFIER.schemas.values():
        assert schema["required"] == list(schema["properties"])
        assert schema["additionalProperties"] is False


def test_justification_bound_comes_from_the_configuration():
    """roles.justification_chars reaches every schema that has a justification."""
    verifier = Verifier(PAPER, RolesConfig(justification_chars=123))
    lengths = [
        s["properties"]["justification"]["maxLength"] for s in verifier.schemas.values() if len(s["properties"]) > 1
    ]
    assert lengths == [123, 123, 123]


def test_only_the_dispute_schema_waits_for_the_thinking():
    """An engine constrains the dispute call behind </think> and the others from the first token."""
    assert {call: VERIFIER.schema_after(call) for call in CALLS} == {
        CallType.SCREEN: None,
        CallType.REASON: None,
        CallType.EQUIVALENCE: None,
        CallType.DISPUTE: "</think>",
    }


@pytest.mark.parametrize("call", CALLS)
def test_schemas_compile_in_the_constrained_decoder(call):
    """The shipped grammar engine takes each schema."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(VERIFIER.schemas[call]))
    assert LLMatcher.validate_grammar(grammar) == ""


@st.composite
def schema_instance(draw, call: CallType):
    values = {}
    for key, schema in verdict_schemas(60)[call]["properties"].items():
        values[key] = draw(st.sampled_from(schema["enum"]) if "enum" in schema else JUSTIFICATIONS)
    return values


JUSTIFICATIONS = st.text(max_size=60) | st.lists(
    st.sampled_from(["</think>", "<think>", "{", "}", '"', "\\", r"\frac{1}{2}", '{"match": 1}', "\n", "```", "x"]),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("call", CALLS)
@given(data=st.data())
def test_whatever_a_schema_allows_the_parser_accepts(call, data):
    """Round trip: any instance, compact or indented, escaped or not, is parsed to its own values."""
    value = data.draw(schema_instance(call))
    indent = data.draw(st.sampled_from([None, 1]))
    verdict = PARSERS[call](reply(call, json.dumps(value, indent=indent, ensure_ascii=data.draw(st.booleans()))))
    assert verdict.parsed
    names = {"reasoning_score": "score", "correct_answer": "winner"}
    for key in DECIDING[call]:
        expected = 0 if key == "corr_a" and value["fact_q"] == 0 else value[key]
        assert getattr(verdict, names.get(key, key)) == expected


FRAGMENTS = st.sampled_from(
    [
        *('{"justification": "j", ', '"fact_q": ', '"corr_a": 1, ', '"difficulty": 0.4}', '"reasoning_score": ', "1"),
        *('{"match": ', '{"correct_answer": "ref", ', '"justification": "j"}', "true"),
        *("</think>", "<think>", "}", "{", '"', ", ", "\\", "\n"),
    ]
)


@given(st.text(max_size=60) | st.lists(FRAGMENTS, max_size=14).map("".join))
def test_random_text_never_raises_and_accepted_values_are_in_their_sets(text):
    """Random and verdict-like text, re-checked independently."""
    screening = VERIFIER.parse_screening(completion(text))
    assert screening.fact_q in (0, 1)
    assert screening.corr_a in (0, screening.fact_q)
    assert screening.difficulty in ((0.1, 0.4, 0.7, 1.0) if screening.parsed else (0.0,))
    assert VERIFIER.parse_reasoning(completion(text)).score in (0.0, 0.25, 0.5, 1.0)
    assert VERIFIER.parse_equivalence(completion(text)).match in (0, 1)
    dispute = VERIFIER.parse_dispute(completion(text))
    assert dispute.winner in (("ref", "majority") if dispute.parsed else (None,))
