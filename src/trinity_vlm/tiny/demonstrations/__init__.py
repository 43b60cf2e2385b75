"""Supervised examples of every call of page "algorithm", with exact truth from the microcosm: the warm-up's data."""

from trinity_vlm.tiny.demonstrations.example import Demonstration
from trinity_vlm.tiny.demonstrations.mix import DEFAULT_MIX, DemonstrationMix, Group, demonstrations

__all__ = ["DEFAULT_MIX", "Demonstration", "DemonstrationMix", "Group", "demonstrations"]
