"""Messages of OpenAI's API and of ShareGPT's data sets, read as messages of this system."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from agent_r1.runtime.files.file_formats import first_problem
from agent_r1_proto.messages import decode_entry, encode_entry
from agent_r1_proto.tasks import ChatMessage, MessageCall, RolloutTask, Task
from tests.support.builders import rollout_task

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "Emma"}'},
}
SEARCH = MessageCall(name="search", arguments={"query": "Emma"}, id="call_1")


def read(message: dict[str, Any]) -> ChatMessage:
    return ChatMessage.model_validate(json.loads(json.dumps(message)))


@pytest.mark.parametrize(
    ("given", "content", "calls"),
    [
        ({"content": None, "tool_calls": [CALL]}, "", [SEARCH]),
        ({"tool_calls": [CALL]}, "", [SEARCH]),
        ({"content": "Look.", "tool_calls": [CALL, CALL]}, "Look.", [SEARCH, SEARCH]),
        # What the API's own objects have at all times.
        (
            {"content": "x", "refusal": None, "audio": None, "annotations": [], "tool_calls": None},
            "x",
            [],
        ),
        (
            {"content": None, "function_call": {"name": "search", "arguments": ""}},
            "",
            [MessageCall(name="search")],
        ),
        (
            {"content": "", "tool_calls": [{"name": "search", "arguments": {"query": "Emma"}}]},
            "",
            [MessageCall(name="search", arguments={"query": "Emma"})],
        ),
        (
            {"content": "Jane", "reasoning_content": "easy\n"},
            "<think>\neasy\n</think>\n\nJane",
            [],
        ),
        (
            {"content": None, "reasoning": "hm", "tool_calls": [CALL]},
            "<think>\nhm\n</think>\n\n",
            [SEARCH],
        ),
    ],
)
def test_an_assistants_message_of_the_api_is_read(
    given: dict[str, Any], content: str, calls: list[MessageCall]
):
    message = read({"role": "assistant", **given})
    assert (message.content, message.tool_calls) == (content, calls)
    assert read(message.model_dump(mode="json")) == message  # as a second reader gets it


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"role": "developer", "content": "Be brief."},
            ChatMessage(role="system", content="Be brief."),
        ),
        (
            {"role": "tool", "tool_call_id": "call_1", "name": "search", "content": "Jane"},
            ChatMessage(role="tool", content="Jane", tool_call_id="call_1"),
        ),
        (
            {"role": "function", "name": "search", "content": "Jane"},
            ChatMessage(role="tool", content="Jane"),
        ),
        ({"role": "user", "name": "ann", "content": "Hi"}, ChatMessage(role="user", content="Hi")),
        ({"from": "human", "value": "Who?"}, ChatMessage(role="user", content="Who?")),
        ({"from": "gpt", "value": "Jane"}, ChatMessage(role="assistant", content="Jane")),
        ({"from": "system", "value": "s"}, ChatMessage(role="system", content="s")),
        ({"from": "observation", "value": "o"}, ChatMessage(role="tool", content="o")),
        (
            {
                "from": "function_call",
                "value": '{"name": "search", "arguments": {"query": "Emma"}}',
            },
            ChatMessage(
                role="assistant",
                content="",
                tool_calls=[MessageCall(name="search", arguments={"query": "Emma"})],
            ),
        ),
    ],
)
def test_other_roles_and_sharegpt_are_read(given: dict[str, Any], expected: ChatMessage):
    assert read(given) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"role": "assistant", "content": None, "refusal": "I cannot say."},
        {"role": "assistant", "refusal": "I cannot say."},
        {"role": "assistant", "content": "", "refusal": "I cannot say.", "tool_calls": []},
        {"role": "assistant", "content": "I cannot say.", "refusal": None, "annotations": []},
        {"role": "assistant", "content": "I cannot say.", "refusal": ""},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I cannot say."}]},
    ],
)
def test_a_refusal_is_what_the_assistant_said(given: dict[str, Any]):
    assert read(given).text() == "I cannot say."


def test_parts_of_text_are_read_whatever_the_api_calls_them():
    parts = [
        {"type": "text", "text": "Who ", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "wrote"},
        "Emma?",
    ]
    assert read({"role": "user", "content": parts}).text() == "Who \nwrote\nEmma?"


@pytest.mark.parametrize(
    ("given", "where", "said"),
    [
        ({"role": "user", "content": None}, "1", "content is null or missing"),
        (
            {"role": "assistant", "content": "Emma", "refusal": "No."},
            "1",
            "refusal stands beside a content; keep the one",
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": 3}]},
            "1",
            "tool_calls.0.function (3) must be a JSON object",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "1",
            "tool_calls.0.function.arguments ('{') is no JSON",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "1",
            "tool_calls.0.function.arguments ([]) must be a JSON object",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
            "1.tool_calls.0.name",
            "Input should be a valid string",
        ),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            "1",
            "tool_calls belong to a message of an assistant, not of user",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            "1",
            "content.0 (image_url) cannot be shown to the policy",
        ),
        ({"from": "narrator", "value": "x"}, "1", "from ('narrator') must be one of human, user"),
        ({"role": "assistant", "tool_calls": 3}, "1", "tool_calls (3) must be a list"),
        ({"from": ["human"], "value": "x"}, "1", "from (['human']) must be one of human, user"),
        ({"role": "bot", "content": "x"}, "1.role", "Input should be 'system', 'user'"),
        ({"role": "user", "content": "x", "mood": "good"}, "1.mood", "Extra inputs"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_message_and_field(
    given: dict[str, Any], where: str, said: str
):
    with pytest.raises(ValidationError) as caught:
        Task.model_validate({"id": "t", "prompt": [{"role": "user", "content": "Hi"}, given]})
    text = first_problem(caught.value)
    assert text.startswith(f"prompt.{where}: ")
    assert said in text


def test_a_task_with_calls_travels_whole_and_says_its_version():
    prompt = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Jane"},
    ]
    task = rollout_task(task=Task.model_validate({"id": "t", "prompt": prompt}))
    assert task.written_version() == "2.1"
    assert decode_entry(RolloutTask, encode_entry(task)) == task
