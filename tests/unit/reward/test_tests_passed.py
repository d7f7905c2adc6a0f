"""`tests_passed` and `all_tests_passed`: the last call of code_tests, as the trajectory has it."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.reward.config import RewardTable
from agent_r1.reward.scorer import ComponentError, Scorer, request_of
from agent_r1_proto.rewards import ScoreCall, ScoreRequest, ScoreTurn
from agent_r1_proto.tools import ResultPart, TextPart
from agent_r1_proto.trajectory import ToolCallRecord, Turn
from tests.builders import trajectory

TABLE = RewardTable(components={"tests_passed": 1.0, "all_tests_passed": 0.5})


def call(text: str, tool: str = "code_tests", status: Any = "ok") -> ToolCallRecord:
    parts: list[ResultPart] = [TextPart(text=text)] if text else []
    return ToolCallRecord(
        end_token_index=3, tool=tool, status=status, arguments={"code": "x"}, parts=parts
    )


async def scored(*calls: ToolCallRecord) -> tuple[float, float]:
    made = trajectory()
    first = made.turns[0]
    end = int(made.action_mask.nonzero()[0][0])
    placed = [one.model_copy(update={"end_token_index": end}) for one in calls]
    turn = Turn(start=first.start, end=first.end, text="x", finish_reason="stop", calls=placed)
    reward = await Scorer(TABLE).score(request_of(made.model_copy(update={"turns": [turn]})))
    return reward.components["tests_passed"], reward.components["all_tests_passed"]


async def test_the_last_call_counts():
    assert await scored(call("1 of 4 tests passed.\nFailed: …")) == (0.25, 0.0)
    assert await scored(call("All 4 tests passed."), call("3 of 4 tests passed.")) == (0.75, 0.0)
    assert await scored(call("0 of 4 tests passed."), call("All 4 tests passed.")) == (1.0, 1.0)


async def test_calls_that_ran_no_tests_change_nothing():
    assert await scored() == (0.0, 0.0)
    assert await scored(call("All 9 tests passed.", tool="python_exec")) == (0.0, 0.0)
    for status in ("malformed", "over_limit", "error"):
        later = call("Error: no", status=status)
        assert await scored(call("3 of 4 tests passed."), later) == (0.75, 0.0)


async def test_what_the_program_prints_cannot_fake_the_counts():
    text = "0 of 4 tests passed.\nFailed: assert f()\n  All 4 tests passed."
    assert await scored(call(text)) == (0.0, 0.0)


async def test_a_tool_of_another_kind_under_that_name_is_an_error():
    with pytest.raises(ComponentError, match=r"not the first line of type = .code_tests"):
        await scored(call("fine"))
    with pytest.raises(ComponentError, match="not the first line"):
        await scored(call(""))


async def test_calls_without_answers_are_an_error_and_not_a_failed_test():
    turn = ScoreTurn(text="x", num_calls=1, calls=[ScoreCall(tool="code_tests")])
    with pytest.raises(ComponentError, match="a call of POST /score has no answer"):
        await Scorer(TABLE).score(ScoreRequest(payload={}, turns=[turn]))
    turn = ScoreTurn(text="x", num_calls=1)
    with pytest.raises(ComponentError, match="says how many calls were made but not which"):
        await Scorer(TABLE).score(ScoreRequest(payload={}, turns=[turn]))
