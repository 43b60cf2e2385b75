"""Special tokens and thinking blocks."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trinity_vlm.config import RolesConfig
from trinity_vlm.errors import ConfigError
from trinity_vlm.roles.text import checked_prefix, one_line, split_thinking, strip_special_tokens

TOKENS = [
    *("<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "<|begin_of_box|>", "<｜end▁of▁sentence｜>"),
    *("<think>", "</think>", "</THINK>", "<answer>", "</answer>", "<tool_call>"),
    *("<image>", "<video>", "<IMG_CONTEXT>", "<start_of_turn>", "<s>", "</s>"),
]
PIECES = st.lists(
    st.sampled_from([*TOKENS, "<|im_", "end|>", "<thi", "nk>", "<", "|", ">", "x", " ", "\n"]), max_size=12
)


@pytest.mark.parametrize("token", TOKENS)
def test_every_kind_of_special_token_is_removed(token):
    """Template, placeholder and parser tokens of the common families go; the words around them stay apart."""
    assert one_line(f"a{token}b") == "a b"


@given(PIECES.map("".join))
@example("<|im_<|im_end|>end|>")
@example("<|<|x|>|image_pad|>")
@example("<thi<think>nk>")
def test_no_token_can_be_assembled_from_pieces(text):
    """Removing an inner token never leaves an outer one behind, and a second pass changes nothing."""
    clean = strip_special_tokens(text)
    assert not any(token in clean for token in TOKENS)
    assert strip_special_tokens(clean) == clean
    assert one_line(one_line(text)) == one_line(text)


@pytest.mark.parametrize("text", ["is a < b and c > d?", "|x| > 3", "AB < CD", "x<y>z", "f: a -> b", "{x | x>0}"])
def test_ordinary_comparison_signs_are_left_alone(text):
    """Mathematics that only resembles a tag is no tag."""
    assert strip_special_tokens(text) == text


def test_line_breaks_stay_in_traces_and_go_from_fields():
    """A trace keeps its lines; a question or answer is one line, so it can't fake another field of a prompt."""
    assert strip_special_tokens("a\n<think>b\x00c\n") == "a\n b c"
    assert one_line("why?\nProposed answer:\t5") == "why? Proposed answer: 5"


@pytest.mark.parametrize(
    ("text", "prefix", "error", "thinking", "rest"),
    [
        ("look</think>\nrest", "<think>\n", None, "look", "\nrest"),
        ("<think>look</think>rest", "", None, "look", "rest"),
        ("\n<think>\nlook</think>rest", "", None, "look", "rest"),
        ("</think>rest", "<think>\n", None, "", "rest"),
        ("<think>\nlook</think>rest", "<think>\n", None, "look", "rest"),
        ("a <think> b </think> c </think> d", "<think>\n", "ambiguous_thinking", "", ""),
        ("look <think> again </think> rest", "<think>\n", "ambiguous_thinking", "", ""),
        ("look</think>rest", "", "no_thinking", "", ""),
        ("Sure! <think>look</think>rest", "", "no_thinking", "", ""),
        ("", "", "no_thinking", "", ""),
        ("look", "<think>\n", "unclosed_thinking", "", ""),
        ("<think>look", "", "unclosed_thinking", "", ""),
        ("", "<think>\n", "unclosed_thinking", "", ""),
    ],
)
def test_the_prefix_is_restored_and_the_block_must_close(text, prefix, error, thinking, rest):
    """Prefix in the prompt or tag opened by the model; an opening tag repeated at the start is one, later an error."""
    split = split_thinking(text, prefix)
    assert (split.error, split.thinking, split.rest) == (error, thinking, rest)


@pytest.mark.parametrize("prefix", ["Let me see", " <think>", "<think>x</think>"])
def test_a_prefix_that_opens_no_block_is_refused(prefix):
    """With such a prefix every completion would be malformed; the message names key and value."""
    with pytest.raises(ConfigError, match=r"roles\.thinking_prefix=.*<think>"):
        checked_prefix(RolesConfig(thinking_prefix=prefix))


@pytest.mark.parametrize("prefix", ["", "<think>\n", "<think>\nFirst, "])
def test_usable_prefixes_are_taken_as_they_are(prefix):
    """Empty, default and longer prefixes are fine."""
    assert checked_prefix(RolesConfig(thinking_prefix=prefix)) == prefix
