"""Stop rules: a run that cannot succeed ends and says why.

train.py reports every final result and every second spent waiting; `FailureMonitor` shows the
first failure of each kind at once and raises `RunFailedError` when a rule is met. Pure: no clock.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from agent_r1_proto.tools import TextPart
from agent_r1_proto.trajectory import ToolCallRecord

logger = logging.getLogger(__name__)

WINDOW_BATCHES = 2
"""The share of failures is taken over so many batches."""
SAME_ERROR_SHARE = 0.95
"""A tool whose every call in the window is an error, this share of them the same, is broken."""
SHOWN_REASONS = 3
LONGEST_REASON = 300
"""Characters of a reason that are shown."""
NO_REASON = "no reason given"


class RunFailedError(RuntimeError):
    """The run cannot go on; the message says what was seen, the limit and where to look."""


def reason_kind(reason: str) -> str:
    """Return a reason without what differs from one sample to the next (numbers, ids)."""
    return re.sub(r"0x[0-9a-fA-F]+|\d+(\.\d+)?", "#", first_line(reason))[:LONGEST_REASON]


def first_line(reason: str) -> str:
    """Return what is shown of a reason."""
    return reason.strip().splitlines()[0][:LONGEST_REASON] if reason.strip() else NO_REASON


def _call_error(call: ToolCallRecord) -> str:
    if call.error:
        return call.error
    lines = [part.text for part in call.parts if isinstance(part, TextPart) and part.text.strip()]
    return lines[-1].strip().splitlines()[-1] if lines else "error"


class FailureMonitor:
    """Counts failed samples and idle time of one run."""

    def __init__(
        self,
        *,
        max_failed_share: float,
        samples_per_batch: int,
        stall_timeout_s: float,
        log_dir: Path,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Failures by kind, over the whole run."""
        self._examples: dict[str, str] = {}
        """By kind, the first reason as it was given, numbers and all."""
        self._max_failed_share = max_failed_share
        self._stall_timeout_s = stall_timeout_s
        self._log_dir = log_dir
        self._window: deque[str | None] = deque(maxlen=WINDOW_BATCHES * samples_per_batch)
        self._samples_per_batch = samples_per_batch
        self._calls: dict[str, deque[str | None]] = {}
        """Per tool: None for a call that was answered, else the kind of error."""
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """Seconds the learner has waited since a group last completed."""
        return self._idle_s

    def succeeded(self) -> None:
        """Note a final result that can be trained on."""
        self._window.append(None)

    def failed(self, reason: str, rollout_id: str) -> None:
        """Note a final result without a trajectory to train on.

        Raises:
            RunFailedError: more than `max_failed_share` of the last two batches failed.
        """
        kind = reason_kind(reason)
        self.note(kind, reason, rollout_id)
        self._window.append(kind)
        if len(self._window) < (self._window.maxlen or 0):
            return
        failures = sum(1 for entry in self._window if entry is not None)
        share = failures / len(self._window)
        if share > self._max_failed_share:
            raise RunFailedError(
                f"{failures} of the last {len(self._window)} samples failed ({share:.0%}); "
                f"learner.max_failed_share allows {self._max_failed_share:.0%}. "
                f"{self.explain()}"
            )

    def observe_calls(self, calls: Sequence[ToolCallRecord], rollout_id: str) -> None:
        """Note the tool calls of a trajectory.

        An error the tool answers goes to the model and is no failure of ours. Only a tool that
        answers nothing but one and the same error cannot be learned from.

        Raises:
            RunFailedError: every call of a tool in the last two batches ended in the same error.
        """
        for call in calls:
            if call.status not in ("ok", "error"):
                continue
            window = self._calls.setdefault(
                call.tool, deque(maxlen=WINDOW_BATCHES * self._samples_per_batch)
            )
            if call.status == "ok":
                window.append(None)
                continue
            error = _call_error(call)
            kind = reason_kind(f"tool {call.tool} answered an error: {error}")
            self.note(kind, f"tool {call.tool} answered an error: {error}", rollout_id)
            window.append(kind)
            if (
                len(window) == window.maxlen
                and window.count(kind) >= SAME_ERROR_SHARE * len(window)
                and None not in window
            ):
                raise RunFailedError(
                    f"each of the last {len(window)} calls of tool {call.tool!r} ended in an "
                    f"error. {self.explain()}"
                )

    def note(self, kind: str, reason: str, rollout_id: str) -> None:
        """Count a failure and show it when it is the first of its kind."""
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            self._examples[kind] = first_line(reason)
            logger.error(
                "first failure of its kind rollout_id=%s reason=%s log_dir=%s",
                rollout_id,
                reason[:LONGEST_REASON] or NO_REASON,
                self._log_dir,
            )

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
        reasons = "; ".join(f"{count} x {self._examples[kind]}" for kind, count in common)
        return f"Most frequent reasons: {reasons}. {logs}"
