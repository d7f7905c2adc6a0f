"""Calls that a model writes as plain text: ReAct's actions, and a program in a fenced block."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.rollout.envs.text_env import TextEnv
from agent_r1.text.chat_format import ChatFormat, reply_roles
from agent_r1.text.reading import parse_turn
from agent_r1.text.tool_formats import ToolFormat
from agent_r1.text.tool_formats.code_block import CodeBlockFormat
from agent_r1.text.tool_formats.react import ReactFormat
from tests.support.builders import rollout_task
from tests.support.fakes import FakeToolServer
from tests.unit.rollout.loops import ANSWER, agent_loop

ACTION = 'Thought: I search.\nAction: search\nAction Input: {"query": "Ada"}'
ADA = ("search", {"query": "Ada"}, "")


def read(tool_format: ToolFormat, text: str) -> list[tuple[str, dict[str, Any], str]]:
    calls = parse_turn(text, tool_format=tool_format).calls
    return [(call.name, dict(call.arguments), call.error) for call in calls]


@pytest.mark.parametrize(
    "text",
    [
        ACTION,
        f"<think>who?</think>\n{ACTION}\n",
        ACTION.replace("Input: ", "Input:\n"),
        ACTION.replace("search\n", "search  \n  "),
        f"{ACTION}\nObservation: Ada was born.\n{ACTION}\n<answer>Ada</answer>",
    ],
)
def test_the_first_action_of_a_turn_is_its_call(text: str):
    turn = parse_turn(text, tool_format=ReactFormat())
    assert read(ReactFormat(), text) == [ADA]
    assert turn.answer is None  # what follows an action, the model made up
    assert text[: turn.calls[0].end].endswith("}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Action: search", "no line `Action Input:`"),
        ("Action: search\nI wait.", "no line `Action Input:`"),
        ("Action: search\nAction Input: Ada", "not valid JSON"),
        ('Action: search\nAction Input: "Ada"', '"arguments" of the tool call must be a JSON obj'),
        ("Action:\nAction Input: {}", '"name" of the tool call must be the name of a tool'),
    ],
)
def test_an_action_that_cannot_be_read_says_why(text: str, reason: str):
    ((name, _, error),) = read(ReactFormat(), text)
    assert name == ""
    assert reason in error


@pytest.mark.parametrize("text", ["My Action: search", "<answer>Ada</answer>", "Actions: two"])
def test_other_text_is_no_action(text: str):
    assert read(ReactFormat(), text) == []


def test_the_last_fenced_block_is_the_program():
    text = "First:\n```python\nx = 1\n```\nBetter:\n```py\nx = 2\n```\nDone."
    assert read(CodeBlockFormat(), text) == [("code_tests", {"code": "x = 2\n"}, "")]
    assert read(CodeBlockFormat(), "```\nx = 3\n```") == [("code_tests", {"code": "x = 3\n"}, "")]


@pytest.mark.parametrize(
    "text", ["x = 1", "```python\nx = 1", "<think>\n```python\nx = 1\n```\n</think>"]
)
def test_a_program_that_is_not_in_a_closed_block_is_none(text: str):
    assert read(CodeBlockFormat(), text) == []


@pytest.mark.parametrize(
    "text",
    [
        "{call}<think>Or\n{other}?</think>",
        "{call}<think>Or\n{other}?</think>Done.<think>\n{other}</think>",
        "<think>\n{other}</think>\n{call}<think>\n{other}</think>",
        "{other}{call}<answer>\n{other}</answer>",
        "{call}<answer>a <answer>\n{other}</answer>",
        "<answer>\n{call}<answer>4</answer>",
        "{other}<think>This never ends.\n{call}",
        "{call}<think>Or\n{other}</think><think>This never ends.",
    ],
)
def test_the_program_is_the_last_block_outside_of_thoughts_and_answers(text: str):
    call, other = "```python\nx = 1\n```\n", "```python\nx = 2\n```\n"
    said = text.format(call=call, other=other)
    assert read(CodeBlockFormat(), said) == [("code_tests", {"code": "x = 1\n"}, "")]


def test_a_tag_in_the_program_hides_nothing():
    text = '```\nx = "<think>"\n```\nOr<think>\n```\nx = 2\n```\n</think>'
    assert read(CodeBlockFormat(), text) == [("code_tests", {"code": 'x = "<think>"\n'}, "")]


async def test_results_of_actions_come_as_messages_and_the_template_sees_no_tool(
    chat: ChatFormat, tokenizer: Any, end_id: int
):
    as_text = ChatFormat(
        tokenizer,
        end_of_turn_ids=[end_id],
        reply_roles=reply_roles(tools=False, messages=True),
        tool_format=ReactFormat(),
    )
    async with (
        FakeToolServer() as server,
        agent_loop(as_text, end_id, [ACTION, ANSWER], server, make_env=TextEnv) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    shown = as_text.decode(trajectory.token_ids.tolist())
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    assert [(call.tool, call.status) for call in trajectory.calls()] == [("search", "ok")]
    assert shown.count("Observation: ") == 1
    assert "<tools>" not in shown
    assert "<tool_response>" not in shown
    # The same template, told of the tool, would have shown it.
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [ANSWER], server) as built,
    ):
        told = chat.decode(built.loop.prompt_tokens(rollout_task().task))
    assert "<tools>" in told
