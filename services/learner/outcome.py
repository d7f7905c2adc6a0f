"""Outcome of a run: what it lost, and the status that says so.

run_end.py --counts of results, evaluations--> `Losses` --> `status` and `reason` in `summary.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.runtime.files.run_folder import SUMMARY_FILE
from agent_r1.runtime.files.state import check_object, read_object

FINISHED = "finished"
FINISHED_WITH_LOSSES = "finished_with_losses"
"""Status of a run whose steps are done and which lost more than `learner.max_lost_share` allows."""
INTERRUPTED = "interrupted"
FAILED = "failed"


class _End(BaseModel):
    """Fields of a summary that a later start reads."""

    model_config = ConfigDict(strict=True)

    status: str
    steps: NonNegativeInt = 0
    starts: NonNegativeInt | None = None
    evaluations_since_best: NonNegativeInt = 0


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the summary in a run folder.

    Raises:
        OSError: there is none.
        ValueError: it is damaged.
    """
    summary = read_object(folder / SUMMARY_FILE)
    check_object(_End, summary)
    return summary


def last_summary(folder: Path) -> dict[str, Any]:
    """Return the summary of a run's last start; {} where that is at work, or has left none."""
    try:
        summary = read_summary(folder)
        starts = Ledger(folder).starts
    except (OSError, ValueError):
        return {}
    of_start = summary.get("starts")
    return summary if of_start is None or of_start >= starts else {}


def finished_status(folder: Path, total_steps: int, patience: int | None = None) -> str | None:
    """Return the status of a run that has nothing left to do; None for any other.

    Args:
        folder: of the run.
        total_steps: of the run, as it is configured now.
        patience: evaluations without a better score that end the run; None is no such limit.
    """
    summary = last_summary(folder)
    if summary.get("status") not in (FINISHED, FINISHED_WITH_LOSSES):
        return None
    gave_up = patience is not None and summary.get("evaluations_since_best", 0) >= patience
    return summary["status"] if gave_up or summary.get("steps", 0) >= total_steps else None


@dataclass(frozen=True)
class Losses:
    """Samples and questions that were asked for and failed for good."""

    failed: int
    """Training samples without a trajectory to train on."""
    samples: int
    """Training samples with a final result."""
    questions: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """(failed, asked) by evaluation and set, as `after/near`."""

    @classmethod
    def of(cls, counts: Mapping[str, int], evaluations: Mapping[str, Mapping[str, Any]]) -> Losses:
        """Gather what was lost.

        Args:
            counts: results by verdict, as `GroupBuffer.counts`.
            evaluations: their records by name, as `RunSummary.evaluations`.
        """
        failed = counts.get("failed", 0)
        questions = {
            f"{name}/{of_set}": (scores["failed"], scores["failed"] + scores["n"])
            for name, record in evaluations.items()
            for of_set, scores in record.get("sets", {}).items()
        }
        return cls(failed=failed, samples=failed + counts.get("filled", 0), questions=questions)

    @property
    def share(self) -> float:
        """Share of the training samples that was lost."""
        return _share(self.failed, self.samples)

    def problems(self, max_share: float) -> list[str]:
        """Say where more was lost than `max_share` allows; [] when it is nowhere."""
        asked = {"training samples": (self.failed, self.samples)} | {
            f"questions of the evaluation {name}": counts for name, counts in self.questions.items()
        }
        return [
            f"{failed} of the {total} {what} failed for good ({_share(failed, total):.0%})"
            for what, (failed, total) in asked.items()
            if _share(failed, total) > max_share
        ]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
