"""`AgentTool`: an agent, served like a tool: one call is one attempt from its start to its end.

The gateway opens a session, calls with an `AgentAttempt` as the `tool_context`, and gets an
`AgentEnd` as the result's data. A connection that breaks does not end the agent: whoever calls next
for the same attempt, perhaps another gateway that has taken the session over, waits for the agent
that runs, and the agent's requests go to that gateway from then on. `close` ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from urllib.parse import urlsplit

from pydantic import JsonValue, ValidationError

from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1.runtime.user_code import check_methods, import_named
from agent_r1.sandbox.worker import SandboxStartError
from agent_r1.tools.agents.agent import Agent
from agent_r1.tools.agents.containers import ContainerAttempt, ContainerRunner
from agent_r1.tools.agents.ending import Json, describe_end
from agent_r1.tools.agents.relay import Relay
from agent_r1.tools.agents.sandbox import AgentSandbox, Attempt, absolute, is_file
from agent_r1.tools.base import (
    Arguments,
    CallContext,
    Tool,
    ToolUnavailableError,
    parse_settings,
)
from agent_r1_proto.agents import AGENTS, AgentAttempt, AgentEnd
from agent_r1_proto.tools import ToolResult

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""Time after an attempt's limit in which its keeper must have ended it."""


class AgentTool(Tool):
    """Runs agents.

    Args:
        settings: fields of `AgentSettings`.

    Raises:
        ValueError: a setting is wrong, or `type` is not an `Agent`.
    """

    name = AGENTS
    description = "Runs an agent on a task; its tool_context is an AgentAttempt."
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    sessions = True

    def __init__(self, **settings: JsonValue) -> None:
        self.settings = parse_settings(AgentSettings, settings)
        kind = None if self.settings.type is None else import_agent(self.settings.type)
        self.version = self.settings.version or (kind.version if kind else Agent.version)
        self._runner = (
            AgentSandbox(self.settings)
            if self.settings.runner == "process"
            else ContainerRunner(self.settings)
        )
        self._running: dict[str, _Running] = {}

    async def start(self) -> None:
        """Start the sandbox, or reach what runs containers, and try an attempt there.

        Raises:
            ValueError: it does not work here; the text says what to do.
        """
        try:
            await self._runner.start()
        except ValueError as exc:
            raise ValueError(f"{exc}{_hint(self.settings, str(exc))}") from exc

    async def stop(self) -> None:
        """End every agent, and the sandbox."""
        await asyncio.gather(*map(self.close, list(self._running)))
        await self._runner.stop()

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Run an agent, or wait for the one that runs already, or say how it ended.

        Raises:
            ToolUnavailableError: the call is wrong, or the sandbox ended under the agent.
        """
        attempt = read_attempt(context)
        running = self._running.get(context.rollout_id)
        if running is None:
            running = _Running(self._runner, self.settings, attempt)
            self._running[context.rollout_id] = running
        running.move(attempt.url)
        end = await asyncio.shield(running.task)
        return ToolResult(data=end.model_dump(mode="json"))

    async def close(self, rollout_id: str) -> None:
        """End an agent, if it still runs, with all that it started and wrote."""
        running = self._running.pop(rollout_id, None)
        if running is not None:
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)


class _Running:
    """One agent, until its session is closed."""

    def __init__(
        self,
        runner: AgentSandbox | ContainerRunner,
        settings: AgentSettings,
        attempt: AgentAttempt,
    ) -> None:
        self._runner = runner
        self._settings = settings
        self._url = attempt.url
        self._relay: Relay | None = None
        self.task = asyncio.create_task(self._run(attempt))

    def move(self, url: str) -> None:
        """Send the agent's requests to this gateway from now on."""
        self._url = url
        if self._relay is not None:
            self._relay.move(url)

    async def _run(self, attempt: AgentAttempt) -> AgentEnd:
        try:
            inside = await self._runner.begin(_make_order(attempt, self._settings))
        except SandboxStartError as exc:
            return AgentEnd(exit="not_started", error=str(exc))
        began = time.monotonic()
        try:
            assert inside.listener is not None
            async with Relay(inside.listener, self._url) as self._relay:
                report = await self._wait(inside, attempt.timeout_s + GRACE_S)
            end = describe_end(self._settings, report)
            return end.model_copy(update={"latency_s": time.monotonic() - began})
        finally:
            self._relay = None
            await inside.end()

    async def _wait(self, inside: Attempt | ContainerAttempt, timeout_s: float) -> Json:
        try:
            async with asyncio.timeout(timeout_s):
                report = await inside.report()
        except TimeoutError:  # the machine is too busy for the keeper
            return {"why": "timeout"}
        if report is None:
            raise ToolUnavailableError("the sandbox of the agents ended while an agent ran")
        return report


def read_attempt(context: CallContext) -> AgentAttempt:
    """Return the attempt that a call is about.

    Raises:
        ToolUnavailableError: the call is wrong.
    """
    try:
        return AgentAttempt.model_validate(context.tool_context)
    except ValidationError as exc:
        # Not its text: that has the values, and one is the session's key.
        problems = "; ".join(
            f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
            for error in exc.errors(include_url=False, include_input=False)
        )
        raise ToolUnavailableError(f"tool_context is no AgentAttempt: {problems}") from None


def import_agent(name: str) -> type[Agent]:
    """Import `module:Name`, the value of `type`.

    Raises:
        ValueError: there is no such thing, or it is not an agent.
    """
    found = import_named(name, f"agent.type ({name})")
    if not (isinstance(found, type) and issubclass(found, Agent)):
        raise ValueError(
            f"agent.type ({name}) is not a subclass of agent_r1.Agent; derive it from Agent, or "
            "set agent.command to start a program"
        )
    check_methods(found, f"agent class {found.__name__}", {"run": ("task", "model")})
    return found


def _make_order(attempt: AgentAttempt, settings: AgentSettings) -> Json:
    """Return what the keeper of an attempt is told, or a container is made of."""
    words = settings.command or []
    if settings.runner == "process":  # an image has files of its own
        words = [str(absolute(word)) if is_file(word) else word for word in words]
    return {
        "command": words or None,
        "task": attempt.task.model_dump(mode="json"),
        "prompt": attempt.task.prompt[-1].shown(),
        "key": attempt.key,
        "model": attempt.model,
        "context": attempt.context,
        "timeout_s": attempt.timeout_s,
        "path": urlsplit(attempt.url).path,
    }


def _hint(settings: AgentSettings, problem: str) -> str:
    """Return what to do about a class that cannot be imported, where that is the problem."""
    if settings.type is None or "Error: " not in problem:
        return ""
    return (
        f"; {settings.type} sees the installed packages, the Python files beside it, and what "
        "agent.show names"
    )
