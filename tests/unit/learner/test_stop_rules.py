"""Stop rules: the share of failures, stalls, tools that answer nothing but one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.stop_rules import FailureMonitor, RunFailedError
from agent_r1_proto.failures import Failure, failure, reason_kind
from agent_r1_proto.parts import TextPart
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory
from tests.support.builders import trajectory


def make(**changes: Any) -> FailureMonitor:
    settings = {"max_failed_share": 0.5, "samples_per_batch": 2, "stall_timeout_s": 10.0}
    return FailureMonitor(**(settings | changes), log_dir=Path("runs/r/logs"))


def call(status: str = "error", error: str = "KeyError: 7", tool: str = "search") -> ToolCallRecord:
    return ToolCallRecord(end_token_index=2, tool=tool, status=status, error=error)  # pyright: ignore[reportArgumentType]


def calling(*calls: ToolCallRecord) -> Trajectory:
    return trajectory(calls=list(calls))


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


def test_reasons_of_an_earlier_start_are_explained_by_their_kind():
    monitor = make()
    monitor.counts["boom #"] = 3  # from the checkpoint
    assert "3 x boom #" in monitor.explain()


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


def test_a_run_of_which_every_sample_fails_stops_within_one_batch():
    # A batch of 12: two would be 24, and nothing after the first 12 will be better.
    monitor = make(samples_per_batch=12)
    for i in range(11):
        monitor.failed("boom", f"r/{i}")
    with pytest.raises(RunFailedError, match=r"12 of the last 12 samples failed \(100%\)"):
        monitor.failed("boom", "r/11")


def test_one_success_makes_the_run_wait_for_two_batches():
    monitor = make(samples_per_batch=12)
    monitor.succeeded()
    for i in range(22):
        monitor.failed("boom", f"r/{i}")
    with pytest.raises(RunFailedError, match="23 of the last 24 samples failed"):
        monitor.failed("boom", "r/22")


def test_a_run_that_allows_every_failure_goes_on():
    monitor = make(max_failed_share=1.0)
    for i in range(40):
        monitor.failed("boom", f"r/{i}")
    assert monitor.counts == {"boom": 40}


def test_attempts_that_are_made_again_are_shown_and_counted_as_attempts():
    shown: list[Failure] = []
    monitor = make(show=shown.append)
    first = failure("rollout", "tool_http_500: /open\n  File tool.py, line 3", "r/1")
    monitor.note_attempts([(first, 5)])
    monitor.note_attempts([(first, 2)])
    monitor.failed("tool_http_500: /open", "r/1")  # the same, for good
    assert [(one.where, one.reason) for one in shown] == [("rollout", first.reason)]
    assert monitor.attempts == 7
    assert monitor.counts == {"tool_http_#: /open": 1}


def test_errors_of_a_tool_are_shown_once_whatever_the_model_asked_for():
    shown: list[Failure] = []
    monitor = make(show=shown.append)
    monitor.note_calls(calling(call(error="KeyError: 'Atlantis'"), call("ok", "")))
    monitor.note_calls(calling(call(error="KeyError: 'Mordor'"), call("malformed", "no JSON")))
    assert [(one.where, one.kind) for one in shown] == [
        ("tools", "tool search answered an error: KeyError: #")
    ]


def test_no_more_than_so_many_kinds_are_shown_and_all_are_counted():
    shown: list[Failure] = []
    monitor = make(max_failed_share=1.0, show=shown.append)
    for i in range(100):
        monitor.failed("x" * (i + 1), f"r/{i}")
    assert len(shown) == 64
    assert monitor.counts.total() == 100


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
    monitor.observe_calls(calling(*(call(error=f"KeyError: {n}") for n in (7, 8, 9))))
    with pytest.raises(RunFailedError, match="each of the last 4 calls of tool 'search'"):
        monitor.observe_calls(calling(call()))


def test_the_error_may_be_in_the_answer_itself():
    monitor = make(samples_per_batch=1)
    parts = [TextPart(text="Traceback\nZeroDivisionError: 5")]
    record = ToolCallRecord(end_token_index=2, tool="t", status="error", parts=list(parts))
    monitor.observe_calls(calling(record))
    with pytest.raises(RunFailedError, match="ZeroDivisionError: 5"):
        monitor.observe_calls(calling(record))


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
    make().observe_calls(calling(*calls))
