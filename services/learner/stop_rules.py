"""Stop rules: a run that cannot succeed ends and says why.

collector.py reports every final result, what the failure board says and every second spent waiting;
`FailureMonitor` shows the first failure of each kind at once, and what hinders learning while it
lasts; it raises `RunFailedError` when a rule is met. No rule reads a clock or Redis.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.runtime.files.conditions import Condition, Conditions
from agent_r1_proto.failures import Failure, Where, call_error, call_failures, failure, reason_kind
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory

if TYPE_CHECKING:
    from agent_r1.learner.groups import Group
    from agent_r1.learner.learning_watch import LearningWatch

logger = logging.getLogger(__name__)

WINDOW_BATCHES = 2
"""The share of failures is taken over so many batches."""
FEWEST_ALL_FAILED = 8
"""Samples of which each failed, at least, before a run stops without two batches of results."""
SAME_ERROR_SHARE = 0.95
"""A tool whose every call in the window is an error, this share of them the same, is broken."""
SHOWN_REASONS = 3
SHOWN_KINDS = 64
"""Kinds of failures shown, at most; all are counted."""


class RunFailedError(RuntimeError):
    """The run cannot continue; the message says what was seen, the limit and where to look."""


class FailureMonitor:
    """Counts failed samples and idle time of one run.

    Args:
        max_failed_share: share of failed samples that ends the run.
        samples_per_batch: samples asked for per batch.
        stall_timeout_s: longest wait without a complete group, in seconds.
        log_dir: folder of the services' logs, for messages.
        show: called with the first failure of each kind, at once.
        learning: looks whether the run can learn; None looks at nothing.
    """

    def __init__(
        self,
        *,
        max_failed_share: float,
        samples_per_batch: int,
        stall_timeout_s: float,
        log_dir: Path,
        show: Callable[[Failure], None] | None = None,
        learning: LearningWatch | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Final failures and errors that tools answered, by kind, over the whole run."""
        self.attempts = 0
        """Attempts that failed since this start, those that were made again included."""
        self._examples: dict[str, str] = {}
        """First reason of this start by kind, as it was given, numbers and all."""
        self._max_failed_share = max_failed_share
        self._stall_timeout_s = stall_timeout_s
        self._log_dir = log_dir
        self.show = show
        self.note_condition: Callable[[Condition], None] = lambda condition: None
        """Callback for each condition of the run when it begins, and when it is over."""
        self._learning = learning
        self._conditions, self.redis_lost = (
            Conditions("learner", lambda condition: self.note_condition(condition))
            for _ in range(2)
        )
        self._shown: set[str] = set()
        self._window: deque[str | None] = deque(maxlen=WINDOW_BATCHES * samples_per_batch)
        self._all_failed = min(
            WINDOW_BATCHES * samples_per_batch, max(samples_per_batch, FEWEST_ALL_FAILED)
        )
        self._samples_per_batch = samples_per_batch
        self._calls: dict[str, deque[str | None]] = {}
        """Per tool: None for a call that was answered, else the kind of error."""
        self._idle_s = 0.0

    def succeeded(self) -> None:
        """Note a final result that can be trained on."""
        self._window.append(None)

    def failed(self, reason: str, rollout_id: str, where: Where = "rollout") -> None:
        """Note a final result without a trajectory to train on.

        Raises:
            RunFailedError: more than `max_failed_share` of the last two batches failed, or every
                sample of a whole batch did: what is to come would fail as well.
        """
        one = failure(where, reason, rollout_id)
        self.note(one)
        self._window.append(one.kind)
        failures = sum(1 for entry in self._window if entry is not None)
        seen = len(self._window)
        enough = seen == self._window.maxlen or failures == seen >= self._all_failed
        if enough and failures / seen > self._max_failed_share:
            raise RunFailedError(
                f"{failures} of the last {seen} samples failed ({failures / seen:.0%}); "
                f"learner.max_failed_share allows {self._max_failed_share:.0%}. "
                f"{self.explain()}"
            )

    def observe_calls(self, trajectory: Trajectory) -> None:
        """Note the tool calls of a trajectory that is trained on.

        An error the tool answers goes to the model and is no failure of ours. Only a tool that
        answers nothing but one and the same error cannot be learned from.

        Raises:
            RunFailedError: every call of a tool in the last two batches ended in the same error.
        """
        self.note_calls(trajectory)
        if self._learning is not None:
            self._learning.saw_calls(trajectory)
            self._conditions.update(self._learning.look())
        for call in trajectory.calls():
            if call.status in ("ok", "error"):
                self._watch_tool(call)

    def saw_failed(self, trajectory: Trajectory) -> None:
        """Note how long the calls of an attempt took that failed."""
        if self._learning is not None:
            self._learning.saw_times(trajectory)
            self._conditions.update(self._learning.look())

    def saw_group(self, group: Group) -> None:
        """Note a complete group, whether it is trained on or not."""
        if self._learning is not None:
            self._learning.saw_group(group)
            self._conditions.update(self._learning.look())

    def note_calls(self, trajectory: Trajectory) -> None:
        """Count the errors that tools answered, and show the first of each kind."""
        for one in call_failures(trajectory):
            self.note(one)

    def _watch_tool(self, call: ToolCallRecord) -> None:
        window = self._calls.setdefault(
            call.tool, deque(maxlen=WINDOW_BATCHES * self._samples_per_batch)
        )
        error = call_error(call)
        window.append(None if error is None else reason_kind(error))
        if (
            len(window) == window.maxlen
            and None not in window
            and window.count(window[-1]) >= SAME_ERROR_SHARE * len(window)
        ):
            raise RunFailedError(
                f"each of the last {len(window)} calls of tool {call.tool!r} ended in an "
                f"error. {self.explain()}"
            )

    def note(self, one: Failure) -> None:
        """Count a failure and show it when it is the first of its kind."""
        self.counts[one.kind] += 1
        self._examples.setdefault(one.kind, one.reason.splitlines()[0])
        self._show_first(one)

    def note_attempts(self, news: Sequence[tuple[Failure, int]]) -> None:
        """Count failed attempts as the failure board tells them, and show new kinds.

        Args:
            news: what `FailureBoard.read` returned.
        """
        for one, count in news:
            self.attempts += count
            self._show_first(one)

    def _show_first(self, one: Failure) -> None:
        if one.kind in self._shown or len(self._shown) >= SHOWN_KINDS:
            return
        self._shown.add(one.kind)
        logger.error(
            "first failure of its kind where=%s rollout_id=%s reason=%s log_dir=%s",
            one.where,
            one.rollout_id,
            one.reason,
            self._log_dir,
        )
        if self.show is not None:
            self.show(one)

    def group_completed(self) -> None:
        """Note progress: a group is complete."""
        self._idle_s = 0.0

    def waited(self, seconds: float, doing: str) -> None:
        """Note time spent waiting for groups.

        Raises:
            RunFailedError: no group completed within `stall_timeout_s` of waiting.
        """
        self._idle_s += seconds
        if self._idle_s > self._stall_timeout_s:
            raise RunFailedError(
                f"no group completed for {self._idle_s:.0f} s while waiting ({doing}); "
                f"learner.stall_timeout_s allows {self._stall_timeout_s:g} s. {self.explain()}"
            )

    def explain(self) -> str:
        """Return the most frequent reasons and where the logs are."""
        logs = f"See the logs in {self._log_dir}"
        if not self.counts:
            return f"No sample reported a failure: is a rollout server running? {logs}"
        common = self.counts.most_common(SHOWN_REASONS)
        reasons = "; ".join(f"{n} x {self._examples.get(kind, kind)}" for kind, n in common)
        return f"Most frequent reasons: {reasons}. {logs}"
