"""A run whose Verifier is another model on a server, and what the configuration says of servers."""

import json

import pytest
from loop_factory import small_config
from openai_server import LoopbackServer

from trinity_vlm.cli.training import prompt_digest
from trinity_vlm.config import load_config
from trinity_vlm.errors import ConfigError
from trinity_vlm.loop import evolve
from trinity_vlm.recording import Silent
from trinity_vlm.rundir import RunDirectory


def obedient(body):
    """The first completion that the body's structural tag allows."""
    words = {"json_schema": '"fine"', "tag": "so</think>"}
    pieces = body["response_format"]["format"]["elements"]
    free = [
        p["pattern"].split("|")[0].replace("\\", "") if p["type"] == "regex" and p["pattern"] != r"\n{0,2}" else ""
        for p in pieces
    ]
    return ["".join(p.get("value") or words.get(p["type"]) or w for p, w in zip(pieces, free, strict=True))]


@pytest.mark.parametrize("override", ["engine.kind=openai", "engine.servers={urls: ['http://a'], model: m}"])
def test_openai_and_its_servers_belong_together(override):
    with pytest.raises(ConfigError, match=r"needs engine.servers"):
        load_config("tiny", [override])


def test_a_run_with_another_model_as_verifier(tmp_path):
    """One of its two servers dies before the second step; no verdict is missing."""
    with LoopbackServer(obedient, model="stronger") as first, LoopbackServer(obedient, model="stronger") as second:
        urls = f"urls: ['{first.url}', '{second.url}/v1']"
        verifier = f"roles.verifier_engine={{kind: openai, {urls}, model: stronger}}"
        config = small_config(verifier, "roles.verifier_tokens=100")

        class Killer(Silent):
            def step(self, step, total, metrics):
                if step == 1:
                    first.kill()

        with RunDirectory.create(tmp_path / "run", config, prompt_digest=prompt_digest(config)) as run:
            evolve(config, run, Killer())
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "calls/screen" in line]
        asked = len(first.answered) + len(second.answered)
    verifier_calls = ("screen", "equivalence", "reason", "dispute")
    assert len(steps) == 2
    assert asked == sum(step[f"calls/{call}"] for step in steps for call in verifier_calls) > 0
    assert not any(step.get(f"unparsed/{call}") for step in steps for call in verifier_calls)
    assert steps[1]["engine/verifier/ejections"] == 1
