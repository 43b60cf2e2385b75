"""The rules of Appendix F and docs/algorithm.md that the paper set must carry, whatever its wording."""

import json
import re

import pytest
from roles_helpers import CONFIG, PAPER, completion

from trinity_vlm.roles import Questioner, Verifier
from trinity_vlm.roles.jsontext import json_objects
from trinity_vlm.roles.verifier import verdict_schemas
from trinity_vlm.types import CallType

# One regular expression per rule, searched without regard to case and line breaks.
FACTS = {
    CallType.PROPOSE: {
        "all domains": r"science.*mathematics.*charts.*everyday",
        "not to be looked up": r"nobody can simply look up",
        "three or more chained steps": r"three or more dependent steps",
        "state tracking, hidden inference, cascade": r"tracking a state.*unseen.*cascade",
        "beat the solver for real": r"fails at its first try.*real attempts",
        "method not to be named at sight": r"name the right method straight away.*too easy",
        "deepen by": r"simulation.*hidden state.*joining two fields.*recast",
        "visible only": r"must be visible",
        "invent nothing": r"invent nothing",
        "no suppositions": r'suppose that".*if we assume".*given that X is Y',
        "needs the picture": r"without the picture the question must be unanswerable",
        "no decoration": r"decoration",
        "grounding words": r'"shown", "in the figure", "in the diagram"',
        "under 35 words, two sentences": r"under 35 words, at most two sentences",
        "never the method": r"never reveal the method",
        "weak and better examples": r"Weak:.*Better:.*Weak:.*Better:",
        "seven domains": r"STEM / geometry:.*Real world:.*Charts / data:.*Logic.*Spatial.*END STATE.*3D:.*Topology:",
        "occluded and opposite view": r"occluded, the view from behind, the inside",
        "pieces, loops, layers": r"pieces after a cut, one loop or two, what lies above",
        "trivial counting banned, occluded allowed": r"counting plainly separate.*allowed:.*occluded.*inferred",
        "read-and-compute banned": r"read-and-compute",
        "method giveaway banned": r"giving away a formula",
        "long questions banned": r"35 words or more",
        "templates cost everything, variants too": r"reward 0, and so are their variants",
        "solids and polygons": r"edges, faces or vertices.*sides of a named polygon",
        "vocabulary": r"technical term",
        "diagonal, slope, area, volume, coefficient": r"diagonal.*slope.*area of a circle.*volume of a cube.*binomial",
        "standard angles": r"30, 45 or 60.*sine, cosine or tangent.*slope 1",
        "keyword theorems": r"tangent circles.*third angle.*cyclic quadrilateral",
        "labels": r"largest or smallest.*given axis position.*nearest to the origin",
        "wanted kinds": r"simulation, inference about hidden state, integration of several fields",
        "collapse to geometry": r"collapse into school geometry.*transformation, a 3D or a topological",
        "geometry check": r"SAS similarity, midline, centroid, diagonals of a par.*one-substitution.*giveaway",
        "cap announced": r"caps their difficulty at 0\.4",
        "answer length": r"1-10 words",
        "answer form": r"number, a word or a short phrase",
    },
    CallType.SOLVE: {
        "think then answer": r"<think>.*</think>.*<answer>.*\\boxed\{.*</answer>",
        "plan": r"plan before you calculate",
        "read first": r"look carefully first.*readings",
        "step by step": r"one step at a time",
        "commit": r"no second-guessing",
        "concise": r"economical",
        "value only": r"final value alone: a number, a word or a short phrase.*no working.*no explanation",
        "one box, nowhere else": r"exactly one \\boxed\{\}, inside <answer>, and none anywhere else",
        "right and wrong": r"Right: \\boxed\{12\}.*Wrong: \\boxed\{12 or 15\}",
    },
    CallType.SCREEN: {
        "both halves of factuality": r"BOTH halves.*every premise is visible.*image is needed.*without it could not",
        "absent things": r"absent from the image",
        "suppositions": r"supposition",
        "misdescription": r"misdescribes",
        "made-up numbers": r"makes up a number or a ratio",
        "fabricated specifics": r"fabricated specifics",
        "claim by claim": r"claims one at a time",
        "right and short": r"correct, and a number, a word or a short phrase",
        "sentence or explanation is 0": r"0: incorrect, or a full sentence, or containing an explanation",
        "notation is no reason": r"3/4 and 3:4.*degrees.*cosine.*never a reason for 0.*VALUE",
        "Q1": r"Q1 .*beyond reading.*No: 0\.1",
        "Q2": r"Q2 .*chained\? No.*0\.4",
        "Q3": r"Q3 .*No .*0\.7\. Yes.*cites which: 1\.0",
        "criteria": r"\(a\) INTEGRATION.*\(b\) CHOICE.*\(c\) REFORMULATION.*\(d\) BEYOND-TEXTBOOK",
        "recognizing is not (d)": r"Pythagoras.*SAS.*lookup, not \(d\)",
        "cap": r"cap at 0\.4, even for several steps.*one substitution",
        "cap triggers": r"right triangle.*bisector.*cyclic, or inscribed.*lines, a transversal.*similar triangles",
        "levels": r"0\.1 OBSERVABLE.*0\.4 SINGLE-STEP.*0\.7 MULTI-STEP.*DIRECT THEOREM.*1\.0 CONCEPTUAL",
        "read-read-subtract is one": r"two reads, ONE operation",
        "remembered sequence": r"next term of 1, 8, 27, 64",
        "relations": r"parallel, perpendicular, equal, similar or congruent.*0\.7",
        "sequences": r"squares, cubes, factorials, powers of 2, Fibonacci, arithmetic or geometric.*0\.4",
        "inscribed angle": r"inscribed or cyclic figure: 0\.7",
        "Pythagoras dressed up": r"squares or semicircles on a right triangle.*0\.7",
        "one word after a setup": r"conditional geometric setup answered by one word.*usually 0\.7",
        "vague": r"vague questions.*0\.7 at most",
        "auto 0.4: trigonometry": r"standard angles \(30, 45, 60",
        "auto 0.4: coefficients": r"coefficient of a binomial or a polynomial",
        "auto 0.4: angle sum": r"remaining angle",
        "auto 0.4: naming": r"sides a named polygon.*edges, vertices or faces a named solid",
        "auto 0.4: two legs": r"Pythagoras with both legs given",
        "auto 0.1 or 0.4: extremes": r"largest or smallest labelled item.*0\.1, or 0\.4 at most",
        "auto 0.4: parallelogram": r"parallelogram's diagonals plus the midpoint",
        "auto 0.4: proportionality": r"line parallel to a triangle's side.*basic proportionality",
        "auto 0.4: midline": r"midline theorem",
        "auto 0.4: fold, with exception": r"one fold.*Exception: 3 or more cuts.*after unfolding: 0\.7",
        "auto 0.4: net, with exception": r"net to be folded.*Exception: which face ends up opposite.*0\.7",
        "auto 0.4: centroid": r"centroid: the 2:1",
        "steps are not difficulty": r"number of steps is not the difficulty.*0\.4, although that is four steps",
        "named theorem is never 1.0": r"directly, is never 1\.0, whether or not the question names it",
        "rarity": r"fewer than 10%",
        "time scale": r"under 10 s: 0\.1; 10 s to 1 min: 0\.4; 1 to 5 min.*0\.7; .*more than 5 min: 1\.0",
        "hard limits": r"within 15 seconds means 0\.4 at most; within 1 minute, 0\.7 at most",
        "in doubt": r"in doubt between 0\.7 and 1\.0: 0\.7",
        "no excuse for 1.0": r'"takes expert knowledge" or "uses a theorem" is no reason',
        "justification template": r"Factuality:.*Sketch:.*Non-trivial steps:.*Q1:.*Q2:.*Q3:.*Cap:.*Time:.*Difficulty:",
        "clamp": r"if fact_q is 0, corr_a is 0",
    },
    CallType.REASON: {
        "three checks in order": r"in this order.*1\. Visual\..*2\. Logic\..*3\. Shortcuts\.",
        "visual limit": r"visual error limits the score to 0\.25",
        "logic limit": r"critical logic error limits the score to 0\.25",
        "shortcut limit": r"shortcut limits the score to 0\.5",
        "clean is 1.0": r"none at all, and no errors, the score is 1\.0",
        "levels": r"0\.0 +NO REASONING.*0\.25 FLAWED.*0\.5 +CORRECT.*1\.0 +FULLY EXPLICIT",
        "verification is free": r"sanity check.*never lowers",
        "typical problems": r'"typical" or "standard".*0\.0',
        "logic on a misread image": r"misread image is 0\.25",
        "commonest score": r"0\.5 is the commonest",
    },
    CallType.EQUIVALENCE: {
        "question disambiguates": r"question settle which aspect",
        "units": r'"9" and "9 kg"',
        "synonyms": r"Synonyms:",
        "format": r'"3/4" and "three quarters"; LaTeX',
        "mathematics": r'"x\^2-9" and "\(x-3\)\(x\+3\)"',
        "rounding": r"rounding and significant digits",
        "more specific": r'"isosceles triangle" for "triangle"',
        "qualifier": r'two things are asked at once.*"C, 4" matches "4"',
        "different values": r'match is 0 for different values: "12" and "21"',
    },
    CallType.DISPUTE: {
        "look, solve, choose": r"1\. Look at the image.*2\. Work out your own solution, step by step.*3\. Choose.*YOUR",
        "units": r"4\. Units and format make no difference",
        "think first": r"think first",
        "votes are no evidence": r"number of votes is",
    },
}
CASES = [(call, name, pattern) for call, facts in FACTS.items() for name, pattern in facts.items()]


@pytest.mark.parametrize(("call", "name", "pattern"), CASES, ids=[f"{c}: {n}" for c, n, _ in CASES])
def test_rule_is_present(call, name, pattern):
    """Each rule, threshold, level and exception of the source is stated in its call's rubric."""
    assert re.search(pattern, PAPER.text(call, "system"), re.IGNORECASE | re.DOTALL), name


@pytest.mark.parametrize("call", [CallType.SCREEN, CallType.REASON, CallType.EQUIVALENCE, CallType.DISPUTE])
def test_rubric_states_the_keys_in_schema_order(call):
    """The output contract in words and the schema agree: same keys, same order, and every allowed value is named."""
    text = PAPER.text(call, "system")
    properties = verdict_schemas(100)[call]["properties"]
    contract = text[text.lower().rindex("output") :]
    positions = [contract.index(f'"{key}"') for key in properties]
    assert positions == sorted(positions)
    for key, schema in properties.items():
        if "enum" in schema:
            values = " | ".join(json.dumps(value) for value in schema["enum"])
            assert f'"{key}": <{values}>' in contract


def test_questioner_examples_would_pass_the_format_rules_if_they_were_not_examples():
    """One example per domain, eleven in all, each under 35 words and grounded; only copying makes them malformed."""
    text = PAPER.text(CallType.PROPOSE, "system")
    examples = json_objects(text)[1:]
    assert len(examples) == 11
    plain = Questioner(PAPER, CONFIG)
    for example in examples:
        assert len(example["question"].split()) < 35
        copied = plain.parse(completion(f"x</think>{json.dumps(example)}"))
        assert copied.error == "example_question"
        fresh = {"question": f"New: {example['question']}", "answer": f"new {example['answer']}"}
        assert plain.parse(completion(f"x</think>{json.dumps(fresh)}")).format_valid
    grounded = sum(bool(re.search(r"\bshown\b|in the figure|diagram", e["question"])) for e in examples)
    assert grounded == 11


def test_reasoning_examples_are_valid_verdicts_of_three_levels():
    """The examples in the rubric are read by the parser as the scores they illustrate."""
    verifier = Verifier(PAPER, CONFIG)
    examples = [o for o in json_objects(PAPER.text(CallType.REASON, "system")) if "reasoning_score" in o]
    verdicts = [verifier.parse_reasoning(completion(json.dumps(example))) for example in examples]
    assert [v.score for v in verdicts if v.parsed] == [0.25, 0.5, 1.0]
