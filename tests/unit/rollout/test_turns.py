"""Turns: their calls, what the model sees of the results, and the limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.control_tokens import TRUNCATION_MARKER
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import SamplingParameters
from agent_r1_proto.tool_pool import ToolInstance, ToolState
from agent_r1_proto.tools import ToolCall, ToolResult
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FakeToolServer,
    call_text,
)
from tests.unit.rollout.loops import ANSWER, agent_loop


async def test_calls_of_a_turn_all_run_and_are_answered_in_order(chat: ChatFormat, end_id: int):
    turn = "".join(
        [
            call_text(query="a"),
            "<tool_call>{oops}</tool_call>",
            call_text("teleport"),
            call_text(query=3),
            call_text(query="b"),
        ]
    )
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [turn, ANSWER], server, env={"max_calls_per_turn": 4}) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    statuses = [call.status for call in trajectory.turns[0].calls]
    assert statuses == ["ok", "malformed", "unknown_tool", "malformed", "over_limit"]
    ends = [call.end_token_index for call in trajectory.turns[0].calls]
    assert ends == sorted(set(ends))
    assert [call.arguments for call in server.calls] == [{"query": "a"}]
    shown = built.policy.requests[1].token_ids
    text = chat.decode(shown[trajectory.turns[0].end :])
    responses = [part.split("\n</tool_response>")[0] for part in text.split("<tool_response>\n")]
    assert responses[1:] == [
        'result of {"query": "a"}',
        "Error: the tool call is not valid JSON: Expecting property name enclosed in double "
        "quotes at character 1",
        "Error: there is no tool 'teleport'; tools: search",
        "Error: the arguments do not fit search: query: 3 is not of type 'string'",
        "Error: only the first 4 tool calls of a turn are run; this one was not",
    ]


async def test_calls_of_one_turn_run_at_once(chat: ChatFormat, end_id: int):
    turn = call_text(query="a") + call_text(query="b")
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [turn, ANSWER], server) as built,
    ):
        await built.loop.run(rollout_task())
    assert [len(request.calls) for request in server.requests] == [2]


async def test_tool_error_is_an_answer(chat: ChatFormat, end_id: int):
    def no_such_page(_: ToolCall) -> ToolResult:
        return ToolResult(status="error", parts=[TextPart(text="no such page")])

    async with (
        FakeToolServer(answer=no_such_page) as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "COMPLETED"
    assert trajectory.turns[0].calls[0].status == "error"
    assert "no such page" in chat.decode(trajectory.token_ids.tolist())


@pytest.mark.parametrize(
    ("fault", "reason", "attempts"),
    [
        ({"always": 503}, "tool_busy: search", 3),
        ({"always": 404}, "tool_http_4xx: search", 1),
        ({"always": 501}, "tool_broken: search", 1),
        ({"reply": b"<html>"}, "tool_bad_reply: search", 1),
    ],
)
async def test_outage_fails_the_attempt_and_is_no_observation(
    chat: ChatFormat, end_id: int, fault: dict[str, Any], reason: str, attempts: int
):
    async with (
        FakeToolServer(**fault) as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server, retries=2) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith(f"{reason}: ")
    (call,) = trajectory.turns[0].calls
    assert (call.status, call.attempt) == ("failed", attempts - 1)
    assert call.error == trajectory.reason
    assert len(server.requests) == attempts
    # Nothing follows the sampled turn.
    assert trajectory.turns[0].end == len(trajectory.token_ids)
    assert len(built.policy.requests) == 1


async def test_short_outage_is_retried_and_recorded(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer(statuses=[503, 429]) as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server, retries=2) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "COMPLETED"
    assert trajectory.turns[0].calls[0].attempt == 2


async def test_a_call_without_an_answer_says_how_long_it_was_waited_for(
    chat: ChatFormat, end_id: int
):
    async def slow(_: ToolCall) -> ToolResult:
        await asyncio.sleep(30)
        return ToolResult()

    async with (
        FakeToolServer(answer=slow) as server,
        agent_loop(chat, end_id, [call_text(query="a")], server, timeout_s=0.2) as built,
    ):
        trajectory = await asyncio.wait_for(built.loop.run(rollout_task()), 10)
    assert trajectory.reason.startswith("tool_timeout: search")
    assert 200 <= trajectory.turns[0].calls[0].latency_ms < 10_000


async def test_max_turns_truncates_after_the_last_calls_ran(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a")], server, env={"max_turns": 2}) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_turns")
    assert len(trajectory.turns) == 2
    assert trajectory.action_mask[-1]  # ends with what was sampled, no unread result
    assert trajectory.turns[1].calls[0].status == "ok"


async def test_task_overrides_max_turns(chat: ChatFormat, end_id: int):
    task = rollout_task(sampling=SamplingParameters(max_turns=1))
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server) as built,
    ):
        trajectory = await built.loop.run(task)
    assert (trajectory.reason, len(trajectory.turns)) == ("max_turns", 1)


async def test_turn_cut_by_its_limit_ends_without_an_end_token(chat: ChatFormat, end_id: int):
    text = call_text(query="a") * 3
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [text], server, env={"max_tokens_per_turn": 10}) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_tokens_per_turn")
    assert trajectory.turns[0].finish_reason == "length"
    assert trajectory.num_action_tokens == 10
    assert end_id not in trajectory.token_ids[trajectory.prompt_length :]
    assert server.calls == []


async def test_context_limit_cuts_a_turn(chat: ChatFormat, end_id: int):
    async with agent_loop(chat, end_id, ["x" * 500], max_context=120) as built:
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_trajectory_tokens")
    assert len(trajectory.token_ids) == 120


async def test_result_that_leaves_no_room_ends_the_trajectory(chat: ChatFormat, end_id: int):
    def long(_: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text="y" * 1000)])

    async with (
        FakeToolServer(answer=long) as server,
        agent_loop(chat, end_id, [call_text(query="a")], server, max_context=900) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_trajectory_tokens")
    assert trajectory.action_mask[-1]
    assert len(built.policy.requests) == 1


async def test_long_tool_results_are_cut_with_a_marker(chat: ChatFormat, end_id: int):
    def long(_: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text="y" * 300)])

    limits = {"max_tool_response_chars": 100, "max_tool_response_tokens": 40}
    async with (
        FakeToolServer(answer=long) as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server, env=limits) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    text = chat.decode(built.policy.requests[1].token_ids)
    response = text.rsplit("<tool_response>\n", 1)[1].split("\n</tool_response>")[0]
    assert response.endswith(TRUNCATION_MARKER)
    assert len(chat.encode_text(response)) <= 40
    (part,) = trajectory.turns[0].calls[0].parts
    assert isinstance(part, TextPart)
    assert len(part.text) == 100


def announced(*servers: FakeToolServer) -> ToolState:
    instances = [
        ToolInstance(instance=s.instance, url=s.url, spec=s.spec, capacity=8) for s in servers
    ]
    return ToolState(instances, [server.version for server in servers], {})


@pytest.mark.parametrize(("pin", "versions"), [("trajectory", ["7", "7"]), ("none", ["7", "8"])])
async def test_a_new_version_in_the_middle_of_a_trajectory(
    chat: ChatFormat, end_id: int, pin: str, versions: list[str]
):
    def upgrade(_: ToolCall) -> ToolResult:
        built.tools.directory.update("search", announced(old, new))
        return ToolResult(parts=[TextPart(text="x")])

    async with (
        FakeToolServer(answer=upgrade) as old,
        FakeToolServer(version="8", instance="fake-2") as new,
        agent_loop(
            chat,
            end_id,
            [call_text(query="a"), call_text(query="b"), ANSWER],
            old,
            env={"pin": pin},
        ) as built,
    ):
        built.tools.directory.update("search", announced(old))
        trajectory = await built.loop.run(rollout_task())
    assert [call.version for call in trajectory.calls()] == versions
    instances = {"7": "fake-1", "8": "fake-2"}
    assert [call.instance for call in trajectory.calls()] == [instances[v] for v in versions]


async def test_data_of_a_tool_is_recorded_up_to_a_limit(chat: ChatFormat, end_id: int):
    answers: dict[str, Any] = {"few": [{"id": "p1"}], "many": ["x" * 20_000]}

    def answer(call: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text="x")], data=answers[str(call.arguments["query"])])

    async with (
        FakeToolServer(answer=answer) as server,
        agent_loop(
            chat, end_id, [call_text(query="few"), call_text(query="many"), ANSWER], server
        ) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert [call.data for call in trajectory.calls()] == [[{"id": "p1"}], None]
