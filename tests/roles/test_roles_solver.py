"""Format rules of the Solver (docs/algorithm.md, step 4)."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from roles_helpers import CONFIG, NO_PREFIX, PAPER, completion, thought

from trinity_vlm.roles import Solver
from trinity_vlm.roles.solver import SolutionError

SOLVER = Solver(PAPER, CONFIG)
OPENS_ITSELF = Solver(PAPER, NO_PREFIX)
BOXED = r"<answer>\boxed{5}</answer>"

MALFORMED = {
    "unclosed_thinking": [completion(BOXED), completion("steps"), completion("")],
    "ambiguous_thinking": [
        completion(f"a <think> b </think>{BOXED}"),
        completion(f"a </think> b </think>{BOXED}"),
        thought(f"{BOXED}<think>more"),
        thought(r"<answer>\boxed{</think>5}</answer>"),
    ],
    "no_answer": [
        thought(r"\boxed{5}"),
        thought(r"<answer>\boxed{5}"),
        thought(r"\boxed{5}</answer>"),
        thought(r"</answer>\boxed{5}<answer>"),
        completion(f"{BOXED}</think>5"),
    ],
    "many_answers": [
        thought(BOXED + BOXED),
        thought(rf"<answer>{BOXED}</answer>"),
        thought(rf"<answer>first {BOXED}"),
        thought(rf"{BOXED}</answer>"),
    ],
    "no_box": [
        thought("<answer>5</answer>"),
        thought(r"<answer>\boxed 5</answer>"),
        thought(r"<answer>\boxedtext{5}</answer>"),
    ],
    "many_boxes": [
        thought(r"<answer>\boxed{5} or \boxed{6}</answer>"),
        thought(r"<answer>\boxed{\boxed{5}}</answer>"),
        thought(r"<answer>\boxed{5} \boxed</answer>"),
    ],
    "box_outside_answer": [
        completion(rf"so \boxed{{5}}</think>{BOXED}"),
        completion(rf"I must use \boxed{{}}</think>{BOXED}"),
        thought(rf"\boxed{{5}} {BOXED}"),
        thought(rf"{BOXED} \boxed {{5}}"),
    ],
    "unbalanced_box": [
        thought(r"<answer>\boxed{5</answer>"),
        thought(r"<answer>\boxed{\frac{1}{2}</answer>"),
        thought(r"<answer>\boxed{5</answer>}"),
        thought(r"<answer>\boxed{5\}</answer>"),
    ],
    "empty_box": [
        thought(rf"<answer>\boxed{{{inside}}}</answer>")
        for inside in ("", "  ", "{}", "<|im_end|>", r"\text{ }", "$ $")
    ],
}


@pytest.mark.parametrize(("error", "case"), [(error, case) for error, cases in MALFORMED.items() for case in cases])
def test_each_rule_has_its_own_slug(error, case):
    """Every violation of a format rule is refused under its stable name, without reasoning or answer."""
    parsed = SOLVER.parse(case)
    assert (parsed.format_valid, parsed.error, parsed.reasoning, parsed.answer) == (False, error, None, None)


@pytest.mark.parametrize("text", [f"x</think>{BOXED}", "x"])
def test_truncation_beats_every_other_rule(text):
    """A truncated solution is malformed even when its box is complete."""
    assert SOLVER.parse(completion(text, truncated=True)).error == "truncated"


@pytest.mark.parametrize("text", [f"x</think>{BOXED}", BOXED])
def test_without_a_prefix_the_model_must_open_the_block(text):
    """An empty roles.thinking_prefix asks the model for the opening tag."""
    assert OPENS_ITSELF.parse(completion(text)).error == "no_thinking"
    assert OPENS_ITSELF.parse(completion(f"<think>x</think>{BOXED}")).format_valid


def test_the_table_covers_every_slug():
    """A new slug needs examples: all but the two tested apart stand in the table, each at least twice."""
    slugs = {slug for part in get_args(SolutionError) for slug in get_args(part)}
    assert slugs == set(MALFORMED) | {"truncated", "no_thinking"}
    assert all(len(cases) >= 2 for cases in MALFORMED.values())


@pytest.mark.parametrize(
    ("inside", "answer"),
    [
        ("5", "5"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\frac{\sqrt{2}}{1+\frac{1}{x}}", r"\frac{\sqrt{2}}{1+\frac{1}{x}}"),
        (r"\{1, 2\}", r"\{1, 2\}"),
        (r"\left\{ x", r"\left\{ x"),
        (r"a \\ b", r"a \\ b"),
        (" red\n bar ", "red bar"),
        ("5<|im_end|>", "5"),
    ],
)
def test_nested_and_escaped_braces_stay_in_the_answer(inside, answer):
    """The box ends at its own brace; white space and special tokens are cleaned."""
    parsed = SOLVER.parse(thought(rf"<answer>{chr(10)}\boxed{{{inside}}}{chr(10)}</answer>"))
    assert (parsed.error, parsed.reasoning, parsed.answer) == (None, "I look at the image.", answer)


@pytest.mark.parametrize(
    "text",
    [
        f"steps</think>So:\n{BOXED}\nDone.",
        r"steps</think><answer>The value is \boxed{5}.</answer>",
        f"<think>\nsteps</think>{BOXED}",
        f"the <answer> tag comes later</think>{BOXED}",
        r"steps</think><answer>\boxed {5}</answer>",
    ],
)
def test_harmless_variants_are_accepted(text):
    """Prose around block and box, a repeated opening tag, an answer tag merely named while thinking."""
    assert SOLVER.parse(completion(text)).answer == "5"


FRAGMENTS = st.sampled_from(
    ["</think>", "<think>", "<answer>", "</answer>", r"\boxed{", r"\boxed", "{", "}", "\\", "5", r"\{", " ", "\n"]
)


@given(st.text(max_size=60) | st.lists(FRAGMENTS, max_size=16).map("".join), st.booleans())
def test_random_text_never_raises_and_acceptance_implies_the_contract(text, closed):
    """Independent re-check of step 4 on accepted solutions."""
    text = f"x</think>{text}" if closed else text
    parsed = SOLVER.parse(completion(text))
    if not parsed.format_valid:
        assert parsed.error in MALFORMED
        return
    _, rest = text.split("</think>")
    _, opened = rest.split("<answer>")
    block, _ = opened.split("</answer>")
    assert text.count(r"\boxed") == block.count(r"\boxed") == 1
    assert parsed.answer
    assert "".join(parsed.answer.split()) in "".join(block.split())


@given(
    st.recursive(
        st.sampled_from(["x", "1", "+", r"\{", r"\}"]),
        lambda t: st.lists(t, min_size=1).map(lambda p: "{" + "".join(p) + "}"),
        max_leaves=8,
    )
)
def test_any_balanced_content_is_returned_whole(content):
    """Brace matching is exact for every nesting, escaped braces aside."""
    parsed = SOLVER.parse(thought(rf"<answer>\boxed{{a{content}b}}</answer>"))
    assert parsed.answer == f"a{content}b"
