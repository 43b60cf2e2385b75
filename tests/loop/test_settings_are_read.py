"""No setting is accepted and ignored; every preset can start."""

import ast
from pathlib import Path

import pytest
from loop_factory import small_config, write_images

import trinity_vlm
from trinity_vlm.assembly import check_settings
from trinity_vlm.cli.training import prompt_digest
from trinity_vlm.config import Config, Section, all_keys, load_config, preset_names
from trinity_vlm.loop import evolve
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.workers import Workers

PACKAGE = Path(trinity_vlm.__file__).parent
COMMAND_LINE_KEYS = {"run_dir", "dry_run"}
OTHER_BRANCH_KEYS = {
    "images.column",
    "roles.dispute_retries",
    "rewards.rho_f",
    "update.alternate_every",
    "tracking.project",
    *(key for key in all_keys() if key.startswith("engine.vllm.")),
}
"""Read only with parquet shards, a dispute, a malformed candidate, schedule=alternating, a tracker and vLLM, which a
short clean run does not meet."""


def attributes_read(file):
    """Names read as ``x.name``, by syntax, not by text; any string counts in a file that calls ``getattr``."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    if any(isinstance(node, ast.Name) and node.id == "getattr" for node in nodes):
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names


def section_of(key):
    """The class that declares a dotted key, and the key's own name."""
    *parents, leaf = key.split(".")
    section = Config
    for parent in parents:
        section = section.model_fields[parent].annotation
    return section, leaf


@pytest.fixture(scope="module")
def names_in_source():
    files = [f for f in PACKAGE.rglob("*.py") if f.name not in ("config.py", "engine_settings.py")]
    return set().union(*map(attributes_read, files))


@pytest.mark.parametrize("key", all_keys())
def test_every_key_is_read_outside_the_configuration(key, names_in_source):
    assert key.rpartition(".")[2] in names_in_source, f"{key} can be set but nothing reads it"


def test_a_run_really_reads_its_settings(tmp_path, monkeypatch):
    """Watched on a real run: the static check above can't tell two sections' keys of one name apart, this one can."""
    config = small_config("evaluation.problems=2")
    read = set()
    plain = Section.__getattribute__

    def watched(self, name):
        read.add((type(self), name))
        return plain(self, name)

    monkeypatch.setattr(Section, "__getattribute__", watched)
    with RunDirectory.create(tmp_path / "run", config, prompt_digest=prompt_digest(config)) as run:
        evolve(config, run)
    monkeypatch.undo()
    ignored = {key for key in all_keys() if section_of(key) not in read}
    assert ignored <= OTHER_BRANCH_KEYS | COMMAND_LINE_KEYS, ignored


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_passes_the_checks_of_a_dry_run(preset, tmp_path):
    folder = write_images(tmp_path / "pictures")
    check_settings(load_config(preset, [f"images.source={folder}", "dry_run=true"]), Workers())
