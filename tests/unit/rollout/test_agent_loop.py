"""One trajectory: tokens, masks, calls, limits, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.rollout.outside_text import TRUNCATION_MARKER
from agent_r1.rollout.policy import EngineDeadError
from agent_r1.rollout.trajectory_builder import derive_seed
from agent_r1_proto.messages import decode_entry, encode_entry
from agent_r1_proto.tasks import ChatMessage, SamplingParameters, Task
from agent_r1_proto.tool_pool import ToolInstance, ToolState
from agent_r1_proto.tools import TextPart, ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FORGETFUL_TEMPLATE,
    FakeToolServer,
    build_tokenizer,
    call_text,
)
from tests.unit.rollout.loops import ANSWER, agent_loop, sampled


def spoken(chat: ChatFormat, trajectory: Trajectory) -> list[str]:
    """The masked-in tokens of each turn, decoded, end-of-turn token included."""
    return [chat.decode(trajectory.token_ids[t.start : t.end].tolist()) for t in trajectory.turns]


async def test_two_turns_are_one_sequence_with_mask_and_logprobs(chat: ChatFormat, end_id: int):
    search = "<think>look</think>" + call_text(query="Ada")
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [search, ANSWER], server) as built,
    ):
        trajectory = await built.loop.run(rollout_task(run_id="run"))

    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    # The whole sequence reads as the dialogue, in the template's own words.
    assert chat.decode(trajectory.token_ids.tolist()).endswith(
        "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"
        f"{search}<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        'result of {"query": "Ada"}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
        f"{ANSWER}<|im_end|>"
    )
    # Mask and log-probabilities: exactly what was sampled, end-of-turn token included.
    first, second = sampled(chat, end_id, search), sampled(chat, end_id, ANSWER)
    assert trajectory.token_ids[trajectory.action_mask].tolist() == first + second
    expected = [-(i + 1) / 100 for turn in (first, second) for i in range(len(turn))]
    np.testing.assert_allclose(
        trajectory.rollout_logprobs[trajectory.action_mask], expected, rtol=1e-6
    )
    assert spoken(chat, trajectory) == [f"{search}<|im_end|>", f"{ANSWER}<|im_end|>"]
    assert [turn.text for turn in trajectory.turns] == [search, ANSWER]
    assert trajectory.prompt_length == trajectory.turns[0].start
    # The second prompt is the first with what was sampled and the reply, token for token.
    turn = trajectory.turns[1]
    assert built.policy.requests[1].token_ids == trajectory.token_ids[: turn.start].tolist()

    (call,) = trajectory.turns[0].calls
    assert chat.encode("</tool_call>") == [trajectory.token_ids[call.end_token_index]]
    assert (call.tool, call.arguments, call.status) == ("search", {"query": "Ada"}, "ok")
    assert (call.version, call.instance, call.attempt) == ("7", "fake-1", 0)
    assert call.latency_ms > 0
    assert call.parts == [TextPart(text='result of {"query": "Ada"}')]
    # It survives the wire.
    assert decode_entry(Trajectory, encode_entry(trajectory)).turns == trajectory.turns


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


async def test_a_trajectory_has_a_time_of_its_own(chat: ChatFormat, end_id: int):
    async def slow(_: ToolCall) -> ToolResult:
        await asyncio.sleep(30)
        return ToolResult()

    async with (
        FakeToolServer(answer=slow) as server,
        agent_loop(
            chat, end_id, [call_text(query="a")], server, env={"trajectory_timeout_s": 0.2}
        ) as built,
    ):
        trajectory = await asyncio.wait_for(built.loop.run(rollout_task()), 10)
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith(("trajectory_timeout: ", "tool_timeout: search"))
    assert trajectory.latency_ms < 5000


# -- limits --------------------------------------------------------------------------------------


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


async def test_prompt_longer_than_the_context_is_the_tasks_fault(
    chat: ChatFormat, end_id: int, caplog: pytest.LogCaptureFixture
):
    task = rollout_task(task=Task(id="long", prompt="z" * 500))
    async with agent_loop(chat, end_id, [ANSWER], max_context=200) as built:
        trajectory = await built.loop.run(task)
        await built.loop.run(task)
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "prompt_too_long")
    assert len(trajectory.token_ids) == trajectory.prompt_length == 200
    assert built.policy.requests == []
    (loud,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "task_id=long" in loud.getMessage()
    assert "limit=200; raise model.max_context" in loud.getMessage()


# -- prompts, seeds, versions --------------------------------------------------------------------


async def test_first_prompt_is_logged_in_full(
    chat: ChatFormat, end_id: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    env = {"system_prompt": "You find things."}
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [ANSWER], server, env=env) as built,
    ):
        for _ in range(2):
            await built.loop.run(rollout_task())
    (line,) = [r.getMessage() for r in caplog.records if "first prompt" in r.getMessage()]
    assert "<|im_start|>system\nYou find things.\n<tools>" in line
    assert "Looks things up." in line


async def test_prompt_that_ends_with_a_result_is_shown_as_between_turns(
    chat: ChatFormat, end_id: int
):
    said = call_text(query="Ada")
    shown = "<|im_end|>" + "long " * 30
    prompt = [
        ChatMessage(role="user", content="who?"),
        ChatMessage(role="assistant", content=said),
        ChatMessage(role="tool", content=shown),
    ]
    env = {"max_tool_response_chars": 64, "system_prompt": "Be brief."}

    def found(_: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text=shown)])

    async with (
        FakeToolServer(answer=found) as server,
        agent_loop(chat, end_id, [said, ANSWER], server, env=env) as built,
    ):
        sampled_it = await built.loop.run(rollout_task())
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [ANSWER], server, env=env) as built,
    ):
        sampling = SamplingParameters(temperature=0.0, max_turns=1)
        task = rollout_task(task=Task(id="t", prompt=prompt), sampling=sampling)
        trajectory = await built.loop.run(task)
    # The same tokens as if the model had called the tool, but none of them counts as sampled.
    assert trajectory.token_ids.tolist() == sampled_it.token_ids.tolist()
    assert trajectory.prompt_length == trajectory.turns[0].start == sampled_it.turns[1].start
    assert (trajectory.status, len(trajectory.turns)) == ("COMPLETED", 1)
    assert server.calls == []
    text = chat.decode(trajectory.token_ids.tolist())
    assert text.count(TRUNCATION_MARKER) == 1
    assert "Be brief.\n<tools>" in text


async def test_own_system_message_stands(chat: ChatFormat, end_id: int):
    prompt = [ChatMessage(role="system", content="Mine."), ChatMessage(role="user", content="q")]
    task = rollout_task(task=Task(id="t", prompt=prompt, payload={"answers": ["secret"]}))
    async with agent_loop(chat, end_id, [ANSWER], env={"system_prompt": "Yours."}) as built:
        trajectory = await built.loop.run(task)
    text = chat.decode(trajectory.token_ids.tolist())
    assert "Mine." in text
    assert "Yours." not in text
    assert "secret" not in text


async def test_task_chooses_its_tools(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server) as built,
    ):
        none = rollout_task(task=Task(id="t", prompt="q", tools=[]))
        trajectory = await built.loop.run(none)
        assert "<tools>" not in chat.decode(trajectory.token_ids.tolist())
        assert trajectory.turns[0].calls[0].status == "unknown_tool"
        missing = rollout_task(task=Task(id="t", prompt="q", tools=["maps"]))
        failed = await built.loop.run(missing)
    assert (failed.status, failed.reason) == (
        "FAILED",
        "unknown_tool_in_task: maps; offered: search",
    )


async def test_unknown_enabled_tool_is_refused_at_start(chat: ChatFormat, end_id: int):
    with pytest.raises(ValueError, match=r"env\.enable_tools names maps"):
        async with agent_loop(chat, end_id, [ANSWER], env={"enable_tools": ["maps"]}):
            pass


async def test_every_turn_has_its_own_seed_and_the_samples_temperature(
    chat: ChatFormat, end_id: int
):
    task = rollout_task(sampling=SamplingParameters(temperature=0.7))
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server) as built,
    ):
        trajectory = await built.loop.run(task)
    seeds = [request.seed for request in built.policy.requests]
    assert seeds == [derive_seed(5, task.key, 0), derive_seed(5, task.key, 1)]
    assert trajectory.seed == seeds[0]
    assert {request.temperature for request in built.policy.requests} == {0.7}
    assert trajectory.temperature == 0.7
    assert len({request.request_id for request in built.policy.requests}) == 2


def test_seeds_are_stable_and_differ_by_sample_and_attempt_but_not_incarnation():
    # `printf 0/3/1/0/2 | b2sum -l 64`, halved: pinned, so that runs repeat across releases.
    key = rollout_task(group_id=3, sample_index=1).key
    assert derive_seed(0, key, 2) == 3409881853848135412
    others = [
        rollout_task(group_id=3, sample_index=1, attempt=1).key,
        rollout_task(group_id=3, sample_index=0).key,
        rollout_task(group_id=4, sample_index=1).key,
    ]
    assert len({derive_seed(0, k, 2) for k in [key, *others]}) == 4
    assert derive_seed(0, rollout_task(group_id=3, sample_index=1, incarnation=9).key, 2) == (
        derive_seed(0, key, 2)
    )


async def test_seed_of_the_task_is_used_for_the_first_turn(chat: ChatFormat, end_id: int):
    task = rollout_task(sampling=SamplingParameters(seed=11))
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server) as built,
    ):
        trajectory = await built.loop.run(task)
    first, second = (request.seed for request in built.policy.requests)
    assert (first, trajectory.seed) == (11, 11)
    assert second != 11


async def test_version_spans_follow_the_tokens_across_a_weight_load(chat: ChatFormat, end_id: int):
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server) as built,
    ):
        policy = built.policy

        def load_then_answer(call: ToolCall) -> ToolResult:
            policy.policy_version = 4
            return ToolResult(parts=[TextPart(text="x")])

        server.answer = load_then_answer
        trajectory = await built.loop.run(rollout_task())
    first, second = trajectory.turns
    assert [(s.policy_version, s.start, s.end) for s in trajectory.version_spans] == [
        (0, first.start, first.end),
        (4, second.start, second.end),
    ]
    assert trajectory.policy_versions() == [0, 4]


async def test_dead_engine_is_nobodys_attempt(chat: ChatFormat, end_id: int):
    async with agent_loop(chat, end_id, [ANSWER]) as built:
        built.policy.die()
        with pytest.raises(EngineDeadError):
            await built.loop.run(rollout_task())


# -- sessions and environments -------------------------------------------------------------------


async def test_session_is_opened_at_the_first_call_and_closed_however_it_ends(
    chat: ChatFormat, end_id: int
):
    async with (
        FakeToolServer(sessions=True) as server,
        agent_loop(
            chat,
            end_id,
            [call_text(query="a"), call_text(query="b")],
            server,
            retries=0,
            env={"max_turns": 2},
        ) as built,
    ):
        done = await built.loop.run(rollout_task())
        assert (server.opened, server.closed) == ([done.rollout_id], [done.rollout_id])
        server.statuses = [200, 500]
        failed = await built.loop.run(rollout_task(attempt=1))
    assert failed.reason.startswith("tool_http_5xx: search: ")
    assert server.closed == [done.rollout_id, failed.rollout_id]


async def test_calls_of_one_session_keep_their_order(chat: ChatFormat, end_id: int):
    turn = call_text(query="a") + call_text(query="b") + call_text(query="c")
    async with (
        FakeToolServer(sessions=True) as server,
        agent_loop(chat, end_id, [turn, ANSWER], server) as built,
    ):
        await built.loop.run(rollout_task())
    assert [[c.arguments["query"] for c in r.calls] for r in server.requests] == [
        ["a"],
        ["b"],
        ["c"],
    ]


class Scored(ToolEnv):
    """Rewards calls, stops after the tool says so."""

    def __init__(self, task: Task, bonus: float = 0.5) -> None:
        super().__init__(task)
        self.bonus = bonus
        self.closed = False

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        step = await super().step(turn, results)
        found = [self.bonus if result.data == "hit" else None for result in results]
        missed = sum(result.data == "miss" for result in results)
        key = f"{missed} missed \ud83d"
        step = replace(step, process_rewards=found, turn_reward=-missed, state_key=key)
        if any(result.data == "goal" for result in results):
            return replace(step, done=True, reason="goal")
        return step


async def test_environment_rewards_calls_and_ends_the_trajectory(chat: ChatFormat, end_id: int):
    def answer(call: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text="x")], data=call.arguments["query"])

    async with (
        FakeToolServer(answer=answer) as server,
        agent_loop(
            chat,
            end_id,
            [call_text(query="hit") + call_text(query="miss"), call_text(query="goal")],
            server,
            make_env=Scored,
        ) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "goal")
    assert [call.process_reward for call in trajectory.calls()] == [0.5, None, None]
    assert [turn.process_reward for turn in trajectory.turns] == [-1.0, 0.0]
    # Where the first turn led, half a surrogate pair replaced.
    keys = [turn.state_key for turn in trajectory.turns]
    assert keys == ["", "1 missed \N{REPLACEMENT CHARACTER}"]


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


class Insisting(ToolEnv):
    """Asks again, once, when the model answers without a call."""

    sends_messages = True

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        if turn.number == 0:
            return EnvStep(message="Are you sure?")
        return await super().step(turn, results)


async def test_environment_may_speak_as_the_user(tokenizer: Any, end_id: int):
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"))
    async with agent_loop(chat, end_id, [ANSWER], make_env=Insisting) as built:
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "COMPLETED"
    assert chat.decode(trajectory.token_ids.tolist()).endswith(
        f"{ANSWER}<|im_end|>\n<|im_start|>user\nAre you sure?<|im_end|>\n"
        f"<|im_start|>assistant\n{ANSWER}<|im_end|>"
    )


@pytest.fixture(scope="module")
def forgetful(end_id: int) -> ChatFormat:
    tokenizer = build_tokenizer(template=FORGETFUL_TEMPLATE)
    return ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)


async def test_a_rewritten_history_begins_a_segment_of_the_trajectory(
    forgetful: ChatFormat, end_id: int
):
    search = "<think>look</think>" + call_text(query="Ada")
    turns = [search, search, ANSWER]
    async with (
        FakeToolServer() as server,
        agent_loop(forgetful, end_id, turns, server) as built,
    ):
        trajectory = await built.loop.run(rollout_task())

    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    # Each segment is what the model was asked with, and what it then wrote, token for token.
    said = [sampled(forgetful, end_id, turn) for turn in turns]
    wanted = [
        [*request.token_ids, *turn]
        for request, turn in zip(built.policy.requests, said, strict=True)
    ]
    bounds = trajectory.segment_bounds()
    assert [trajectory.token_ids[start:end].tolist() for start, end in bounds] == wanted
    lengths = [len(segment) for segment in wanted]
    assert trajectory.segment_starts == [lengths[0], lengths[0] + lengths[1]]
    # The later ones begin with the dialogue without its thoughts.
    last = forgetful.decode(built.policy.requests[-1].token_ids)
    assert (last.count("<think>"), last.count("<tool_call>")) == (0, 2)
    # What was sampled stands there once; everything that points at it points into the whole.
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [
        t for turn in said for t in turn
    ]
    expected = [-(i + 1) / 100 for turn in said for i in range(len(turn))]
    np.testing.assert_allclose(
        trajectory.rollout_logprobs[trajectory.action_mask], expected, rtol=1e-6
    )
    assert spoken(forgetful, trajectory) == [f"{turn}<|im_end|>" for turn in turns]
    close = forgetful.encode("</tool_call>")
    assert [[trajectory.token_ids[c.end_token_index]] for c in trajectory.calls()] == [close] * 2
    spans = [(span.start, span.end) for span in trajectory.version_spans]
    assert spans == [(turn.start, turn.end) for turn in trajectory.turns]
    assert decode_entry(Trajectory, encode_entry(trajectory)).turns == trajectory.turns


async def test_the_context_limits_a_segment_and_not_the_trajectory(
    forgetful: ChatFormat, end_id: int
):
    search = f"<think>{'so ' * 200}</think>" + call_text(query="Ada")  # about 650 tokens
    async with (
        FakeToolServer() as server,
        agent_loop(forgetful, end_id, [search, search, ANSWER], server, max_context=1200) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "COMPLETED"
    longest = max(end - start for start, end in trajectory.segment_bounds())
    assert longest <= 1200 < len(trajectory.token_ids)


async def test_a_rewritten_history_that_leaves_no_room_ends_the_trajectory(
    forgetful: ChatFormat, end_id: int
):
    async with (
        FakeToolServer(answer=lambda _: ToolResult(parts=[TextPart(text="x" * 300)])) as server,
        agent_loop(forgetful, end_id, [call_text(query="Ada")], server, max_context=400) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_trajectory_tokens")
    # Nothing was sampled after it, so it is no part of the trajectory.
    assert trajectory.segment_starts == []
    assert trajectory.action_mask[-1]


async def test_a_history_that_the_template_cannot_render_fails_the_attempt(end_id: int):
    template = FORGETFUL_TEMPLATE.replace(
        "{%- for message in messages -%}",
        "{%- if messages|length > 5 %}{{ raise_exception('too long a talk') }}{% endif -%}"
        "{%- for message in messages -%}",
    )
    tokenizer = build_tokenizer(template=template)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="Ada")], server) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("chat_template_error: the chat template cannot render")


async def test_the_environment_gets_the_answer_that_the_pattern_finds(
    chat: ChatFormat, end_id: int
):
    seen: list[str | None] = []

    class Listening(ToolEnv):
        async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
            seen.append(turn.answer)
            return await super().step(turn, results)

    env = {"answer_pattern": r"Answer: (\w+)"}
    for text in ("Answer: no. Answer: yes.", ANSWER):
        async with agent_loop(chat, end_id, [text], env=env, make_env=Listening) as built:
            await built.loop.run(rollout_task())
    assert seen == ["yes", None]


class Broken(ToolEnv):
    """Raises."""

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        raise KeyError("goal")


class Unmade(ToolEnv):
    """Cannot be made."""

    def __init__(self, task: Task) -> None:
        raise LookupError("no goal \ud800")


def returning(step: Any) -> type[ToolEnv]:
    """Return an environment whose steps are all this one."""

    class Mine(ToolEnv):
        async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> Any:
            return step

    return Mine


@pytest.mark.parametrize(
    ("make_env", "reason"),
    [
        (Broken, "Broken.step raised KeyError: 'goal'"),
        (Unmade, "Unmade(...) raised LookupError: no goal \N{REPLACEMENT CHARACTER}"),
        (returning(EnvStep()), "Mine.step returned nothing to continue with after a turn"),
        (returning(None), "Mine.step returned None; it must return an EnvStep"),
        (returning({"done": True}), "Mine.step returned dict ({'done': True}); it must return an"),
        (
            returning(EnvStep(done=True, process_rewards=[1.0])),
            "Mine.step returned 1 process rewards for 0 calls; return one per call, or none",
        ),
        (
            returning(EnvStep(done=True, process_rewards=[float("nan")])),
            "Mine.step returned process_rewards = [nan]; they must be a list of finite numbers",
        ),
        (
            returning(EnvStep(done=True, process_rewards=0.5)),  # type: ignore[arg-type]
            "Mine.step returned process_rewards = 0.5; they must be a list",
        ),
        (
            returning(EnvStep(done=True, turn_reward=float("inf"))),
            "Mine.step returned turn_reward = inf; it must be a finite number or None",
        ),
        (
            returning(EnvStep(done=True, state_key=("a", 1))),  # type: ignore[arg-type]
            "Mine.step returned state_key = ('a', 1); it must be a text",
        ),
        (
            returning(EnvStep(observations="found")),
            "Mine.step returned observations = 'found'; they must be a list of texts",
        ),
        (
            returning(EnvStep(done=1)),  # type: ignore[arg-type]
            "Mine.step returned done = 1; it must be True or False",
        ),
        (
            returning(EnvStep(message=b"on")),  # type: ignore[arg-type]
            "Mine.step returned message = b'on'; it must be a text or None",
        ),
    ],
)
async def test_environment_that_fails_fails_the_attempt(
    chat: ChatFormat,
    end_id: int,
    make_env: Any,
    reason: str,
    caplog: pytest.LogCaptureFixture,
):
    async with agent_loop(chat, end_id, [ANSWER], make_env=make_env) as built:
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith(f"env_error: {reason}")
    assert any(record.exc_info for record in caplog.records)  # the traceback is in the log


async def test_half_a_surrogate_pair_of_an_environment_is_replaced(chat: ChatFormat, end_id: int):
    class Quoting(ToolEnv):
        async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
            if results:
                return EnvStep(observations=["half \ud83d pair"] * len(results))
            return EnvStep(done=True, reason="an\udc00swer")

    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="a"), ANSWER], server, make_env=Quoting) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == (
        "COMPLETED",
        "an\N{REPLACEMENT CHARACTER}swer",
    )
    assert "half \N{REPLACEMENT CHARACTER} pair" in chat.decode(trajectory.token_ids.tolist())
