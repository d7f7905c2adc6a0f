"""The learning rate of each optimizer step: warm-up, then constant, cosine or linear."""

from __future__ import annotations

import math

from agent_r1.learner.config import EngineTable


def learning_rate(table: EngineTable, step: int, total_steps: int | None) -> float:
    """Return the learning rate of optimizer step `step`.

    Args:
        table: gives lr, lr_schedule, warmup_steps and min_lr_ratio.
        step: 0 is the first optimizer step.
        total_steps: optimizer steps of the whole run; needed by cosine and linear.

    Raises:
        ValueError: the schedule needs total_steps and there is none.
    """
    if step < table.warmup_steps:
        return table.lr * (step + 1) / table.warmup_steps
    if table.lr_schedule == "constant":
        return table.lr
    if total_steps is None:
        raise ValueError(
            f'lr_schedule ("{table.lr_schedule}") needs the number of steps of the run; set steps '
            'or choose lr_schedule = "constant"'
        )
    length = max(1, total_steps - 1 - table.warmup_steps)
    progress = min(1.0, (step - table.warmup_steps) / length)
    if table.lr_schedule == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        share = 1.0 - progress
    return table.lr * (table.min_lr_ratio + (1.0 - table.min_lr_ratio) * share)
