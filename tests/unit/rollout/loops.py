"""Builds an agent loop over fakes, so that a test shows only what it is about."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import ToolEnv
from agent_r1.text.chat_format import ChatFormat
from agent_r1_proto.trajectory import Trajectory
from tests.support.fakes import FakePolicy, FakeToolServer

ANSWER = "<think>done</think><answer>Ada</answer>"


@dataclass
class Built:
    """A loop and the fakes behind it."""

    loop: AgentLoop
    policy: FakePolicy
    tools: ToolClient
    servers: Mapping[str, FakeToolServer] = field(default_factory=dict)


def sampled(chat: ChatFormat, end_id: int, text: str) -> list[int]:
    """Return a turn as the model samples it: its text and the end-of-turn token."""
    return [*chat.encode(text), end_id]


def spoken(chat: ChatFormat, trajectory: Trajectory) -> list[str]:
    """Return the sampled tokens of each turn, decoded, end-of-turn token included."""
    return [chat.decode(trajectory.token_ids[t.start : t.end].tolist()) for t in trajectory.turns]


@asynccontextmanager
async def agent_loop(
    chat: ChatFormat,
    end_id: int,
    turns: Sequence[str | list[int]],
    *servers: FakeToolServer,
    env: Mapping[str, Any] | None = None,
    make_env: Any = ToolEnv,
    max_context: int = 4096,
    **tool_options: Any,
) -> AsyncIterator[Built]:
    """A loop whose model writes `turns`; text gets the end-of-turn token, token ids do not."""
    script = [sampled(chat, end_id, turn) if isinstance(turn, str) else turn for turn in turns]
    policy = FakePolicy(script, eos_token_ids=[end_id], max_context=max_context)
    tools = ToolClient({server.name: server.url for server in servers}, **tool_options)
    try:
        await tools.start(wait_s=60.0)
        yield Built(
            loop=AgentLoop(
                policy=policy,
                chat=chat,
                tools=tools,
                env=EnvConfig(**(env or {})),
                make_env=make_env,
                max_context=max_context,
                run_seed=5,
                server_id="server-1",
            ),
            policy=policy,
            tools=tools,
            servers={server.name: server for server in servers},
        )
    finally:
        await tools.stop()
