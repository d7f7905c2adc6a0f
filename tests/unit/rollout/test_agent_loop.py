"""One trajectory from its task to its end: prompt, tokens, masks, seeds, time and sessions."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.control_tokens import TRUNCATION_MARKER
from agent_r1.text.tokens import EngineDeadError, turn_seed
from agent_r1_proto.messages import decode_entry, encode_entry
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import ChatMessage, SamplingParameters, Task
from agent_r1_proto.tools import ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import (
    HERMES_TEMPLATE,
    FakeToolServer,
    build_tokenizer,
    call_text,
)
from tests.unit.rollout.loops import ANSWER, agent_loop, sampled, spoken


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


@pytest.mark.parametrize(
    ("condition", "prompt"),
    [
        ("messages[0].role == 'system'", "who?"),
        (
            "messages | length == 2 and messages[1].role == 'user'",
            [ChatMessage(role="user", content="a")] * 2,
        ),
    ],
)
async def test_a_prompt_that_the_template_refuses_fails_the_attempt(
    end_id: int, condition: str, prompt: str | list[ChatMessage]
):
    raising = f"{{%- if {condition} %}}{{{{ raise_exception('no, thanks') }}}}{{% endif -%}}"
    tokenizer = build_tokenizer(template=raising + HERMES_TEMPLATE)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id])
    env = {"system_prompt": "Be brief."} if isinstance(prompt, str) else {}
    async with agent_loop(chat, end_id, [ANSWER], env=env) as built:
        task = Task(id="t", prompt=prompt)
        trajectory = await built.loop.run(rollout_task().model_copy(update={"task": task}))
        with pytest.raises(ValueError, match="no, thanks"):
            built.loop.prompt_tokens(task)
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("chat_template_error: the chat template cannot render")
    assert built.policy.requests == []


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
    assert seeds == [turn_seed(5, task, 0), turn_seed(5, task, 1)]
    assert trajectory.seed == seeds[0]
    assert {request.temperature for request in built.policy.requests} == {0.7}
    assert trajectory.temperature == 0.7
    assert len({request.request_id for request in built.policy.requests}) == 2


def test_seeds_are_stable_and_differ_by_sample_and_attempt_but_not_incarnation():
    # `printf 0/3/1/0/2 | b2sum -l 64`, halved: pinned, so that runs repeat across releases.
    task = rollout_task(group_id=3, sample_index=1)
    assert turn_seed(0, task, 2) == 3409881853848135412
    others = [
        rollout_task(group_id=3, sample_index=1, attempt=1),
        rollout_task(group_id=3, sample_index=0),
        rollout_task(group_id=4, sample_index=1),
    ]
    assert len({turn_seed(0, other, 2) for other in [task, *others]}) == 4
    resumed = rollout_task(group_id=3, sample_index=1, incarnation=9)
    assert turn_seed(0, resumed, 2) == turn_seed(0, task, 2)


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
