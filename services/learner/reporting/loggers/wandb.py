"""`wandb`: Weights & Biases; `WANDB_MODE=offline` writes into the run folder only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.loggers.completions import COLUMNS, Completion
from agent_r1.runtime.imports import import_extra

PROJECT = "agent-r1"
"""Project where WANDB_PROJECT names no other."""


class WandbLogger:
    """One run of W&B, which a resumed run continues."""

    def __init__(self, run: RunFacts) -> None:
        wandb = import_extra("wandb", "wandb", 'learner.loggers ("wandb")')
        self._table = wandb.Table
        self._run = wandb.init(
            project=wandb.Settings().project or PROJECT,
            id=run.unique_id,
            name=run.id,
            dir=str(run.folder),
            config=dict(run.config),
            resume="allow",
        )
        self._newest_step = int(self._run.summary.get("step") or 0)
        # Steps of the run are not W&B's own count, which a resumed run goes on with.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers, in W&B's own time, but for a step that is made again after a resume."""
        if step <= self._newest_step:
            return
        self._run.log({"step": step, **values})

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Send a table, but for a step that is made again after a resume."""
        if step > self._newest_step:
            table = self._table(columns=list(COLUMNS), data=list(map(list, completions)))
            self._run.log({"step": step, "completions": table})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()
