"""The warm-up's data: demonstrations of all six calls, asked in the very prompts of the roles.

Headroom is designed here, in two ways. The Solver learns two habits, glancing and looking
(``demonstrations/policy.py``), and nothing tells it which is better. And the policy's calls are shown images of the
base style only, the Verifier's calls more styles, among them some like the style the model later evolves on: the
Verifier starts out sturdier than the Solver whose work it grades, as a larger or better-trained verifier would be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from trinity_vlm.config import RolesConfig, load_config
from trinity_vlm.environments.microcosm.environment import StyleMix
from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.questioner import Questioner
from trinity_vlm.roles.solver import Solver
from trinity_vlm.roles.verifier import Verifier
from trinity_vlm.supervised import SupervisedExample
from trinity_vlm.tiny.demonstrations import DEFAULT_MIX, Demonstration, DemonstrationMix, demonstrations
from trinity_vlm.types import CallType, ImageRecord, Prompt

POLICY_STYLES: StyleMix = (("base", 1.0),)
VERIFIER_STYLES: StyleMix = (
    ("base", 0.5),
    ("palette-0.5", 0.04),
    ("dark-0.5", 0.04),
    ("small-0.5", 0.05),
    ("noise-0.5", 0.03),
    ("jitter-0.6", 0.03),
    ("outline+grid", 0.02),
    ("more", 0.03),
    ("palette-0.4+dark-0.4", 0.06),
    ("palette-0.5+dark-0.4+small-0.3", 0.08),
    ("palette-0.7+dark-0.6+small-0.5", 0.08),
    ("palette-0.6+small-0.4+jitter-0.4", 0.04),
)
VERIFIER_CALLS = (
    (CallType.SCREEN, 0.44),
    (CallType.REASON, 0.26),
    (CallType.DISPUTE, 0.2),
    (CallType.EQUIVALENCE, 0.1),
)
VERIFIER_SHARE = 0.46
"""Of the images. Comparing one's own finding with a text is learnt more slowly than reading and solving."""


def tiny_roles() -> RolesConfig:
    """The roles section of the ``tiny`` preset: prompt set, thinking prefix, budgets, sampling."""
    return load_config("tiny").roles


def warmup_mix() -> DemonstrationMix:
    """The shipped checkpoint's mix: each group with its own calls and styles."""
    policy, verifier = DEFAULT_MIX.groups
    groups = (
        replace(policy, share=1 - VERIFIER_SHARE, styles=POLICY_STYLES),
        replace(verifier, share=VERIFIER_SHARE, calls=VERIFIER_CALLS, styles=VERIFIER_STYLES),
    )
    return replace(DEFAULT_MIX, groups=groups)


def refinement_mix() -> DemonstrationMix:
    """For a second stage: mostly the calls that compare an own finding with a text, the others against forgetting."""
    policy, verifier = warmup_mix().groups
    calls = ((CallType.REASON, 0.45), (CallType.DISPUTE, 0.35), (CallType.SCREEN, 0.14), (CallType.EQUIVALENCE, 0.06))
    return replace(DEFAULT_MIX, groups=(replace(policy, share=0.1), replace(verifier, share=0.9, calls=calls)))


class RolePrompts:
    """The prompt of a demonstration, worded by the roles as in an episode."""

    def __init__(self, roles: RolesConfig) -> None:
        prompts = PromptSet.load(roles.prompts)
        self.questioner = Questioner(prompts, roles)
        self.solver = Solver(prompts, roles)
        self.verifier = Verifier(prompts, roles)

    def prompt(self, demonstration: Demonstration) -> Prompt:
        d = demonstration
        if d.call is CallType.EQUIVALENCE:
            return self.verifier.equivalence_prompt(d.question, d.answer, d.prediction)
        assert d.image is not None
        image = ImageRecord(d.image_uid, d.image, "microcosm")
        match d.call:
            case CallType.PROPOSE:
                return self.questioner.prompt(image)
            case CallType.SOLVE:
                return self.solver.prompt(image, d.question)
            case CallType.SCREEN:
                return self.verifier.screening_prompt(image, d.question, d.answer)
            case CallType.REASON:
                return self.verifier.reasoning_prompt(image, d.question, d.reasoning)
            case CallType.DISPUTE:
                return self.verifier.dispute_prompt(image, d.question, d.answer, d.majority_answer, d.reasoning)


@cache
def role_prompts(prompt_set: str, thinking_prefix: str) -> RolePrompts:
    """One per process: templates compile slowly."""
    return RolePrompts(tiny_roles().model_copy(update={"prompts": prompt_set, "thinking_prefix": thinking_prefix}))


@dataclass(frozen=True)
class DemonstrationSource:
    """Batches of ``images_per_batch`` images with ``mix.per_image`` examples each, a pure function of the seed."""

    mix: DemonstrationMix
    roles: RolesConfig
    seed: int
    num_batches: int
    images_per_batch: int

    def __len__(self) -> int:
        return self.num_batches

    def batch(self, index: int) -> list[SupervisedExample]:
        prompts = role_prompts(self.roles.prompts, self.roles.thinking_prefix)
        first = index * self.images_per_batch
        return [
            SupervisedExample(prompts.prompt(demonstration), demonstration.completion)
            for image in range(first, first + self.images_per_batch)
            for demonstration in demonstrations(self.mix, self.seed, image)
        ]
