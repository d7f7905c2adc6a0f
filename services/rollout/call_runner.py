"""The tool calls of one turn: refused with a text for the model, or run, each with its record.

turns.py hands in what reading.py read; calls go out through attempts/tool_client.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import JsonValue

from agent_r1.attempts.tool_client import ToolClient, ToolOutageError, ToolReply
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import CallResult, CallStatus
from agent_r1.runtime.tracing import span
from agent_r1.text.control_tokens import TRUNCATION_MARKER
from agent_r1.text.reading import ParsedCall, TurnText
from agent_r1.text.tokens import recorded_data
from agent_r1_proto.component_notes import begin_component
from agent_r1_proto.parts import ImagePart, Part, ResultPart, StoredImage, TextPart
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import ANSWERED, ToolCallRecord, Turn

_PastCall = tuple[int, dict[str, JsonValue]]
"""Turn and arguments of a call."""


@dataclass(frozen=True)
class CallOutcome:
    """One call of a turn: its record, what the environment sees, and an outage if there was one."""

    record: ToolCallRecord
    result: CallResult | None
    outage: ToolOutageError | None = None


@dataclass
class CallRunner:
    """Runs the calls of one trajectory's turns, and keeps its tool sessions."""

    tools: ToolClient
    env: EnvConfig
    specs: Mapping[str, ToolSpec]
    """The tools this trajectory is offered, by name."""
    rollout: RolloutTask
    """Whose calls these are."""
    pins: Mapping[str, str] = field(default_factory=dict)
    """Versions this trajectory keeps, by tool; given back by `close`."""
    deadline: float | None = None
    """Monotonic seconds at which the trajectory's time is up."""
    path: str = ""
    """Path of the branch whose calls these are, where an attempt has several."""
    replayed: int = field(default=0, init=False)
    """Calls that were made once more, to bring a session to the state of the branch."""
    _sessions: list[str] = field(default_factory=list, init=False)
    _to_replay: dict[str, list[_PastCall]] = field(default_factory=dict, init=False)
    """By tool, the calls of the branch before it had a session of its own."""

    @property
    def rollout_id(self) -> str:
        """Name that tools are told: the attempt, and its branch where it has several."""
        return ".".join(filter(None, (str(self.rollout.key), self.path)))

    async def fork(self, path: str, turns: Sequence[Turn]) -> CallRunner:
        """Return what runs the calls of another branch, from the state that the sessions have.

        Args:
            path: of the branch.
            turns: so far; the calls of a tool that does not fork are repeated before its next one.

        Raises:
            ToolOutageError: a tool did not fork its session.
        """
        twin = dataclasses.replace(self, path=path)
        self.tools.directory.pin_again(self.pins)
        try:
            for name in (*self._sessions, *self._to_replay):
                if self.specs[name].forks and name in self._sessions:
                    twin._sessions.append(name)
                    await self.tools.fork_session(name, self.rollout_id, twin.rollout_id)
                else:
                    twin._to_replay[name] = _answered(name, turns)
        except BaseException:
            await twin.close()
            raise
        return twin

    async def close(self) -> None:
        """Close the sessions that were opened, and let the pinned versions go."""
        for name in self._sessions:
            await self.tools.close_session(name, self.rollout_id)
        self.tools.directory.unpin(self.pins)
        self.pins = {}

    async def run(self, number: int, turn: TurnText, ends: Sequence[int]) -> list[CallOutcome]:
        """Run the calls of a turn: at once, those of one session in their order.

        Args:
            number: of the turn, from 0.
            turn: what the model wrote.
            ends: for each call, the index into `token_ids` of the token that closes it.

        Returns:
            One outcome per call, in order; calls after an outage in a session are left out.
        """
        if not turn.calls:
            return []
        calls: list[CallOutcome | None] = [None] * len(turn.calls)
        lanes: dict[str, list[int]] = {}
        for i, (parsed, end) in enumerate(zip(turn.calls, ends, strict=True)):
            calls[i] = self._refuse(i, parsed, end)
            if calls[i] is None:
                lane = parsed.name if self.specs[parsed.name].sessions else f"{parsed.name} {i}"
                lanes.setdefault(lane, []).append(i)

        async def run_lane(indexes: list[int]) -> None:
            for i in indexes:
                await begin_component(f"tool {turn.calls[i].name!r}")
                with span("tool call", tool=turn.calls[i].name):
                    outcome = calls[i] = await self._call(number, turn.calls[i], ends[i])
                if outcome.outage is not None:
                    return

        if len(lanes) == 1:
            await run_lane(next(iter(lanes.values())))
        elif lanes:
            async with asyncio.TaskGroup() as group:
                for indexes in lanes.values():
                    group.create_task(run_lane(indexes))
        return [call for call in calls if call is not None]

    def num_runnable(self, turn: TurnText) -> int:
        """Return how many calls of a turn would reach a tool."""
        return sum(self._refuse(i, call, 0) is None for i, call in enumerate(turn.calls))

    def _refuse(self, index: int, parsed: ParsedCall, end: int) -> CallOutcome | None:
        """Answer a call that cannot be run; None where it can."""
        status: CallStatus
        if index >= self.env.max_calls_per_turn:
            status = "over_limit"
            error = (
                f"only the first {self.env.max_calls_per_turn} tool calls of a turn are run; "
                "this one was not"
            )
        elif parsed.error:
            status, error = "malformed", parsed.error
        elif parsed.name not in self.specs:
            status = "unknown_tool"
            offered = ", ".join(sorted(self.specs)) or "none"
            error = f"there is no tool {parsed.name!r}; tools: {offered}"
        else:
            problem = self.tools.argument_error(self.specs[parsed.name], parsed.arguments)
            if problem is None:
                return None
            status, error = "malformed", f"the arguments do not fit {parsed.name}: {problem}"
        text = f"Error: {error}"
        record = _record(parsed, end, status=status, parts=[TextPart(text=text)], error=error)
        return CallOutcome(record, CallResult(parsed.name, parsed.arguments, status, text))

    async def _call(self, number: int, parsed: ParsedCall, end: int) -> CallOutcome:
        spec = self.specs[parsed.name]
        version = self.pins.get(parsed.name)
        started = time.monotonic()
        try:
            if spec.sessions and parsed.name not in self._sessions:
                self._sessions.append(parsed.name)
                context = self.rollout.task.tool_context
                await self.tools.open_session(parsed.name, self.rollout_id, context, version)
                await self._replay(parsed.name)
            reply = await self._send(parsed.name, parsed.arguments, number)
        except ToolOutageError as exc:
            record = _record(
                parsed,
                end,
                status="failed",
                version=version or spec.version,
                instance=exc.instance,
                attempt=exc.attempts - 1,
                latency_ms=(time.monotonic() - started) * 1000,
                error=str(exc),
            )
            return CallOutcome(record, None, exc)
        text, parts = self._shown(reply.result.parts)
        record = _record(
            parsed,
            end,
            status=reply.result.status,
            version=reply.version,
            instance=reply.instance,
            attempt=reply.attempt,
            latency_ms=reply.latency_ms,
            parts=parts,
            data=recorded_data(reply.result.data),
        )
        images = any(isinstance(part, StoredImage) for part in parts)
        result = CallResult(
            parsed.name,
            parsed.arguments,
            reply.result.status,
            text,
            reply.result.data,
            parts if images else (),
        )
        return CallOutcome(record, result)

    async def _replay(self, name: str) -> None:
        """Repeat the calls of the branch that a session of its own has not seen."""
        for turn, arguments in self._to_replay.pop(name, ()):
            self.replayed += 1
            await self._send(name, arguments, turn)

    async def _send(self, name: str, arguments: dict[str, JsonValue], turn: int) -> ToolReply:
        return await self.tools.call(
            name,
            arguments,
            rollout_id=self.rollout_id,
            turn=turn,
            tool_context=self.rollout.task.tool_context,
            version=self.pins.get(name),
            deadline=self.deadline,
        )

    def _shown(self, parts: Sequence[ResultPart]) -> tuple[str, list[Part]]:
        """Return the text of a result within the limit, and the parts that are kept of it."""
        kept: list[Part] = [StoredImage.of(p) if isinstance(p, ImagePart) else p for p in parts]
        text = "\n".join(part.text for part in kept if isinstance(part, TextPart))
        limit = self.env.max_tool_response_chars
        if len(text) <= limit:
            return text, kept
        text = text[: limit - len(TRUNCATION_MARKER)] + TRUNCATION_MARKER
        return text, [TextPart(text=text), *(p for p in kept if isinstance(p, StoredImage))]


def _record(parsed: ParsedCall, end: int, **facts: Any) -> ToolCallRecord:
    return ToolCallRecord(
        end_token_index=end, tool=parsed.name, arguments=parsed.arguments, **facts
    )


def _answered(name: str, turns: Sequence[Turn]) -> list[_PastCall]:
    """Return the calls that a tool has answered in some turns."""
    return [
        (number, call.arguments)
        for number, turn in enumerate(turns)
        for call in turn.calls
        if call.tool == name and call.status in ANSWERED
    ]
