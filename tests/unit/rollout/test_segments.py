"""Trajectories under a chat template that rewrites earlier turns: one segment for each history."""

from __future__ import annotations

import numpy as np
import pytest

from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.messages import decode_entry, encode_entry
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import (
    FORGETFUL_TEMPLATE,
    HERMES_TEMPLATE,
    FakeToolServer,
    build_tokenizer,
    call_text,
)
from tests.unit.rollout.loops import ANSWER, agent_loop, sampled, spoken


@pytest.fixture(scope="module")
def forgetful(end_id: int) -> ChatFormat:
    tokenizer = build_tokenizer(template=FORGETFUL_TEMPLATE)
    return ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)


async def test_a_rewritten_history_begins_a_segment_of_the_trajectory(
    forgetful: ChatFormat, end_id: int
):
    search = "<think>look</think>" + call_text(query="Ada")
    turns = [search, search, ANSWER]
    async with (
        FakeToolServer() as server,
        agent_loop(forgetful, end_id, turns, server) as built,
    ):
        trajectory = await built.loop.run(rollout_task())

    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    # Each segment is what the model was asked with, and what it then wrote, token for token.
    said = [sampled(forgetful, end_id, turn) for turn in turns]
    wanted = [
        [*request.token_ids, *turn]
        for request, turn in zip(built.policy.requests, said, strict=True)
    ]
    bounds = trajectory.segment_bounds()
    assert [trajectory.token_ids[start:end].tolist() for start, end in bounds] == wanted
    lengths = [len(segment) for segment in wanted]
    assert trajectory.segment_starts == [lengths[0], lengths[0] + lengths[1]]
    # The later ones begin with the dialogue without its thoughts.
    last = forgetful.decode(built.policy.requests[-1].token_ids)
    assert (last.count("<think>"), last.count("<tool_call>")) == (0, 2)
    # What was sampled stands there once; everything that points at it points into the whole.
    assert trajectory.token_ids[trajectory.action_mask].tolist() == [
        t for turn in said for t in turn
    ]
    expected = [-(i + 1) / 100 for turn in said for i in range(len(turn))]
    np.testing.assert_allclose(
        trajectory.rollout_logprobs[trajectory.action_mask], expected, rtol=1e-6
    )
    assert spoken(forgetful, trajectory) == [f"{turn}<|im_end|>" for turn in turns]
    close = forgetful.encode("</tool_call>")
    assert [[trajectory.token_ids[c.end_token_index]] for c in trajectory.calls()] == [close] * 2
    spans = [(span.start, span.end) for span in trajectory.version_spans]
    assert spans == [(turn.start, turn.end) for turn in trajectory.turns]
    assert decode_entry(Trajectory, encode_entry(trajectory)).turns == trajectory.turns


async def test_the_context_limits_a_segment_and_not_the_trajectory(
    forgetful: ChatFormat, end_id: int
):
    search = f"<think>{'so ' * 200}</think>" + call_text(query="Ada")  # about 650 tokens
    async with (
        FakeToolServer() as server,
        agent_loop(forgetful, end_id, [search, search, ANSWER], server, max_context=1200) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "COMPLETED"
    longest = max(end - start for start, end in trajectory.segment_bounds())
    assert longest <= 1200 < len(trajectory.token_ids)


async def test_a_rewritten_history_that_leaves_no_room_ends_the_trajectory(
    forgetful: ChatFormat, end_id: int
):
    async with (
        FakeToolServer(answer=lambda _: ToolResult(parts=[TextPart(text="x" * 300)])) as server,
        agent_loop(forgetful, end_id, [call_text(query="Ada")], server, max_context=400) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_trajectory_tokens")
    # Nothing was sampled after it, so it is no part of the trajectory.
    assert trajectory.segment_starts == []
    assert trajectory.action_mask[-1]


async def test_a_history_that_the_template_cannot_render_fails_the_attempt(end_id: int):
    template = FORGETFUL_TEMPLATE.replace(
        "{%- for message in messages -%}",
        "{%- if messages|length > 5 %}{{ raise_exception('too long a talk') }}{% endif -%}"
        "{%- for message in messages -%}",
    )
    tokenizer = build_tokenizer(template=template)
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id], segments=True)
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="Ada")], server) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("chat_template_error: the chat template cannot render")


async def test_a_reply_that_the_template_cannot_render_fails_the_attempt(end_id: int):
    # Three results in one reply; what was checked at the start are two.
    template = HERMES_TEMPLATE.replace(
        "{%- for message in messages -%}",
        "{%- if messages|selectattr('role', 'equalto', 'tool')|list|length > 2 -%}"
        "{{ raise_exception('too many') }}{%- endif -%}"
        "{%- for message in messages -%}",
        1,
    )
    chat = ChatFormat(build_tokenizer(template=template), end_of_turn_ids=[end_id], segments=True)
    async with (
        FakeToolServer() as server,
        agent_loop(chat, end_id, [call_text(query="Ada") * 3], server) as built,
    ):
        trajectory = await built.loop.run(rollout_task())
    assert trajectory.status == "FAILED"
    assert trajectory.reason.startswith("chat_template_error: the chat template cannot render")
