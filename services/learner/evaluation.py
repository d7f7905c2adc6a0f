"""Evaluation before, during and after training, on the servers that also roll out for training.

train.py --name--> tasks with purpose `eval` --> rollout, reward --> a reply stream --> here -->
`evaluations.jsonl`, metrics and the summary. Training rollouts continue meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.learner.config import EvaluationConfig, LearnerConfig
from agent_r1.learner.redis_memory import MAX_QUESTIONS_IN_FLIGHT
from agent_r1.learner.stop_rules import FEWEST_ALL_FAILED, FailureMonitor, RunFailedError
from agent_r1_proto.failures import Failure, failure, place_of_failure
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import SamplingParameters, Task
from agent_r1_service.evaluation_client import (
    EvalClient,
    EvalResult,
    SetScores,
    mean_over_sets,
    summarise,
)
from agent_r1_service.task_files import read_task_file

logger = logging.getLogger(__name__)

SHARE_DURING = 4
"""An evaluation during training asks at most 1/4 of a training batch at one time."""


@dataclass(frozen=True)
class Evaluation:
    """One finished evaluation."""

    name: str
    """`before`, `after`, or `during`."""
    step: int
    policy_version: int
    """Newest version when it began."""
    sets: dict[str, SetScores]
    results: list[EvalResult]
    duration_s: float

    def record(self) -> dict[str, Any]:
        """Return the scores as JSON."""
        return {
            "policy_version": self.policy_version,
            "duration_s": self.duration_s,
            "sets": {name: scores.model_dump(mode="json") for name, scores in self.sets.items()},
        }

    def metrics(self) -> dict[str, float]:
        """Return `eval/<set>/<score>` and `eval/step`."""
        values: dict[str, float] = {"eval/step": float(self.step)}
        for name, scores in self.sets.items():
            found = {"n": scores.n, "failed": scores.failed, **scores.components}
            found |= {f"calls/{tool}": value for tool, value in scores.calls.items()}
            if scores.reward is not None:
                found["reward"] = scores.reward
            values |= {f"eval/{name}/{key}": float(value) for key, value in found.items()}
        return values


def load_sets(config: EvaluationConfig) -> dict[str, list[Task]]:
    """Read the evaluation sets; every task carries its set's name as `metadata.set`.

    Raises:
        TaskFileError: a file is missing, empty or malformed; file and line are named.
    """
    sets: dict[str, list[Task]] = {}
    for name, path in config.sets.items():
        tasks = read_task_file(Path(path))[: config.max_questions]
        sets[name] = [
            task.model_copy(update={"metadata": {**task.metadata, "set": name}}) for task in tasks
        ]
    return sets


def in_domain_sets(sets: Sequence[str], trained_sets: set[str]) -> list[str]:
    """Return the evaluation sets whose kind of question is trained on.

    Those are the sets named in `metadata.set` of a training task; where none is, all of them.
    """
    named = [name for name in sets if name in trained_sets]
    return named or list(sets)


class TrainingEvaluation:
    """Asks the evaluation sets of one run."""

    def __init__(
        self,
        *,
        sets: dict[str, list[Task]],
        trained_sets: set[str],
        config: EvaluationConfig,
        learner: LearnerConfig,
        broker: Broker,
        run_id: str,
        incarnation: int,
        monitor: FailureMonitor,
        read_board: Callable[[], Awaitable[None]],
    ) -> None:
        self.sets = sets
        self.in_domain = in_domain_sets(list(sets), trained_sets)
        self._config = config
        self._learner = learner
        self._broker = broker
        self._run_id = run_id
        self._incarnation = incarnation
        self._monitor = monitor
        self._read_board = read_board

    def score(self, sets: dict[str, SetScores]) -> float | None:
        """Return the mean reward over the in-domain sets, by which checkpoints are kept."""
        return mean_over_sets(sets, "reward", self.in_domain)

    async def run(self, name: str, step: int, policy_version: int) -> Evaluation:
        """Ask every set and wait for the answers.

        Args:
            name: `before`, `during` or `after`.
            step: learner step of the weights.
            policy_version: newest version now.

        Raises:
            RunFailedError: more than `max_failed_share` of the questions failed.
        """
        during = name == "during"
        limit = self._config.max_questions_during if during else None
        tasks = [task for tasks in self.sets.values() for task in tasks[:limit]]
        batch = self._learner.groups_per_batch * self._learner.group_size
        client = EvalClient(
            self._broker,
            run_id=self._run_id,
            client_id=f"learner-{self._incarnation}-{name}-{step}",
            sampling=SamplingParameters(temperature=self._config.temperature),
            timeout_s=self._config.timeout_s,
            sample_timeout_s=self._learner.sample_timeout_s,
            max_attempts=self._learner.max_attempts,
            max_in_flight=max(1, batch // SHARE_DURING) if during else MAX_QUESTIONS_IN_FLIGHT,
        )
        logger.info(
            "evaluation started name=%s step=%d policy_version=%d questions=%d",
            name,
            step,
            policy_version,
            len(tasks),
        )
        started = time.monotonic()
        failures = seen = 0

        async def watch(result: EvalResult) -> None:
            nonlocal failures, seen
            seen += 1
            failures += result.failed
            if result.scored is not None:
                self._monitor.note_calls(result.scored.trajectory)
            if not result.failed:
                return
            await self._read_board()  # it has the traceback that the result has not
            self._monitor.note(_failure_of(result))
            all_failed = failures == seen >= max(FEWEST_ALL_FAILED, batch)
            self._check(failures, len(tasks), name, all_failed=all_failed)

        results = await client.run(tasks, watch)
        evaluation = Evaluation(
            name=name,
            step=step,
            policy_version=policy_version,
            sets=summarise(results),
            results=results,
            duration_s=time.monotonic() - started,
        )
        self._log(evaluation)
        return evaluation

    def _check(self, failures: int, total: int, name: str, *, all_failed: bool = False) -> None:
        """Stop the run when too many questions failed, or a batch did and none was answered.

        Raises:
            RunFailedError: one of the two is true.
        """
        share = 1.0 if all_failed else failures / max(1, total)
        if share > self._learner.max_failed_share:
            raise RunFailedError(
                f"{failures} of the {total} questions of the evaluation {name!r} failed or gave no "
                f"result within evaluation.timeout_s ({self._config.timeout_s:g}); "
                f"learner.max_failed_share allows {self._learner.max_failed_share:.0%}. "
                f"{self._monitor.explain()}"
            )

    def _log(self, evaluation: Evaluation) -> None:
        for name, scores in evaluation.sets.items():
            logger.info(
                "evaluation %s set=%s step=%d n=%d failed=%d reward=%s components=%s calls=%s "
                "duration_s=%.1f",
                evaluation.name,
                name,
                evaluation.step,
                scores.n,
                scores.failed,
                "none" if scores.reward is None else f"{scores.reward:.3f}",
                _means(scores.components),
                _means(scores.calls),
                evaluation.duration_s,
            )


def _failure_of(result: EvalResult) -> Failure:
    if result.scored is None:
        return failure("evaluation", result.reason)
    trajectory = result.scored.trajectory
    return failure(place_of_failure(trajectory), result.reason, trajectory.rollout_id)


def _means(values: Mapping[str, float]) -> str:
    return ",".join(f"{name}:{value:.3f}" for name, value in values.items()) or "none"
