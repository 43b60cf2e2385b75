"""Which settings may change when a run is resumed, and how a change is noticed."""

import json

import pytest
import yaml
from rundir_helpers import make_config

from trinity_vlm.checkpoint import CheckpointState, save_checkpoint
from trinity_vlm.config import all_keys, load_config, preset_names
from trinity_vlm.errors import RunDirectoryError
from trinity_vlm.rundir import CHANGEABLE, RunDirectory, check_resumable, config_hash
from trinity_vlm.rundir.config_changes import flatten, hash_values

TEXTS = ["short", "off", "cpu", "float32", "eager", "correct", "engine", "per_worker", "alternating", "dense", "other"]


def changed(config, key):
    """A valid configuration that differs from ``config`` in ``key`` only, or None when no other value is legal."""
    values = config.model_dump(mode="json")
    *parents, leaf = key.split(".")
    node = values
    for parent in parents:
        node = node[parent]
    old = node[leaf]
    options = [
        option
        for option in (True, False, 7, 10**7, 0.9, 0.55, ["wandb"], *TEXTS)
        if type(option) is type(old) or old is None
    ]
    for option in options:
        if option != old:
            node[leaf] = option
            try:
                return make_config(**values)
            except Exception:
                continue
    return None


NOT_SINGLE_VALUES = ("lora.dropout", "engine.servers", "roles.verifier_engine", "engine.layout", "engine.sub_batch")
"""0 is the first one's only value in a run; the others are sections or need another engine, see the tests below."""


@pytest.mark.parametrize("key", [key for key in all_keys() if key not in NOT_SINGLE_VALUES])
def test_each_setting_may_or_may_not_change_on_resume(tmp_path, config, key):
    """Every key of the configuration: the changeable ones are stored, any other raises naming key and values."""
    other = changed(config, key)
    assert other is not None, f"give this test another value of {key}"
    RunDirectory.create(tmp_path / "a", config).close()
    old, new = (flatten(c.model_dump(mode="json"))[key] for c in (config, other))
    whole = key.split(".")[0] in ("steps", "run_dir", "checkpoint", "evaluation", "tracking", "dry_run")
    update = ("gradient_checkpointing", "compile_layers", "overlap", "tokens_per_microbatch")
    if whole or key.startswith("engine.vllm.") or key in [f"update.{name}" for name in update]:
        assert config_hash(other) == config_hash(config)
        with RunDirectory.resume(tmp_path / "a", other) as run:
            assert run.config == other
        assert RunDirectory.open(tmp_path / "a").config == other
    else:
        assert config_hash(other) != config_hash(config)
        with pytest.raises(RunDirectoryError) as caught:
            RunDirectory.resume(tmp_path / "a", other)
        assert f"{key}: the run has {old!r}, asked for is {new!r}" in str(caught.value)
        assert RunDirectory.open(tmp_path / "a").config == config
        RunDirectory.resume(tmp_path / "a").close()


@pytest.mark.parametrize(
    "changes",
    [
        {"roles": {"verifier_engine": {"urls": ["http://a:1"], "model": "m"}}},
        {"engine": {"kind": "openai", "servers": {"urls": ["http://a:1"], "model": "m"}}},
    ],
)
def test_servers_cannot_join_a_run(config, changes):
    """A run keeps its engines: the section that was unset is named."""
    with pytest.raises(RunDirectoryError, match=r"roles\.verifier_engine|engine\.servers"):
        check_resumable(config, make_config(**changes))


def test_a_run_keeps_its_layout():
    adapters, paper = (make_config(engine={"kind": "vllm", "layout": layout}) for layout in ("adapters", "paper"))
    twos = make_config(engine={"kind": "vllm", "layout": "paper", "sub_batch": 2})
    with pytest.raises(RunDirectoryError, match=r"engine\.layout: the run has 'adapters'"):
        check_resumable(adapters, paper)
    with pytest.raises(RunDirectoryError, match=r"engine\.sub_batch: the run has None"):
        check_resumable(paper, twos)


def test_fewer_steps_than_are_done_are_refused(tmp_path):
    """Nothing is stored: the run can go on as it was."""
    config = make_config(steps=9)
    with RunDirectory.create(tmp_path / "a", config) as run:
        save_checkpoint(run.checkpoints_path, CheckpointState(7, {}, {}), keep_last=2, keep_every=0)
    with pytest.raises(RunDirectoryError, match=r"steps=6: .* has done 7 already"):
        RunDirectory.resume(tmp_path / "a", make_config(steps=6))
    assert RunDirectory.open(tmp_path / "a").config == config
    RunDirectory.resume(tmp_path / "a", make_config(steps=7)).close()


def test_servers_may_move(tmp_path):
    """Other addresses and deadlines are stored, but not another model behind them."""

    def run_with(url, model="m", timeout=9):
        servers = {"urls": [url], "model": model, "timeout": timeout}
        return make_config(engine={"kind": "openai", "servers": servers})

    before, moved = run_with("http://a:1"), run_with("http://b:2", timeout=5)
    check_resumable(before, moved)
    assert config_hash(before) == config_hash(moved)
    RunDirectory.create(tmp_path / "a", before).close()
    RunDirectory.resume(tmp_path / "a", moved).close()
    assert RunDirectory.open(tmp_path / "a").config == moved
    with pytest.raises(RunDirectoryError, match=r"engine\.servers\.model: the run has 'm', asked for is 'n'"):
        check_resumable(before, run_with("http://a:1", "n"))


def test_all_differences_are_named_at_once(config):
    """Two fixed keys changed: both appear, the changeable one does not."""
    other = make_config(seed=3, steps=7, lora={"rank": 8})
    with pytest.raises(RunDirectoryError) as caught:
        check_resumable(config, other)
    assert "seed: the run has 0, asked for is 3" in str(caught.value)
    assert "lora.rank: the run has 32, asked for is 8" in str(caught.value)
    assert "steps:" not in str(caught.value)
    assert all(key in str(caught.value) for key in CHANGEABLE)


@pytest.mark.parametrize("preset", preset_names())
def test_the_hash_survives_the_yaml_file(tmp_path, preset):
    """The hash of config.yaml as read from disk is the hash of the configuration: floats and lists included."""
    config = load_config(preset)
    with RunDirectory.create(tmp_path / "a", config) as run:
        values = yaml.safe_load((run.path / "config.yaml").read_text())
    assert hash_values(values) == config_hash(config)


def test_a_run_of_an_earlier_version_without_a_new_key_resumes(tmp_path, config):
    """A key that did not exist when the run started takes its default; the run's hash stays what it was."""
    RunDirectory.create(tmp_path / "a", config).close()
    values = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    del values["engine"]["cuda_graphs"]
    (tmp_path / "a" / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    manifest = json.loads((tmp_path / "a" / "manifest.json").read_text())
    (tmp_path / "a" / "manifest.json").write_text(json.dumps(manifest | {"config_hash": hash_values(values)}))
    with RunDirectory.resume(tmp_path / "a", make_config(steps=999)) as run:
        assert run.config == make_config(steps=999)
    RunDirectory.resume(tmp_path / "a").close()


def test_an_edited_config_file_is_noticed(tmp_path, config):
    """Editing a fixed setting in config.yaml is refused on resume; editing steps there is fine."""
    RunDirectory.create(tmp_path / "a", config).close()
    path = tmp_path / "a" / "config.yaml"
    text = path.read_text()
    path.write_text(text.replace("seed: 0", "seed: 1"))
    with pytest.raises(RunDirectoryError, match="was edited"):
        RunDirectory.resume(tmp_path / "a")
    path.write_text(text.replace("steps: 300", "steps: 400"))
    with RunDirectory.resume(tmp_path / "a") as run:
        assert run.config.steps == 400


def test_changed_prompts_are_refused(tmp_path, config):
    """A run does not go on with other prompts; an unknown digest on either side is let through."""
    RunDirectory.create(tmp_path / "a", config, prompt_digest="one").close()
    with pytest.raises(RunDirectoryError, match=r"prompt digest one, now two"):
        RunDirectory.resume(tmp_path / "a", prompt_digest="two")
    RunDirectory.resume(tmp_path / "a", prompt_digest="one").close()
    RunDirectory.resume(tmp_path / "a").close()
