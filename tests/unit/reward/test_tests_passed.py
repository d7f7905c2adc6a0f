"""`tests_passed` and `all_tests_passed`: the counts of the last call of code_tests."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import JsonValue

from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1_proto.parts import TextPart
from agent_r1_proto.rewards import ScoreCall, ScoreRequest, ScoreTurn
from agent_r1_proto.trajectory import ToolCallRecord, Turn
from tests.support.builders import trajectory

TABLE = RewardConfig(components={"tests_passed": 1.0, "all_tests_passed": 0.5})


def call(
    passed: int, total: int = 4, *, tool: str = "code_tests", status: Any = "ok"
) -> ToolCallRecord:
    counts: JsonValue = {"passed": passed, "failed": total - passed, "total": total}
    return ToolCallRecord(
        end_token_index=3, tool=tool, status=status, arguments={"code": "x"}, data=counts
    )


async def scored(*calls: ToolCallRecord) -> tuple[float, float]:
    made = trajectory()
    first = made.turns[0]
    end = int(made.action_mask.nonzero()[0][0])
    placed = [one.model_copy(update={"end_token_index": end}) for one in calls]
    turn = Turn(start=first.start, end=first.end, text="x", finish_reason="stop", calls=placed)
    reward = await Scorer(TABLE).score_trajectory(made.model_copy(update={"turns": [turn]}))
    return reward.components["tests_passed"], reward.components["all_tests_passed"]


async def test_the_last_call_counts():
    assert await scored(call(1)) == (0.25, 0.0)
    assert await scored(call(4), call(3)) == (0.75, 0.0)
    assert await scored(call(0), call(4)) == (1.0, 1.0)


async def test_calls_that_ran_no_tests_change_nothing():
    assert await scored() == (0.0, 0.0)
    assert await scored(call(4, tool="python_exec")) == (0.0, 0.0)
    for status in ("malformed", "over_limit", "error"):
        assert await scored(call(3), call(0, status=status)) == (0.75, 0.0)


async def test_what_the_program_prints_cannot_fake_the_counts():
    fake = TextPart(text='All 4 tests passed.\n{"passed": 4, "failed": 0, "total": 4}')
    assert await scored(call(0).model_copy(update={"parts": [fake]})) == (0.0, 0.0)


@pytest.mark.parametrize(
    "data",
    [None, {}, [], "4 of 4", {"passed": 5, "failed": 0, "total": 4}, {"passed": 0, "total": 0}],
)
async def test_a_tool_of_another_kind_under_that_name_is_an_error(data: Any):
    with pytest.raises(ComponentError, match=r'needs the counts .* of type = "code_tests"'):
        await scored(call(4).model_copy(update={"data": data}))


async def test_a_request_over_http_carries_the_counts_itself():
    counts: JsonValue = {"passed": 3, "failed": 1, "total": 4}
    one = ScoreCall(tool="code_tests", data=counts)
    turn = ScoreTurn(text="x", num_calls=1, calls=[one])
    reward = await Scorer(TABLE).score(ScoreRequest(payload={}, turns=[turn]))
    assert reward.components["tests_passed"] == 0.75
    turn = ScoreTurn(text="x", num_calls=1)
    with pytest.raises(ComponentError, match="says how many calls were made but not which"):
        await Scorer(TABLE).score(ScoreRequest(payload={}, turns=[turn]))
