"""The tokens of an interaction whose tools run elsewhere: no environment, no calls of ours."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent_r1.text.chat_format import ChatFormat, asked_dialogue
from agent_r1.text.tokens import Interaction, TokenLoop, UnreadableTurnError
from agent_r1_proto.tasks import Role
from tests.support.builders import rollout_task
from tests.support.fakes import FORGETFUL_TEMPLATE, FakePolicy, build_tokenizer, call_text

LIMITS = {"max_chars": 1000, "max_tokens": None}
SEARCH = "<think>look</think>" + call_text(query="Ada")


def make_loop(chat: ChatFormat, end_id: int, *turns: str, max_context: int = 4096) -> TokenLoop:
    script = [[*chat.encode(turn), end_id] for turn in turns]
    policy = FakePolicy(script, eos_token_ids=[end_id], max_context=max_context)
    return TokenLoop(policy, chat, max_context=max_context, max_tokens_per_turn=300)


def begin(chat: ChatFormat) -> Interaction:
    interaction = Interaction(rollout_task())
    task = interaction.rollout.task
    interaction.messages = asked_dialogue(task, None, lambda text: reply(chat, "tool", text))
    interaction.add_prompt(chat.render_prompt(interaction.messages))
    return interaction


def reply(chat: ChatFormat, role: Role, text: str):
    return chat.outside_message(role, text, **LIMITS)


async def sample(loop: TokenLoop, interaction: Interaction) -> None:
    number = len(interaction.turns)
    await loop.sample(interaction, temperature=1.0, seed=number, request_id=f"r/{number}")


async def test_what_was_sampled_and_what_was_read_stand_side_by_side(chat: ChatFormat, end_id: int):
    loop, interaction = make_loop(chat, end_id, SEARCH, "It is Ada."), begin(chat)
    prompt = list(interaction.token_ids)
    await sample(loop, interaction)
    said = list(interaction.token_ids)
    loop.append(interaction, [reply(chat, "tool", "Ada was born in 1815.")])
    shown = list(interaction.token_ids)
    await sample(loop, interaction)
    assert interaction.ended is None

    interaction.ended = ("COMPLETED", "answer")
    trajectory = interaction.finish(seed=0)
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    first, second = trajectory.turns
    assert said[len(prompt) :] == [*chat.encode(SEARCH), end_id]
    assert "Ada was born in 1815." in chat.decode(shown[len(said) :])
    # Sampled: behind the prompt up to the result, and all that stands behind the result.
    wanted = [
        len(prompt) <= i < len(said) or i >= len(shown) for i in range(len(interaction.token_ids))
    ]
    assert trajectory.action_mask.tolist() == wanted
    assert (first.start, first.end) == (len(prompt), len(said))
    assert (second.start, second.text) == (len(shown), "It is Ada.")
    assert (first.thought, first.calls) == ("look", [])  # calls are for whoever runs them


async def test_a_history_that_is_rewritten_begins_a_segment(end_id: int):
    tokenizer = build_tokenizer(template=FORGETFUL_TEMPLATE)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)
    loop, interaction = make_loop(chat, end_id, SEARCH), begin(chat)
    await sample(loop, interaction)
    length = len(interaction.token_ids)
    loop.append(interaction, [reply(chat, "tool", "1815")])
    assert interaction.ended is None
    assert interaction.segment_starts == [length]
    assert "look" not in chat.decode(interaction.context)


async def test_the_limit_that_cuts_a_turn_is_named(chat: ChatFormat, end_id: int):
    interaction = begin(chat)
    loop = make_loop(chat, end_id, "so " * 600)
    await sample(loop, interaction)
    assert interaction.ended == ("TRUNCATED", "max_tokens_per_turn")
    interaction = begin(chat)
    loop = make_loop(chat, end_id, "so " * 600, max_context=len(interaction.token_ids) + 20)
    await sample(loop, interaction)
    assert interaction.ended == ("TRUNCATED", "max_trajectory_tokens")
    assert len(interaction.context) == loop.max_context


async def test_a_reply_without_room_for_a_turn_behind_it_is_not_appended(
    chat: ChatFormat, end_id: int
):
    interaction = begin(chat)
    loop = make_loop(chat, end_id, "so", max_context=len(interaction.token_ids) + 10)
    await sample(loop, interaction)
    before = list(interaction.token_ids)
    loop.append(interaction, [reply(chat, "tool", "word " * 50)])
    assert interaction.ended == ("TRUNCATED", "max_trajectory_tokens")
    assert interaction.token_ids == before


@pytest.mark.parametrize("left", [0, 1])
async def test_a_reply_fills_the_context_if_it_leaves_no_token(
    chat: ChatFormat, end_id: int, left: int
):
    interaction = begin(chat)
    loop = make_loop(chat, end_id, "so")
    await sample(loop, interaction)
    short = [reply(chat, "tool", "1815")]
    full = len(interaction.token_ids) + len(chat.encode_reply(short))
    replace(loop, max_context=full + left).append(interaction, short)
    assert (interaction.ended is None) == (left == 1)


async def test_a_tool_format_that_fails_is_told_from_a_sampler_that_does(
    chat: ChatFormat, end_id: int, monkeypatch: pytest.MonkeyPatch
):
    loop, interaction = make_loop(chat, end_id, SEARCH), begin(chat)

    def fail(_reader: object, _text: str) -> None:
        raise KeyError("name")

    monkeypatch.setattr(type(chat.reader), "read", fail)
    with pytest.raises(UnreadableTurnError) as caught:
        await sample(loop, interaction)
    assert isinstance(caught.value.__cause__, KeyError)
    assert interaction.turns == []
