"""Keeps what evaluations find: train.py --step--> evaluation.py --scores--> run folder.

One evaluation during training runs at a time, in the background.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from agent_r1.learner.checkpoint import Checkpoints
from agent_r1.learner.evaluation import Evaluation, TrainingEvaluation
from agent_r1.learner.reporting.run_folder import RunFolder
from agent_r1.learner.reporting.summary import RunSummary
from agent_r1.learner.reporting.trajectory_log import readable
from agent_r1.learner.shutdown import StopSignal
from agent_r1_service.evaluation_client import EvalResult

logger = logging.getLogger(__name__)


class Evaluations:
    """Runs the evaluations of one start and writes down their results."""

    def __init__(
        self,
        *,
        runner: TrainingEvaluation,
        folder: RunFolder,
        summary: RunSummary,
        checkpoints: Checkpoints,
        shown_per_set: int,
    ) -> None:
        self._runner = runner
        self._folder = folder
        self._summary = summary
        self._checkpoints = checkpoints
        self._shown_per_set = shown_per_set
        self._metrics: dict[str, float] = {}
        self._running: asyncio.Task[None] | None = None

    @property
    def in_domain(self) -> list[str]:
        """The sets that the means of the summary run over."""
        return self._runner.in_domain

    def take_metrics(self) -> dict[str, float]:
        """Return the scores of evaluations that finished since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    async def run(self, name: str, step: int, policy_version: int) -> None:
        """Ask all sets, wait for the answers and write them down; nothing without sets.

        Raises:
            RunFailedError: more than `max_failed_share` of the questions failed.
        """
        if self._runner.sets:
            self._keep(await self._runner.run(name, step, policy_version))

    def start(self, stop_signal: StopSignal, step: int, policy_version: int) -> None:
        """Evaluate in the background, unless the evaluation before is still running."""
        if self._running is not None and not self._running.done():
            logger.warning(
                "evaluation skipped step=%d: the one before still runs; raise evaluation.every or "
                "lower evaluation.max_questions_during",
                step,
            )
            return
        self._checkpoints.expect_score(step)
        self._running = stop_signal.spawn(self.run("during", step, policy_version), "evaluate")

    async def wait(self) -> None:
        """Wait for the evaluation in the background; its failure reaches the loop by itself."""
        if self._running is not None:
            await asyncio.wait({self._running})

    def _keep(self, evaluation: Evaluation) -> None:
        score = self._runner.score(evaluation.sets)
        self._summary.add_evaluation(evaluation, score)
        values = evaluation.metrics()
        self._metrics |= values
        self._folder.write_scalars(evaluation.step, values)
        self._folder.write_evaluation(evaluation.step, evaluation.name, evaluation.record())
        during = evaluation.name == "during"
        label = f"step_{evaluation.step:06d}" if during else evaluation.name
        self._folder.write_trajectories(f"eval_{label}", self._readable(evaluation))
        if evaluation.name == "after":
            self._folder.write_answers(map(_answer, evaluation.results))
        self._checkpoints.record_score(evaluation.step, score)

    def _readable(self, evaluation: Evaluation) -> list[dict[str, Any]]:
        """Render the first answers of each set: the same questions at every evaluation."""
        shown: dict[str, int] = {}
        lines: list[dict[str, Any]] = []
        for result in evaluation.results:
            name = str(result.task.metadata.get("set"))
            if result.scored is None or shown.get(name, 0) >= self._shown_per_set:
                continue
            shown[name] = shown.get(name, 0) + 1
            lines.append(
                readable(result.scored, step=evaluation.step, advantage=None, trained=False)
            )
        return lines


def _answer(result: EvalResult) -> dict[str, Any]:
    """Return the scores of one question; those of one that failed (an outage) are None."""
    scored = None if result.failed else result.scored
    reward = None if scored is None else scored.reward
    components = {} if reward is None else reward.components
    return {
        "id": result.task.id,
        "set": result.task.metadata.get("set"),
        "type": result.task.metadata.get("type"),
        "failed": result.failed,
        "reward": None if reward is None else reward.total,
        "components": components,
        "calls": {} if scored is None else scored.trajectory.answered_calls(),
        "em": components.get("exact_match"),
        "f1": components.get("f1"),
    }
