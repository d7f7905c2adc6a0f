"""The components `tests_passed` and `all_tests_passed`: what the last `code_tests` call found.

They read the counts that the tool sends beside its text (`TestedCode`), which the program under
test cannot write.
"""

from __future__ import annotations

from pydantic import ValidationError

from agent_r1.text.reading import of_read_turns
from agent_r1_proto.rewards import ScoreCall, ScoreRequest
from agent_r1_proto.tools import TESTS_TOOL, TestedCode


@of_read_turns
def tests_passed(request: ScoreRequest) -> float:
    """Return the share of tests that the last call of `code_tests` passed, 0.0 without one.

    Raises:
        ValueError: the call was not answered by `code_tests`, or its counts are not known.
    """
    last = _last_call(request)
    return 0.0 if last is None else _counts(last).share


def all_tests_passed(request: ScoreRequest) -> float:
    """Return 1.0 when the last call of `code_tests` passed every test, else 0.0.

    Raises:
        ValueError: the call was not answered by `code_tests`, or its counts are not known.
    """
    return float(tests_passed(request) == 1.0)


def _last_call(request: ScoreRequest) -> ScoreCall | None:
    calls = [call for turn in request.turns for call in turn.calls]
    for call in reversed(calls):
        # Calls that were not run (malformed, over a limit) and a tool's own error found nothing.
        if call.tool == TESTS_TOOL and call.status == "ok":
            return call
    if not calls and any(turn.num_calls for turn in request.turns):
        raise ValueError(
            "the request says how many calls were made but not which; tests_passed needs `calls` "
            "with the `data` of each"
        )
    return None


def _counts(call: ScoreCall) -> TestedCode:
    try:
        return TestedCode.model_validate(call.data)
    except ValidationError as exc:
        raise ValueError(
            f"a call of {TESTS_TOOL!r} has data = {call.data!r:.200}; tests_passed needs the "
            'counts {"passed", "failed", "total"} of a tool of type = "code_tests"; give a tool of '
            "another kind another name"
        ) from exc
