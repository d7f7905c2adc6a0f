"""What one wire has and others have not, as its clients see it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from agent_r1.text.chat_format import ChatFormat
from tests.unit.gateway.wire_clients import (
    PARAMETERS,
    Messages,
    Wire,
)
from tests.unit.gateway.wire_fakes import FakeSession
from tests.unit.gateway.wire_sessions import (
    ALL,
    SEARCH,
    faked,
    on,
    opened,
)


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
async def test_what_a_client_says_behind_a_turn_is_read(kind: type[Wire], chat: ChatFormat):
    async with opened(kind, chat, "one", "two", sequences=None) as one:
        wire = one.wire
        got = await wire.ask([wire.user("who?")])
        note = {"role": "assistant", "content": "A NOTE"}
        history = [wire.user("who?"), *got.raw.output, note, wire.user("and?")]
        await wire.ask(history)
        read = chat.decode(one.client.servers.requests[-1].token_ids)
    assert read.index("one") < read.index("A NOTE") < read.index("and?")


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
async def test_a_second_compaction_stands_for_all_before_it(kind: type[Wire], chat: ChatFormat):
    script = ["Ada, I think.", "FIRST", "sure", "SECOND", "end"]
    async with opened(kind, chat, *script, sequences=None) as one:
        wire, before = one.wire, None
        for question in ("who?", "and?"):
            told = await wire.ask([wire.user(question)], previous_response_id=before)
            compacted = await wire.sdk.responses.compact(
                model="policy", previous_response_id=told.raw.id
            )
            before = compacted.id
        await wire.ask([wire.user("so?")], previous_response_id=before)
        read = one.asked()
    assert "SECOND" in read
    assert "so?" in read
    assert not any(text in read for text in ("who?", "FIRST", "and?"))


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
