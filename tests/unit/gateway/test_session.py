"""Sessions: what a client asks, what joins it, and the trajectory that comes of all of it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from agent_r1.gateway.journal import LimitReached
from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.wire import Asked, Begun, Said, WireError
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.messages import encode_entry
from agent_r1_proto.parts import TextPart
from agent_r1_proto.session_log import SessionTakenError
from agent_r1_proto.tasks import ChatMessage, MessageCall
from agent_r1_proto.tools import ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FakeToolServer,
    call_text,
)
from tests.support.learner_fakes import eventually
from tests.unit.gateway.scripted import (
    SEARCH,
    TOOL,
    captured,
    open_client,
    result,
    system,
    user,
)
from tests.unit.rollout.loops import ANSWER, agent_loop


def scripted_turns(seed: int) -> list[str]:
    """Searches, and then an answer: right, wrong, without its tags, or with more around it."""
    chance = random.Random(seed)
    searches = [
        f"<think>step {i}</think>" * chance.randint(0, 1) + call_text(query=f"{chance.random()}")
        for i in range(chance.randint(0, 4))
    ]
    ends = [ANSWER, "<answer>Bob</answer>", "Ada", "<think>so</think>It is <answer>ada</answer>!"]
    return [*searches, chance.choice(ends)]


async def test_fifty_sessions_equal_the_agent_loop_bit_by_bit_and_so_do_their_rewards(
    chat: ChatFormat, end_id: int
):
    answer = ToolResult(parts=[TextPart(text="Ada is a person.")])
    components = {"exact_match": 1.0, "f1": 0.2, "format": 0.3, "tool_efficiency": 0.07}
    scorer = Scorer(RewardConfig(components=components))
    found: set[float] = set()
    async with FakeToolServer(answer=lambda call: answer) as server:
        for seed in range(50):
            rollout = rollout_task(group_id=seed)
            turns = scripted_turns(seed)
            async with agent_loop(chat, end_id, turns, server) as built:
                native = await built.loop.run(rollout)
            client = await open_client(chat, end_id, *turns, rollout=rollout)
            history = [user("who?")]
            for _ in turns:
                told = await client.ask(*history, tools=(TOOL,))
                history.append(told.message)
                if told.message.tool_calls:
                    history.append(result(told.message, "Ada is a person."))
            mine = client.trajectory()
            assert_equal(mine, native)
            assert [one.seed for one in client.servers.requests] == [
                one.seed for one in built.policy.requests
            ]
            reward = await scorer.score_trajectory(mine)
            assert reward == await scorer.score_trajectory(native)
            found.add(reward.total)
    assert len(found) >= 5


def assert_equal(mine: Trajectory, native: Trajectory) -> None:
    """A session's trajectory says what the agent loop's says, to the last bit."""
    for name in ("token_ids", "action_mask", "rollout_logprobs"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(native, name))
    assert mine.version_spans
    assert mine.segment_starts == native.segment_starts == []
    assert (mine.prompt_length, mine.lineages) == (native.prompt_length, [])
    for one, other in zip(mine.turns, native.turns, strict=True):
        assert one.model_copy(update={"calls": []}) == other.model_copy(update={"calls": []})
        assert [(c.end_token_index, c.tool, c.arguments, c.text()) for c in one.calls] == [
            (c.end_token_index, c.tool, c.arguments, c.text()) for c in other.calls
        ]


async def test_history_that_a_client_rewords_is_still_the_policys_own(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, SEARCH, ANSWER)
    told = await client.ask(user("who?"), tools=(TOOL,))
    call = told.message.tool_calls[0]
    # As a framework may send it back: no text, ids of its own, arguments in another order.
    mine = ChatMessage(
        role="assistant",
        content="",
        tool_calls=[MessageCall(name=call.name, arguments=call.arguments, id="fc_9")],
    )
    reply = ChatMessage(role="tool", content="a person", tool_call_id="fc_9")
    await client.ask(user("who?"), mine, reply, tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert (trajectory.segment_starts, trajectory.lineages) == ([], [])


@pytest.mark.parametrize(
    ("sent", "ids"),
    [
        ((1, 0), ("", "")),  # calls in another order
        ((1,), ("",)),  # one is dropped
        ((0, 1), ("fc_8", "fc_9")),
        ((1, 0), ("", "fc_9")),  # an id of the client's stands for the call that is left
    ],
)
async def test_results_belong_to_the_calls_that_their_ids_name(
    chat: ChatFormat, end_id: int, sent: tuple[int, ...], ids: tuple[str, ...]
):
    client = await open_client(chat, end_id, call_text(query="0") + call_text(query="1"), "end")
    told = (await client.ask(user("who?"), tools=(TOOL,))).message
    calls = [
        told.tool_calls[i].model_copy(update={"id": name or told.tool_calls[i].id})
        for i, name in zip(sent, ids, strict=True)
    ]
    results = [
        ChatMessage(role="tool", content=f"of {call.arguments['query']}", tool_call_id=call.id)
        for call in calls
    ]
    mine = ChatMessage(role="assistant", content="", tool_calls=calls)
    await client.ask(user("who?"), mine, *results, tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    found = [call.text() for call in trajectory.turns[0].calls]
    assert found == [f"of {i}" if i in sent else "" for i in (0, 1)]


async def test_a_changed_history_begins_a_segment_with_the_policys_own_tokens(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, SEARCH, ANSWER)
    told = await client.ask(user("who?"), tools=(TOOL,))
    await client.ask(
        system("Be brief."),
        user("who?"),
        told.message,
        result(told.message, "a person"),
        tools=(TOOL,),
    )
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert len(trajectory.segment_starts) == 1
    assert trajectory.lineages == []
    second = trajectory.token_ids[trajectory.segment_starts[0] :].tolist()
    first_turn = client.session.forest.turns[0].token_ids
    text = "".join(map(chr, second))
    assert "".join(map(chr, first_turn)) in text  # its thought included


async def test_as_client_leaves_thoughts_out_of_what_is_sampled_after(
    chat: ChatFormat, end_id: int
):
    rules = SessionRules(run_seed=5, keeps_thoughts=False)
    client = await open_client(chat, end_id, SEARCH, ANSWER, rules=rules)
    told = await client.ask(user("who?"), tools=(TOOL,))
    await client.ask(user("who?"), told.message, result(told.message, "p"), tools=(TOOL,))
    trajectory = client.trajectory()
    assert len(trajectory.segment_starts) == 1
    before = chat.decode(client.servers.requests[1].token_ids)
    assert "look" not in before
    assert "search" in before


async def test_an_equal_request_is_a_sample_unless_it_is_a_retry(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two", "three")
    first = await client.ask(user("who?"))
    again = await client.ask(user("who?"), retries=1)
    other = await client.ask(user("who?"))
    assert (first.texts[0], again.texts[0], other.texts[0]) == ("one", "one", "two")
    assert again.turns == first.turns != other.turns
    await client.ask(user("who?"), first.message, user("and?"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [x.excluded for x in trajectory.lineages] == ["", "branch_not_gone_on_with"]
    assert [turn.text for turn in trajectory.trained_turns()] == ["one", "three"]


async def test_an_answer_that_was_not_delivered_is_told_again(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two")
    lost = await client.ask(user("who?"), deliver=False)
    assert client.trajectory().lineages[0].excluded == "undelivered"
    again = await client.ask(user("who?"))
    assert again.turns == lost.turns
    assert len(client.servers.requests) == 1
    assert client.trajectory().lineages == []


async def test_a_cut_connection_stops_the_sampling_and_a_retry_goes_on(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "a longer answer", "another one")
    client.servers.gate = asyncio.Event()
    async with aclosing(client.session.ask(Asked(messages=(user("who?"),)))) as events:
        async for event in events:
            if isinstance(event, Said):
                break
    (turn,) = client.session.forest.turns
    assert len(turn.token_ids) == 1
    assert turn.finish_reason is None
    cut = client.trajectory()
    assert (cut.lineages[0].excluded, cut.num_action_tokens) == ("undelivered", 1)
    client.servers.gate.set()
    told = await client.ask(user("who?"), retries=1)
    assert told.texts[0] == "a longer answer"
    request = client.servers.requests[-1]
    assert request.token_ids[-1] == turn.token_ids[0]  # what was told is part of the prompt
    captured(client, client.trajectory())


async def test_a_dying_server_costs_no_token(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "a longer answer")
    client.servers.breaks_after = [3, 0, 2, -1]
    told = await client.ask(user("who?"))
    assert told.texts[0] == "a longer answer"
    trajectory = client.trajectory()
    assert trajectory.num_action_tokens == len(chat.encode("a longer answer")) + 1
    expected = [-(i + 1) / 100 for i in range(trajectory.num_action_tokens)]
    np.testing.assert_allclose(trajectory.rollout_logprobs[trajectory.action_mask], expected)
    seeds = [request.seed for request in client.servers.requests]
    assert len(set(seeds)) == 3  # where nothing had come, the same is asked again


@pytest.mark.parametrize(("stop", "turn"), [((), "x"), (("y",), "xy z")])
async def test_nothing_is_sampled_behind_the_last_token_of_a_turn(
    chat: ChatFormat, end_id: int, stop: tuple[str, ...], turn: str
):
    """Its client hangs up while that token is written down, and then its gateway dies."""
    client = await open_client(chat, end_id, turn, "never")
    client.servers.gate = asyncio.Event()
    asking = asyncio.create_task(client.ask(user("who?"), stop=stop))
    await eventually(lambda: len(client.log.entries) == 3, asking)  # its first token
    client.log.gate = asyncio.Event()
    client.servers.gate.set()
    await eventually(lambda: client.log.waiting == 1, asking)
    asking.cancel()
    await asyncio.wait([asking])
    client.log.gate.set()
    await client.session.journal.write()
    heir = await client.successor()
    told = await heir.ask(user("who?"), retries=1, stop=stop)
    assert (told.texts[0], told.reasons[0]) == ("x", "stop")
    assert len(client.servers.requests) == 1
    assert len(heir.session.forest.turns[0].token_ids) == 2
    captured(heir, heir.trajectory())


async def test_what_a_cancelled_writer_left_is_written_before_anyone_is_told(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "one", "two")
    client.log.gate = asyncio.Event()
    asking = asyncio.create_task(client.ask(user("who?")))
    await eventually(lambda: client.log.waiting == 1, asking)
    asking.cancel()
    await asyncio.wait([asking])
    again = asyncio.create_task(client.ask(user("who?"), retries=1))
    await eventually(lambda: client.log.waiting == 2, again)
    assert not client.servers.requests  # its turn is not in the journal yet
    client.log.gate.set()
    assert (await again).texts[0] == "one"
    heir = await client.successor()
    assert [turn.token_ids for turn in heir.session.forest.turns] == [
        turn.token_ids for turn in client.session.forest.turns
    ]


async def test_a_write_that_fails_loses_no_event_and_blocks_no_retry(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two")
    client.log.failures = [OSError("no space left"), OSError("no space left")]
    with pytest.raises(OSError, match="no space"):
        await client.ask(user("who?"))
    with pytest.raises(OSError, match="no space"):
        await client.ask(user("who?"), retries=1)
    assert not client.servers.requests  # nothing is sampled that nobody wrote down
    told = await client.ask(user("who?"), retries=2)
    assert (told.texts[0], told.turns[0]) == ("one", 0)
    heir = await client.successor()
    assert encode_entry(heir.trajectory()) == encode_entry(client.trajectory())


async def test_a_rewritten_history_goes_on_with_the_turn_that_it_contains(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "first", "second", "third")
    told = await client.ask(user("who?"))
    await client.ask(user("who?"))  # another sample, which is not gone on with
    await client.ask(system("Be brief."), user("who?"), told.message, user("more?"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == ["first", "third"]


async def test_ids_of_the_clients_own_keep_the_results(chat: ChatFormat, end_id: int):
    calls = call_text(query="x") + call_text(query="y")
    client = await open_client(chat, end_id, calls, "end", "never")
    told = await client.ask(user("who?"), tools=(TOOL,))
    mine = [
        MessageCall(name=call.name, arguments=call.arguments, id=f"own{i}")
        for i, call in enumerate(told.message.tool_calls)
    ]
    said = ChatMessage(role="assistant", content="", tool_calls=mine)
    results = [ChatMessage(role="tool", content=f"r{i}", tool_call_id=f"own{i}") for i in (1, 0)]
    await client.ask(user("who?"), said, *results, tools=(TOOL,))
    trajectory = client.trajectory()
    assert [call.text() for call in trajectory.turns[0].calls] == ["r0", "r1"]
    assert trajectory.segment_starts == []


@pytest.mark.parametrize("number", [1.0, -0.0, 12345678901234567890, [{"a": 2.0}]])
async def test_numbers_may_come_back_as_javascript_writes_them(
    chat: ChatFormat, end_id: int, number: object
):
    client = await open_client(chat, end_id, call_text(query=number), "end")
    told = await client.ask(user("who?"), tools=(TOOL,))
    doubles = json.loads(json.dumps(told.message.tool_calls[0].arguments), parse_int=float)
    written = re.sub(r"-?(\d+)\.0\b", r"\1", json.dumps(doubles))
    call = MessageCall(name="search", arguments=json.loads(written), id="own")
    said = ChatMessage(role="assistant", content="", tool_calls=[call])
    found = ChatMessage(role="tool", content="r", tool_call_id="own")
    await client.ask(user("who?"), said, found, tools=(TOOL,))
    trajectory = client.trajectory()
    assert [turn.calls[0].text() for turn in trajectory.turns if turn.calls] == ["r"]
    assert trajectory.segment_starts == []


async def test_calls_of_one_turn_may_come_back_in_messages_of_their_own(
    chat: ChatFormat, end_id: int
):
    calls = call_text(query="x") + call_text(query="y")
    client = await open_client(chat, end_id, calls, calls, "end")
    history: list[ChatMessage] = [user("who?")]
    for answers in ("ab", "cd"):
        told = (await client.ask(*history, tools=(TOOL,))).message
        for i, text in enumerate(answers):
            said = told.model_copy(update={"tool_calls": [told.tool_calls[i]]})
            history += [said, result(told, text, i)]
    await client.ask(*history, tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    found = [[call.text() for call in turn.calls] for turn in trajectory.turns]
    assert found == [["a", "b"], ["c", "d"], []]
    assert trajectory.segment_starts == []
    assert client.session.count_tokens(Asked(tuple(history), tools=(TOOL,))) == len(
        client.servers.requests[-1].token_ids
    )


async def test_equal_answers_of_a_rewritten_history_keep_their_thoughts_in_order(
    chat: ChatFormat, end_id: int
):
    thoughts = [f"<think>{name}</think>same" for name in ("one", "two")]
    client = await open_client(chat, end_id, *thoughts, "end")
    history: list[ChatMessage] = [user("a")]
    for _ in thoughts:
        history += [(await client.ask(*history)).message, user("more")]
    await client.ask(system("Be brief."), *history)
    read = chat.decode(client.servers.requests[-1].token_ids)
    assert 0 < read.index("<think>one") < read.index("<think>two")


async def test_results_of_other_calls_are_another_history(chat: ChatFormat, end_id: int):
    calls = call_text(query="x") + call_text(query="y")
    client = await open_client(chat, end_id, calls, "one", "two")
    told = await client.ask(user("who?"), tools=(TOOL,))
    for order in ((0, 1), (1, 0)):
        results = [result(told.message, text, call) for text, call in zip("AB", order, strict=True)]
        await client.ask(user("who?"), told.message, *results, tools=(TOOL,), retries=1)
    assert len(client.servers.requests) == 3


async def test_volatile_text_of_results_is_that_of_its_own_place(chat: ChatFormat, end_id: int):
    rules = SessionRules(run_seed=5, volatile=(r"at \d+",))
    calls = call_text(query="x") + call_text(query="y")
    client = await open_client(chat, end_id, calls, calls, "end", rules=rules)
    history: list[ChatMessage] = [user("who?")]
    for time in ("10", "11"):
        said = (await client.ask(*history, tools=(TOOL,))).message
        history += [said, result(said, f"ok at {time}", 0), result(said, "ok", 1)]
    await client.ask(*history, tools=(TOOL,))
    trajectory = client.trajectory()
    captured(client, trajectory)
    found = [[call.text() for call in turn.calls] for turn in trajectory.turns[:2]]
    assert found == [["ok at 10", "ok"], ["ok at 11", "ok"]]
    assert client.session.forest.changed_texts == 0


async def test_an_answer_that_is_being_told_is_no_retrys(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two", "three")
    asked = Asked(messages=(user("who?"),))
    turns: list[int] = []
    for _ in range(2):
        async with aclosing(client.session.ask(asked)) as events:
            turns += [event.turn async for event in events if isinstance(event, Begun)]
    assert turns == [0, 1]  # the first was not written yet when the second was asked
    client.session.release(0)
    again = await client.ask(user("who?"))
    assert again.turns[0] == 0


async def test_an_answer_that_nobody_was_told_is_a_retrys(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two", "three")
    async with aclosing(client.session.ask(Asked(messages=(user("who?"),), n=2))) as events:
        begun = await anext(events)  # and then the client hangs up
        assert isinstance(begun, Begun)
        turns = client.session.forest.turns
        await eventually(lambda: all(turn.finish_reason for turn in turns))
    again = await client.ask(user("who?"), retries=1)
    assert again.turns[0] == 1 - begun.turn
    assert len(client.servers.requests) == 2


async def test_an_answer_that_was_cut_off_is_not_had_though_it_is_named(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "a longer answer", "end")
    client.servers.gate = asyncio.Event()
    async with aclosing(client.session.ask(Asked(messages=(user("who?"),)))) as events:
        async for event in events:
            if isinstance(event, Said):
                break
    client.servers.gate.set()
    cut = ChatMessage(role="assistant", content="a")
    named = {1: client.session.turn_id(0)}
    await client.ask(user("who?"), cut, user("go on"), turn_ids=named)
    trajectory = client.trajectory()
    assert [turn.text for turn in trajectory.trained_turns()] == ["end"]
    assert {one.excluded for one in trajectory.lineages} == {"", "undelivered"}


async def test_answers_of_a_later_turn_have_seeds_of_their_own(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", "two", "three")
    told = await client.ask(user("who?"))
    await client.ask(user("who?"), told.message, user("more?"), n=2)
    assert len({request.seed for request in client.servers.requests}) == 3


async def test_a_refused_request_marks_nothing_that_is_not_written(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one", rules=SessionRules(max_context=60))
    told = await client.ask(user("who?"), deliver=False)
    with pytest.raises(WireError, match="shorten"):
        await client.ask(user("who?"), told.message, user("x" * 80))
    assert not client.session.forest.turns[0].delivered


async def test_a_session_that_moves_keeps_its_limits_and_faults(chat: ChatFormat, end_id: int):
    rules = SessionRules(max_requests=2)
    client = await open_client(chat, end_id, "one", rules=rules)
    client.session.count_requests(1)
    await client.session.note_tool("search", "search-1")
    await client.ask(user("who?"))
    with pytest.raises(WireError, match="max_requests"):
        await client.ask(user("and?"))
    client.session.note_fault("tool_timeout: search")
    await client.session.journal.write()
    heir = (await client.successor(rules)).session
    assert (heir.requests, heir.spent, heir.fault) == (2, "max_requests", "tool_timeout: search")
    assert heir.tools == {"search": "search-1"}


async def test_what_comes_during_a_write_is_written_by_the_next(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one")
    journal, before = client.session.journal, len(client.log.entries)
    client.log.gate = asyncio.Event()
    first = asyncio.create_task(journal.write(LimitReached(limit="a")))
    await eventually(lambda: client.log.waiting == 1, first)
    second = asyncio.create_task(journal.write(LimitReached(limit="b")))
    await asyncio.sleep(0)
    client.log.gate.set()
    await asyncio.gather(first, second)
    assert [json.loads(entry)["limit"] for entry in client.log.entries[before:]] == ["a", "b"]


async def test_a_rule_may_come_last(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "first", "second")
    told = await client.ask(user("who?"))
    await client.ask(user("who?"), told.message, system("Be brief."))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert [turn.text for turn in trajectory.trained_turns()] == ["first", "second"]
    assert len(trajectory.segment_starts) == 1


async def test_a_rewritten_history_that_repeats_a_turn_has_had_it(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "first", "second")
    told = await client.ask(user("who?"), deliver=False)
    await client.ask(system("Be brief."), user("who?"), told.message, user("more?"))
    assert [turn.text for turn in client.trajectory().trained_turns()] == ["first", "second"]
    heir = await client.successor()
    assert encode_entry(heir.trajectory()) == encode_entry(client.trajectory())


async def test_of_two_equal_answers_the_one_that_was_heard_is_gone_on_with(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "same", "same", "end")
    told = await client.ask(user("who?"))
    await client.ask(user("who?"), deliver=False)
    await client.ask(user("who?"), told.message, user("more?"))
    first, second, third = client.session.forest.turns
    assert third.parent is first
    assert not second.delivered


async def test_a_retry_is_told_what_it_has_not_had_and_else_the_latest(
    chat: ChatFormat, end_id: int
):
    client = await open_client(chat, end_id, "one", "two", "three", "four")
    await client.ask(user("who?"))
    await client.ask(user("who?"))
    assert (await client.ask(user("who?"), retries=1)).texts[0] == "two"
    three = await client.ask(user("who?"), n=2, deliver=False)
    await client.session.delivered(three.turns[1])
    assert (await client.ask(user("who?"), retries=1)).texts[0] == "three"


async def test_a_request_with_other_limits_is_no_retry(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "a longer answer", "one STOP", "three")
    assert (await client.ask(user("who?"), max_tokens=2, deliver=False)).texts[0] == "a "
    assert (await client.ask(user("who?"), stop=("STOP",), retries=1)).texts[0] == "one "
    assert (await client.ask(user("who?"), retries=1)).texts[0] == "three"
    assert (await client.ask(user("who?"), max_tokens=2, retries=1)).texts[0] == "a "
    heir = await client.successor()
    assert (await heir.ask(user("who?"), stop=("STOP",), retries=1)).texts[0] == "one "
    assert len(client.servers.requests) == 3


@pytest.mark.parametrize("changes", [{"tools": (TOOL,)}, {"constrained": "logit_bias"}])
async def test_a_request_with_other_tools_or_constraints_is_no_retry(
    chat: ChatFormat, end_id: int, changes: dict[str, Any]
):
    rules = SessionRules(allows_constrained=True)
    client = await open_client(chat, end_id, "one", "two", rules=rules)
    assert (await client.ask(user("who?"), **changes)).texts[0] == "one"
    assert (await client.ask(user("who?"), retries=1)).texts[0] == "two"
    assert (await client.ask(user("who?"), retries=1, **changes)).texts[0] == "one"
    assert len(client.servers.requests) == 2


async def test_another_gateway_has_the_same_forest(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, SEARCH, ANSWER)
    told = await client.ask(user("who?"), tools=(TOOL,))
    heir = await client.successor()
    assert heir.session.key == client.session.key
    await heir.ask(user("who?"), told.message, result(told.message, "p"), tools=(TOOL,))
    captured(heir, heir.trajectory())
    assert heir.trajectory().segment_starts == []
    again = await heir.successor()
    assert encode_entry(again.trajectory()) == encode_entry(heir.trajectory())
    with pytest.raises(WireError, match="taken over"):
        await client.ask(user("who?"), told.message, user("more?"), tools=(TOOL,))
    with pytest.raises(SessionTakenError):
        await client.session.journal.write()


@pytest.mark.parametrize("together", [False, True])
async def test_a_stop_text_is_not_shown_and_its_tokens_are_kept(
    chat: ChatFormat, end_id: int, together: bool
):
    client = await open_client(chat, end_id, "one STOP two", "three")
    client.servers.together = together
    told = await client.ask(user("who?"), stop=("STOP",))
    assert (told.texts[0], told.reasons[0]) == ("one ", "stop")
    await client.ask(user("who?"), told.message, user("more?"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert trajectory.turns[0].text == "one STOP"  # the completing token stays sampled
    assert trajectory.segment_starts == []


async def test_another_gateway_knows_what_was_shown_of_a_turn(chat: ChatFormat, end_id: int):
    client = await open_client(chat, end_id, "one STOP two", "three")
    told = await client.ask(user("who?"), stop=("STOP",))
    heir = await client.successor()
    again = await heir.ask(user("who?"), stop=("STOP",), retries=1)
    assert (again.texts[0], again.reasons[0]) == ("one ", "stop")
    await heir.ask(user("who?"), told.message, user("more?"))
    trajectory = heir.trajectory()
    captured(heir, trajectory)
    assert (trajectory.segment_starts, len(trajectory.trained_turns())) == ([], 2)


async def test_what_is_constrained_is_served_where_allowed_and_never_trained(
    chat: ChatFormat, end_id: int
):
    rules = SessionRules(allows_constrained=True)
    client = await open_client(chat, end_id, "one", "two", rules=rules)
    told = await client.ask(user("who?"), constrained="logit_bias")
    await client.ask(user("who?"), told.message, user("more?"))
    trajectory = client.trajectory()
    captured(client, trajectory)
    assert {x.excluded for x in trajectory.lineages} == {"", "constrained"}
    assert [turn.text for turn in trajectory.trained_turns()] == ["two"]


async def test_volatile_text_is_shown_as_it_was_at_first(chat: ChatFormat, end_id: int):
    rules = SessionRules(volatile=(r"now: \d+",))
    client = await open_client(chat, end_id, "one", "two", rules=rules)
    told = await client.ask(system("now: 1"), user("who?"))
    await client.ask(system("now: 2"), user("who?"), told.message, user("more?"))
    trajectory = client.trajectory()
    assert trajectory.segment_starts == []
    assert "now: 2" not in chat.decode(trajectory.token_ids.tolist())
    assert client.session.forest.changed_texts == 1


async def test_volatile_text_of_tools_begins_no_new_history(chat: ChatFormat, end_id: int):
    rules = SessionRules(volatile=(r"now: \d+",))
    client = await open_client(chat, end_id, "one", "two", rules=rules)
    tools = [TOOL.model_copy(update={"description": f"now: {i}"}) for i in range(2)]
    told = await client.ask(user("who?"), tools=(tools[0],))
    await client.ask(user("who?"), told.message, user("more?"), tools=(tools[1],))
    assert client.trajectory().segment_starts == []


async def test_requests_that_are_refused_leave_nothing_of_their_volatile_text(
    chat: ChatFormat, end_id: int
):
    rules = SessionRules(max_context=400, volatile=(r"at \d+",))
    client = await open_client(chat, end_id, "one", rules=rules)
    written = len(client.log.entries)
    for i in range(3):
        with pytest.raises(WireError, match="context length is 400"):
            await client.ask(user(f"at {i} {i} " + "x" * 10_000))
    await client.ask(user("who?"))
    assert sum(map(len, client.log.entries[written:])) < 10_000
    assert client.session.forest.first_seen == {}


async def test_another_gateway_shows_volatile_text_as_it_was_at_first(
    chat: ChatFormat, end_id: int
):
    rules = SessionRules(volatile=(r"now: \d+",))
    client = await open_client(chat, end_id, "one", "two", rules=rules)
    told = await client.ask(system("now: 1"), user("who?"))
    heir = await client.successor(rules)
    # A history that was rewritten is rendered from its beginning.
    await heir.ask(system("now: 2"), user("who?"), told.message, system("Be brief."))
    assert heir.session.forest.turns[-1].begins
    read = chat.decode(client.servers.requests[-1].token_ids)
    assert ("now: 1" in read, "now: 2" in read) == (True, False)
