"""The tokens of an interaction whose tools run elsewhere: no environment, no calls of ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_r1.text.chat_format import ChatFormat, asked_dialogue
from agent_r1.text.tokens import TokenLoop, UnreadableTurnError
from agent_r1.text.trajectory_builder import TrajectoryBuilder
from agent_r1_proto.tasks import Role
from tests.support.builders import rollout_task
from tests.support.fakes import FORGETFUL_TEMPLATE, FakePolicy, build_tokenizer, call_text

LIMITS = {"max_chars": 1000, "max_tokens": None}
SEARCH = "<think>look</think>" + call_text(query="Ada")


def make_loop(chat: ChatFormat, end_id: int, *turns: str, max_context: int = 4096) -> TokenLoop:
    script = [[*chat.encode(turn), end_id] for turn in turns]
    policy = FakePolicy(script, eos_token_ids=[end_id], max_context=max_context)
    return TokenLoop(policy, chat, max_context=max_context, max_tokens_per_turn=300)


def begin(chat: ChatFormat) -> TrajectoryBuilder:
    record = TrajectoryBuilder()
    task = rollout_task().task
    record.messages = asked_dialogue(task, None, lambda text: reply(chat, "tool", text))
    record.add_prompt(chat.render_prompt(record.messages))
    return record


def reply(chat: ChatFormat, role: Role, text: str):
    return chat.outside_message(role, text, **LIMITS)


async def sample(loop: TokenLoop, record: TrajectoryBuilder) -> str | None:
    number = len(record.turns)
    return await loop.sample(record, temperature=1.0, seed=number, request_id=f"r/{number}")


async def test_what_was_sampled_and_what_was_read_stand_side_by_side(chat: ChatFormat, end_id: int):
    loop, record = make_loop(chat, end_id, SEARCH, "It is Ada."), begin(chat)
    prompt = list(record.token_ids)
    assert await sample(loop, record) is None
    said = list(record.token_ids)
    assert loop.append(record, [reply(chat, "tool", "Ada was born in 1815.")])
    shown = list(record.token_ids)
    assert await sample(loop, record) is None

    trajectory = record.finish(rollout_task(), "COMPLETED", "answer", seed=0)
    first, second = trajectory.turns
    assert said[len(prompt) :] == [*chat.encode(SEARCH), end_id]
    assert "Ada was born in 1815." in chat.decode(shown[len(said) :])
    # Sampled: behind the prompt up to the result, and all that stands behind the result.
    wanted = [len(prompt) <= i < len(said) or i >= len(shown) for i in range(len(record.token_ids))]
    assert trajectory.action_mask.tolist() == wanted
    assert (first.start, first.end) == (len(prompt), len(said))
    assert (second.start, second.text) == (len(shown), "It is Ada.")
    assert (first.thought, first.calls) == ("look", [])  # calls are for whoever runs them


async def test_a_history_that_is_rewritten_begins_a_segment(end_id: int):
    tokenizer = build_tokenizer(template=FORGETFUL_TEMPLATE)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)
    loop, record = make_loop(chat, end_id, SEARCH), begin(chat)
    await sample(loop, record)
    length = len(record.token_ids)
    assert loop.append(record, [reply(chat, "tool", "1815")])
    assert record.segment_starts == [length]
    assert "look" not in chat.decode(record.context)


async def test_the_limit_that_cuts_a_turn_is_named(chat: ChatFormat, end_id: int):
    record = begin(chat)
    loop = make_loop(chat, end_id, "so " * 600)
    assert await sample(loop, record) == "max_tokens_per_turn"
    record = begin(chat)
    loop = make_loop(chat, end_id, "so " * 600, max_context=len(record.token_ids) + 20)
    assert await sample(loop, record) == "max_trajectory_tokens"
    assert len(record.context) == loop.max_context


async def test_a_reply_without_room_for_a_turn_behind_it_is_not_appended(
    chat: ChatFormat, end_id: int
):
    record = begin(chat)
    loop = make_loop(chat, end_id, "so", max_context=len(record.token_ids) + 10)
    await sample(loop, record)
    before = list(record.token_ids)
    assert not loop.append(record, [reply(chat, "tool", "word " * 50)])
    short = [reply(chat, "tool", "1815")]
    full = len(before) + len(chat.encode_reply(short))
    assert not replace(loop, max_context=full).append(record, short)  # the turn has no token left
    assert record.token_ids == before
    assert replace(loop, max_context=full + 1).append(record, short)


async def test_a_tool_format_that_fails_is_told_from_a_sampler_that_does(
    chat: ChatFormat, end_id: int, monkeypatch: pytest.MonkeyPatch
):
    loop, record = make_loop(chat, end_id, SEARCH), begin(chat)

    def fail(_reader: object, _text: str) -> None:
        raise KeyError("name")

    monkeypatch.setattr(type(chat.reader), "read", fail)
    with pytest.raises(UnreadableTurnError) as caught:
        await sample(loop, record)
    assert isinstance(caught.value.__cause__, KeyError)
    assert record.turns == []
