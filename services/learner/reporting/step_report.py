"""Report of a step: train.py --StepReport--> metrics, trajectories, one log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from agent_r1.learner.collector import RolloutCollector
from agent_r1.learner.engine.interface import TrainSample
from agent_r1.learner.groups import Group, staleness
from agent_r1.learner.reporting.metrics import batch_metrics, reward_delay_s
from agent_r1.learner.reporting.summary import RunSummary
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.stop_rules import FailureMonitor
from agent_r1.learner.weights.delivery import PushReport
from agent_r1.runs.record import readable
from agent_r1.runs.store import StoredTrajectory, Tokens
from agent_r1.runtime.durations import format_duration
from agent_r1_proto.rewards import ScoredTrajectory

logger = logging.getLogger(__name__)

COUNTED = ("duplicate", "failed", "old_incarnation", "foreign", "reissued", "lost", "retried")


@dataclass
class StepReport:
    """One learner step, from the batch to the push."""

    step: int
    groups: Sequence[Group]
    samples: Sequence[TrainSample]
    """What the engine was given of each surviving trajectory, by group and sample."""
    advantages: Sequence[float]
    """Mean advantage of each surviving trajectory, by group and sample."""
    entropies: Sequence[npt.NDArray[np.float32]] | None
    """[T] of each; see `Prepared.entropies`."""
    newest_version: int
    """Version of the weights that the batch was trained on."""
    policy_version: int
    """Version of the weights when the step ended: that of its push, unless it was stopped."""
    engine: dict[str, float]
    """Metrics of `PolicyEngine.train_batch`."""
    rollout_s: float
    """Time the learner waited for the batch, in seconds."""
    learn_s: float
    step_s: float = 0.0
    push: PushReport | None = None
    """Push of the step; None when the run was stopped before it was complete."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Scores of evaluations that finished since the last step."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled in this batch."""
        return sum(s.trajectory.num_action_tokens for g in self.groups for s in g.survivors)

    @property
    def max_staleness(self) -> int:
        """Age of the oldest trajectory of this batch, in learner steps."""
        return max(
            staleness(s.trajectory, self.newest_version) for g in self.groups for s in g.survivors
        )

    def times(self) -> dict[str, float]:
        """Return the duration of the step and its parts, in seconds."""
        return {
            "step_s": self.step_s,
            "rollout_s": self.rollout_s,
            "reward_s": reward_delay_s(self.groups),
            "learn_s": self.learn_s,
            "push_s": self.push.total_s if self.push else 0.0,
        }


def stored_step(
    report: StepReport,
    failures: Sequence[ScoredTrajectory],
    limit: int | None,
    system_prompt: str | None = None,
) -> Iterator[StoredTrajectory]:
    """Render the first trained trajectories (whole groups first), and the first failed ones.

    Args:
        report: of the step.
        failures: results since the last step that could not be trained on.
        limit: most of each of the two kinds; None: all.
        system_prompt: that of the run.
    """
    survivors = [scored for group in report.groups for scored in group.survivors]
    entropies = report.entropies or [None] * len(survivors)
    trained = zip(survivors, report.samples, report.advantages, entropies, strict=True)
    for scored, sample, advantage, of_tokens in islice(trained, limit):
        trajectory, age = scored.trajectory, staleness(scored.trajectory, report.newest_version)
        record = readable(
            scored,
            step=report.step,
            advantage=advantage,
            trained=True,
            staleness=age,
            system_prompt=system_prompt,
        )
        tokens = Tokens.of(
            trajectory,
            learner_logprobs=sample.old_logprobs,
            entropies=of_tokens,
            advantages=sample.advantages,
        )
        yield StoredTrajectory(record, tokens)
    for scored in islice(failures, limit):
        record = readable(
            scored,
            step=report.step,
            advantage=None,
            trained=False,
            system_prompt=system_prompt,
        )
        yield StoredTrajectory(record, Tokens.of(scored.trajectory))


def _engine_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Give the engine's few names without an area one."""
    areas = {"grad_norm": "grad/norm", "lr": "learn/lr", "tokens_per_s": "learn/tokens_per_s"}
    return {areas.get(name, name): value for name, value in metrics.items()}


def _push_metrics(push: PushReport | None) -> dict[str, float]:
    if push is None:
        return {}
    values = {
        "push/pause_s": push.pause_s,
        "push/wait_s": push.wait_s,
        "push/gather_s": push.gather_s,
        "push/write_s": push.write_s,
        "push/fetch_s": push.fetch_s,
        "push/canary_s": push.predict_s + push.score_s,
        "push/servers": float(push.servers),
        "push/size_bytes": float(push.size_bytes),
        "push/bytes_sent": float(push.bytes_sent),
    }
    if push.canary_floor is not None:
        values["canary/floor"] = push.canary_floor
    if push.readings:
        values["canary/dlogp_max"] = max(reading.max for reading in push.readings)
        values["canary/dlogp_mean"] = max(reading.mean for reading in push.readings)
    return values


class StepReporter:
    """Writes down one step at a time."""

    def __init__(
        self,
        spec: RunSpec,
        *,
        summary: RunSummary,
        collector: RolloutCollector,
        monitor: FailureMonitor,
    ) -> None:
        self._spec = spec
        self._summary = summary
        self._collector = collector
        self._monitor = monitor
        self._counted = self._failures()
        """Failures as of the step before."""
        self.newest: dict[str, float] = {}
        """The newest value of everything that was written."""
        self.written_at = time.time()
        """Time when the last step was written, or this start began; Unix time, in seconds."""

    def write(self, report: StepReport) -> None:
        """Write a step to `metrics.jsonl`, TensorBoard, `trajectories/` and the log."""
        values = self._values(report)
        self.newest.update(values)
        self.written_at = time.time()
        self._summary.add_times(report.times())
        self._spec.folder.write_metrics(report.step, values)
        self._spec.folder.write_trajectories(
            f"step_{report.step:06d}",
            stored_step(
                report,
                self._collector.take_failures(),
                self._spec.learner.stored_limit,
                self._spec.system_prompt,
            ),
        )
        self._progress_line(report.step, values)

    def _values(self, report: StepReport) -> dict[str, float]:
        values = batch_metrics(
            report.groups,
            report.advantages,
            report.newest_version,
            self._spec.learner.max_staleness,
        )
        values |= _engine_metrics(report.engine)
        values["policy/version"] = float(report.policy_version)
        values |= _push_metrics(report.push)
        values |= {f"time/{name}": value for name, value in report.times().items()}
        values["throughput/tokens_per_s"] = report.sampled_tokens / max(report.step_s, 1e-9)
        depths = self._collector.depths
        values |= {f"queue/{name}": float(depth) for name, depth in depths.items()}
        streams = [depth for name, depth in depths.items() if name != "dead_letters"]
        values["queue/depth"] = float(sum(streams))
        counts = self._collector.groups.counts
        values |= {f"results/{name}": float(counts[name]) for name in COUNTED}
        values["group/dropped"] = float(counts["dropped_groups"])
        values["filter/equal_groups"] = float(counts["equal_groups"])
        if removed := self._spec.folder.removed_steps:
            values["trajectories/removed_steps"] = float(removed)
        values |= self._new_failures()
        return values | report.evaluation

    def _failures(self) -> dict[str, int]:
        counts = self._collector.groups.counts
        return {
            "failed": counts["failed"],
            "attempts": self._monitor.attempts,
            "dead_letters": counts["dead_letters"],
        }

    def _new_failures(self) -> dict[str, float]:
        """Return the failures since the step before."""
        before, self._counted = self._counted, self._failures()
        return {f"failures/{k}": float(v - before[k]) for k, v in self._counted.items()}

    def _progress_line(self, step: int, values: dict[str, float]) -> None:
        total = self._spec.total_steps
        eta_s = (total - step) * (self._summary.median_step_s() or 0.0)
        logger.info(
            "step %d/%d reward=%.3f tokens/s=%.0f queue=%d staleness=%d late=%.0f%% "
            "version=%d failed=%d attempts_failed=%d dead_letters=%d step_s=%.2f eta=%s",
            step,
            total,
            values["reward/mean"],
            values["throughput/tokens_per_s"],
            values["queue/depth"],
            values["staleness/max"],
            100 * values["staleness/late_share"],
            values["policy/version"],
            values["failures/failed"],
            values["failures/attempts"],
            values["failures/dead_letters"],
            values["time/step_s"],
            format_duration(eta_s),
        )
