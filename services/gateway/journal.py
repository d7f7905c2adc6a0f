"""What happens in a session, as it is written down before an agent sees it.

session.py appends; a gateway that takes a session over reads them all, and has the same forest. A
message that only this system writes: one JSON object an entry.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from agent_r1_proto.agents import AgentEnd
from agent_r1_proto.generation import FinishReason, GeneratedPart
from agent_r1_proto.messages import Message
from agent_r1_proto.session_log import SessionLog, SessionTakenError
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import ToolCallRecord


class TurnBegun(Message):
    """A request was placed, and its turn is to be sampled; fields as in `TurnNode`."""

    event: Literal["begun"] = "begun"
    number: int
    parent: int | None
    lineage: int
    root: str
    """What the lineage is known by."""
    asked: str
    begins: bool
    prompt: list[int]
    opening: str = ""
    replies: list[ChatMessage] = []
    constrained: str = ""
    kept: list[ChatMessage] | None = None
    kept_whole: bool = True
    limits: str = ""
    instructions: str = ""
    offered: list[str] = []


class VolatileSeen(Message):
    """A message with volatile text came for the first time."""

    event: Literal["volatile"] = "volatile"
    history: str
    """Digest of the history that ends with it."""
    message: ChatMessage


class TokensSampled(Message):
    """Tokens of a turn."""

    event: Literal["sampled"] = "sampled"
    turn: int
    part: GeneratedPart


class TurnEnded(Message):
    """The end of a turn."""

    event: Literal["ended"] = "ended"
    turn: int
    reason: FinishReason
    shown: int | None = None
    """Characters of it that were shown, where a stop text cut it; None: all."""


class TurnDelivered(Message):
    """The client has had a turn."""

    event: Literal["delivered"] = "delivered"
    turn: int


class SessionOpened(Message):
    """The first event of a session."""

    event: Literal["opened"] = "opened"
    key: str
    """Credential of the session."""
    started_at: float
    """Unix time, seconds."""


class ToolCalled(Message):
    """A tool of the run is about to be called."""

    event: Literal["tool"] = "tool"
    tool: str
    instance: str
    """That holds the attempt's session with the tool; "" where it has none."""


class ToolAnswered(Message):
    """What a tool of the run answered."""

    event: Literal["tool_answered"] = "tool_answered"
    turn: int
    """That made the call, or was the newest when the agent's own program did."""
    record: ToolCallRecord
    """Its `end_token_index` is not known yet."""


class LimitReached(Message):
    """A limit of the session refused a request."""

    event: Literal["limit"] = "limit"
    limit: str


class FaultNoted(Message):
    """A request could not be served, by a fault of ours."""

    event: Literal["fault"] = "fault"
    fault: str


class AttemptCalled(Message):
    """The agent is about to be called."""

    event: Literal["called"] = "called"
    instance: str
    """Of the service that runs it."""


class AttemptEnded(Message):
    """The attempt is over; its trajectory is published next."""

    event: Literal["over"] = "over"
    end: AgentEnd | None = None
    """What the agents' side says; None where it failed."""
    outage: str = ""
    """Why it failed, where that was no fault of the agent."""


Event = (
    SessionOpened
    | TurnBegun
    | VolatileSeen
    | TokensSampled
    | TurnEnded
    | TurnDelivered
    | ToolCalled
    | ToolAnswered
    | LimitReached
    | FaultNoted
    | AttemptCalled
    | AttemptEnded
)
_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


class Journal:
    """The journal of one session, which this gateway owns once `read` has returned.

    Events of concurrent writers travel together, in order, and none is lost where a writer is
    cancelled or a write fails: the next one begins with them.
    """

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._waiting: list[bytes] = []
        self._writing = asyncio.Lock()
        self.is_taken = False
        """Another gateway has taken the session over."""

    async def read(self) -> list[Event]:
        """Take the session over, and return what has happened in it."""
        return [_EVENT.validate_json(entry) for entry in await self._log.take()]

    async def key(self) -> str:
        """Return the credential of the session, whoever owns it; "" where nobody opened it."""
        entry = await self._log.first()
        if entry is None:
            return ""
        opened = _EVENT.validate_json(entry)
        assert isinstance(opened, SessionOpened)
        return opened.key

    def note(self, event: Event) -> None:
        """Let the next write begin with an event."""
        self._waiting.append(event.model_dump_json().encode())

    async def write(self, *events: Event) -> None:
        """Write events down; they, and all before them, are there when this returns.

        Raises:
            SessionTakenError: another gateway has taken the session over.
        """
        for event in events:
            self.note(event)
        async with self._writing:
            entries = list(self._waiting)
            try:
                if entries:
                    await self._log.append(entries)
            except SessionTakenError:
                self.is_taken = True
                raise
            del self._waiting[: len(entries)]

    async def delete(self) -> None:
        """Forget the session."""
        await self._log.delete()
