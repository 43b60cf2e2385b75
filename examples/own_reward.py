"""A reward of your own: Eq. (1), but a question that the same episode has already asked earns nothing.

    PYTHONPATH=examples trinity-vlm train tiny steps=5 rewards.questioner=own_reward:new_questions_only

A reward function gets a finished episode and the ``rewards`` section, and returns one reward per candidate, in order
(``rewards.solver``: one SolverReward per solution). It is called once per episode, without model, files or clock.
"""

from __future__ import annotations

from dataclasses import replace

from trinity_vlm.config import RewardsConfig
from trinity_vlm.rewards import questioner_rewards
from trinity_vlm.types import Episode, QuestionerReward


def new_questions_only(episode: Episode, config: RewardsConfig) -> tuple[QuestionerReward, ...]:
    """Eq. (1); a later candidate with the words of an earlier one gets 0. The selected one is never touched."""
    seen = {_words(episode.candidates[episode.selected].question)} if episode.selected is not None else set()
    rewards = []
    for position, reward in enumerate(questioner_rewards(episode, config)):
        words = _words(episode.candidates[position].question)
        repeated = bool(words) and words in seen and position != episode.selected
        rewards.append(replace(reward, total=0.0) if repeated else reward)
        seen.add(words)
    return tuple(rewards)


def _words(question: str | None) -> tuple[str, ...]:
    return tuple((question or "").lower().strip(" ?").split())
