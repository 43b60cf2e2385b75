"""When two short answers say the same thing: the microcosm's own ground truth, independent of the package's matcher."""

from __future__ import annotations

import re

from trinity_vlm.environments.microcosm.descriptions import SINGULARS
from trinity_vlm.environments.microcosm.vocabulary import LABELS, MARK_KINDS

NUMBER_WORDS: tuple[str, ...] = (
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
)
SYNONYMS = {
    "none": "0",
    "nothing": "0",
    "large": "big",
    "little": "small",
    "gray": "grey",
    "violet": "purple",
    "disc": "circle",
    "true": "yes",
    "false": "no",
    **{word: str(value) for value, word in enumerate(NUMBER_WORDS)},
}
_FILLERS = {"the", "a", "an", "on", "side", "colour", "color", "shape", "value"}
_COUNTED_NOUNS = {*SINGULARS.values(), *MARK_KINDS, *(f"{kind}s" for kind in MARK_KINDS)}


def same_answer(given: str, truth: str) -> bool:
    """Whether ``given`` means ``truth``, seen through number words, synonyms, plurals, articles and counted nouns."""
    return canonical(given) == canonical(truth)


def canonical(answer: str) -> str:
    """One spelling for all forms of an answer, for example ``"Bar C."`` -> ``"c"``, ``"two stars"`` -> ``"2"``."""
    words = re.sub(r"[^\w.\- ]", " ", answer.lower()).split()
    words = [word.rstrip(".") for word in words if word not in _FILLERS] or words
    words = [SINGULARS.get(word, SYNONYMS.get(word, word)) for word in words]
    words = [re.sub(r"^(-?\d+)\.0+$", r"\1", word) for word in words if word]
    if len(words) == 2 and re.fullmatch(r"-?\d+", words[0]) and words[1] in _COUNTED_NOUNS:
        words = words[:1]
    if len(words) == 2 and words[0] in MARK_KINDS and words[1] in LABELS.lower():
        words = words[1:]
    return " ".join(words)
