"""Limits of sessions: where a turn ends, what is refused, and what is no longer waited for."""

from __future__ import annotations

import asyncio
import json

import pytest

from agent_r1.gateway import session
from agent_r1.gateway.journal import AttemptEnded
from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.wire import Asked, WireError
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.generation import GenerateRequest
from agent_r1_proto.registry import RolloutServer
from tests.support.learner_fakes import eventually
from tests.unit.gateway.scripted import (
    TOOL,
    captured,
    open_client,
    user,
)


async def test_a_turn_ends_at_its_limit_and_where_the_context_is_full(
    chat: ChatFormat, end_id: int
):
    probe = await open_client(chat, end_id, "one")
    length = probe.session.count_tokens(Asked(messages=(user("who?"),)))
    for rules in (SessionRules(max_tokens_per_turn=3), SessionRules(max_context=length + 3)):
        client = await open_client(chat, end_id, "a longer answer", rules=rules)
        told = await client.ask(user("who?"))
        assert (told.texts[0], told.reasons[0]) == ("a l", "length")


async def test_a_limit_is_noted_once_however_often_an_agent_asks(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", rules=SessionRules(max_session_tokens=8))
    await client.ask(user("who?"))
    with pytest.raises(WireError, match="max_session_tokens"):
        client.session.count_tokens(Asked(messages=(user("who?"),)))
    assert client.session.spent == ""  # nothing was asked of the policy
    for _ in range(3):
        with pytest.raises(WireError, match="max_session_tokens"):
            await client.ask(user("who?"))
    await client.session.journal.write()
    noted = [json.loads(entry)["event"] for entry in client.log.entries]
    assert (client.session.spent, noted.count("limit")) == ("max_session_tokens", 1)


async def test_limits_are_errors_that_say_what_to_do(chat: ChatFormat, end_id: int):
    rules = SessionRules(max_context=60, max_requests=2)
    client = await open_client(chat, end_id, "one", rules=rules)
    with pytest.raises(WireError, match="shorten the history") as full:
        await client.ask(user("x" * 100))
    assert full.value.kind == "context_full"
    with pytest.raises(WireError, match="allow_constrained"):
        await client.ask(user("who?"), constrained="response_format json_schema")
    await client.ask(user("who?"))
    with pytest.raises(WireError, match="max_requests"):
        await client.ask(user("who?"))
    assert client.session.spent == "max_requests"
    heir = await client.successor()
    heir.session.close()  # given back: another gateway goes on with it
    with pytest.raises(WireError) as given_back:
        await heir.ask(user("who?"))
    assert given_back.value.kind == "unavailable"
    heir.session.close(AttemptEnded())
    with pytest.raises(WireError) as ended:
        await heir.ask(user("who?"))
    assert ended.value.kind == "ended"


async def test_what_is_far_too_long_is_refused_by_its_beginning(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", rules=SessionRules(max_context=60))
    encoded: list[int] = []
    encode = chat._outside.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            chat._outside, "encode", lambda text: encoded.append(len(text)) or encode(text)
        )
        for messages, tools in (
            ((user("x" * 5_000_000),), ()),
            ((user("x"), user("y" * 900), user("z" * 900)), ()),
            ((user("who?"),), (TOOL.model_copy(update={"description": "d" * 100_000}),)),
        ):
            with pytest.raises(WireError, match="or more") as full:
                await client.ask(*messages, tools=tools)
            assert full.value.kind == "context_full"
        with pytest.raises(WireError):
            client.session.count_tokens(Asked(messages=(user("x" * 5_000_000),)))
    assert max(encoded) <= 16 * 60
    assert client.session.forest.turns == []


async def test_every_answer_counts_against_the_limits(chat: ChatFormat, end_id: int):
    rules = SessionRules(max_in_flight=3, max_requests=4)
    client = await open_client(chat, end_id, "one", rules=rules)
    with pytest.raises(WireError, match=r"n \(4\) must be at most 3") as never:
        await client.ask(user("who?"), n=4)
    assert never.value.kind == "invalid_request"
    client.servers.gate = asyncio.Event()
    three = asyncio.create_task(client.ask(user("who?"), n=3))
    await eventually(lambda: len(client.servers.requests) == 3, three)
    with pytest.raises(WireError, match="3 answers of this session are in flight") as busy:
        await client.ask(user("and?"))
    assert busy.value.kind == "busy"
    client.servers.gate.set()
    await three
    with pytest.raises(WireError, match=r"used its 4 \(agent.max_requests\)"):
        await client.ask(user("and?"), n=2)
    await client.ask(user("and?"))
    with pytest.raises(WireError, match="max_requests"):
        client.session.count_requests(1)  # as a call of a tool does


async def test_max_tokens_ends_an_answer_and_the_dialogue_goes_on(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "a longer answer", "more")
    told = await client.ask(user("who?"), max_tokens=3)
    assert (told.reasons[0], len(client.session.forest.turns[0].token_ids)) == ("length", 3)
    await client.ask(user("who?"), told.message, user("go on"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    # The end of turn that the policy did not sample is the template's.
    assert not trajectory.action_mask[trajectory.turns[0].end]
    assert trajectory.token_ids[trajectory.turns[0].end] == end_id


async def test_a_request_that_the_engine_refuses_is_a_fault_of_ours(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one")
    client.servers.refusal = "token 9 is unknown"
    with pytest.raises(WireError, match="token 9") as refused:
        await client.ask(user("who?"))
    assert refused.value.kind == "unavailable"
    assert client.session.fault == "policy_error: token 9 is unknown"


class Clock:
    """A clock that only servers move on."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("tokens", "is_given_up"), [(1, False), (0, True)])
async def test_a_turn_is_given_up_once_nothing_was_sampled_for_long(
    chat: ChatFormat, end_id: int, tokens: int, is_given_up: bool, monkeypatch: pytest.MonkeyPatch
):
    client, clock = await open_client(chat, end_id, "one"), Clock()
    monkeypatch.setattr(session, "time", clock)
    monkeypatch.setattr(session, "RETRY_S", 0.0)
    sample = client.servers.stream

    async def stream(server: RolloutServer, request: GenerateRequest):
        clock.now += session.GIVE_UP_S * 0.6
        async for part in sample(server, request):
            yield part

    monkeypatch.setattr(client.servers, "stream", stream)
    client.servers.breaks_after = [tokens] * 3
    if is_given_up:
        with pytest.raises(WireError, match="nothing sampled for 120 s: one stopped"):
            await client.ask(user("who?"))
        assert client.session.fault.startswith("rollout_unavailable: ")
    else:
        assert (await client.ask(user("who?"))).texts[0] == "one"
