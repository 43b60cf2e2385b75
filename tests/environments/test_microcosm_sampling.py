"""Splits, styles, scenes, and the distribution of sampled questions."""

from collections import Counter, defaultdict
from dataclasses import fields
from random import Random

import pytest

from trinity_vlm.environments.microcosm import (
    BASE,
    SHIFTS,
    SPLITS,
    ChartScene,
    Microcosm,
    execute,
    listing,
    parse_style,
    text,
)
from trinity_vlm.environments.microcosm.answers import canonical
from trinity_vlm.environments.microcosm.perturb import misread, misread_answer, neighbouring_answer, plausible_answer
from trinity_vlm.environments.microcosm.sampler import sample_question, sample_ungrounded
from trinity_vlm.environments.microcosm.vocabulary import CELLS, COLOURS, LABELS, SHAPES, SIZES
from trinity_vlm.environments.protocol import Answer, Failure, Ungrounded
from trinity_vlm.errors import ConfigError

WORLD = Microcosm()
VALID_ANSWERS = {
    "attribute": {*COLOURS, *SHAPES, *SIZES},
    "colour": set(COLOURS),
    "label": set(LABELS),
    "yes_no": {"yes", "no"},
}


def test_scene_is_a_function_of_split_and_index():
    """The same address gives the same scene and pixels, in any order and from another instance."""
    forward = [WORLD.scene("evolve", index) for index in range(20)]
    backward = [Microcosm().scene("evolve", index) for index in reversed(range(20))]
    assert forward == backward[::-1]
    uid, image = WORLD.image("evolve", 7)
    assert uid == "microcosm:evolve/000007"
    assert image.tobytes() == WORLD.render(WORLD.scene_of(uid)).tobytes()


def test_scene_is_stable_between_versions():
    """Held-out sets stay the same sets: this scene is pinned."""
    assert listing(WORLD.scene("base-heldout", 0)) == "E green 1, H red 5, N yellow 3, P orange 1"


def test_splits_are_disjoint():
    """No seed and no picture of one split occurs in another."""
    seeds = {name: {WORLD.scene(name, index).seed for index in range(1500)} for name in SPLITS}
    assert sum(map(len, seeds.values())) == len(set().union(*seeds.values()))
    pictures = {WORLD.image(name, index)[1].tobytes() for name in SPLITS for index in range(25)}
    assert len(pictures) == 25 * len(SPLITS)


def test_style_override_keeps_the_scene():
    """NAME@STYLE shows a split's own objects and questions in another style, for paired comparisons."""
    for index in range(30):
        assert listing(WORLD.scene("evolve@noise+dark", index)) == listing(WORLD.scene("evolve@base", index))
    plain, dark = WORLD.problems("base-heldout", 20, 3), WORLD.problems("base-heldout@dark", 20, 3)
    assert [(p.question, p.answer) for p in plain] == [(p.question, p.answer) for p in dark]
    assert all(a.image.tobytes() != b.image.tobytes() for a, b in zip(plain, dark, strict=True))


def test_uid_rebuilds_the_scene():
    """A uid with a style override is enough to rebuild its scene."""
    uid, _ = WORLD.image("train@palette-0.3+small", 12)
    assert uid == "microcosm:train@palette-0.3+small/000012"
    assert WORLD.scene_of(uid) == WORLD.scene("train@palette-0.3+small", 12)


@pytest.mark.parametrize("uid", ["evolve/000001", "folder:evolve/1", "microcosm:evolve", "microcosm:evolve/-1", ""])
def test_foreign_uid_is_refused(uid):
    """A uid that isn't the microcosm's own names the expected form."""
    with pytest.raises(ConfigError, match="expected microcosm:SPLIT/INDEX"):
        WORLD.scene_of(uid)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("elvove", "known are train, base-heldout, evolve, evolve-heldout"),
        ("evolve@sepia", "unknown shift 'sepia'"),
        ("evolve@small-2", "number in \\[0, 1\\]"),
        ("evolve@small-", "number in \\[0, 1\\]"),
        ("evolve@small-nan", "number in \\[0, 1\\]"),
        ("evolve@", "unknown shift ''"),
    ],
)
def test_unknown_split_or_style_is_refused(split, message):
    """Errors name the value and what is allowed."""
    with pytest.raises(ConfigError, match=message):
        WORLD.scene(split, 0)


def test_negative_index_is_refused():
    """Indices start at 0."""
    with pytest.raises(ConfigError, match="index=-1"):
        WORLD.scene("evolve", -1)


def test_shift_amounts_interpolate():
    """Amount 0 is the base, 1 the shift's own value, one half lies in the middle; shifts combine."""
    assert parse_style("base") == BASE == parse_style("small-0+dark-0")
    assert parse_style("palette-0.3").palette == pytest.approx(0.3)
    assert parse_style("dark-0.5").background == pytest.approx((BASE.background + 50) / 2)
    both = parse_style("palette+small-0.5")
    assert both.palette == 1.0
    assert both.object_scale == pytest.approx(0.81)
    assert both.pixel_noise == BASE.pixel_noise
    knobs = {field.name for field in fields(BASE)}
    assert all(set(shift) <= knobs for shift in SHIFTS.values())


def test_scenes_are_well_formed():
    """Counts follow the style, cells and labels don't repeat, chart values are axis steps."""
    for split, things, marks in (("train@base", (3, 6), (3, 5)), ("train@more", (7, 9), (6, 7))):
        for index in range(300):
            scene = WORLD.scene(split, index)
            if isinstance(scene, ChartScene):
                assert marks[0] <= len(scene.marks) <= marks[1]
                labels = [mark.label for mark in scene.marks]
                assert labels == sorted(set(labels))
                assert len({mark.colour for mark in scene.marks}) == len(labels)
                assert all(mark.value in range(scene.unit, scene.axis_max + 1, scene.unit) for mark in scene.marks)
            else:
                assert things[0] <= len(scene.things) <= things[1]
                cells = [thing.cell for thing in scene.things]
                assert cells == sorted(set(cells), key=CELLS.index)


@pytest.fixture(scope="module")
def sampled():
    """Scenes with one sampled question each."""
    rng = Random(5)
    scenes = [WORLD.scene("train", index) for index in range(5000)]
    return [(scene, *sample_question(rng, scene)) for scene in scenes]


def test_constant_answers_do_badly(sampled):
    """The best constant answer per type is right in less than 45 % on average, and in none above 66 %."""
    answers = defaultdict(Counter)
    for _, program, answer in sampled:
        answers[program.type][answer.text] += 1
    best = {kind: max(counts.values()) / counts.total() for kind, counts in answers.items()}
    assert sum(best.values()) / len(best) < 0.45
    assert max(best.values()) < 0.66, best


def test_sampled_answers_are_the_executors(sampled):
    """Sampled questions are grounded, their answers of the declared kind and not negative."""
    for scene, program, answer in sampled:
        assert execute(scene, program) == answer
        if program.kind.answer in VALID_ANSWERS:
            assert answer.text in VALID_ANSWERS[program.kind.answer]
        else:
            assert answer.text.isdigit()


def test_levels_are_balanced(sampled):
    """All four difficulty levels are drawn about equally often."""
    levels = Counter(program.difficulty for _, program, _ in sampled)
    assert set(levels) == {0.1, 0.4, 0.7, 1.0}
    assert min(levels.values()) > 0.2 * len(sampled)


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_yes_no_share_of_every_prefix(split):
    """However long the problem set, at most 15 % of it are yes/no questions; and there are some."""
    problems = WORLD.problems(split, 300, seed=1)
    count = 0
    for position, problem in enumerate(problems, start=1):
        count += problem.answer in ("yes", "no")
        assert count <= 0.15 * position
    assert count > 10


def test_problems_are_fixed_and_prefix_stable():
    """Same arguments, same problems; a longer set continues a shorter one; another seed has other images."""
    short, long = WORLD.problems("evolve-heldout", 12, 0), WORLD.problems("evolve-heldout", 30, 0)
    for a, b in zip(short, long, strict=False):
        assert (a.uid, a.question, a.answer, a.image.tobytes()) == (b.uid, b.question, b.answer, b.image.tobytes())
    other = WORLD.problems("evolve-heldout", 30, 1)
    assert not {p.uid for p in long} & {p.uid for p in other}
    for problem in long:
        judgement = WORLD.judge(WORLD.scene_of(problem.uid), problem.question, problem.answer)
        assert judgement.right


def test_ungrounded_questions_fail_for_the_wanted_reason():
    """Every kind of ungrounded question can be drawn in every domain, and fails as asked."""
    rng = Random(2)
    found = Counter()
    for index in range(150):
        scene = WORLD.scene("train", index)
        for reason in Failure:
            drawn = sample_ungrounded(rng, scene, reason)
            if drawn:
                program, outcome = drawn
                assert outcome == execute(scene, program)
                assert isinstance(outcome, Ungrounded)
                assert outcome.reason is reason
                found[type(scene).__name__, reason] += 1
    assert len(found) == 2 * len(Failure)
    assert min(found.values()) > 15, found


def test_misread_changes_the_scene_and_the_answer():
    """A misread scene differs from the true one in a few items; a misread answer differs from the true answer."""
    rng = Random(3)
    changed = 0
    for index in range(300):
        scene = WORLD.scene("train", index)
        changed += listing(misread(rng, scene)) != listing(scene)
        program, answer = sample_question(rng, scene)
        read = misread_answer(rng, scene, program)
        if read:
            wrong_scene, wrong = read
            assert execute(wrong_scene, program) == wrong
            assert wrong.text != answer.text
    assert changed > 290


def test_wrong_answers_are_wrong_and_of_the_right_kind():
    """A neighbouring answer never means the true one; plausible answers are of the question's kind."""
    rng = Random(4)
    for index in range(800):
        scene = WORLD.scene("train", index)
        program, answer = sample_question(rng, scene)
        wrong = neighbouring_answer(rng, scene, answer.text)
        assert canonical(wrong) != canonical(answer.text)
        valid = VALID_ANSWERS.get(program.kind.answer)
        for text_ in (wrong, plausible_answer(rng, scene, program)):
            assert text_ in valid if valid else text_.isdigit()


def test_questions_read_like_sentences(sampled):
    """No slot is left unfilled and every question ends with one question mark."""
    for _, program, answer in sampled[:500]:
        assert isinstance(answer, Answer)
        question = text(program)
        assert question.endswith("?")
        assert question.count("?") == 1
        assert "{" not in question
        assert "None" not in question
