"""Stop rules: the share of failures, stalls, tools that answer nothing but one error."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.learner.failures import FailureMonitor, RunFailedError, reason_kind
from agent_r1_proto.tools import TextPart
from agent_r1_proto.trajectory import ToolCallRecord


def make(**changes: float) -> FailureMonitor:
    settings = {"max_failed_share": 0.5, "samples_per_batch": 2, "stall_timeout_s": 10.0}
    return FailureMonitor(**(settings | changes), log_dir=Path("runs/r/logs"))  # pyright: ignore[reportArgumentType]


def call(status: str = "error", error: str = "KeyError: 7", tool: str = "search") -> ToolCallRecord:
    return ToolCallRecord(end_token_index=0, tool=tool, status=status, error=error)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("tool_timeout: search after 12.5 s", "tool_timeout: search after # s"),
        ("object at 0x7f3a", "object at #"),
        ("first line\nsecond line", "first line"),
        ("", "no reason given"),
        ("  \n ", "no reason given"),
    ],
)
def test_reasons_that_differ_in_numbers_are_one_kind(reason: str, kind: str):
    assert reason_kind(reason) == kind


def test_the_run_stops_when_too_large_a_share_of_two_batches_failed():
    monitor = make()
    monitor.succeeded()
    monitor.failed("boom 1", "r/1")
    monitor.failed("boom 2", "r/2")
    with pytest.raises(RunFailedError) as caught:
        monitor.failed("bang", "r/3")
    text = str(caught.value)
    assert "3 of the last 4 samples failed (75%); learner.max_failed_share allows 50%" in text
    assert "2 x boom 1; 1 x bang" in text
    assert "runs/r/logs" in text


def test_half_of_the_samples_may_fail():
    monitor = make()
    for _ in range(20):
        monitor.succeeded()
        monitor.failed("boom", "r/1")


def test_old_failures_leave_the_window():
    monitor = make()
    monitor.failed("boom", "r/1")
    monitor.failed("boom", "r/2")
    for _ in range(4):
        monitor.succeeded()
    monitor.failed("boom", "r/3")
    monitor.failed("boom", "r/4")
    assert monitor.counts["boom"] == 4


def test_fewer_samples_than_two_batches_do_not_stop_the_run():
    monitor = make()
    for i in range(3):
        monitor.failed("boom", f"r/{i}")


def test_the_first_failure_of_each_kind_is_shown_once(caplog: pytest.LogCaptureFixture):
    monitor = make(max_failed_share=1.0)
    for i in range(5):
        monitor.failed(f"boom {i}", f"r/{i}")
    monitor.failed("bang", "r/9")
    shown = [record.getMessage() for record in caplog.records]
    assert len(shown) == 2
    assert "rollout_id=r/0 reason=boom 0" in shown[0]
    assert "reason=bang" in shown[1]


def test_waiting_too_long_without_a_complete_group_stops_the_run():
    monitor = make()
    monitor.waited(6.0, "2 groups outstanding")
    monitor.group_completed()
    monitor.waited(6.0, "2 groups outstanding")
    with pytest.raises(RunFailedError, match=r"12 s while waiting \(2 groups outstanding\)"):
        monitor.waited(6.0, "2 groups outstanding")


def test_a_stall_without_failures_asks_for_the_rollout_server():
    with pytest.raises(RunFailedError, match="is a rollout server running"):
        make().waited(11.0, "waiting")


def test_a_tool_that_answers_only_one_error_stops_the_run():
    monitor = make()
    monitor.observe_calls([call(), call(error="KeyError: 8"), call(error="KeyError: 9")], "r/1")
    with pytest.raises(RunFailedError, match="each of the last 4 calls of tool 'search'"):
        monitor.observe_calls([call()], "r/2")


def test_the_error_may_be_in_the_answer_itself():
    monitor = make(samples_per_batch=1)
    parts = [TextPart(text="Traceback\nZeroDivisionError: 5")]
    record = ToolCallRecord(end_token_index=0, tool="t", status="error", parts=list(parts))
    monitor.observe_calls([record], "r/1")
    with pytest.raises(RunFailedError, match="ZeroDivisionError: 5"):
        monitor.observe_calls([record], "r/2")


@pytest.mark.parametrize(
    "calls",
    [
        [call(), call(), call(), call("ok", "")],  # it works sometimes
        [call(), call(), call(error="other"), call(error="third")],  # the model's own mistakes
        [call(), call(), call(), call("malformed", "not JSON")],  # never reached the tool
        [call(), call(), call(tool="a"), call(tool="b")],
    ],
)
def test_errors_a_model_can_learn_from_do_not_stop_the_run(calls: list[ToolCallRecord]):
    make().observe_calls(calls, "r/1")
