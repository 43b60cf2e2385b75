"""The microcosm as an Environment: splits, uids, images, judgements and held-out problems.

A split is named ``NAME`` or ``NAME@STYLE``, for example ``evolve`` or ``base-heldout@palette-0.3+small``; the style
replaces the split's own and leaves objects and questions as they are, unless it asks for more objects. Splits of
different names draw from different seeds. An image's uid, ``microcosm:SPLIT/INDEX``, is enough to rebuild its scene.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from PIL import Image

from trinity_vlm.environments.microcosm import programs
from trinity_vlm.environments.microcosm.answers import same_answer
from trinity_vlm.environments.microcosm.programs import Program
from trinity_vlm.environments.microcosm.render import render
from trinity_vlm.environments.microcosm.sampler import sample_question
from trinity_vlm.environments.microcosm.scenes import Scene, sample_scene
from trinity_vlm.environments.microcosm.style import EVOLVE_STYLE, parse_style
from trinity_vlm.environments.protocol import Answer, Judgement, Problem, Ungrounded
from trinity_vlm.errors import ConfigError
from trinity_vlm.seeds import derive_seed

StyleMix = tuple[tuple[str, float], ...]
"""Style names with weights."""

SPLITS: Mapping[str, StyleMix] = {
    "train": (("base", 0.98), ("more", 0.01), ("outline+grid+thin+dashed", 0.01)),
    "base-heldout": (("base", 1.0),),
    "evolve": ((EVOLVE_STYLE, 1.0),),
    "evolve-heldout": ((EVOLVE_STYLE, 1.0),),
}
MAX_YES_NO_SHARE = 0.15
PROBLEMS_PER_SEED = 1_000_000
"""Problem sets of different seeds use different images of a split."""


class Microcosm:
    """Shapes, bar charts and line charts without end; stateless, every method a pure function of its arguments."""

    name = "microcosm"

    def scene(self, split: str, index: int) -> Scene:
        """The index-th scene of a split. Raises ConfigError for an unknown split or style, or a negative index."""
        if index < 0:
            raise ConfigError(f"microcosm index={index}: must be 0 or more")
        name, at, style_name = split.partition("@")
        if name not in SPLITS:
            known = ", ".join(SPLITS)
            raise ConfigError(f"microcosm split {split!r}: unknown; known are {known}, each also as NAME@STYLE")
        rng = Random(derive_seed(self.name, name, index))
        names, weights = zip(*SPLITS[name], strict=True)
        drawn = rng.choices(names, weights)[0]
        return sample_scene(rng, parse_style(style_name if at else drawn))

    def scene_of(self, uid: str) -> Scene:
        """The scene behind an image uid. Raises ConfigError when the uid isn't a microcosm one."""
        source, _, address = uid.partition(":")
        split, _, index = address.rpartition("/")
        if source != self.name or not index.isdigit():
            raise ConfigError(
                f"image uid {uid!r}: expected {self.name}:SPLIT/INDEX, for example microcosm:evolve/000123"
            )
        return self.scene(split, int(index))

    def uid(self, split: str, index: int) -> str:
        return f"{self.name}:{split}/{index:06d}"

    def image(self, split: str, index: int) -> tuple[str, Image.Image]:
        """(uid, 128x128 RGB image): pixels only, no labels."""
        return self.uid(split, index), render(self.scene(split, index))

    def render(self, scene: Scene) -> Image.Image:
        return render(scene)

    def text(self, program: Program) -> str:
        return programs.text(program)

    def parse(self, question: str) -> Program | None:
        return programs.parse(question)

    def execute(self, scene: Scene, program: Program) -> Answer | Ungrounded:
        return programs.execute(scene, program)

    def judge(self, scene: Scene, question: str, answer: str) -> Judgement:
        """Whether a question is well-formed and grounded in the scene, and the answer the executor's."""
        program = programs.parse(question)
        if program is None:
            return Judgement(parsable=False, grounded=False, right=False, answer=None)
        truth = programs.execute(scene, program)
        if isinstance(truth, Ungrounded):
            return Judgement(parsable=True, grounded=False, right=False, answer=None)
        return Judgement(parsable=True, grounded=True, right=same_answer(answer, truth.text), answer=truth.text)

    def problems(self, split: str, n: int, seed: int) -> list[Problem]:
        """``n`` images of a split with one question each; of every prefix at most 15 % are yes/no questions.

        The first ``m`` problems are the same for every ``n >= m``.
        """
        problems: list[Problem] = []
        yes_no_count = 0
        for position in range(n):
            index = seed * PROBLEMS_PER_SEED + position
            scene = self.scene(split, index)
            room = yes_no_count + 1 <= MAX_YES_NO_SHARE * (position + 1)
            rng = Random(derive_seed(self.name, "problems", split.partition("@")[0], index))
            program, answer = sample_question(rng, scene, yes_no=None if room else False)
            yes_no_count += program.kind.yes_no
            uid = self.uid(split, index)
            question = programs.text(program)
            problems.append(Problem(render(scene), uid, question, answer.text, program.difficulty, program.type))
        return problems
