"""`tensorboard`: events in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.loggers.completions import Completion
from agent_r1.runtime.files.run_folder import TENSORBOARD_DIR
from agent_r1.runtime.files.writing import report_full_disk


class TensorBoardLogger:
    """Writes `tensorboard/`; every write is complete when the call returns."""

    def __init__(self, run: RunFacts, step: int) -> None:
        # Only here: it imports torch, and a start that is refused need not wait for that.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = run.folder / TENSORBOARD_DIR
        # TensorBoard then hides what earlier files say of this step and later ones.
        self._events = SummaryWriter(self._folder, purge_step=step + 1 if step else None)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Append numbers to the events."""
        with report_full_disk("TensorBoard events", self._folder):
            for tag, value in values.items():
                self._events.add_scalar(tag, value, step)
            self._events.flush()

    def log_completions(self, step: int, completions: Sequence[Completion]) -> None:
        """Leave them out: TensorBoard has no tables."""

    def close(self) -> None:
        """Close the event file."""
        with report_full_disk("TensorBoard events", self._folder):
            self._events.close()
