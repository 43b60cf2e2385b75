"""When no server answers, the error says what to try."""

import pytest

from trinity_vlm.engine.openai import check_servers
from trinity_vlm.errors import ConfigError


@pytest.mark.parametrize(
    ("context", "way_out"), [(None, "unset roles.verifier_engine"), (9, "set engine.kind=transformers")]
)
def test_no_answer_comes_with_something_to_try(world, context, way_out):
    """A command that shows whether a server is there, where starting one is described, and how to do without."""
    gone = world.server()
    gone.kill()
    with pytest.raises(ConfigError, match=r"KEY\.urls: no server answers") as refusal:
        check_servers(world.config(gone), "KEY", context)
    text = str(refusal.value)
    assert f"curl {gone.url}/v1/models" in text
    assert "docs/engines.md" in text
    assert way_out in text
