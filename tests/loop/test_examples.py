"""The examples: the command that each one names is accepted, and each one does what it says."""

import importlib
import re
import zipfile
from pathlib import Path

import pytest
from loop_factory import small_config, write_images

from trinity_vlm.assembly import assemble
from trinity_vlm.cli.main import EXIT_FAILURE, EXIT_USER, main
from trinity_vlm.engine.protocol import Engine
from trinity_vlm.images import ImageStream, open_source
from trinity_vlm.loop import outer_step
from trinity_vlm.roles import PromptSet
from trinity_vlm.types import CallType, Candidate, Completion, Episode, ImageRecord, Prompt, ScreeningVerdict

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMAND = re.compile(r"^    (?:\w+=\S+ )*trinity-vlm (.+)$", re.MULTILINE)
FILES = sorted([*EXAMPLES.glob("own_*.py"), *EXAMPLES.glob("own_prompts/*.jinja")])


@pytest.fixture(autouse=True)
def pictures(tmp_path, monkeypatch):
    """Where the commands expect to be run: the repository's folder, a ``photos`` folder and a zip of pictures."""
    folder = write_images(tmp_path / "photos", 5)
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, f"inner/{file.name}")
        archive.writestr("notes.txt", "no picture")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setenv("PICTURES_ZIP", str(tmp_path / "photos.zip"))


def test_there_is_one_example_for_each_way_to_extend():
    assert {f.stem for f in EXAMPLES.glob("own_*")} == {
        "own_reward",
        "own_advantage",
        "own_prompts",
        "own_images",
        "own_engine",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_the_command_of_an_example_passes_a_dry_run(capsys, file):
    """Whether this machine can run it is another question, with another exit code."""
    (arguments,) = COMMAND.findall(file.read_text())
    assert main([*arguments.split(), "dry_run=true"]) in (0, EXIT_FAILURE)
    assert "settings and prompts are fine, images were found" in capsys.readouterr().out


def candidate(index, question):
    verdict = ScreeningVerdict(True, 1, 1, 0.4)
    return Candidate(index, Prompt(()), Completion((), (1,), "", "stop"), True, None, question, "3", verdict)


def test_own_reward_pays_a_repeated_question_nothing():
    """Unselected candidates earn 0.3 * 0.4 / 2 = 0.06; the second and third repeat the first or the selected one."""
    own_reward = importlib.import_module("own_reward")
    questions = ("How many dots?", "how many  dots", "What colour is A?", "What colour is A?")
    candidates = tuple(candidate(i, q) for i, q in enumerate(questions))
    episode = Episode(1, ImageRecord("a", None), candidates, 3, (), None, "3")
    found = own_reward.new_questions_only(episode, small_config().rewards)
    assert [r.total for r in found] == pytest.approx([0.06, 0.0, 0.0, 0.06])


def test_own_advantage_is_centred_and_drops_ties():
    own_advantage = importlib.import_module("own_advantage")
    assert own_advantage.centred((1, 0, 0, 0)) == (0.75, -0.25, -0.25, -0.25)
    assert own_advantage.centred((0.2, 0.2)) == (None, None)


def test_own_prompts_replace_one_template_of_twelve():
    own, paper = PromptSet.load(str(EXAMPLES / "own_prompts")), PromptSet.load("paper")
    text = own.text(CallType.SOLVE, "user", question="How many?")
    assert text.startswith("Question: How many?\n")
    assert "two parts of the image" in text
    assert own.text(CallType.SOLVE, "system") == paper.text(CallType.SOLVE, "system")
    assert own.digest != paper.digest


def test_own_images_reads_the_pictures_of_a_zip_and_resumes():
    config = small_config("images.source=own_images:zipped").images
    stream = ImageStream(open_source(config), config, 0, 0, 1, None)
    first = [r.uid for r in stream.take(3)]
    state = stream.state_dict()
    rest = [r.uid for r in stream.take(2)]
    assert sorted(first + rest) == [f"photos.zip/inner/{i}.png" for i in range(5)]
    resumed = ImageStream(open_source(config), config, 0, 0, 1, None)
    resumed.load_state_dict(state)
    assert [r.uid for r in resumed.take(2)] == rest


def test_own_images_without_an_archive_is_a_named_fault(capsys, monkeypatch):
    monkeypatch.setenv("PICTURES_ZIP", "nothing.zip")
    assert main(["train", "tiny", "images.source=own_images:zipped", "dry_run=true"]) == EXIT_USER
    assert "nothing.zip" in capsys.readouterr().err


def test_all_examples_work_together_in_a_real_step(capsys):
    """One step with all own parts but the prompts: the engine's count is what the episodes report."""
    config = small_config(
        "rewards.questioner=own_reward:new_questions_only",
        "rewards.advantages=own_advantage:centred",
        "images.source=own_images:zipped",
        "engine.kind=own_engine:counting",
    )
    with assemble(config) as system:
        assert isinstance(system.engine, Engine)
        system.serve(0)
        metrics = outer_step(system, 0).metrics
        for call in CallType:
            assert system.engine.tokens[call] == metrics[f"completion_tokens/{call}"]
    assert "tokens generated:" in capsys.readouterr().out
