"""What a demonstration is, and the scene and image it is made from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from PIL import Image

from trinity_vlm.environments.microcosm.programs import Program, text
from trinity_vlm.environments.microcosm.sampler import sample_question
from trinity_vlm.environments.microcosm.scenes import Scene, listing
from trinity_vlm.environments.protocol import Answer, Ungrounded
from trinity_vlm.types import CallType

END_OF_THINKING = "\n</think>\n"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One supervised example of one call, independent of how its prompt is worded.

    image: None for the text-only equivalence call; ``image_uid`` is always that of the scene it came from
    question: what the call is asked about; "" for propose
    answer: the proposed or reference answer; "" for propose, solve and reason, whose prompts hold none
    prediction: the answer compared with the reference (equivalence)
    majority_answer: the answer opposed to the reference (dispute)
    reasoning: the thinking block shown to the Verifier (reason), or the majority's supporting trace (dispute)
    completion: exactly what the model should write after its prompt; where the prompt ends with the thinking prefix,
        the completion starts inside the thinking block
    case: which situation the example shows, for example ``"misread"``
    program_type, difficulty: of the question; "" and 0.0 for an unreadable question
    truth: the executor's answer, None when the question is not grounded
    """

    call: CallType
    image_uid: str
    image: Image.Image | None
    question: str
    completion: str
    case: str
    answer: str = ""
    prediction: str = ""
    majority_answer: str = ""
    reasoning: str = ""
    program_type: str = ""
    difficulty: float = 0.0
    truth: str | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """One scene with its rendered image, and the generator that draws demonstrations of it."""

    rng: Random
    scene: Scene
    uid: str
    image: Image.Image

    def question(self) -> tuple[Program, Answer]:
        """A grounded question about the scene."""
        return sample_question(self.rng, self.scene)

    def trace(self, outcome: Answer | Ungrounded) -> str:
        """The listing of the scene and the steps of an execution: the full reasoning in fixed short wording."""
        return full_trace(self.scene, outcome)

    def demonstration(
        self,
        call: CallType,
        program: Program,
        truth: str | None,
        *,
        case: str,
        completion: str,
        question: str | None = None,
        **shown: str,
    ) -> Demonstration:
        """Fill in what every example about ``program`` shares; ``question`` overrides the wording of the program."""
        return Demonstration(
            call=call,
            image_uid=self.uid,
            image=None if call is CallType.EQUIVALENCE else self.image,
            question=text(program) if question is None else question,
            completion=completion,
            case=case,
            program_type=program.type,
            difficulty=program.difficulty,
            truth=truth,
            **shown,
        )


def full_trace(scene: Scene, outcome: Answer | Ungrounded) -> str:
    """``a1 big red star, c2 small blue cross. star: a1 = 1``."""
    return f"{listing(scene)}. {steps_of(outcome)}"


def steps_of(outcome: Answer | Ungrounded) -> str:
    return "; ".join(outcome.trace)


def json_object(**values: str | float) -> str:
    """One line of JSON, keys in the given order."""
    return json.dumps(values, ensure_ascii=False)
