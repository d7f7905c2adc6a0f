"""The mathematics of training: advantage estimators and losses, each with its paper.

train.py --rewards--> ADVANTAGES --advantages--> losses, called by the engine. Pure functions of
arrays and tensors: no Redis, no HTTP, no DeepSpeed. A new estimator is one file in `advantages/`
and one line in `ADVANTAGES`.
"""

from __future__ import annotations

from agent_r1.learner.algorithms.advantages import AdvantageBatch, AdvantageEstimator
from agent_r1.learner.algorithms.advantages.grpo import (
    group_relative_advantages,
    grpo_advantages,
)

ADVANTAGES: dict[str, AdvantageEstimator] = {
    "grpo": grpo_advantages,
}
"""Every estimator by the name `learner.advantage` takes."""


def find_estimator(name: str) -> AdvantageEstimator:
    """Return the estimator called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in ADVANTAGES:
        known = ", ".join(sorted(ADVANTAGES))
        raise ValueError(f'learner.advantage ("{name}") is unknown; choose one of: {known}')
    return ADVANTAGES[name]


__all__ = [
    "ADVANTAGES",
    "AdvantageBatch",
    "AdvantageEstimator",
    "find_estimator",
    "group_relative_advantages",
    "grpo_advantages",
]
