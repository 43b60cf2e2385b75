"""A prompt that is too long and a budget that is: told apart by the numbers in the refusal."""

import pytest
from openai_server import CONTEXT

from trinity_vlm.engine.openai.limits import Room, stated_room
from trinity_vlm.errors import EngineError

TOO_LARGE = (
    "'max_tokens' or 'max_completion_tokens' is too large: {budget}. This model's maximum context length is {context} "
    "tokens and your request has {prompt} input tokens ({budget} > {context} - {prompt})."
)
OUT_OF_TWO = (
    "This model's maximum context length is {context} tokens. However, you requested {total} tokens ({prompt} in the "
    "messages, {budget} in the completion). Please reduce the length of the messages or completion."
)
AT_LEAST = (
    "This model's maximum context length is {context} tokens. However, you requested {budget} output tokens and your "
    "prompt contains at least {bound} input tokens, for a total of at least 2001 tokens."
)


@pytest.mark.parametrize("words", [TOO_LARGE, OUT_OF_TWO, AT_LEAST])
def test_a_budget_beyond_the_context_is_cut_to_what_the_prompt_leaves(world, ask, play, words):
    """Not taken for a prompt that is too long: the answer has the tokens that are left; only no room gives none."""
    server = world.server(lambda body: ["x" * CONTEXT])
    server.refuses = words
    engine = world.engine(server)
    around = len("system:be brief\nuser:\nassistant:")
    fits, full = "y" * (CONTEXT - around - 8), "y" * (CONTEXT - around + 1)
    (answer,), (none,) = play(engine, [ask(fits), ask(full)])
    assert (answer.text, len(answer.token_ids), answer.finish_reason) == ("x" * 8, 8, "length")
    assert (none.text, none.token_ids, none.finish_reason) == ("", (), "length")


def test_a_budget_that_is_refused_again_is_an_error(world, ask, play):
    """One cut is tried; then the server's own words end the run rather than an answer that looks like silence."""
    server = world.server()
    server.chat = lambda body: (400, {"error": {"message": TOO_LARGE.format(budget=50, context=2000, prompt=1500)}})
    engine = world.engine(server)
    with pytest.raises(EngineError, match="is too large: 50"):
        play(engine, [ask()])
    assert [body["max_tokens"] for body in server.bodies] == [50, 500]


@pytest.mark.parametrize(
    ("words", "room"),
    [
        (TOO_LARGE.format(budget=8192, context=8192, prompt=1500), Room(6692)),
        (OUT_OF_TWO.format(total=9692, prompt=1500, budget=8192, context=8192), Room(6692)),
        ("maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.", Room(0)),
        ("maximum context length is 8192 tokens. However, your request has 8192 input tokens.", Room(0)),
        (AT_LEAST.format(context=8192, budget=64, bound=8129), Room(None)),
        (AT_LEAST.format(context=8192, budget=0, bound=8193), Room(0)),
        ("maximum context length is 8192 tokens. However, you requested 64 output tokens and your prompt contains "
         "100000 characters (more than 81280 characters, which is the upper bound for 8128 input tokens).", Room(None)),
        ("max_tokens=9000 cannot be greater than max_model_len=max_total_tokens=8192.", Room(None)),
        ("The decoder prompt (length 9000) is longer than the maximum model length of 8192.", Room(0)),
        ("Input exceeds the context window. context_length_exceeded", Room(0)),
        ("maximum context length is less than max_tokens", None),
        ("top_k cannot be greater than 100", None),
    ],
)  # fmt: skip
def test_what_refusals_say_about_the_room_behind_the_prompt(words, room):
    """Context minus prompt where both are named; None tokens where only the server can tell."""
    assert stated_room(words) == room
