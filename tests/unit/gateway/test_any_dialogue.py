"""Whatever an agent does, every sampled token is in the trajectory once, in its own context."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_r1.gateway.session import SessionRules
from agent_r1.gateway.trajectory import Credit
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.messages import decode_entry, encode_entry
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import Trajectory
from tests.support.fakes import FORGETFUL_TEMPLATE, HERMES_TEMPLATE, build_tokenizer, call_text
from tests.unit.gateway.scripted import Client, open_client, system, user

TURNS = (
    "<think>so</think>plain",
    "plain",
    "<think>a</think>" + call_text(query="x"),
    call_text(query="x") + call_text(query="y"),
    "<tool_call>\nbroken",
    "",
)


@pytest.fixture(scope="module", params=[HERMES_TEMPLATE, FORGETFUL_TEMPLATE])
def chat(request: pytest.FixtureRequest) -> ChatFormat:
    tokenizer = build_tokenizer(template=request.param)
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return ChatFormat(
        tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"), segments=True
    )


async def _behave(client: Client, chance: random.Random) -> dict[int, list[str]]:
    """Do what agents do: go on, ask anew, go back, reword the past, sample several, go away.

    Returns:
        What the user and the system said before each turn, by the turn's number.
    """
    asked: dict[int, list[str]] = {}
    histories: list[list[ChatMessage]] = [[user("first")]]
    for step in range(8):
        history = list(chance.choice(histories))
        kind = chance.choice(("go on", "go on", "anew", "back", "reword", "system"))
        if kind == "anew":
            history = [user(f"other {chance.randrange(2)}")]
        elif kind == "back":
            history = history[: 1 + 2 * chance.randrange(len(history) // 2 + 1)]
        elif kind == "reword" and len(history) > 1:
            at = chance.randrange(len(history))
            said = history[at].role == "assistant"
            words = ChatMessage(role="assistant", content="as I said") if said else user("hm")
            history[at] = words
        elif kind == "system" and history[0].role != "system":
            history = [system("be brief"), *history]
        if history[-1].role == "assistant":
            history.append(user("and?"))
        n = chance.choice((1, 1, 1, 2))
        told = await client.ask(
            *history,
            n=n,
            retries=chance.choice((0, 0, 1)),
            deliver=chance.random() < 0.8,
            stop=chance.choice(((), (), ("la",))),
            max_tokens=chance.choice((None, None, 4)),
        )
        given = [str(m.content) for m in history if m.role in ("system", "user")]
        asked |= dict.fromkeys(told.turns.values(), given)
        message = told.messages[chance.randrange(n)]
        replies = [
            ChatMessage(role="tool", content=f"r{step}", tool_call_id=call.id)
            for call in message.tool_calls
        ]
        histories.append([*history, message, *(replies or [user(f"go on {step}")])])
    return asked


@settings(max_examples=40, deadline=None)
@example(seed=28831, keeps=False, credit="main")  # the agent had nothing of the longest lineage
@given(seed=st.integers(0, 1 << 32), keeps=st.booleans(), credit=st.sampled_from(["all", "main"]))
def test_every_token_once_and_behind_what_it_was_sampled_after(
    chat: ChatFormat, seed: int, keeps: bool, credit: Literal["all", "main"]
):
    asyncio.run(_check(chat, random.Random(seed), keeps, Credit(credit)))


async def _check(chat: ChatFormat, chance: random.Random, keeps: bool, credit: Credit) -> None:
    end_id = min(chat._end_of_turn_ids)
    script = [chance.choice(TURNS) for _ in range(40)]
    rules = SessionRules(run_seed=1, max_context=1 << 20, keeps_thoughts=keeps, max_requests=100)
    client = await open_client(chat, end_id, *script, rules=rules)
    asked = await _behave(client, chance)
    for turn, said in asked.items():
        read = chat.decode(client.session.forest.turns[turn].context())
        blocks = re.findall(r"<\|im_start\|>(?:system|user)\n(.*?)<\|im_end\|>", read, re.DOTALL)
        assert [text for text in blocks if "<tool_response>" not in text] == said
    trajectory = client.trajectory(credit=credit)
    nodes = client.session.forest.turns
    wanted = Counter((tuple(n.context()), tuple(n.token_ids)) for n in nodes if n.token_ids)
    found: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    tokens = trajectory.token_ids.tolist()
    for start, end in trajectory.segment_bounds():
        for turn in trajectory.turns:
            if start <= turn.start < end:
                found[tuple(tokens[start : turn.start]), tuple(tokens[turn.start : turn.end])] += 1
    assert found == wanted
    assert trajectory.num_action_tokens == sum(len(n.token_ids) for n in nodes)
    main = trajectory.lineages[0] if trajectory.lineages else None
    assert main is None or main.name.startswith("main")
    assert len({lineage.name for lineage in trajectory.lineages}) == len(trajectory.lineages)
    # What was sampled for a client that had all of it, and went on with it, is trained.
    trained = {turn.start for turn in trajectory.trained_turns()}
    assert len(trained) >= min(1, sum(n.delivered for n in nodes))
    assert decode_entry(Trajectory, encode_entry(trajectory)) is not None
    heir = await client.successor(rules)
    assert encode_entry(heir.trajectory(credit=credit)) == encode_entry(trajectory)
