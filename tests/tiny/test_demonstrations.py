"""Demonstrations: every verdict re-derived from the scene, every completion read by the roles' own parsers."""

import json
import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from trinity_vlm.config import RolesConfig
from trinity_vlm.environments.microcosm import Microcosm, execute, listing, parse, parse_style, text
from trinity_vlm.environments.microcosm.answers import same_answer
from trinity_vlm.environments.microcosm.sampler import sample_question
from trinity_vlm.environments.protocol import Answer
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.tiny.demonstrations import DEFAULT_MIX, Demonstration, DemonstrationMix, Group, demonstrations
from trinity_vlm.tiny.demonstrations.equivalence import EQUIVALENCE_CASES
from trinity_vlm.tiny.demonstrations.judging import REASONING_CASES, misread_names
from trinity_vlm.tiny.demonstrations.policy import is_glance
from trinity_vlm.tiny.demonstrations.screening import SCREENING_CASES, garbled
from trinity_vlm.tiny.demonstrations.variants import wordings
from trinity_vlm.types import CallType, Completion

WORLD = Microcosm()
ROLES = RolesConfig(prompts="short")
PROMPTS = PromptSet.load("short")
EVEN_MIX = DemonstrationMix(
    (Group(1.0, tuple((call, 1.0) for call in CallType), (("base", 0.6), ("more", 0.2), ("palette-0.3", 0.2))),),
    per_image=6,
)


@pytest.fixture(scope="module")
def sample() -> list[Demonstration]:
    """About 500 demonstrations of each call."""
    return [d for index in range(500) for d in demonstrations(EVEN_MIX, seed=7, index=index)]


def of(sample, call):
    return [d for d in sample if d.call is call]


def written(d):
    return Completion((), (), d.completion, "stop")


def true_trace(d):
    scene = WORLD.scene_of(d.image_uid)
    return f"{listing(scene)}. {'; '.join(execute(scene, parse(d.question)).trace)}"


def test_every_call_and_case_occurs(sample):
    """No situation of any role is missing from the sample."""
    cases = Counter((d.call, str(d.case)) for d in sample)
    wanted = {(CallType.SCREEN, str(case)) for case, _ in SCREENING_CASES}
    wanted |= {(CallType.REASON, case) for case, _, _ in REASONING_CASES}
    wanted |= {(CallType.EQUIVALENCE, case) for case, _ in EQUIVALENCE_CASES}
    wanted |= {(CallType.DISPUTE, "ref_right"), (CallType.DISPUTE, "majority_right")}
    wanted |= {(CallType.PROPOSE, "right"), (CallType.SOLVE, "looked"), (CallType.SOLVE, "glanced")}
    assert set(cases) == wanted
    assert min(cases.values()) >= 5, cases


def test_images_belong_to_their_uids(sample):
    """The image is that of the uid's scene; only the text-only call has none."""
    for d in sample[:300]:
        assert (d.image is None) == (d.call is CallType.EQUIVALENCE)
        if d.image is not None:
            assert d.image.tobytes() == WORLD.render(WORLD.scene_of(d.image_uid)).tobytes()


def test_propose(sample):
    """A proposal lists the scene, works the question out, and its pair is grounded and right."""
    questioner = Questioner(PROMPTS, ROLES)
    for d in of(sample, CallType.PROPOSE):
        candidate = questioner.parse(written(d))
        assert candidate.format_valid, (candidate.error, d.completion)
        assert WORLD.judge(WORLD.scene_of(d.image_uid), candidate.question, candidate.answer).right
        trace, _, pair = d.completion.partition("\n</think>\n")
        assert trace == true_trace(replace(d, question=candidate.question))
        assert list(json.loads(pair)) == ["question", "answer"]
        assert d.question == d.answer == ""


def test_solve(sample):
    """A solution boxes the right answer, worked out from a listing of the scene or only stated."""
    solver = Solver(PROMPTS, ROLES)
    for d in of(sample, CallType.SOLVE):
        solution = solver.parse(written(d))
        assert solution.format_valid, (solution.error, d.completion)
        assert solution.reasoning == (f"answer {d.truth}" if d.case == "glanced" else true_trace(d))
        assert is_glance(solution.reasoning) == (d.case == "glanced")
        assert WORLD.judge(WORLD.scene_of(d.image_uid), d.question, solution.answer).right
        assert d.completion.endswith(f"\n</think>\n<answer>\\boxed{{{d.truth}}}</answer>")
        assert d.answer == ""


def test_harder_questions_are_glanced_at_more_often(sample):
    """The share of glances rises with the difficulty, and neither habit is rare at any level."""
    glanced = {
        level: [d.case == "glanced" for d in of(sample, CallType.SOLVE) if d.difficulty == level]
        for level in (0.1, 0.4, 0.7, 1.0)
    }
    shares = {level: sum(cases) / len(cases) for level, cases in glanced.items()}
    assert shares == pytest.approx({0.1: 0.3, 0.4: 0.4, 0.7: 0.5, 1.0: 0.6}, abs=0.12), shares


def test_screen(sample):
    """Both verdicts and the level follow from the scene; the justification starts with what the image shows."""
    verifier = Verifier(PROMPTS, ROLES)
    for d in of(sample, CallType.SCREEN):
        verdict = verifier.parse_screening(written(d))
        judgement = WORLD.judge(WORLD.scene_of(d.image_uid), d.question, d.answer)
        assert verdict.parsed
        assert (verdict.fact_q, verdict.corr_a) == (int(judgement.grounded), int(judgement.right)), d
        assert d.truth == judgement.answer
        program = parse(d.question)
        assert verdict.difficulty == (program.difficulty if program else 0.1)
        assert list(json.loads(d.completion)) == ["justification", "fact_q", "corr_a", "difficulty"]
        if program:
            assert verdict.justification.startswith(true_trace(d))
        assert (d.case in ("right", "right_reworded")) == judgement.right
        assert (d.case == "unreadable") == (not judgement.parsable)


def test_screening_sees_honest_temptations(sample):
    """Blind questions mostly come with the answer anybody would give, and some right answers in other words."""
    blind = [d for d in of(sample, CallType.SCREEN) if d.case == "blind"]
    tempting = [d for d in blind if re.search(rf"\b{d.answer}\b", d.question) or d.answer in ("0", "yes", "no")]
    assert len(tempting) > 0.4 * len(blind)
    reworded = [d for d in of(sample, CallType.SCREEN) if d.case == "right_reworded"]
    assert all(d.answer != d.truth for d in reworded)


def derived_score(d) -> float:
    """The rubric, applied to the text alone: what is listed, and which steps follow."""
    scene = WORLD.scene_of(d.image_uid)
    steps = "; ".join(execute(scene, parse(d.question)).trace)
    if d.reasoning == f"{listing(scene)}. {steps}":
        return 1.0
    if d.reasoning in (steps, f"{listing(scene)}. answer {d.truth}"):
        return 0.5
    listed = re.match(r"([a-d][1-4] |[A-Z] [a-z]+ \d)", d.reasoning) and ". " in d.reasoning
    return 0.25 if listed else 0.0


def test_reason(sample):
    """The score follows from comparing the shown reasoning with the scene, which the justification spells out."""
    verifier = Verifier(PROMPTS, ROLES)
    for d in of(sample, CallType.REASON):
        verdict = verifier.parse_reasoning(written(d))
        assert verdict.parsed
        assert verdict.score == derived_score(d), d
        seen, _, rest = verdict.justification.partition(". ")
        assert f"{re.sub(' (ok|no)(?=,|$)', '', seen)}. {rest}".startswith(f"{true_trace(d)}. "), d
        assert list(json.loads(d.completion)) == ["justification", "reasoning_score"]


def test_reasoning_is_compared_item_by_item(sample):
    """Behind each item of the true listing stands whether the shown listing has it."""
    for d in of(sample, CallType.REASON):
        seen = json.loads(d.completion)["justification"].partition(". ")[0]
        shown = d.reasoning.partition(". ")[0].split(", ")
        if d.case in ("listing_skipped", "none"):
            assert seen == listing(WORLD.scene_of(d.image_uid))
            continue
        marks = [item.rsplit(" ", 1) for item in seen.split(", ")]
        assert [mark == "ok" for _, mark in marks] == [item in shown for item, _ in marks], d
        assert all(mark in ("ok", "no") for _, mark in marks)
        assert ("no" in dict(marks).values()) == (d.case == "misread")


def test_misread_reasoning_is_consistent_but_about_another_scene(sample):
    """A misread trace lists something that isn't there, and the finding names exactly the cells or labels concerned."""
    for d in of(sample, CallType.REASON):
        if d.case == "misread":
            shown, true = d.reasoning.partition(". ")[0], listing(WORLD.scene_of(d.image_uid))
            keys = {e.split()[0] for e in set(shown.split(", ")) ^ set(true.split(", "))}
            named = json.loads(d.completion)["justification"].rpartition("misread ")[2].split()
            assert keys == set(named)
            assert named


def test_wrong_steps_are_not_the_right_ones(sample):
    """A wrong-step trace reads the scene rightly and lacks one of the right steps."""
    for d in of(sample, CallType.REASON):
        if d.case == "wrong_step":
            shown_listing, _, shown = d.reasoning.partition(". ")
            scene = WORLD.scene_of(d.image_uid)
            assert shown_listing == listing(scene)
            assert not set(execute(scene, parse(d.question)).trace) <= set(shown.split("; "))


def test_dispute(sample):
    """Exactly one side is right, the ruling names it, and a wrong majority's support misreads the scene."""
    verifier = Verifier(PROMPTS, ROLES)
    for d in of(sample, CallType.DISPUTE):
        scene = WORLD.scene_of(d.image_uid)
        right = {
            side: WORLD.judge(scene, d.question, a).right
            for side, a in (("ref", d.answer), ("majority", d.majority_answer))
        }
        assert sum(right.values()) == 1
        verdict = verifier.parse_dispute(written(d))
        assert right[verdict.winner]
        thinking, _, ruling = d.completion.partition("\n</think>\n")
        sides = f"ref {d.answer}, majority {d.majority_answer}, answer {d.truth}"
        assert thinking == f"{true_trace(d)}. {sides}: {verdict.winner}"
        assert list(json.loads(ruling)) == ["correct_answer", "justification"]
        if is_glance(d.reasoning):
            assert d.reasoning == f"answer {d.majority_answer}"
            continue
        assert (d.reasoning == true_trace(d)) == right["majority"]
        assert d.reasoning.startswith(listing(scene)) == right["majority"]


def test_dispute_sides_are_balanced(sample):
    """Neither side wins by habit."""
    share = Counter(d.case for d in of(sample, CallType.DISPUTE))
    assert 0.4 < share["ref_right"] / share.total() < 0.6


def test_equivalence(sample):
    """The match is the environment's own judgement of the two texts, whatever their wording; texts always differ."""
    verifier = Verifier(PROMPTS, ROLES)
    matches = Counter()
    for d in of(sample, CallType.EQUIVALENCE):
        verdict = verifier.parse_equivalence(written(d))
        assert verdict.match == int(same_answer(d.prediction, d.answer)), d
        assert d.prediction != d.answer
        assert d.question
        matches[verdict.match] += 1
    assert 0.35 < matches[1] / matches.total() < 0.6


def test_other_wordings_mean_the_same():
    """Every wording of every sampled answer is another text for the same answer."""
    rng = Random(0)
    for index in range(1500):
        program, answer = sample_question(rng, WORLD.scene("train", index))
        for wording in wordings(answer.text, program):
            assert wording != answer.text
            assert same_answer(wording, answer.text), (wording, answer.text)


def test_garbled_questions_cannot_be_read():
    """Garbling leaves a text of the same words that no template fits."""
    rng = Random(1)
    for index in range(300):
        program, _ = sample_question(rng, WORLD.scene("train", index))
        question = garbled(rng, text(program))
        assert parse(question) is None
        assert set(question.split()) <= set(text(program).split())


def test_misread_names_covers_moved_and_missing_items():
    """An item that moved is named by both cells, a missing one by its own."""
    scene = next(s for s in (WORLD.scene("train", i) for i in range(50)) if hasattr(s, "things"))
    first, *rest = scene.things
    free = next(cell for cell in ("d4", "c4", "b4", "a4") if all(t.cell != cell for t in scene.things))
    assert misread_names(scene, replace(scene, things=tuple(rest))) == [first.cell]
    moved = replace(scene, things=(*rest, replace(first, cell=free)))
    assert misread_names(scene, moved) == sorted([first.cell, free])


def test_stream_is_a_pure_function_of_seed_and_index():
    """Any order of indices gives the same demonstrations; another seed gives other images."""
    forward = [_plain(demonstrations(DEFAULT_MIX, 1, index)) for index in range(12)]
    backward = [_plain(demonstrations(DEFAULT_MIX, 1, index)) for index in reversed(range(12))]
    assert forward == backward[::-1]
    other = {d[0].image_uid for d in (demonstrations(DEFAULT_MIX, 2, index) for index in range(12))}
    assert not other & {plain[0][0] for plain in forward}


def _plain(group):
    return [(d.image_uid, d.call, d.question, d.completion, d.image and d.image.tobytes()) for d in group]


def test_groups_share_an_image_and_keep_to_their_calls_and_styles():
    """Each image serves ``per_image`` demonstrations of one group, in a style of that group."""
    mix = DemonstrationMix(
        (
            Group(0.5, ((CallType.SOLVE, 1.0), (CallType.PROPOSE, 1.0)), (("base", 1.0),)),
            Group(0.5, ((CallType.SCREEN, 1.0), (CallType.DISPUTE, 1.0)), (("dark", 1.0), ("small", 1.0))),
        ),
        per_image=3,
    )
    shares = Counter()
    for index in range(200):
        group = demonstrations(mix, 0, index)
        assert len(group) == 3
        assert len({(d.image_uid, id(d.image)) for d in group}) == 1
        policy = group[0].call in (CallType.SOLVE, CallType.PROPOSE)
        assert all((d.call in (CallType.SOLVE, CallType.PROPOSE)) == policy for d in group)
        style = WORLD.scene_of(group[0].image_uid).style
        assert style in ([parse_style("base")] if policy else [parse_style("dark"), parse_style("small")])
        shares[policy] += 1
    assert 70 < shares[True] < 130


def test_default_mix_covers_all_calls():
    """The default warm-up teaches every call, the Solver most."""
    calls = Counter(d.call for index in range(400) for d in demonstrations(DEFAULT_MIX, 0, index))
    assert set(calls) == set(CallType)
    assert calls.most_common(1)[0][0] is CallType.SOLVE
    assert min(calls.values()) > 0.02 * calls.total()


def test_texts_are_short(sample):
    """Token economy: wording of a base-style solution stays under 400 characters, any text under 640."""
    for d in sample:
        assert len(d.completion) < 640
        assert len(d.reasoning) < 640
        if d.call is CallType.SOLVE and "@base/" in d.image_uid:
            assert len(d.completion) < 400


def test_demonstrated_questions_are_rarely_yes_no(sample):
    """Proposals and solutions hold at most 15 % yes/no questions, so that guessing is not learned."""
    policy = of(sample, CallType.PROPOSE) + of(sample, CallType.SOLVE)
    assert sum(d.truth in ("yes", "no") for d in policy) <= 0.15 * len(policy)
    assert all(
        isinstance(execute(WORLD.scene_of(d.image_uid), parse(d.question)), Answer) for d in policy if d.question
    )
