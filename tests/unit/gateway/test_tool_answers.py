"""Which turn a tool of the run has answered."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.trajectory import ToolCallRecord
from tests.support.fakes import build_tokenizer, call_text
from tests.unit.gateway.scripted import open_client, user

END = "<|im_end|>"


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    tokenizer = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids(END)
    return ChatFormat(
        tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"), segments=True
    )


def answered(data: JsonValue, query: str = "x") -> ToolCallRecord:
    return ToolCallRecord(
        end_token_index=0, tool="search", arguments={"query": query}, status="ok", data=data
    )


async def test_an_answer_goes_to_the_last_turn_whose_call_is_open(chat: ChatFormat):
    call = call_text(query="x")
    client = await open_client(chat, min(chat._end_of_turn_ids), call, call, "plain")
    session = client.session
    await session.tool_answered(answered(0, "y"))  # by the agent's program, before any turn
    for question in ("one", "two", "three"):  # agents of their own, and two make the same call
        await client.ask(user(question))
    for data in (1, 2, 3):
        await session.tool_answered(answered(data))
    assert [(one.turn, one.record.data) for one in session.tool_answers] == [
        (0, 0),
        (1, 1),
        (0, 2),
        (2, 3),  # no call is open: the agent's program made it
    ]


async def test_equal_calls_of_a_turn_have_an_answer_each(chat: ChatFormat):
    client = await open_client(chat, min(chat._end_of_turn_ids), call_text(query="x") * 2)
    await client.ask(user("who?"))
    for data in (1, 2):
        await client.session.tool_answered(answered(data))
    (turn,) = client.trajectory().turns
    assert [call.data for call in turn.calls] == [1, 2]
