"""Attempts of agents: a session is opened, the agent is called, and a trajectory comes of it.

services/attempts/worker.py hands in `RolloutTask`s and publishes what is returned; wires find the
sessions here. The agent's service is called like a tool. Where another gateway has begun an
attempt, its journal says how far it came, and its agent still runs.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import JsonValue, ValidationError

from agent_r1.attempts.tool_client import ToolClient, ToolOutageError
from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.journal import AttemptCalled, AttemptEnded, Journal
from agent_r1.gateway.servers import RolloutServers
from agent_r1.gateway.session import MODEL, AgentSession, SessionRules
from agent_r1.gateway.trajectory import (
    Credit,
    join_compacted,
    last_main_turn,
    session_trajectory,
)
from agent_r1.gateway.wire import WireError
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.tokens import failed_trajectory, recorded_data, turn_seed
from agent_r1_proto.agents import AGENTS, AgentAttempt, AgentEnd, AgentTask
from agent_r1_proto.parts import TextPart, shown_text
from agent_r1_proto.session_log import SessionLog, SessionTakenError
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.tools import ToolResult, ToolSpec
from agent_r1_proto.trajectory import Status, ToolCallRecord, Trajectory

logger = logging.getLogger(__name__)

CALL_MARGIN_S = 15.0
"""Time that the agents' service has beside the agent's own: to start it, and to answer."""
FIND_AGAIN_S = 0.25
RETRY_AFTER_S = 5.0
"""When a client is to ask again where this gateway cannot wait; it is gone by then."""
SESSION_KEPT_S = 600.0
"""A journal is kept for so long after the attempt's time is up."""


def session_name(rollout: RolloutTask) -> str:
    """Return the id of an attempt's session: the same at every gateway, and fit for a URL."""
    text = f"{rollout.reply_stream or ''} {rollout.key}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(eq=False, kw_only=True)
class AgentAttempts:
    """Makes attempts, many at a time."""

    broker: Broker
    chat: ChatFormat
    servers: RolloutServers
    tools: ToolClient
    """Knows the service that runs agents."""
    agent: AgentConfig
    rules: SessionRules
    server_id: str
    """Name of this gateway."""
    wire_url: str
    """Base URL that agents call."""
    on_end: Callable[[AgentSession, Trajectory], None] = lambda session, trajectory: None
    """Called at the end of each attempt."""
    is_stopping: bool = False
    """Attempts that are cancelled from now on are given back: their agents run on, for the gateway
    that takes them."""
    _open: dict[str, AgentSession] = field(default_factory=dict[str, AgentSession], init=False)
    _journals: dict[str, Journal] = field(default_factory=dict[str, Journal], init=False)

    async def find(self, session_id: str, key: str) -> AgentSession:
        """Return an open session by its id and its key.

        One that is open nowhere, or at another gateway, is waited for: SDKs give up at once where
        there is no session, and after two seconds where a service is away, while the entry of a
        gateway that died is another's only when its lease ends.

        Raises:
            WireError: there is none of that id and key, or no gateway has taken it in time.
        """
        deadline = time.monotonic() + 2 * self.broker.lease_s
        while True:
            session = self._open.get(session_id)
            expected = session.key if session else await self._journal(session_id).key()
            if not expected or not hmac.compare_digest(expected.encode(), key.encode()):
                raise WireError(
                    "no_session",
                    "there is no session of this id and key; it has ended, or the API key is "
                    "another one's",
                )
            if session is not None:
                return session
            if self.is_stopping or time.monotonic() > deadline:
                raise WireError(
                    "unavailable",
                    "the session goes on at another gateway; send the request again",
                    retry_after_s=RETRY_AFTER_S,
                )
            await asyncio.sleep(FIND_AGAIN_S)  # whoever takes it says so to Redis alone

    def offered(self, session: AgentSession) -> dict[str, ToolSpec]:
        """Return the tools of the run that a session may call, by name."""
        specs = {name: spec for name, spec in self.tools.specs.items() if name != AGENTS}
        wanted = session.rollout.task.tools
        return specs if wanted is None else {n: s for n, s in specs.items() if n in wanted}

    async def call_tool(
        self, session: AgentSession, name: str, arguments: dict[str, JsonValue]
    ) -> ToolResult:
        """Let a tool of the run answer a call of an agent.

        Raises:
            WireError: it is not offered, or a service failed, so that the attempt is made again.
        """
        session.count_requests(1)
        spec = self.offered(session).get(name)
        if spec is None:
            offered = ", ".join(sorted(self.offered(session))) or "none"
            raise WireError("invalid_request", f"there is no tool {name!r}; offered: {offered}")
        problem = self.tools.argument_error(spec, arguments)
        if problem is not None:
            return ToolResult(status="error", parts=[TextPart(text=f"Error: {problem}")])
        context = session.rollout.task.tool_context
        session_id = session.session_id
        try:
            if spec.sessions and name not in session.tools:
                await self._open_with(session, name)
            await session.note_tool(name, self.tools.holder(name, session_id))
            reply = await self.tools.call(
                name,
                arguments,
                rollout_id=session_id,
                turn=max(len(session.forest.turns) - 1, 0),
                tool_context=context,
            )
        except ToolOutageError as exc:
            session.note_fault(exc.reason)
            raise WireError("unavailable", exc.reason) from exc
        record = ToolCallRecord(
            end_token_index=0,
            tool=name,
            arguments=arguments,
            status=reply.result.status,
            version=reply.version,
            instance=reply.instance,
            attempt=reply.attempt,
            latency_ms=reply.latency_ms,
            parts=[TextPart(text=reply.result.text())],
            data=recorded_data(reply.result.data),
        )
        await session.tool_answered(record)
        return reply.result

    async def _open_with(self, session: AgentSession, tool: str) -> None:
        """Open a session with a tool, once for all calls that wait for it."""
        opening = session.opening.get(tool)
        if opening is None:
            opening = asyncio.create_task(self._open_session(session, tool))
            session.opening[tool] = opening
            opening.add_done_callback(lambda _: session.opening.pop(tool))
        await asyncio.wait([opening])  # which goes on for the others where this call is cancelled
        opening.result()

    async def _open_session(self, session: AgentSession, tool: str) -> None:
        """Open a session with a tool; close it where nobody is left who would."""
        context = session.rollout.task.tool_context
        await self.tools.open_session(tool, session.session_id, context)
        session.tools[tool] = self.tools.holder(tool, session.session_id)
        if session.is_closed:
            await self.tools.close_session(tool, session.session_id)

    async def run(self, rollout: RolloutTask) -> Trajectory:
        """Make one attempt, or go on with one that another gateway has begun.

        Raises:
            CancelledError: another gateway has taken the attempt over.
        """
        if rollout.decoding is not None:
            return failed_trajectory(
                rollout,
                f"decoding_refused: {rollout.decoding.method} searches branches of our own loop, "
                "and an agent has a loop of its own; leave the decoding out",
            )
        session_id = session_name(rollout)
        journal = self._journal(session_id)
        session = AgentSession(rollout, session_id, journal, self.chat, self.servers, self.rules)
        await session.open()
        self._open[session_id], self._journals[session_id] = session, journal
        try:
            if session.over is None:
                over = await self._call(session)
                session.close(over)
                await journal.write(over)
        except asyncio.CancelledError:
            del self._journals[session_id]  # another gateway goes on with it, or nobody
            session.close()
            try:
                await journal.write()  # faults and limits that wait for the next write
            except Exception as exc:  # noqa: BLE001 - whatever it is, the attempt is given up
                logger.warning("journal not written session=%s error=%r", session_id, exc)
            raise
        except SessionTakenError as exc:
            del self._journals[session_id]
            # Its entry has another reader by now, who publishes; nothing is left to do here.
            logger.warning("session taken over by another gateway session=%s", session_id)
            raise asyncio.CancelledError from exc
        finally:
            session.close()
            del self._open[session_id]
            if not journal.is_taken and (session.over is not None or not self.is_stopping):
                ending = (self.tools.close_session(n, session_id) for n in (AGENTS, *session.tools))
                await asyncio.shield(asyncio.gather(*ending))
        assert session.over is not None
        trajectory = self._trajectory(session, session.over)
        self.on_end(session, trajectory)
        return trajectory

    def _journal(self, session_id: str) -> Journal:
        kept_s = self.agent.timeout_s + CALL_MARGIN_S + SESSION_KEPT_S
        return Journal(SessionLog(self.broker, session_id, kept_s))

    async def forget(self, trajectory: Trajectory) -> None:
        """Delete the journal of an attempt whose trajectory is published, or nobody wants."""
        journal = self._journals.pop(session_name(trajectory.rollout), None)
        if journal is not None:
            await journal.delete()

    # -- the agent -------------------------------------------------------------------------------

    async def _call(self, session: AgentSession) -> AttemptEnded:
        """Let the agent run to its end.

        Raises:
            SessionTakenError: another gateway goes on with it.
        """
        task = session.rollout.task
        left_s = session.started_at + self.agent.timeout_s - time.time()
        attempt = AgentAttempt(
            task=AgentTask(id=task.id, prompt=task.messages(), metadata=task.metadata),
            url=f"{self.wire_url}/sessions/{session.session_id}/v1",
            key=session.key,
            model=MODEL,
            context=self.rules.max_context,
            timeout_s=max(left_s, 0.001),
        )
        name = session.session_id
        try:
            if session.called is None:
                await self.tools.open_session(AGENTS, name, None)
                await session.journal.write(AttemptCalled(instance=self.tools.holder(AGENTS, name)))
            else:
                self.tools.resume_session(AGENTS, name, session.called)
                for tool, instance in session.tools.items():
                    if instance:
                        self.tools.resume_session(tool, name, instance)
            reply = await self.tools.call(
                AGENTS,
                {},
                rollout_id=name,
                turn=0,
                tool_context=attempt.model_dump(mode="json"),
                timeout_s=max(left_s, 0.0) + CALL_MARGIN_S,
            )
            return AttemptEnded(end=AgentEnd.model_validate(reply.result.data))
        except ToolOutageError as exc:
            return AttemptEnded(outage=exc.reason)
        except ValidationError as exc:
            return AttemptEnded(outage=f"agent_bad_reply: {exc.error_count()} fields are wrong")

    # -- what comes of it ------------------------------------------------------------------------

    @property
    def _credit(self) -> Credit:
        return Credit(self.agent.credit, self.agent.side_calls)

    def _trajectory(self, session: AgentSession, over: AttemptEnded) -> Trajectory:
        end = over.end
        status, reason = _outcome(session, over)
        join_compacted(session, self.chat)
        answer = self._answer(session, end)
        return session_trajectory(
            session,
            self.chat,
            self._credit,
            (status, reason),
            answer=answer,
            data=None if end is None else end.model_dump(mode="json", exclude={"answer"}),
            seed=turn_seed(self.rules.run_seed, session.rollout, 0),
            server_id=self.server_id,
            started_at=session.started_at,
            latency_ms=max(time.time() - session.started_at, 0.0) * 1000,
        )

    def _answer(self, session: AgentSession, end: AgentEnd | None) -> str | None:
        """Return the answer: what the markup of an answer holds, or else the whole text."""
        text: str | None
        if self.agent.answer == "message":
            turn = last_main_turn(session, self._credit)
            if turn is None or turn.said is None or turn.said.tool_calls:
                return None
            if turn.read is not None and turn.read.answer is not None:
                return None  # it says so itself
            text = shown_text(turn.said.content)
        else:
            text = None if end is None else end.answer
        if text is None:
            return None
        marked = self.chat.reader.read(text).answer
        return text.strip() if marked is None else marked


def _outcome(session: AgentSession, over: AttemptEnded) -> tuple[Status, str]:
    """Say how an attempt ended: what is no fault of the agent fails, and is made again."""
    end = over.end
    if end is None:
        return "FAILED", over.outage
    if end.exit == "lost":
        return "FAILED", f"agent_lost: {end.error}"
    if session.fault:
        return "FAILED", session.fault
    if not any(turn.token_ids for turn in session.forest.turns):
        if end.exit == "not_started":  # which an agent could say of itself at any time
            return "FAILED", f"agent_not_started: {end.error}"
        return "FAILED", f"agent_silent: it asked for no turn and ended ({end.exit}) {end.error}"
    if session.spent:
        return "TRUNCATED", session.spent
    if end.exit == "timeout":
        return "TRUNCATED", "agent_timeout"
    if end.exit != "ok" and session.has_moved:  # its requests may have failed meanwhile
        return (
            "FAILED",
            f"agent_lost: its session moved to another gateway, and it ended: {end.error}",
        )
    if end.exit != "ok":
        return "TRUNCATED", f"agent_failed: {end.error}"
    return "COMPLETED", "answer"
