"""Episodes against scripted models: every branch of Section 2, with hand-worked outcomes."""

import asyncio
import json
from collections import Counter

import pytest
from PIL import Image

from trinity_vlm.answers import Matcher
from trinity_vlm.config import MatcherConfig, RolesConfig
from trinity_vlm.engine.scripted import TRUNCATED, ScriptedEngine
from trinity_vlm.episode import Cast, play_episode
from trinity_vlm.loop import play_episodes
from trinity_vlm.roles import PromptSet, Questioner, Solver, Verifier
from trinity_vlm.seeds import derive_seed
from trinity_vlm.types import POLICY, VERIFIER, CallType, ImageRecord, Tier

IMAGE = ImageRecord("folder/a.png", Image.new("RGB", (64, 64), "white"))


def proposal(question="How many red dots are shown?", answer="3"):
    return f"looking</think>\n{json.dumps({'question': question, 'answer': answer})}"


def solution(answer):
    return f"I count them.</think>\n<answer>\\boxed{{{answer}}}</answer>"


def screening(fact=1, corr=1, difficulty=0.7):
    return json.dumps({"justification": "seen", "fact_q": fact, "corr_a": corr, "difficulty": difficulty})


def reasoning(score=0.5):
    return json.dumps({"justification": "fine", "reasoning_score": score})


def dispute(winner):
    return f"I solve it.</think>\n{json.dumps({'correct_answer': winner, 'justification': 'my own count'})}"


def play(script, *, occurrence=0, **settings):
    """Run one episode; returns it with the engine that was asked."""
    script = {
        CallType.PROPOSE: [proposal()],
        CallType.SCREEN: [screening()],
        CallType.SOLVE: [solution("3")],
        CallType.EQUIVALENCE: ['{"match": 0}'],
        CallType.REASON: [reasoning()],
        CallType.DISPUTE: [dispute("ref")],
    } | script
    config = RolesConfig(prompts="short", **settings)
    prompts = PromptSet.load("short")
    engine = ScriptedEngine(script)
    with Matcher(MatcherConfig(symbolic=False)) as matcher:
        cast = Cast(
            Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config), matcher, engine, config, 7
        )
        return asyncio.run(play_episode(IMAGE, 5, cast, occurrence)), engine


def calls(engine):
    return Counter(request.call for request in engine.requests)


def test_selects_the_hardest_candidate_that_passes():
    """Malformed, ungrounded and wrong candidates never become supervision, however hard they look."""
    episode, engine = play(
        {
            CallType.PROPOSE: ["no thinking block", proposal("A?"), proposal("B?"), proposal("C?")],
            CallType.SCREEN: [screening(fact=0, difficulty=1.0), screening(difficulty=0.4), screening(difficulty=0.7)],
        }
    )
    assert [c.format_valid for c in episode.candidates] == [False, True, True, True]
    assert calls(engine)[CallType.SCREEN] == 3
    assert episode.selected == 3
    assert episode.reference == "3"
    assert all("C?" in r.prompt.messages[-1].text for r in engine.requests if r.call is CallType.SOLVE)


def test_no_passing_candidate_ends_the_episode_with_questioner_rollouts_only():
    episode, engine = play({CallType.SCREEN: [screening(corr=0)]})
    assert episode.selected is None
    assert episode.solutions == ()
    assert episode.reference is None
    assert set(calls(engine)) == {CallType.PROPOSE, CallType.SCREEN}


def test_unparsed_screening_never_passes_and_is_counted():
    episode, _ = play({CallType.SCREEN: ["no verdict"]})
    assert episode.selected is None
    assert [c.screening.parsed for c in episode.candidates] == [False] * 4
    assert [r.parsed for r in episode.calls if r.call is CallType.SCREEN] == [False] * 4


def test_a_retry_is_a_new_draw_and_the_last_verdict_counts():
    episode, engine = play({CallType.SCREEN: ["nothing", screening()]}, candidates=1, verifier_retries=1)
    seeds = [r.seed for r in engine.requests if r.call is CallType.SCREEN]
    assert episode.candidates[0].screening.passed
    assert len(set(seeds)) == 2


def test_the_three_tiers_decide_in_order():
    """A rule match and a clean numeric mismatch ask no model; what is left goes to one text-only call each."""
    episode, engine = play(
        {
            CallType.SOLVE: [solution("3.0"), solution("8"), solution("three red ones"), solution("a trio")],
            CallType.EQUIVALENCE: ['{"match": 1}', "unreadable"],
        }
    )
    verdicts = [s.correctness for s in episode.solutions]
    assert [v.tier for v in verdicts] == [Tier.RULE, Tier.NUMERIC_GUARD, Tier.MODEL, Tier.UNPARSED]
    assert [v.correct for v in verdicts] == [1, 0, 1, 0]
    assert [v.raw for v in verdicts] == ["", "", '{"match": 1}', "unreadable"]
    equivalence = [r for r in engine.requests if r.call is CallType.EQUIVALENCE]
    assert len(equivalence) == 2
    assert all(r.prompt.image is None for r in equivalence)


def test_malformed_and_truncated_solutions_are_not_graded():
    episode, engine = play({CallType.SOLVE: [solution("3"), "no box", solution("3") + TRUNCATED, solution("4")]})
    assert [s.correctness is not None for s in episode.solutions] == [True, False, False, True]
    assert calls(engine)[CallType.REASON] == 2


def test_an_overturned_dispute_rewrites_reference_and_correctness():
    """3 of 4 agree on 4 against the reference 3 and the Verifier sides with them (step 6)."""
    answers = [solution("5"), solution("4"), solution("4"), solution("4.0")]
    episode, engine = play({CallType.SOLVE: answers, CallType.DISPUTE: [dispute("majority")]})
    assert episode.dispute.overturned
    assert episode.dispute.member_indices == (1, 2, 3)
    assert episode.reference == "4"
    assert episode.corr_a_revoked
    assert [s.correctness_before_dispute.correct for s in episode.solutions] == [0, 0, 0, 0]
    assert [s.correctness.correct for s in episode.solutions] == [0, 1, 1, 1]
    (request,) = [r for r in engine.requests if r.call is CallType.DISPUTE]
    assert request.schema_after == "</think>"
    assert request.prompt.assistant_prefix


def test_the_verifier_may_keep_the_reference():
    episode, _ = play({CallType.SOLVE: [solution("4")], CallType.DISPUTE: [dispute("ref")]})
    assert episode.dispute is not None
    assert not episode.dispute.overturned
    assert episode.dispute.raw == dispute("ref")
    assert episode.reference == "3"
    assert not episode.corr_a_revoked


def test_an_unparsed_dispute_adopts_the_majority_after_its_retries():
    episode, engine = play({CallType.SOLVE: [solution("4")], CallType.DISPUTE: ["mumble"]})
    assert calls(engine)[CallType.DISPUTE] == 3
    assert episode.dispute.adopted_without_verdict
    assert episode.dispute.attempts == 3
    assert episode.dispute.raw == "mumble"
    assert episode.reference == "4"


@pytest.mark.parametrize(
    ("answers", "settings"),
    [
        (["4", "4", "5", "6"], {}),
        (["3", "4", "4", "4"], {"dispute_majority": 1.0}),
        (["4", "4", "4", "4"], {"disputes": False}),
    ],
)
def test_no_dispute_without_a_strong_consensus_or_when_off(answers, settings):
    episode, engine = play({CallType.SOLVE: [solution(a) for a in answers]}, **settings)
    assert episode.dispute is None
    assert CallType.DISPUTE not in calls(engine)


def test_a_correct_member_stops_the_dispute():
    """The equivalence call accepted one member of the majority, so the reference is not contradicted."""
    episode, _ = play(
        {
            CallType.SOLVE: [solution("the trio")],
            CallType.EQUIVALENCE: ['{"match": 1}', '{"match": 0}', '{"match": 0}', '{"match": 0}'],
        }
    )
    assert episode.dispute is None


def test_reason_scope_correct_skips_wrong_solutions():
    episode, engine = play(
        {CallType.SOLVE: [solution("3"), solution("8"), solution("9"), solution("3")]}, reason_scope="correct"
    )
    assert calls(engine)[CallType.REASON] == 2
    assert [s.reasoning_verdict is not None for s in episode.solutions] == [True, False, False, True]


def test_policy_speaks_freely_and_verdicts_are_constrained():
    """Constraining a policy call would change the policy; verdicts carry their schema."""
    _, engine = play({})
    for request in engine.requests:
        policy = request.call in (CallType.PROPOSE, CallType.SOLVE)
        assert request.adapter == (POLICY if policy else VERIFIER)
        assert (request.json_schema is None) == policy
        assert request.want_logprobs == policy


def test_seeds_depend_on_what_is_drawn_and_never_on_order():
    """All requests of an episode draw differently; the same episode again draws the same; a second episode of the
    same image in the same step does not."""

    def seeds(occurrence):
        return sorted(derive_seed(r.seed, r.first) for r in play({}, occurrence=occurrence)[1].requests)

    first, again, second = seeds(0), seeds(0), seeds(1)
    assert len(set(first)) == len(first)
    assert first == again
    assert not set(first) & set(second)


def test_an_image_that_other_workers_play_in_the_same_step_is_asked_differently():
    """Occurrences count over all workers, so that no two rollouts of a step are the same draw."""

    async def itself(episode):
        return episode

    def first_seed(seen):
        with Matcher(MatcherConfig(symbolic=False)) as matcher:
            config, prompts = RolesConfig(prompts="short"), PromptSet.load("short")
            engine = ScriptedEngine(lambda request: ["nothing"] * request.n)
            roles = Questioner(prompts, config), Solver(prompts, config), Verifier(prompts, config)
            cast = Cast(*roles, matcher, engine, config, 7)
            asyncio.run(play_episodes([IMAGE, IMAGE], 1, cast, itself, seen))
        return [request.seed for request in engine.requests]

    alone, behind_two = first_seed(Counter()), first_seed(Counter({IMAGE.uid: 2}))
    assert len({*alone, *behind_two}) == 4
