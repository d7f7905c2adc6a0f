"""The components `tests_passed` and `all_tests_passed`: what the last `code_tests` call found.

Counts are read from the first line of the call's recorded text, which the tool writes itself and
no limit of `[env]` cuts: "3 of 5 tests passed." or "All 5 tests passed." What the tested program
printed or raised comes after it and is never read here.
"""

from __future__ import annotations

import re

from agent_r1_proto.rewards import ScoreCall, ScoreRequest
from agent_r1_proto.tools import TextPart
from agent_r1_proto.trajectory import ToolCallRecord

TOOL = "code_tests"
_ALL = re.compile(r"All (\d+) tests passed\.")
_SOME = re.compile(r"(\d+) of (\d+) tests passed\.")


class AnsweredCall(ScoreCall):
    """A call with the first line the tool answered; calls of `POST /score` have none."""

    first_line: str


def answered_call(call: ToolCallRecord) -> AnsweredCall:
    """Return a recorded call as components see it."""
    texts = [part.text for part in call.parts if isinstance(part, TextPart)]
    return AnsweredCall(
        tool=call.tool,
        arguments=call.arguments,
        status=call.status,
        first_line=texts[0].partition("\n")[0] if texts else "",
    )


def tests_passed(request: ScoreRequest) -> float:
    """Return the share of tests that the last call of `code_tests` passed, 0.0 without one.

    Raises:
        ValueError: the call was not answered by `code_tests`, or its answer is not known.
    """
    passed, total = _last_counts(request)
    return passed / total if total else 0.0


def all_tests_passed(request: ScoreRequest) -> float:
    """Return 1.0 when the last call of `code_tests` passed every test, else 0.0.

    Raises:
        ValueError: the call was not answered by `code_tests`, or its answer is not known.
    """
    passed, total = _last_counts(request)
    return float(total > 0 and passed == total)


def _last_counts(request: ScoreRequest) -> tuple[int, int]:
    calls = [call for turn in request.turns for call in turn.calls]
    for call in reversed(calls):
        # Calls that were not run (malformed, over a limit) and a tool's own error found nothing.
        if call.tool == TOOL and call.status == "ok":
            return _counts(call)
    if not calls and any(turn.num_calls for turn in request.turns):
        raise ValueError(
            "the request says how many calls were made but not which; tests_passed needs the "
            "trajectory's calls and their answers"
        )
    return 0, 0


def _counts(call: ScoreCall) -> tuple[int, int]:
    if not isinstance(call, AnsweredCall):
        raise ValueError(
            "a call of POST /score has no answer, which tests_passed reads; score trajectories, or "
            "remove tests_passed and all_tests_passed from reward.components"
        )
    found_all = _ALL.match(call.first_line)
    if found_all:
        return int(found_all[1]), int(found_all[1])
    found = _SOME.match(call.first_line)
    if found is None:
        raise ValueError(
            f"the tool {TOOL!r} answered {call.first_line[:100]!r}, which is not the first line of "
            'type = "code_tests"; give a tool of another kind another name'
        )
    return int(found[1]), int(found[2])
