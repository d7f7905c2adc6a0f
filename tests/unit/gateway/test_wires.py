"""The features of every wire, as its clients see them: the table of docs/any-agent.md.

The SDKs of OpenAI and Anthropic ask real sessions with a scripted policy over a real port. A test
says with `on` which wires have what it is about; the page has the same table.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from agent_r1.gateway.wire import Waiting
from agent_r1.text.chat_format import ChatFormat
from tests.support.fakes import FORGETFUL_TEMPLATE, build_tokenizer, call_text
from tests.unit.gateway.wire_clients import (
    WIRES,
    Answer,
    Chat,
    Messages,
    Responses,
    Wire,
)
from tests.unit.gateway.wire_fakes import CALL, FakeSession, turn
from tests.unit.gateway.wire_sessions import (
    ALL,
    HAVE,
    SEARCH,
    Opened,
    faked,
    on,
    opened,
    post,
    reasons,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "any-agent.md"


def test_the_table_of_the_page_is_what_is_tested():
    for module in ("test_wire_features", "test_wire_refusals"):
        importlib.import_module(f"tests.unit.gateway.{module}")
    rows = re.findall(r"^\| [^|]+ \| `(test_\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    told = {
        name: tuple(wire for wire, cell in zip(ALL, cells.split("|"), strict=True) if "yes" in cell)
        for name, cells in rows
    }
    assert told == HAVE


# -- answers -------------------------------------------------------------------------------------


@on(*ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_thought_text_and_parallel_calls(kind: type[Wire], stream: bool):
    texts = ["<th", "ink>Hm", "m</think>\nLet", " me see.\n", CALL[:20], CALL[20:], CALL]
    session = FakeSession(
        [
            Waiting(),
            *turn(*texts),
        ]
    )
    async with faked(kind, session) as wire:
        got = await wire.ask([wire.user("Where?")], tools=[wire.tool()], stream=stream)
    assert (got.thought, got.content) == ("Hmm", "Let me see.")
    asked = {"q": "東京"}
    assert got.calls == [("call_3_0", "search", asked), ("call_3_1", "search", asked)]
    assert got.reason == reasons(kind)["calls"]
    assert got.usage == (10, 4, 7)
    assert session.asked[0].tools[0].name == "search"
    assert session.asked[0].is_streamed == stream
    assert session.delivered_turns == [3]


@on(*ALL)
async def test_a_call_that_cannot_be_read_is_text(kind: type[Wire]):
    async with faked(kind, FakeSession(turn("<tool_call>{se", "arch}</tool_call>"))) as wire:
        got = await wire.ask([wire.user("Where?")], tools=[wire.tool()], stream=True)
    assert (got.content, got.calls) == ("<tool_call>{search}</tool_call>", [])


@on(*ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_may_say_nothing(kind: type[Wire], stream: bool, chat: ChatFormat):
    async with opened(kind, chat, "", "two") as one:
        wire, history = one.wire, [one.wire.user("who?")]
        got = await wire.ask(history, stream=stream)
        assert (got.content, got.reason) == ("", reasons(kind)["stop"])
        await wire.ask([*history, *wire.said(got), wire.user("and?")])


EVENTS = {
    "responses": [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.reasoning_summary_part.added"),
        *("response.reasoning_summary_text.delta", "response.reasoning_summary_text.done"),
        *("response.reasoning_summary_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.content_part.added"),
        *("response.output_text.delta", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done"),
        *("response.output_item.done", "response.output_item.added"),
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        *("response.output_item.done", "response.completed"),
    ],
    "messages": [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta"),
        *("content_block_stop", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "content_block_start"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ],
}


@on("responses", "messages")
def test_the_events_of_a_stream_come_in_the_order_of_the_api(kind: type[Wire]):
    session = FakeSession(turn("<think>Hm</think>", "Let me", " see.", CALL))
    events = stream_of(kind, session, tools=[kind().tool()])
    assert [name for name, _ in events] == EVENTS[kind.name]
    assert all(data["type"] == name for name, data in events)
    if kind is Responses:
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert [data.get("output_index", -1) for _, data in events] == [
            *[-1] * 2,
            *[0] * 6,
            *[1] * 7,
            *[2] * 4,
            -1,
        ]
        done = [data["item"] for name, data in events if name == "response.output_item.done"]
        assert events[-1][1]["response"]["output"] == done
    else:
        indexes = [data["index"] for _, data in events if "index" in data]
        assert indexes == [0] * 4 + [1] * 4 + [2] * 3


def stream_of(
    kind: type[Wire], session: FakeSession, **more: Any
) -> list[tuple[str, dict[str, Any]]]:
    """Return names and data of the events of a stream."""
    wire = kind()
    history = {"input" if kind is Responses else "messages": [wire.user("Where?")]}
    got = asyncio.run(post(kind, session, wire.body(**history, stream=True, **more)))
    assert got.headers["content-type"] == "text/event-stream; charset=utf-8"
    events: list[tuple[str, dict[str, Any]]] = []
    for event in got.text.strip().split("\n\n"):
        if not event.startswith(":"):
            name, data = event.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


@on(*ALL)
async def test_the_length_limit_is_kept(kind: type[Wire], chat: ChatFormat):
    limit: Any = {"max_output_tokens" if kind is Responses else "max_tokens": 3}
    async with opened(kind, chat, "a longer answer", "more") as one:
        wire, history = one.wire, [one.wire.user("who?")]
        got = await wire.ask(history, **limit)
        assert (got.reason, got.usage[2]) == (reasons(kind)["length"], 3)
        if kind is Responses:
            assert got.raw.incomplete_details.reason == "max_output_tokens"
            assert got.raw.output[-1].status == "incomplete"
        await wire.ask([*history, *wire.said(got), wire.user("go on")])


@on("chat", "messages")
async def test_stop_texts_end_an_answer(kind: type[Wire], chat: ChatFormat):
    stops: Any = {"stop" if kind is Chat else "stop_sequences": ["END", "STOP"]}
    async with opened(kind, chat, "one STOP two", "more") as one:
        wire, history = one.wire, [one.wire.user("who?")]
        got = await wire.ask(history, **stops)
        assert got.content == "one "
        if kind is Messages:
            assert (got.reason, got.raw.stop_sequence) == ("stop_sequence", "STOP")
        await wire.ask([*history, *wire.said(got), wire.user("go on")])


@on("chat")
async def test_several_answers_and_their_logprobs(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "one", "two", sequences=None) as one:
        got = await one.wire.ask([one.wire.user("who?")], n=2, logprobs=True)
    assert {choice.message.content for choice in got.raw.choices} == {"one", "two"}
    assert all(choice.logprobs.content for choice in got.raw.choices)


# -- histories -----------------------------------------------------------------------------------


@on(*ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_dialogue_with_tools_is_one_sequence(
    kind: type[Wire], stream: bool, chat: ChatFormat
):
    both = SEARCH + "\n" + call_text(query="Bob")
    async with opened(kind, chat, both, SEARCH, "<think>so</think>Ada") as one:
        wire, tools = one.wire, [one.wire.tool()]
        history = [wire.user("who?")]
        for _ in range(2):
            got = await wire.ask(history, tools=tools, stream=stream)
            assert got.thought == "look"
            history += wire.said(got)
            # The results come in another order than the calls.
            history += wire.results(*[(i, f"found {i}") for i, _, _ in reversed(got.calls)])
        got = await wire.ask(history, tools=tools, stream=stream)
        assert (got.thought, got.content) == ("so", "Ada")
        assert got.usage[1] > 0
    turns = one.trajectory.turns
    assert [len(turn.calls) for turn in turns] == [2, 1, 0]
    assert [call.text() for call in turns[0].calls] == [f"found {call}" for call in _calls_of(one)]


def _calls_of(one: Opened) -> list[str]:
    said = one.client.session.forest.turns[0].said
    assert said is not None
    return [call.id for call in said.tool_calls]


@on(*ALL)
async def test_ids_of_calls_name_the_turn(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "Let me see." + SEARCH, "Ada") as one:
        wire, tools = one.wire, [one.wire.tool()]
        history = [wire.user("who?")]
        got = await wire.ask(history, tools=tools)
        (call,) = [(name, "search", {"query": "another"}) for name, _, _ in got.calls]
        reworded = _reworded(kind, call)
        await wire.ask([*history, *reworded, *wire.results((call[0], "x"))], tools=tools)


def _reworded(kind: type[Wire], call: tuple[str, str, Any]) -> list[Any]:
    """The assistant's message with another text and other arguments, and the id of its call."""
    name, function, arguments = call
    if kind is Messages:
        use = {"type": "tool_use", "id": name, "name": function, "input": arguments}
        return [{"role": "assistant", "content": [{"type": "text", "text": "Hm"}, use]}]
    if kind is Responses:
        said = {"type": "function_call", "call_id": name, "name": function}
        return [
            {"role": "assistant", "content": "Hm"},
            said | {"arguments": json.dumps(arguments)},
        ]
    return Chat().said(Answer(None, content="Hm", calls=[call]))


@on("responses", "messages")
async def test_a_thought_that_comes_back_names_the_turn(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "<think>so</think>Ada", "two") as one:
        wire, history = one.wire, [one.wire.user("who?")]
        more: dict[str, Any] = {}
        if kind is Responses:
            more = {"store": False, "include": ["reasoning.encrypted_content"]}
        got = await wire.ask(history, **more)
        if kind is Responses:
            encrypted = got.raw.output[0].encrypted_content
            said = [
                {"type": "reasoning", "summary": [], "encrypted_content": encrypted},
                {"role": "assistant", "content": "reworded"},
            ]
        else:
            thinking = got.raw.content[0].to_dict() | {"thinking": ""}
            text = {"type": "text", "text": "reworded"}
            said = [{"role": "assistant", "content": [thinking, text]}]
        await wire.ask([*history, *said, wire.user("and?")], **more)
        # Later on the client leaves the thought out, and sends what was said.
        plain = _plain(kind, got.content)
        await wire.ask([*history, plain, wire.user("and?"), _plain(kind, "two"), wire.user("so?")])


def _plain(kind: type[Wire], text: str) -> Any:
    return {"role": "assistant", "content": text}


@on("responses", "messages")
async def test_thoughts_are_told_where_they_are_asked_for(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "<think>so</think>Ada", sequences=None) as one:
        history = [one.wire.user("who?")]
        if kind is Messages:
            got = await one.wire.ask(history, thinking={"type": "disabled"})
            assert [block.type for block in got.raw.content] == ["text"]
            shown = {"type": "adaptive", "display": "omitted"}
            got = await one.wire.ask(history, thinking=shown, stream=True)
            assert (got.thought, got.raw.content[0].type) == ("", "thinking")
            assert got.raw.content[0].signature
        else:
            got = await one.wire.ask(history)
            assert got.raw.output[0].encrypted_content is None


@on(*ALL)
async def test_content_may_be_a_text_or_a_list_and_have_markers(kind: type[Wire], chat: ChatFormat):
    part = {"responses": "input_text"}.get(kind.name, "text")
    marked = {"type": part, "text": "who?", "cache_control": {"type": "ephemeral"}}
    async with opened(kind, chat, "one", "two", "three") as one:
        wire = one.wire
        first = {"role": "user", "content": [marked]}
        got = await wire.ask([first])
        again = [wire.user("who?"), {"role": "assistant", "content": got.content}]
        got = await wire.ask([*again, wire.user("and?")])
        said = {"role": "assistant", "content": [{"type": "text", "text": got.content}]}
        await wire.ask(
            [
                *again,
                {"role": "user", "content": [marked | {"text": "and?"}]},
                said,
                wire.user("so?"),
            ]
        )


SYSTEM = {
    "chat": lambda text: {"messages": [{"role": "system", "content": text}]},
    "responses": lambda text: {"instructions": text},
    "messages": lambda text: {"system": [{"type": "text", "text": text}]},
}


@on(*ALL)
async def test_instructions_come_first(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "one") as one:
        wire, given = one.wire, SYSTEM[kind.name]("Be brief.")
        head = given.pop("messages", [])
        await wire.ask([*head, wire.user("who?")], **given)
        assert one.asked().startswith("<|im_start|>system\nBe brief.<|im_end|>")


@on("responses", "messages")
async def test_system_text_among_the_messages_is_shown_where_it_stands(
    kind: type[Wire], chat: ChatFormat
):
    role = "developer" if kind is Responses else "system"
    early, late = ({"role": role, "content": text} for text in ("Rules.", "Hurry."))
    async with opened(kind, chat, "one", "two") as one:
        wire, given = one.wire, SYSTEM[kind.name]("Be brief.")
        history = [early, wire.user("who?")]
        got = await wire.ask(history, **given)
        assert one.asked().startswith("<|im_start|>system\nBe brief.\n\nRules.<|im_end|>")
        await wire.ask([*history, *wire.said(got), late, wire.user("and?")], **given)
        assert "<|im_start|>user\nHurry.<|im_end|>" in one.asked()


@on("messages")
async def test_several_results_and_text_may_share_a_message(kind: type[Wire], chat: ChatFormat):
    both = call_text(query="Ada") + "\n" + call_text(query="Bob")
    async with opened(kind, chat, both, "two") as one:
        wire, tools = one.wire, [one.wire.tool()]
        history = [wire.user("who?")]
        got = await wire.ask(history, tools=tools)
        (first, _, _), (second, _, _) = got.calls
        text = {"type": "text", "text": "found", "cache_control": {"type": "ephemeral"}}
        blocks = [
            {"type": "tool_result", "tool_use_id": second, "content": "gone", "is_error": True},
            {"type": "tool_result", "tool_use_id": first, "content": [text]},
            {"type": "text", "text": "Hurry."},
        ]
        await wire.ask(
            [*history, *wire.said(got), {"role": "user", "content": blocks}], tools=tools
        )
        read = one.asked()
        assert re.search(r"gone.*found.*user\nHurry\.", read, re.DOTALL)
    assert [call.text() for call in one.trajectory.turns[0].calls] == ["found", "gone"]


@on(*ALL)
async def test_a_retry_is_told_the_same_answer(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "<think>so</think>one", "two", sequences=None) as one:
        wire, history = one.wire, [one.wire.user("who?")]
        first = await wire.ask(history)
        headers = {"x-stainless-retry-count": "1"}
        again = await wire.ask(history, extra_headers=headers)
        assert (again.thought, again.content) == (first.thought, first.content) == ("so", "one")
        another = await wire.ask(history)  # which is another sample
        assert another.content == "two"
        assert len(one.client.session.forest.turns) == 2


def test_a_template_that_rewrites_has_a_segment_for_each_turn_on_every_wire(end_id: int):
    forgetful = ChatFormat(
        build_tokenizer(template=FORGETFUL_TEMPLATE),
        end_of_turn_ids=[end_id],
        reply_roles=("tool", "user"),
        segments=True,
    )

    async def check(kind: type[Wire]) -> None:
        async with opened(kind, forgetful, SEARCH, "Ada", sequences=2) as one:
            wire, tools = one.wire, [one.wire.tool()]
            got = await wire.ask([wire.user("who?")], tools=tools)
            history = [wire.user("who?"), *wire.said(got), *wire.results((got.calls[0][0], "p"))]
            await wire.ask(history, tools=tools)

    for kind in WIRES.values():
        asyncio.run(check(kind))
