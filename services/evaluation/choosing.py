"""Choosing one of several answers to a question, which were sampled and stored.

`summary.py` and `matrix/pool.py` choose from the same stored answers in several ways.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_r1.evaluation.answers import Answer
from agent_r1.text.answers import most_frequent

SCORERS = ("reward_model", "critic", "judge")
"""Reward components that can choose among answers: they need not know the right one."""


def majority(answers: Sequence[Answer]) -> Answer:
    """Return an answer that most say; the first where several are, or where all are empty."""
    return answers[most_frequent(answer.prediction for answer in answers)]


def best_by(answers: Sequence[Answer], component: str) -> Answer | None:
    """Return the answer that a component scores highest; None where it has not scored them all."""
    if any(component not in answer.components for answer in answers):
        return None
    return max(answers, key=lambda answer: answer.components[component])
