"""The learning rate of each optimizer step: warm-up, then constant, cosine or linear.

Steps are those of the run's plan: one that is skipped, since filters left it nothing, has its place
in the schedule, and AdamW's moments do not move in it.
"""

from __future__ import annotations

import math

from agent_r1.learner.config import EngineConfig


def learning_rate(config: EngineConfig, step: int, total_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step`.

    Args:
        config: gives lr, lr_schedule, warmup_steps and min_lr_ratio.
        step: 0 is the first optimizer step.
        total_steps: optimizer steps of the whole run; needed by cosine and linear.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return config.lr
    assert total_steps is not None
    length = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / length)
    if config.lr_schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


class LearningRates:
    """The learning rates of policy and critic at every optimizer step of a run.

    Both follow the same schedule from a rate of their own. The critic's begins with the run, the
    policy's with the first step that trains the policy.
    """

    def __init__(
        self,
        config: EngineConfig,
        total_steps: int | None,
        *,
        critic_lr: float | None = None,
        policy_starts: int = 0,
    ) -> None:
        """Note what the schedules begin and end with.

        Args:
            config: the policy's rate, and the schedule of both.
            total_steps: optimizer steps of the whole run; needed by cosine and linear.
            critic_lr: the critic's rate after warm-up; None without one.
            policy_starts: optimizer steps at the start that train the critic alone.
        """
        self._config = config
        self._total = total_steps
        self._policy_starts = policy_starts
        self._critic_table = (
            None if critic_lr is None else config.model_copy(update={"lr": critic_lr})
        )

    def policy(self, step: int) -> float:
        """Return the policy's rate at optimizer step `step`; 0 is the run's first."""
        total = None if self._total is None else self._total - self._policy_starts
        return learning_rate(self._config, max(0, step - self._policy_starts), total)

    def critic(self, step: int) -> float:
        """Return the critic's rate at optimizer step `step`."""
        assert self._critic_table is not None
        return learning_rate(self._critic_table, step, self._total)
