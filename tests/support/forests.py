"""Forests as agents leave them: real sessions over a policy that writes at random.

tree: branches of a long history, and branches of these. rewritten: a client that shortens each tool
result as soon as there is a newer one. sub_agents: an agent that has parts of its task done by
others, each with a prompt of its own kind. Sizes are in characters, about a token each.

`make bench CASE=forests` trains on them, at the sizes of small public agents.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from agent_r1.gateway.session import SessionRules
from agent_r1.learner.engine.interface import TrainSample
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import Trajectory
from tests.support.builders import rollout_task
from tests.support.fakes import build_tokenizer, call_text
from tests.unit.gateway.scripted import Client, open_client, result, system, user

CONTEXT = 1 << 16


@dataclass(frozen=True)
class Sizes:
    """How much is said, in characters, and how often."""

    prompt: int = 2000
    """System prompt with what it says of tools."""
    task: int = 100
    said: int = 40
    """By the policy in one turn."""
    result: int = 150
    """Of a tool."""
    turns: int = 6
    """Of the trunk, of a client that rewrites, and of a main agent, which asks as many others."""
    boughs: int = 3
    branches: int = 4
    """Of each bough."""
    sub_turns: int = 2


SMALL = Sizes(prompt=60, task=12, said=8, result=20, turns=4, boughs=2, branches=3, sub_turns=1)


class Agent:
    """An agent whose policy and tools say what a seed draws.

    Args:
        client: of its session.
        sizes: of what is said.
        rng: draws it.
    """

    def __init__(self, client: Client, sizes: Sizes, rng: np.random.Generator) -> None:
        self.client = client
        self.sizes = sizes
        self._rng = rng

    def words(self, length: int) -> str:
        """Return words of that many characters."""
        letters = self._rng.choice([*"abcdefghijklmnop    "], length)
        return "".join(letters).strip() or "a"

    async def say(self, history: list[ChatMessage]) -> ChatMessage:
        """Return what the policy says after a history: a call."""
        call = call_text(query=self.words(self.sizes.said))
        chat, end_id = self.client.chat, self.client.servers.end_id
        self.client.servers.turns = [[*chat.encode(call), end_id]]
        return (await self.client.ask(*history)).message

    async def turn(self, history: list[ChatMessage]) -> list[ChatMessage]:
        """Return a history with one more turn and the result of its call."""
        said = await self.say(history)
        return [*history, said, result(said, self.words(self.sizes.result))]


async def tree(agent: Agent, opening: list[ChatMessage]) -> None:
    """Grow a trunk, boughs and their branches, each from another hint."""
    trunk = opening
    for _ in range(agent.sizes.turns):
        trunk = await agent.turn(trunk)
    for _ in range(agent.sizes.boughs):
        bough = await agent.turn([*trunk, user(agent.words(agent.sizes.said))])
        for _ in range(agent.sizes.branches):
            await agent.say([*bough, user(agent.words(agent.sizes.said))])


async def rewritten(agent: Agent, opening: list[ChatMessage]) -> None:
    """Take turns, and keep only the newest result."""
    history = opening
    for _ in range(agent.sizes.turns):
        kept = [
            m.model_copy(update={"content": "done"}) if m.role == "tool" else m for m in history
        ]
        history = [*kept[:-1], history[-1]]
        history = await agent.turn(history)


async def sub_agents(agent: Agent, opening: list[ChatMessage]) -> None:
    """Take turns of a main agent, each of which another agent works for."""
    main = opening
    prompt = system(_drawn(agent.sizes.prompt, seed=1))
    for _ in range(agent.sizes.turns):
        main = await agent.turn(main)
        sub = [prompt, user(agent.words(agent.sizes.task))]
        for _ in range(agent.sizes.sub_turns):
            sub = await agent.turn(sub)


Grow = Callable[[Agent, list[ChatMessage]], Awaitable[None]]
KINDS: dict[str, Grow] = {"tree": tree, "rewritten": rewritten, "sub_agents": sub_agents}


async def grow(kind: str, sizes: Sizes, group_size: int, *, seed: int = 0) -> list[Trajectory]:
    """Return the sessions of a group: attempts at one task.

    Args:
        kind: in KINDS.
        sizes: of what is said.
        group_size: number of sessions.
        seed: of all that is random.
    """
    tokenizer = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatFormat(
        tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"), segments=True
    )
    opening = [system(_drawn(sizes.prompt, seed=0)), user(_drawn(sizes.task, seed=seed + 2))]
    rules = SessionRules(run_seed=5, max_context=CONTEXT)
    trajectories: list[Trajectory] = []
    for i in range(group_size):
        rollout = rollout_task(sample_index=i, group_size=group_size)
        client = await open_client(chat, end_id, "", rollout=rollout, rules=rules)
        agent = Agent(client, sizes, np.random.default_rng([seed, i]))
        await KINDS[kind](agent, opening)
        trajectories.append(client.trajectory())
    return trajectories


def samples_of(trajectories: list[Trajectory], *, seed: int = 0) -> list[TrainSample]:
    """Return trajectories as the learner trains them, with random advantages and returns."""
    rng = np.random.default_rng(seed)
    samples: list[TrainSample] = []
    for trajectory in trajectories:
        mask = trajectory.trained_mask()
        samples.append(
            TrainSample(
                token_ids=trajectory.token_ids,
                loss_mask=mask,
                rollout_logprobs=trajectory.rollout_logprobs,
                advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
                value_mask=mask,
                returns=_floats(mask, rng.normal(size=len(mask))),
                old_values=np.zeros(len(mask), np.float32),
                segment_starts=trajectory.segment_starts,
            )
        )
    return samples


def _floats(mask: Any, values: Any) -> Any:
    return np.where(mask, values, 0.0).astype(np.float32)


def _drawn(length: int, *, seed: int) -> str:
    letters = np.random.default_rng(seed).choice([*"abcdefghijklmnop    "], length)
    return "".join(letters).strip() or "a"
