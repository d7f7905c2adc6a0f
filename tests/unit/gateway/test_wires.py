"""The features of every wire, as its clients see them: the table of docs/any-agent.md.

The SDKs of OpenAI and Anthropic ask real sessions with a scripted policy over a real port. A test
says with `on` which wires have what it is about; the page has the same table.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.beta import message_create_params as anthropic_params
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as openai_params

from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.wire import Event, Session, Waiting, WireError
from agent_r1.gateway.wires.chat import ChatRequest
from agent_r1.gateway.wires.messages import MessagesRequest
from agent_r1.gateway.wires.responses import ResponsesRequest
from agent_r1.text.chat_format import ChatFormat
from tests.support.fakes import FORGETFUL_TEMPLATE, build_tokenizer, call_text
from tests.unit.gateway.scripted import Client, open_client
from tests.unit.gateway.wire_clients import (
    PARAMETERS,
    WIRES,
    Answer,
    Chat,
    Messages,
    Responses,
    Wire,
)
from tests.unit.gateway.wire_fakes import CALL, KEY, WAIT_S, FakeSession, served, turn, without_port

SEARCH = "<think>look</think>" + call_text(query="Ada")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "any-agent.md"


ALL = tuple(WIRES)
HAVE: dict[str, tuple[str, ...]] = {}
"""Wires that have what a test is about, by the test's name."""


def on(*names: str) -> Callable[[Any], Any]:
    """Mark a test as that of a feature which these wires have."""

    def mark(test: Any) -> Any:
        HAVE[test.__name__] = names
        return pytest.mark.parametrize("kind", [WIRES[name] for name in names], ids=names)(test)

    return mark


def test_the_table_of_the_page_is_what_is_tested():
    rows = re.findall(r"^\| [^|]+ \| `(test_\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    told = {
        name: tuple(wire for wire, cell in zip(ALL, cells.split("|"), strict=True) if "yes" in cell)
        for name, cells in rows
    }
    assert told == HAVE


# -- a session over a port -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat(tokenizer: Any, end_id: int) -> ChatFormat:
    return ChatFormat(
        tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"), segments=True
    )


@dataclass
class Opened:
    """A session of a scripted policy, and a client of a wire that asks it."""

    client: Client
    wire: Wire
    trajectory: Any = None
    """What came of it, once the server has ended: only then is everything delivered."""

    def asked(self) -> str:
        """What the policy read before its last turn."""
        turn = self.client.session.forest.turns[-1]
        return self.client.chat.decode(turn.context())


@contextlib.asynccontextmanager
async def opened(
    kind: type[Wire],
    chat: ChatFormat,
    *turns: str,
    sequences: int | None = 1,
    rules: SessionRules | None = None,
) -> AsyncIterator[Opened]:
    """Serve a session, and check in the end what its histories have become.

    Args:
        kind: of the client.
        chat: the model's template.
        turns: what the policy writes.
        sequences: of tokens, of one lineage, that are expected; None: whatever they are.
        rules: of the session.
    """
    rules = rules or SessionRules(run_seed=5, max_context=100_000)
    client = await open_client(chat, min(chat._end_of_turn_ids), *turns, rules=rules)
    session: Any = client.session
    async with faked(kind, session) as wire:
        one = Opened(client, wire)
        yield one
    one.trajectory = client.trajectory()
    if sequences is not None:
        assert len(list(one.trajectory.segment_bounds())) == sequences
        assert one.trajectory.lineages == []


@contextlib.asynccontextmanager
async def faked(kind: type[Wire], session: FakeSession) -> AsyncIterator[Wire]:
    """Serve a session, and open a client of it."""
    async with served(session) as (url, _):
        wire = kind(url)
        async with wire.sdk:
            yield wire


def reasons(kind: type[Wire]) -> dict[str, str]:
    """How a wire says why an answer ended."""
    return {
        "chat": {"stop": "stop", "calls": "tool_calls", "length": "length"},
        "responses": {"stop": "completed", "calls": "completed", "length": "incomplete"},
        "messages": {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"},
    }[kind.name]


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


async def post(
    kind: type[Wire], session: Session | FakeSession, body: Any = None, **how: Any
) -> httpx.Response:
    how.setdefault("headers", {"authorization": f"Bearer {KEY}"})
    if body is not None:
        how["json"] = body
    async with without_port(session) as client:  # type: ignore[arg-type]
        return await client.post(kind.path, **how)


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


# -- what only one wire has ----------------------------------------------------------------------


@on("responses")
@pytest.mark.parametrize("taken_over", [False, True])
async def test_a_dialogue_goes_on_by_the_id_of_the_answer(
    kind: type[Wire], taken_over: bool, chat: ChatFormat
):
    script = ["Let me see." + SEARCH, "<think>so</think>Ada", "end"]
    async with opened(kind, chat, *script, sequences=None) as one:
        wire, tools = one.wire, [one.wire.tool()]
        given = {"tools": tools, "instructions": "Be brief."}
        got = await wire.ask([wire.user("who?")], **given)
        results = wire.results((got.calls[0][0], "found"))
        got = await wire.ask(results, previous_response_id=got.raw.id, **given)
        assert got.raw.previous_response_id
        heir = await one.client.successor() if taken_over else one.client
        session: Any = heir.session
        async with faked(kind, session) as other:
            more = {"previous_response_id": got.raw.id, **given}
            last = await other.ask([wire.user("sure?")], **more)
        assert last.content == "end"
    trajectory = heir.trajectory()
    assert (trajectory.segment_starts, trajectory.lineages) == ([], [])


@on("responses")
async def test_what_is_not_stored_is_not_found(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "one") as one:
        wire = one.wire
        got = await wire.ask([wire.user("who?")], store=False)
        for name in (got.raw.id, "resp_68a1"):
            with pytest.raises(openai.BadRequestError, match="names nothing") as refused:
                await wire.ask([wire.user("and?")], previous_response_id=name)
            assert refused.value.param == "previous_response_id"
        named = {"type": "item_reference", "id": got.raw.output[0].id}
        with pytest.raises(openai.BadRequestError, match="names nothing"):
            await wire.ask([wire.user("who?"), named, wire.user("and?")])


@on("responses")
async def test_items_may_be_named_alone(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "Let me see." + SEARCH, "two") as one:
        wire, tools = one.wire, [one.wire.tool()]
        got = await wire.ask([wire.user("who?")], tools=tools)
        named = [{"type": "item_reference", "id": item.id} for item in got.raw.output]
        results = wire.results((got.calls[0][0], "found"))
        await wire.ask([wire.user("who?"), *named, *results], tools=tools)
        with pytest.raises(openai.BadRequestError, match="names nothing"):
            await wire.ask([{"type": "item_reference", "id": "msg_x"}, wire.user("and?")])


@on("responses")
@pytest.mark.parametrize("by_trigger", [False, True])
async def test_a_compaction_is_one_item_and_comes_back_as_a_summary(
    kind: type[Wire], by_trigger: bool, chat: ChatFormat
):
    script = [SEARCH, "<think>all</think>Asked for Ada; found her.", "Ada"]
    async with opened(kind, chat, *script, sequences=2 if by_trigger else 3) as one:
        wire, tools = one.wire, [one.wire.tool()]
        history = [wire.user("who?")]
        got = await wire.ask(history, tools=tools)
        whole = [*history, *wire.said(got), *wire.results((got.calls[0][0], "found"))]
        if by_trigger:
            asked = wire.body(
                input=[*whole, {"type": "compaction_trigger", "id": None}], tools=tools
            )
            async with wire.sdk.responses.stream(**asked, store=False) as events:
                names = [event.type async for event in events]
                compacted = await events.get_final_response()
            added, done = "response.output_item.added", "response.output_item.done"
            assert names[2:] == [added, done, "response.completed"]
        else:
            compacted = await wire.sdk.responses.compact(model="policy", input=whole)
        (item,) = compacted.output
        assert item.type == "compaction"
        await wire.ask([*history, item.model_dump(exclude_unset=True), wire.user("and?")])
        summary = "Summary of the conversation so far:\nAsked for Ada; found her."
        assert f"<|im_start|>user\n{summary}<|im_end|>" in one.asked()
        foreign = {"type": "compaction", "encrypted_content": "gAAAA"}
        with pytest.raises(openai.BadRequestError, match="names nothing"):
            await wire.ask([foreign, wire.user("and?")])
    assert len(list(one.trajectory.trained_turns())) == 3


@on("responses")
@pytest.mark.parametrize("taken_over", [False, True])
async def test_what_was_compacted_is_gone_on_with_by_ids_as_a_summary(
    kind: type[Wire], taken_over: bool, chat: ChatFormat
):
    script = ["Ada, I think.", "Asked for Ada; found her.", "sure", "end", "end"]
    summary = "<|im_start|>user\nSummary of the conversation so far:\nAsked for Ada; found her."
    async with opened(kind, chat, *script, sequences=None) as one:
        wire = one.wire
        first = await wire.ask([wire.user("who?")])
        compacted = await wire.sdk.responses.compact(
            model="policy", previous_response_id=first.raw.id
        )
        heir = await one.client.successor() if taken_over else one.client
        session: Any = heir.session
        referred = {"type": "item_reference", "id": compacted.output[0].id}
        read: list[str] = []
        async with faked(kind, session) as other:
            question = other.user("and?")
            by_id = await other.ask([question], previous_response_id=compacted.id)
            read.append(heir.chat.decode(session.forest.turns[-1].context()))
            await other.ask([question], previous_response_id=by_id.raw.id)
            read.append(heir.chat.decode(session.forest.turns[-1].context()))
            await other.ask([referred, question])
            read.append(heir.chat.decode(session.forest.turns[-1].context()))
    assert all(text.count(summary) == 1 and "who?" not in text for text in read), read
    assert [text.count("and?") for text in read] == [1, 2, 1]


@on("responses")
@pytest.mark.parametrize("stream", [False, True])
async def test_custom_tools_and_namespaces_are_functions_of_the_policy(
    kind: type[Wire], stream: bool, chat: ChatFormat
):
    def call(name: str, **arguments: str) -> str:
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    patch = {"type": "custom", "name": "patch", "description": "Edits.", "format": grammar}
    list_ = {"type": "function", "name": "list", "parameters": PARAMETERS}
    files = {"type": "namespace", "name": "files", "description": "Files.", "tools": [list_]}
    tools: Any = [patch, files, {"type": "web_search"}]
    script = [call("patch", input="*** Begin\n+a") + call("files__list", query="."), "done"]
    async with opened(kind, chat, *script) as one:
        wire, history = one.wire, [one.wire.user("mend it")]
        got = await wire.ask(history, tools=tools, stream=stream)
        assert '"input"' in one.asked()
        assert "start: /.+/" in one.asked()
        custom, function = got.raw.output
        assert (custom.type, custom.name, custom.input) == (
            "custom_tool_call",
            "patch",
            "*** Begin\n+a",
        )
        assert (function.namespace, function.name) == ("files", "list")
        results = [
            {"type": "custom_tool_call_output", "call_id": custom.call_id, "output": "ok"},
            *wire.results((function.call_id, "a.py")),
        ]
        await wire.ask([*history, *wire.said(got), *results], tools=tools)
    assert [call.text() for call in one.trajectory.turns[0].calls] == ["ok", "a.py"]


@on("responses", "messages")
async def test_tools_that_a_provider_would_run_are_left_out(
    kind: type[Wire], caplog: pytest.LogCaptureFixture
):
    session = FakeSession()
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    async with faked(kind, session) as wire:
        for _ in range(2):
            await wire.ask([wire.user("Where?")], tools=[hosted, wire.tool()])
    assert [tool.name for tool in session.asked[0].tools] == ["search"]
    assert sum("web_search_20250305" in one.getMessage() for one in caplog.records) == 1


@on("messages")
async def test_tokens_are_counted_and_nothing_is_sampled(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, SEARCH, "two") as one:
        wire: Any = one.wire
        tools, history = [wire.tool()], [wire.user("who?")]

        async def count(messages: list[Any]) -> int:
            given = {"model": "policy", "messages": messages, "tools": tools}
            return (await wire.sdk.beta.messages.count_tokens(**given)).input_tokens

        before = await count(history)
        got = await wire.ask(history, tools=tools)
        assert before == got.usage[0]
        history += [*wire.said(got), *wire.results((got.calls[0][0], "found"))]
        before = await count(history)
        assert len(one.client.session.forest.turns) == 1
        got = await wire.ask(history, tools=tools)
        assert before == got.usage[0]


@on(*ALL)
async def test_models_are_listed_in_the_form_of_the_client(kind: type[Wire]):
    async with faked(kind, FakeSession()) as wire:
        page = await wire.sdk.models.list()
        assert [model.id for model in page.data] == ["policy"]
        assert (await wire.sdk.models.retrieve("policy")).id == "policy"
        if kind is Messages:
            assert page.data[0].display_name == "policy"


# -- refusals ------------------------------------------------------------------------------------


FORCED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"tool_choice": "required"}, "tool_choice required"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format json_object"),
    ("responses", {"tool_choice": "required"}, "tool_choice required"),
    ("responses", {"tool_choice": {"type": "function", "name": "search"}}, "tool_choice function"),
    (
        "responses",
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}}},
        "text.format json_schema",
    ),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice any"),
    ("messages", {"tool_choice": {"type": "tool", "name": "search"}}, "tool_choice tool"),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}}},
        "output_config.format",
    ),
]


@on(*ALL)
async def test_what_forces_the_answer_is_refused(kind: type[Wire], chat: ChatFormat):
    forced = [(fields, named) for name, fields, named in FORCED if name == kind.name]
    async with opened(kind, chat, "one", sequences=None) as one:
        for fields, named in forced:
            with pytest.raises(_sdk(kind).BadRequestError, match=re.escape(named)) as refused:
                await one.wire.ask([one.wire.user("x")], tools=[one.wire.tool()], **fields)
            assert "agent.allow_constrained" in str(refused.value)
    assert one.client.session.forest.turns == []


@on(*ALL)
async def test_a_tool_choice_of_none_offers_none(kind: type[Wire]):
    session = FakeSession()
    choice: Any = {"type": "none"} if kind is Messages else "none"
    async with faked(kind, session) as wire:
        await wire.ask([wire.user("Where?")], tools=[wire.tool()], tool_choice=choice)
    assert (session.asked[0].tools, session.asked[0].constrained) == ((), "")


@on("chat", "responses")
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_a_choice_of_allowed_tools_offers_those(kind: type[Wire], mode: str):
    session = FakeSession()
    names: list[Any] = ["search", "other"]
    tools: list[Any] = [{"type": "function", "name": name, "parameters": {}} for name in names]
    allowed: dict[str, Any] = {"mode": mode, "tools": [{"type": "function", "name": "other"}]}
    if kind is Chat:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        allowed["tools"] = [{"type": "function", "function": {"name": "other"}}]
        allowed = {"allowed_tools": allowed}
    async with faked(kind, session) as wire:
        choice = {"type": "allowed_tools", **allowed}
        await wire.ask([wire.user("Where?")], tools=tools, tool_choice=choice)
    assert [tool.name for tool in session.asked[0].tools] == ["other"]
    forced = "" if mode == "auto" else "tool_choice allowed_tools"
    assert session.asked[0].constrained == forced


def _sdk(kind: type[Wire]) -> Any:
    return anthropic if kind is Messages else openai


@on(*ALL)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_context_is_said_so_that_agents_know_it(
    kind: type[Wire], stream: bool, chat: ChatFormat
):
    rules = SessionRules(max_context=60)
    async with opened(kind, chat, "one", rules=rules, sequences=None) as one:
        asking = one.wire.ask([one.wire.user("x" * 100)], stream=stream)
        if kind is Responses and stream:
            got = await asking
            assert (got.reason, got.raw.error.code) == ("failed", "context_length_exceeded")
            return
        with pytest.raises(_sdk(kind).BadRequestError) as refused:
            await asking
        if kind is Messages:
            error = refused.value.body["error"]
            assert error["type"] == "invalid_request_error"
            assert re.match(r"prompt is too long: \d+ tokens > 60 maximum", error["message"])
        else:
            assert refused.value.code == "context_length_exceeded"


REFUSALS = {
    "busy": ("RateLimitError", "rate_limit_error"),
    "no_session": ("AuthenticationError", "authentication_error"),
    "ended": ("APIStatusError", "not_found_error"),
    "too_large": ("APIStatusError", "request_too_large"),
    "unavailable": ("InternalServerError", "overloaded_error"),
    "invalid_request": ("BadRequestError", "invalid_request_error"),
}


@on(*ALL)
async def test_refusals_are_errors_of_the_client(kind: type[Wire]):
    session = FakeSession()
    async with faked(kind, session) as wire:
        for refusal, (error, form) in REFUSALS.items():
            name: Any = refusal
            session.events = [WireError(name, "too much", retry_after_s=1.2)]
            for stream in (False, True):
                with pytest.raises(getattr(_sdk(kind), error)) as caught:
                    await wire.ask([wire.user("Where?")], stream=stream)
                assert caught.value.response.headers["retry-after"] == "2"
                if kind is Messages:
                    assert caught.value.body["error"]["type"] == form
                    assert caught.value.status_code == {"unavailable": 529, "busy": 429}.get(
                        refusal, caught.value.status_code
                    )
    assert session.delivered_turns == []


@on(*ALL)
async def test_the_key_may_come_as_either_sdk_sends_it(kind: type[Wire]):
    wire = kind()
    session = FakeSession()
    name = "input" if kind is Responses else "messages"
    body = wire.body(**{name: [wire.user("Where?")]})
    for headers in ({"x-api-key": KEY}, {"authorization": f"BEARER {KEY}"}):
        assert (await post(kind, session, body, headers=headers)).status_code == 200
    for headers in ({"x-api-key": "other"}, {"authorization": KEY}, {}):
        got = await post(kind, session, body, headers=headers)
        assert got.status_code == 401
        assert "no session has this id" in got.json()["error"]["message"]


IMAGES = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
    "messages": {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
    },
}


@on(*ALL)
async def test_images_are_refused(kind: type[Wire]):
    async with faked(kind, FakeSession()) as wire:
        message = {"role": "user", "content": [IMAGES[kind.name]]}
        with pytest.raises(_sdk(kind).BadRequestError, match="image"):
            await wire.ask([message])


@on(*ALL)
async def test_fields_that_are_not_known_are_refused_by_name(kind: type[Wire]):
    async with faked(kind, FakeSession()) as wire:
        with pytest.raises(_sdk(kind).BadRequestError, match="unknown fields: frobnicate"):
            await wire.ask([wire.user("Where?")], extra_body={"frobnicate": 1})


PARAMS: dict[str, tuple[Any, set[str]]] = {
    "chat": (
        chat_params.CompletionCreateParamsBase,
        {"audio", "functions", "function_call", "web_search_options"},
    ),
    "responses": (
        openai_params.ResponseCreateParamsBase,
        {"conversation", "prompt"},
    ),
    "messages": (
        anthropic_params.MessageCreateParamsBase,
        {"container", "mcp_servers", "thread"},
    ),
}


@on(*ALL)
async def test_every_parameter_of_the_api_is_known_or_refused_by_name(kind: type[Wire]):
    api, known = PARAMS[kind.name]
    refused: set[str] = set()
    wire = kind()
    name = "input" if kind is Responses else "messages"
    for field_name in api.__annotations__:
        for value in (None, {}):
            body = {field_name: value} | wire.body(**{name: [wire.user("Where?")]})
            got = await post(kind, FakeSession(), body)
            if "unknown fields" in got.text:
                assert f"unknown fields: {field_name};" in got.json()["error"]["message"]
                refused.add(field_name)
            assert value is not None or got.status_code == 200, got.text
    assert refused == known


BAD = {
    "chat": [{"messages": [{"role": "owner", "content": "x"}]}],
    "responses": [
        {"input": []},
        {"input": [{"type": "computer_call"}]},
        {"input": [{"role": "owner", "content": "x"}]},
        {"input": [{"role": "user", "content": 5}]},
        {"input": [{"role": "user", "content": [5]}]},
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        {"input": [{"type": "function_call", "arguments": "{}"}, {"role": "user", "content": ""}]},
        {
            "input": [
                {"type": "function_call", "name": "f", "arguments": "[" * 9000},
                {"role": "user", "content": ""},
            ]
        },
        {
            "input": [
                {"type": "function_call", "name": "f", "arguments": '{"a": "\\ud800"}'},
                {"role": "user", "content": ""},
            ]
        },
        {"input": [{"role": "assistant", "content": "x"}]},
        {"input": "x", "tools": [{"type": "function", "name": "no name"}]},
        {"input": "x", "background": True},
        {"input": "x", "include": ["message.output_text.logprobs"]},
        {"input": "x", "top_logprobs": 2},
    ],
    "messages": [
        {"messages": []},
        {"messages": [{"role": "owner", "content": "x"}]},
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": []}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": 3}]}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "no name"}]},
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0},
        {"messages": [{"role": "user", "content": "x"}], "stop_sequences": ["x"] * 17},
    ],
}


@on(*ALL)
async def test_a_wrong_request_is_refused_in_the_form_of_the_wire(kind: type[Wire]):
    session = FakeSession()
    for fields in BAD[kind.name]:
        got = await post(kind, session, kind().body(**fields))
        assert got.status_code == 400, (fields, got.text)
        error = got.json()["error"]
        assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
        assert ("type" in got.json()) == (kind is Messages)
    for content, status in ((b"{", 400), (b"\xff\xfe", 400), (b"a" * (9 << 20), 413)):
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        got = await post(kind, session, content=content, headers=headers)
        assert got.status_code == status
        assert ("type" in got.json()) == (kind is Messages)
        assert got.json()["error"]["message"]
    assert session.asked == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5) | st.just("user"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(*ResponsesRequest.model_fields, *MessagesRequest.model_fields),
                    *("role", "content", "type", "id", "call_id", "name", "arguments", "text"),
                ]
            ),
            inner,
        )
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(
    [
        *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
        *("item_reference", "compaction", "compaction_trigger"),
        *("tool_use", "tool_result", "thinking"),
    ]
)


@on(*ALL)
def test_no_body_whatever_is_an_error_of_the_gateway(kind: type[Wire]):
    name = "input" if kind is Responses else "messages"
    model = {"chat": ChatRequest, "responses": ResponsesRequest}.get(kind.name, MessagesRequest)
    bodies: list[Any] = []

    @settings(
        max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
    )
    @given(JSON, st.dictionaries(st.sampled_from([*model.model_fields]), JSON), TYPES, JSON)
    def draw(whole: Any, fields: dict[str, Any], item: str, inner: Any) -> None:
        user = kind().user("Where?")
        rest = inner if isinstance(inner, dict) else {"content": inner}
        bodies.append(whole)
        bodies.append(kind().body(**({name: [user]} | fields)))
        odd = {**rest, "type": item}
        odd = odd if kind is Responses else {"role": "user", "content": [odd]}
        bodies.append(kind().body(**{name: [odd, user]}))

    draw()

    async def send_all() -> None:
        async with without_port(FakeSession()) as client:
            for body in bodies:
                headers = {"authorization": f"Bearer {KEY}"}
                got = await client.post(kind.path, json=body, headers=headers)
                assert got.status_code in (200, 400), (body, got.text)
                assert got.status_code == 200 or got.json()["error"]["message"]

    asyncio.run(send_all())


# -- faults --------------------------------------------------------------------------------------


@on(*ALL)
async def test_a_stream_lives_while_nothing_is_said(kind: type[Wire]):
    events = turn("Pa", "ris")
    session = FakeSession([Waiting(), events[0], Waiting(), *events[1:]])
    async with faked(kind, session) as wire:
        got = await wire.ask([wire.user("Where?")], stream=True)
    assert got.content == "Paris"
    body = wire.body(**{"input" if kind is Responses else "messages": [wire.user("Where?")]})
    text = (await post(kind, session, body | {"stream": True})).text
    assert text.startswith(": ping\n\n")
    assert text.count("ping") == (3 if kind is Messages else 2)  # event and type of one


@on(*ALL)
async def test_a_fault_in_a_stream_ends_it_and_nothing_is_delivered(kind: type[Wire]):
    session = FakeSession([*turn("Pa")[:-1], RuntimeError("secret of the gateway")])
    async with faked(kind, session) as wire:
        asking = wire.ask([wire.user("Where?")], stream=True)
        if kind is Responses:
            got = await asking
            assert (got.reason, got.raw.error.code) == ("failed", "server_error")
            assert "secret" not in got.raw.error.message
        else:
            with pytest.raises(_sdk(kind).APIError) as caught:
                await asking
            assert "secret" not in str(caught.value)
        with pytest.raises(_sdk(kind).InternalServerError):
            await wire.ask([wire.user("Where?")])
    assert session.delivered_turns == []
    assert set(session.faults) == {"gateway_error: RuntimeError: secret of the gateway"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_delivery_that_cannot_be_noted_is_a_fault_of_ours(stream: bool):
    session = FakeSession(delivery_fails=ConnectionError("Redis is away"))
    async with faked(Chat, session) as wire:
        with contextlib.suppress(openai.APIError):  # whether it has all by then is the client's
            await wire.ask([wire.user("Where?")], stream=stream)
    assert session.faults[0] == "gateway_error: ConnectionError: Redis is away"


@on(*ALL)
async def test_a_client_that_goes_away_ends_what_is_sampled(kind: type[Wire]):
    begun = asyncio.Event()

    async def never() -> AsyncGenerator[Event]:
        begun.set()
        await asyncio.Event().wait()
        yield Waiting()

    session = FakeSession(turn("Pa")[:-1], never)
    async with faked(kind, session) as wire, asyncio.timeout(WAIT_S):
        asking = asyncio.create_task(wire.ask([wire.user("Where?")], stream=True))
        await begun.wait()
        asking.cancel()
        await session.closed.wait()
        await asyncio.gather(asking, return_exceptions=True)
    assert session.delivered_turns == []


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
