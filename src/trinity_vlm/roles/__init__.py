"""Roles: prompt -> completion -> typed value, for the Questioner, the Solver and the Verifier."""

from trinity_vlm.roles.prompts import PromptSet
from trinity_vlm.roles.questioner import ParsedCandidate, Questioner
from trinity_vlm.roles.solver import ParsedSolution, Solver
from trinity_vlm.roles.verifier import DisputeVerdict, EquivalenceVerdict, Verifier

__all__ = [
    "DisputeVerdict",
    "EquivalenceVerdict",
    "ParsedCandidate",
    "ParsedSolution",
    "PromptSet",
    "Questioner",
    "Solver",
    "Verifier",
]
