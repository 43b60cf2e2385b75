"""Answer matching: rules, a numeric guard and a killable symbolic step (A.3). Open :mod:`trinity_vlm.answers.match`."""

from trinity_vlm.answers.match import AnswerMatcher, Matcher, MatchResult, group_equivalent, match
from trinity_vlm.answers.symbolic import SymbolicComparer, SymbolicCounters, SymbolicPool

__all__ = [
    "AnswerMatcher",
    "MatchResult",
    "Matcher",
    "SymbolicComparer",
    "SymbolicCounters",
    "SymbolicPool",
    "group_equivalent",
    "match",
]
