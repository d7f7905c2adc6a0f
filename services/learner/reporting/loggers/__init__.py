"""Loggers of a run besides `metrics.jsonl`: `learner.loggers` --> run_folder.py.

One file a logger. Each is opened at the step from which the run goes on, gets the numbers of every
later step and a table of some of its samples, and is closed when the learner ends.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.loggers.completions import Completion

logger = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """Writes the numbers of steps somewhere."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write finite numbers by `area/name`."""
        ...

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Write a table of some samples of a step, from another thread than the numbers."""
        ...

    def close(self) -> None:
        """Finish what was begun."""
        ...


def open_loggers(names: Sequence[str], run: RunFacts, step: int) -> list[MetricLogger]:
    """Open the loggers of `learner.loggers`.

    Args:
        names: of the loggers.
        run: what they tell of the run.
        step: the last step that is part of the run; a logger may have seen later ones.

    Raises:
        MissingPackageError: the package of a logger is not installed.
    """
    opened: list[MetricLogger] = []
    for name in names:
        if name == "tensorboard":
            from agent_r1.learner.reporting.loggers.tensorboard import TensorBoardLogger

            opened.append(TensorBoardLogger(run, step))
        elif name == "wandb":
            from agent_r1.learner.reporting.loggers.wandb import WandbLogger

            opened.append(_Unfailing("wandb", WandbLogger(run)))
        else:
            from agent_r1.learner.reporting.loggers.mlflow import MlflowLogger

            opened.append(_Unfailing("mlflow", MlflowLogger(run)))
    return opened


class _Unfailing:
    """A logger whose server may be away: training goes on, and `metrics.jsonl` has every number."""

    def __init__(self, name: str, inner: MetricLogger) -> None:
        self._name = name
        self._inner = inner

    def log(self, step: int, values: Mapping[str, float]) -> None:
        try:
            self._inner.log(step, values)
        except Exception:
            logger.warning("metrics not logged logger=%s step=%d", self._name, step, exc_info=True)

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        try:
            self._inner.log_completions(step, completions)
        except Exception:
            logger.warning("table not logged logger=%s step=%d", self._name, step, exc_info=True)

    def close(self) -> None:
        try:
            self._inner.close()
        except Exception:
            logger.warning("logger not closed logger=%s", self._name, exc_info=True)
