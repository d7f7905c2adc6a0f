"""A gateway with everything around it in one process: a scripted rollout server over HTTP, the
service that runs agents with its real sandbox, Redis.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.gateway.app import create_wire
from agent_r1.gateway.attempts import AgentAttempts
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.servers import RolloutServers
from agent_r1.gateway.session import SessionRules
from agent_r1.rollout.app import create_app as create_rollout
from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.text.chat_format import ChatFormat
from agent_r1.tools.agents.attached import AttachedAgents, add_attempts
from agent_r1.tools.agents.tool import AgentTool
from agent_r1.tools.app import ToolService, create_app
from agent_r1.weights.file import FileFetcher
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.streams import Broker
from agent_r1_proto.weights import NewestVersion
from tests.support.fakes import FakePolicy, FakeToolServer, build_tokenizer

HERE = ListenConfig()


def scene_chat() -> ChatFormat:
    """A chat format for whatever may follow a turn, in which a token is a letter."""
    tokenizer = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    return ChatFormat(
        tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"), segments=True
    )


@asynccontextmanager
async def agent_scene(
    broker: Broker,
    chat: ChatFormat,
    policy: FakePolicy,
    agent: AgentConfig,
    *tools: FakeToolServer,
    rules: SessionRules | None = None,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[AgentAttempts]:
    """Attempts whose agents run for real, and whose policy is scripted.

    `attempts.agent.url` is the address of the service that runs agents.
    """
    registry = Registry(broker)
    async with AsyncExitStack() as stack:
        rollout = await _serve(
            stack,
            create_rollout(
                server_id="rollout-1",
                policy=policy,
                versions=WeightVersions(policy, registry, FileFetcher(Path("/nowhere"), "run")),
                in_flight=lambda: 0,
            ),
        )
        announced = RolloutServer(
            server_id="rollout-1", url=rollout, policy_version=0, pid=1, host="h", started_at=0.0
        )
        await registry.announce_rollout_server(announced, 600.0)
        kind = AttachedAgents if agent.attached else AgentTool
        tool = kind(**agent.service_settings(), **(settings or {}))
        service = ToolService(tool)
        await stack.enter_async_context(service.running())
        app = create_app(service)
        if isinstance(tool, AttachedAgents):
            add_attempts(app, tool)
        agent = agent.model_copy(update={"url": await _serve(stack, app)})
        urls = {AGENTS: str(agent.url)}
        client = ToolClient({**urls, **{tool.name: tool.url for tool in tools}})
        stack.push_async_callback(client.stop)
        await client.start(60.0)
        servers = await stack.enter_async_context(RolloutServers(registry))
        await servers.catch_up(NewestVersion(policy_version=0))
        listener = bind("wire", HERE, None)
        stack.callback(listener.close)
        attempts = AgentAttempts(
            broker=broker,
            chat=chat,
            servers=servers,
            tools=client,
            agent=agent,
            rules=rules or SessionRules(run_seed=5),
            server_id="gateway-1",
            wire_url=advertised_url("wire", HERE, listener.getsockname()[1]),
        )
        await stack.enter_async_context(serving(create_wire(attempts), listener, HERE, None))
        yield attempts


async def _serve(stack: AsyncExitStack, app: Any) -> str:
    listener = bind("test", HERE, None)
    stack.callback(listener.close)
    await stack.enter_async_context(serving(app, listener, HERE, None))
    return advertised_url("test", HERE, listener.getsockname()[1])
