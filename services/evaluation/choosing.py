"""Choosing one of several answers to a question, which were sampled and stored.

`summary.py` and `matrix/pool.py` choose from the same stored answers in several ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agent_r1.evaluation.answers import Answer

SCORERS = ("reward_model", "critic", "judge")
"""Reward components that can choose among answers: they need not know the right one."""


def majority(answers: Sequence[Answer]) -> Answer:
    """Return an answer that most say, the first where several are; the first where all are empty.

    Source: self-consistency, arXiv:2203.11171.
    """
    said = [" ".join((answer.prediction or "").casefold().split()) for answer in answers]
    counts = Counter(filter(None, said))
    return answers[said.index(counts.most_common(1)[0][0]) if counts else 0]


def best_by(answers: Sequence[Answer], component: str) -> Answer | None:
    """Return the answer that a component scores highest; None where it has not scored them all."""
    if any(component not in answer.components for answer in answers):
        return None
    return max(answers, key=lambda answer: answer.components[component])
