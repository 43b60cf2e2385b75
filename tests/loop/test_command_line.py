"""Bad input ends with exit code 2 and a text that names the fault; nothing half-made is left behind."""

import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from loop_factory import picture, write_images
from transformers.utils import is_torchvision_available

from trinity_vlm import assembly, fitting, machine
from trinity_vlm.cli.adapter_card import write_card
from trinity_vlm.cli.main import EXIT_FAILURE, EXIT_USER, main
from trinity_vlm.cli.training import resuming
from trinity_vlm.config import load_config
from trinity_vlm.errors import TrainingError
from trinity_vlm.machine import Gpu
from trinity_vlm.rundir import RunDirectory
from trinity_vlm.workers import Workers

FAST = ["images.per_step=2", "roles.candidates=2", "roles.solutions=2", "evaluation.source=null", "steps=1"]


def refused(capsys, *arguments):
    """The error text of a command line that must end with exit code 2."""
    assert main(list(arguments)) == EXIT_USER
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["roles.solutions=1"], "roles.solutions=1"),
        (["model.min_pixels=99999", "model.max_pixels=9"], "model.min_pixels=99999"),
        (["roles.candidats=3"], "roles.candidats: unknown key; did you mean roles.candidates?"),
        (["roles.candidates=0"], "roles.candidates=0"),
        (["ema.alpha=1.5"], "ema.alpha=1.5"),
        (["update.lr=fast"], "update.lr='fast'"),
        (["steps"], "not key=value"),
        (["steps=yes"], "steps=True: must be an integer >= 1"),
        (["roles.prompts=/nowhere"], "/nowhere"),
        (["rewards.questioner=trinity_vlm.rewards:nothing"], "rewards.questioner"),
        (["engine.kind=no_such_engine:make"], "engine.kind"),
        (["images.source=/no/such/folder"], "/no/such/folder"),
        (["model.path=/no/such/model"], "/no/such/model"),
        (["lora.targets=[no_such_layer]"], "lora.targets"),
        (["lora.targets=[qkv]"], "lora.targets"),
        (["lora.dropout=0.1"], "lora.dropout=0.1"),
        (["evaluation.source=/no/such.jsonl"], "/no/such.jsonl"),
    ],
)
def test_bad_settings_are_named(capsys, tmp_path, overrides, expected):
    run_dir = tmp_path / "run"
    text = refused(capsys, "train", "tiny", f"run_dir={run_dir}", *FAST, *overrides)
    assert expected in text
    assert not run_dir.exists(), "a refused start must not block the corrected one"


@pytest.mark.parametrize(
    "arguments", [["train"], ["bogus"], ["train", "tiny", "--nope"], ["export", "run", "--out", "x", "--what", "zip"]]
)
def test_usage_errors_exit_with_2(arguments):
    assert main(arguments) == EXIT_USER


def test_help_and_version_exit_with_0(capsys):
    assert main(["--version"]) == 0
    assert main(["train", "--help"]) == 0
    assert "resume" in capsys.readouterr().out


def test_an_interrupt_before_there_is_a_run_says_nothing_of_resuming(capsys, monkeypatch):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("trinity_vlm.cli.training.load_config", interrupted)
    assert main(["train", "tiny"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_images_that_were_never_named_are_asked_for(capsys, monkeypatch, tmp_path):
    """The presets' 'images' is a folder that may be there; without it the user is told to set the key, and how."""
    monkeypatch.chdir(tmp_path)
    text = " ".join(refused(capsys, "train", "qwen3-vl-8b", "dry_run=true").split())
    assert "images.source must be set" in text
    assert "for example images.source=photos/" in text
    write_images(tmp_path / "images")
    monkeypatch.setattr(machine, "gpus", lambda: (H200,))
    assert main(["train", "qwen3-vl-8b", "dry_run=true"]) == 0


@pytest.mark.parametrize("preset", ["qwen3-vl-8b", "qwen2.5-vl-7b"])
def test_what_this_machine_cannot_hold_is_refused_before_anything_is_asked_of_a_hub(
    capsys, monkeypatch, tmp_path, preset
):
    """With doctor's exit code, in doctor's words, and without a run directory."""
    monkeypatch.setattr(fitting, "current_gpu", lambda: None)
    monkeypatch.setattr(fitting, "host_capacity_gib", lambda: 8.0)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("a hub was asked"))
    run, folder = tmp_path / "run", write_images(tmp_path / "pictures")
    assert main(["train", preset, f"run_dir={run}", f"images.source={folder}"]) == EXIT_FAILURE
    text = capsys.readouterr().err
    assert "its weights alone take 3" in text
    assert "doctor" in text
    assert not run.exists()


def test_an_unknown_preset_lists_the_known_ones(capsys):
    assert "qwen3-vl-8b" in refused(capsys, "train", "huge")


def test_an_empty_folder_and_a_folder_of_text_are_told_apart(capsys, tmp_path):
    empty, texts = tmp_path / "empty", tmp_path / "texts"
    empty.mkdir()
    texts.mkdir()
    (texts / "notes.txt").write_text("no picture")
    for folder in (empty, texts):
        text = refused(capsys, "train", "tiny", f"run_dir={tmp_path / 'run'}", f"images.source={folder}", *FAST)
        assert str(folder) in text
    assert not (tmp_path / "run").exists()


def test_a_folder_of_broken_pictures_stops_with_the_reasons(capsys, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for index in range(4):
        (broken / f"{index}.png").write_bytes(b"not a picture")
    text = refused(capsys, "train", "tiny", f"run_dir={tmp_path / 'run'}", f"images.source={broken}", *FAST)
    assert "undecodable" in text


H200 = Gpu("Imagined H200", 139.8, 139.0)
SMALL = Gpu("Imagined", 24.0, 23.5)


@pytest.mark.parametrize(
    ("preset", "overrides", "gpus", "code", "problem"),
    [
        ("tiny", (), (), 0, None),
        ("tiny", (), (H200,), 0, None),
        ("qwen3-vl-8b", (), (H200,), 0, None),
        ("qwen3-vl-8b", (), (), EXIT_FAILURE, "no GPU here"),
        ("qwen2.5-vl-7b", (), (), EXIT_FAILURE, "no GPU here"),
        ("qwen3-vl-8b", (), (SMALL,), EXIT_FAILURE, "too much"),
        ("tiny", ("tracking.trackers=[wandb]",), (), EXIT_FAILURE, "wandb: not installed"),
        ("tiny", ("engine.kind=vllm",), (), EXIT_FAILURE, "engine.kind=vllm: not installed"),
        ("qwen3-vl-8b", ("engine.kind=vllm",), (SMALL,), EXIT_FAILURE, "too much"),
        ("qwen3-vl-8b", ("engine.kind=vllm", "engine.vllm.kv_cache_gib=2"), (H200,), EXIT_FAILURE, "one sequence"),
    ],
)
def test_a_dry_run_tells_what_the_doctor_tells_and_writes_nothing(
    capsys, monkeypatch, tmp_path, preset, overrides, gpus, code, problem
):
    """The same lines and the same exit code, after the checks of settings, prompts and images."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(machine, "gpus", lambda: gpus)
    monkeypatch.setattr(fitting, "current_gpu", lambda: gpus[0] if gpus else None)
    monkeypatch.setattr(machine, "_free_host_bytes", lambda: 12 * machine.GIB)
    found = machine.found
    monkeypatch.setattr(machine, "found", lambda modules: not {"wandb", "vllm"} & set(modules) and found(modules))
    run_dir = tmp_path / "run"
    settings = [preset, f"run_dir={run_dir}", f"images.source={write_images(tmp_path / 'pictures')}", *overrides]
    assert main(["train", *settings, "dry_run=true"]) == code
    shown = capsys.readouterr().out
    assert "no weights were loaded" in shown
    assert (problem is None) is ("problem " not in shown)
    assert problem is None or problem in " ".join(shown.split())
    assert main(["doctor", *settings]) == code
    assert without_disk(capsys.readouterr().out) == without_disk(shown[shown.index("this machine  ") :])
    assert not run_dir.exists()


def test_a_dry_run_refuses_a_run_dir_that_a_run_would_refuse(capsys, tmp_path):
    """Before the plan is printed; and a folder that is free stays as it is."""
    pictures = write_images(tmp_path / "pictures")
    with RunDirectory.create(tmp_path / "taken", load_config("tiny")):
        pass
    for occupied in ("taken", "pictures", "x" * 300):
        arguments = ["train", "tiny", f"images.source={pictures}", f"run_dir={tmp_path / occupied}"]
        for more in ([], ["dry_run=true"]):
            assert main([*arguments, *more]) == EXIT_USER
            printed = capsys.readouterr()
            assert printed.out == ""
            assert "run_dir" in printed.err


def test_images_that_were_skipped_are_told_at_the_end(capsys, tmp_path):
    folder = write_images(tmp_path / "pictures", 6)
    (folder / "broken.png").write_bytes(b"nothing")
    arguments = ["train", "tiny", f"run_dir={tmp_path / 'run'}", f"images.source={folder}", *FAST]
    assert main([*arguments, "images.per_step=7"]) == 0
    assert "images skipped, again in every epoch: 1 undecodable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("preset", "overrides", "gpus", "compiler", "problem"),
    [
        ("qwen3-vl-8b", (), (), "cc", "its weights alone take"),
        ("tiny", ("tracking.trackers=[wandb]",), (), "cc", "wandb: not installed"),
        ("tiny", ("engine.kind=vllm",), (), "cc", "vLLM is not installed"),
        ("tiny", (), (H200,), None, "no C compiler|needs a C compiler"),
        ("qwen3-vl-8b", ("engine.kind=vllm",), (SMALL,), "cc", r"needs about [\d.]+ GiB"),
        ("qwen3-vl-8b", ("engine.kind=vllm", "engine.vllm.kv_cache_gib=2"), (H200,), "cc", "one sequence"),
    ],
)
def test_a_run_that_this_machine_cannot_hold_ends_before_anything_is_loaded(
    capsys, monkeypatch, tmp_path, preset, overrides, gpus, compiler, problem
):
    """With the exit code of its dry run, and without a run directory."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(fitting, "current_gpu", lambda: gpus[0] if gpus else None)
    monkeypatch.setattr(fitting, "find_compiler", lambda: compiler)
    monkeypatch.setattr(fitting, "host_capacity_gib", lambda: 12.0)
    for package in ("wandb", "vllm"):  # as if it were not installed
        monkeypatch.setitem(sys.modules, package, None)
    if gpus and overrides:
        monkeypatch.setattr(assembly, "check_installed", lambda: None)
    monkeypatch.setattr(assembly, "assemble", None)
    run_dir = tmp_path / "run"
    settings = [preset, f"run_dir={run_dir}", f"images.source={write_images(tmp_path / 'pictures')}", *overrides]
    assert main(["train", *settings]) == EXIT_FAILURE
    assert re.search(problem, " ".join(capsys.readouterr().err.split()))
    assert not run_dir.exists()


def test_a_folder_with_the_name_of_a_model_is_that_folder(monkeypatch, tmp_path):
    """Its weights may be anything: the size of the hub's model says nothing of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fitting, "current_gpu", lambda: None)
    monkeypatch.setattr(fitting, "host_capacity_gib", lambda: 12.0)
    config = load_config("qwen3-vl-8b")
    with pytest.raises(TrainingError, match="weights alone"):
        fitting.check_capacity(config)
    Path(config.model.path).mkdir(parents=True)
    fitting.check_capacity(config)


def without_disk(text):
    """Another program may fill the disk meanwhile."""
    return [line for line in text.splitlines() if not line.startswith("disk")]


def test_a_dry_run_tells_which_templates_are_the_users(capsys, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "propose.system.jinja").write_text("Ask.")
    folder = write_images(tmp_path / "pictures")
    arguments = [f"images.source={folder}", f"roles.prompts={prompts}", "dry_run=true"]
    assert main(["train", "tiny", *arguments]) == 0
    shown = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "yours: propose.system.jinja" in shown
    assert "11 from the set 'paper'" in shown


def test_images_counts_good_and_bad_files_and_shows_sizes(capsys, tmp_path):
    """One bad file of five is within images.max_skip_rate=0.2, two of six are not: exit codes 0 and 2."""
    folder = write_images(tmp_path / "pictures", 4)
    (folder / "a.png").write_bytes(b"nothing")
    assert main(["images", str(folder), "--set", "model.min_pixels=4096", "--set", "model.max_pixels=4096"]) == 0
    shown = capsys.readouterr().out
    assert "images checked: 5, good: 4, bad: 1" in shown
    assert "1 undecodable" in shown
    assert "a.png: undecodable" in shown
    assert re.search(r"128x128\W+4\W", shown)
    assert re.search(r"64x64\W+4\W+16\W", shown)
    (folder / "b.png").write_bytes(b"")
    text = refused(capsys, "images", str(folder))
    assert "2 of 6 images" in text
    assert "images.max_skip_rate=0.2" in text
    assert main(["images", str(folder), "--set", "images.max_skip_rate=0.5", "--sample", "3"]) == 0
    assert "images checked: 3" in capsys.readouterr().out
    assert "/no/such" in refused(capsys, "images", "/no/such")


def test_resume_of_nothing_and_of_a_foreign_folder(capsys, tmp_path):
    assert str(tmp_path / "nothing") in refused(capsys, "resume", str(tmp_path / "nothing"))
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "file.txt").write_text("mine")
    assert str(tmp_path / "foreign") in refused(capsys, "resume", str(tmp_path / "foreign"))


def test_train_resume_play_solve_and_export_work_together(capsys, tmp_path):
    """A user's whole path on a folder of own pictures: train, extend, look, ask, export all three forms."""
    folder = write_images(tmp_path / "pictures")
    run = tmp_path / "run"
    assert main(["train", "tiny", f"run_dir={run}", f"images.source={folder}", *FAST]) == 0
    assert "going on" not in capsys.readouterr().out
    assert main(["resume", str(run), "steps=2"]) == 0
    assert "going on after step 1 of 2" in capsys.readouterr().out
    assert main(["resume", str(run)]) == 0
    assert "2 of 2 steps are done already" in " ".join(capsys.readouterr().out.split())
    image = folder / "0.png"
    assert main(["play", str(image), "--run", str(run), "--save", str(tmp_path / "episode.parquet")]) == 0
    assert main(["solve", str(image), "How many circles are there?", "--run", str(run)]) == 0
    assert main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    capsys.readouterr()
    assert_card_is_true((tmp_path / "adapter" / "README.md").read_text(), RunDirectory.open(run), step=2)
    assert main(["export", str(run), "--out", str(tmp_path / "merged"), "--what", "merged"]) == 0
    assert ("needs torchvision" in " ".join(capsys.readouterr().out.split())) == (not is_torchvision_available())
    assert main(["export", str(run), "--out", str(tmp_path / "pairs.parquet"), "--what", "pairs"]) == 0
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    assert (tmp_path / "merged" / "model.safetensors").exists()
    assert (run / "figure.png").exists()
    assert main(["train", "tiny", f"run_dir={run}", *FAST]) == EXIT_USER
    assert "already holds a run" in capsys.readouterr().err


def assert_card_is_true(card, run, step):
    """What it says is the run's own; nothing of peft's template is left, and the code loads the adapter."""
    assert "More Information Needed" not in card
    assert f"after step {step} of {run.config.steps}" in card
    assert all(fact in card for fact in (run.run_id, run.manifest.config_hash, run.manifest.prompt_digest))
    assert f"rank {run.config.lora.rank}, alpha 32" in card
    assert f"| `{Path(run.config.images.source).name}` |" in card
    assert str(run.path.parent) not in card
    assert "--max-lora-rank 16" in card
    folder = run.path.parent / "adapter"
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base not in card
    code = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    code = code.replace("PATH/OF/THIS/FOLDER", str(folder)).replace("PATH/OF/THE/BASE", base)
    names = {}
    exec(code, names)
    assert type(names["model"]).__name__.startswith("Peft")
    head = yaml.safe_load(card.split("---")[1])
    assert "base_model" not in head
    assert head["library_name"] == "peft"


@pytest.mark.parametrize(
    ("base", "source", "shown"),
    [
        ("org/model", "org/pictures", ("base_model: org/model", "`org/pictures`")),
        ("org/model", "/home/me/pictures/*.parquet", ("base_model: org/model", "`*.parquet`")),
        ("/gone/home/model", "microcosm:evolve", ("PATH/OF/THE/BASE", "`microcosm:evolve`")),
    ],
)
def test_a_card_names_what_is_on_a_hub_and_no_place_of_this_machine(tmp_path, base, source, shown):
    """Whether it is still there or not."""
    adapter = {"base_model_name_or_path": base, "r": 8, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    config = load_config("tiny", [f"images.source={source}"])
    with RunDirectory.create(tmp_path / "run", config) as run:
        write_card(tmp_path, run, 3)
    card = (tmp_path / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert ("base_model" in front) is (base == "org/model")
    assert all(text in card.replace('"', "") for text in shown)
    assert "/home/" not in card


def test_several_workers_go_on_as_they_began():
    assert resuming(Path("my runs"), Workers(0, 2)) == "torchrun as before, with `-m trinity_vlm resume 'my runs'`,"


def test_a_setting_that_may_not_change_is_refused_on_resume(capsys, tmp_path):
    folder = write_images(tmp_path / "pictures")
    run = tmp_path / "run"
    assert main(["train", "tiny", f"run_dir={run}", f"images.source={folder}", *FAST]) == 0
    text = refused(capsys, "resume", str(run), "update.lr=0.5")
    assert "update.lr" in text
    assert "0.5" in text


def test_every_key_is_listed_with_its_meaning(capsys):
    assert main(["keys", "roles."]) == 0
    text = capsys.readouterr().out
    assert "roles.candidates" in text
    assert "roles.reason_scope" in text


def test_an_unreadable_picture_is_named(capsys, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"nothing")
    assert "broken.png" in refused(capsys, "play", str(broken))
    good = tmp_path / "good.png"
    picture(0).pixels.save(good)
    assert main(["solve", str(good), "What colour is bar A?"]) == 0
