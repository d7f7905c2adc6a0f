"""Evaluation before, during and after training, on the servers that also roll out for training.

train.py --name, step--> tasks with purpose `eval` --> rollout, reward --> a reply stream --> here
--> `evaluations.jsonl`, metrics and the summary. Training continues meanwhile; one evaluation
during training runs at a time, in the background.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints
from agent_r1.learner.collector import RolloutCollector
from agent_r1.learner.redis_memory import MAX_QUESTIONS_IN_FLIGHT
from agent_r1.learner.reporting.summary import RunSummary
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.shutdown import StopSignal
from agent_r1.learner.stop_rules import FEWEST_ALL_FAILED, FailureMonitor, RunFailedError
from agent_r1.runs.record import readable
from agent_r1.runs.store import StoredTrajectory, Tokens
from agent_r1.runtime.evaluation_client import (
    EvalClient,
    EvalResult,
    SetScores,
    mean_over_sets,
    means_over_sets,
    summarise,
)
from agent_r1_proto.failures import Failure, failure, place_of_failure
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import SamplingParameters

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

    @property
    def label(self) -> str:
        """Name in files and in the summary: those during training are named by their step."""
        return f"step_{self.step:06d}" if self.name == "during" else self.name

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


class Evaluations:
    """Asks the evaluation sets of one start, and writes down what came of it."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        broker: Broker,
        collector: RolloutCollector,
        monitor: FailureMonitor,
        summary: RunSummary,
        checkpoints: Checkpoints,
        engine_thread: Executor,
    ) -> None:
        self.in_domain = _in_domain_sets(list(spec.eval_sets), spec.prompts.set_names())
        """The sets that the means of the summary run over."""
        self._spec = spec
        self._broker = broker
        self._collector = collector
        self._monitor = monitor
        self._summary = summary
        self._checkpoints = checkpoints
        self._engine_thread = engine_thread
        self._metrics: dict[str, float] = {}
        self._running: asyncio.Task[None] | None = None

    def take_metrics(self) -> dict[str, float]:
        """Return the scores of evaluations that finished since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def start(self, stop_signal: StopSignal, step: int, policy_version: int) -> None:
        """Evaluate in the background, unless the evaluation before is still running."""
        if self._running is not None and not self._running.done():
            logger.warning(
                "evaluation skipped step=%d: the previous one is still running; raise "
                "evaluation.every or lower evaluation.max_questions_during",
                step,
            )
            return
        self._checkpoints.expect_score(step)
        self._running = stop_signal.spawn(self.run("during", step, policy_version), "evaluate")

    async def wait(self) -> None:
        """Wait for the evaluation in the background; its failure reaches the loop by itself."""
        if self._running is not None:
            await asyncio.wait({self._running})

    def no_longer_improve(self) -> bool:
        """Return whether `evaluation.patience` evaluations in a row were not the best so far."""
        patience = self._spec.evaluation.patience
        return patience is not None and self._summary.evaluations_since_best >= patience

    def forget_after(self) -> None:
        """Forget the last evaluation of a run that has been given more steps since."""
        if self._summary.evaluations.pop("after", None) is not None:
            self._spec.folder.remove_last_evaluation()

    async def run(self, name: str, step: int, policy_version: int) -> None:
        """Ask every set, wait for the answers and write them down; nothing without sets.

        Args:
            name: `before`, `during` or `after`.
            step: learner step of the weights.
            policy_version: newest version now.

        Raises:
            RunFailedError: more than `max_failed_share` of the questions failed.
        """
        if not self._spec.eval_sets:
            return
        started = time.monotonic()
        results = await self._ask(name, step, policy_version)
        evaluation = Evaluation(
            name=name,
            step=step,
            policy_version=policy_version,
            sets=summarise(results),
            results=results,
            duration_s=time.monotonic() - started,
        )
        _log(evaluation)
        await self._keep(evaluation)

    async def _ask(self, name: str, step: int, policy_version: int) -> list[EvalResult]:
        config, learner, during = self._spec.evaluation, self._spec.learner, name == "during"
        limit = config.max_questions_during if during else None
        tasks = [task for tasks in self._spec.eval_sets.values() for task in tasks[:limit]]
        batch = learner.groups_per_batch * learner.group_size
        client = EvalClient(
            self._broker,
            run_id=self._spec.run.id,
            client_id=f"learner-{self._collector.groups.incarnation}-{name}-{step}",
            sampling=SamplingParameters(
                temperature=config.temperature, max_turns=learner.max_turns
            ),
            timeout_s=config.timeout_s,
            sample_timeout_s=learner.sample_timeout_s,
            max_attempts=learner.max_attempts,
            max_in_flight=max(1, batch // SHARE_DURING) if during else MAX_QUESTIONS_IN_FLIGHT,
        )
        logger.info(
            "evaluation started name=%s step=%d policy_version=%d questions=%d",
            name,
            step,
            policy_version,
            len(tasks),
        )
        failures = seen = 0

        async def watch(result: EvalResult) -> None:
            nonlocal failures, seen
            seen += 1
            failures += result.failed
            if result.scored is not None:
                self._monitor.note_calls(result.scored.trajectory)
            if not result.failed:
                return
            await self._collector.read_board()  # it has the traceback that the result has not
            self._monitor.note(_failure_of(result))
            all_failed = failures == seen >= max(FEWEST_ALL_FAILED, batch)
            self._check(failures, len(tasks), name, all_failed=all_failed)

        return await client.run(tasks, watch)

    def _check(self, failures: int, total: int, name: str, *, all_failed: bool = False) -> None:
        """Stop the run when too many questions failed, or a batch did and none was answered.

        Raises:
            RunFailedError: one of the two is true.
        """
        share = 1.0 if all_failed else failures / max(1, total)
        allowed = self._spec.learner.max_failed_share
        if share > allowed:
            raise RunFailedError(
                f"{failures} of the {total} questions of the evaluation {name!r} failed or gave no "
                f"result within evaluation.timeout_s ({self._spec.evaluation.timeout_s:g}); "
                f"learner.max_failed_share allows {allowed:.0%}. {self._monitor.explain()}"
            )

    async def _keep(self, evaluation: Evaluation) -> None:
        folder = self._spec.folder
        score = mean_score(evaluation.sets, self._spec.evaluation.score, self.in_domain)
        self._summary.add_evaluation(evaluation.label, evaluation.record(), score)
        values = evaluation.metrics()
        self._metrics |= values
        folder.write_scalars(evaluation.step, values)
        folder.write_evaluation(
            evaluation.step, evaluation.name, evaluation.record() | {"score": score}
        )
        stored = _stored(evaluation, self._spec.learner.stored_limit, self._spec.system_prompt)
        folder.write_trajectories(f"eval_{evaluation.label}", stored)
        if evaluation.name == "after":
            folder.write_answers(map(_answer, evaluation.results))
        # In the thread that saves: both delete checkpoints. A stop does not lose the score.
        record = asyncio.get_running_loop().run_in_executor(
            self._engine_thread, self._checkpoints.record_score, evaluation.step, score
        )
        await asyncio.shield(record)


def mean_score(sets: dict[str, SetScores], score: str, names: Sequence[str]) -> float | None:
    """Return the mean of `evaluation.score` over the named sets; None where none has it."""
    if score == "reward":
        return mean_over_sets(sets, "reward", names)
    return means_over_sets(sets, "components", names).get(score)


def _in_domain_sets(sets: Sequence[str], trained_sets: set[str]) -> list[str]:
    """Return the evaluation sets whose kind of question is trained on.

    Those are the sets named in `metadata.set` of a training task; where none is, all of them.
    """
    named = [name for name in sets if name in trained_sets]
    return named or list(sets)


def _log(evaluation: Evaluation) -> None:
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


def _stored(
    evaluation: Evaluation, per_set: int | None, system_prompt: str | None
) -> Iterator[StoredTrajectory]:
    """Render the first answers of each set (None: all): the same questions at every evaluation."""
    shown = Counter[str]()
    for result in evaluation.results:
        name = str(result.task.metadata.get("set"))
        if result.scored is None or (per_set is not None and shown[name] >= per_set):
            continue
        shown[name] += 1
        record = readable(
            result.scored,
            step=evaluation.step,
            advantage=None,
            trained=False,
            system_prompt=system_prompt,
        )
        yield StoredTrajectory(record, Tokens.of(result.scored.trajectory))


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
