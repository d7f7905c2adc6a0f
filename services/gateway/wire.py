"""What every wire reads requests into and writes answers from; wires/*.py know the forms of each.

An agent --HTTP--> wires/chat.py --`Asked`--> session.py --`Said`, `Ended`--> the wire --> the agent
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from agent_r1.text.reading import TurnReader
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.tools import ToolSpec

ErrorKind = Literal[
    "invalid_request",
    "context_full",
    "no_session",
    "ended",
    "busy",
    "too_large",
    "unavailable",
]
"""Kinds of errors: a request that is wrong; one that leaves no room for a token, at which agents
shorten their history; a session that is not there, or a wrong key (which looks the same); one that
has ended; a limit on what is in flight; a body over the limit; a fault of ours."""

_ID = re.compile(r"[a-z]+_([0-9a-f]{8}_\d{1,9})(?:_\d{1,9})?")


def turn_id_in(text: str) -> str:
    """Return the id of the turn that an id of ours carries, such as `call_…_0`; "" in others."""
    found = _ID.fullmatch(text)
    return "" if found is None else found[1]


class WireError(Exception):
    """A request that is refused; the message says value, limit and remedy."""

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        param: str = "",
        retry_after_s: float | None = None,
        tokens: tuple[int, int] = (0, 0),
    ) -> None:
        super().__init__(message)
        self.kind: ErrorKind = kind
        self.param = param
        """Field of the body that is wrong; "" where none is."""
        self.retry_after_s = retry_after_s
        self.tokens = tokens
        """Where the context is full: tokens of the request, and how many there may be."""


@dataclass(frozen=True)
class Asked:
    """A request for the next turn, whatever wire it came over."""

    messages: tuple[ChatMessage, ...]
    """The whole history as the client keeps it, without reasoning; it ends with a message of the
    user or of a tool."""
    tools: tuple[ToolSpec, ...] = ()
    """Offered to the policy; their version is ""."""
    max_tokens: int | None = None
    """Most tokens to sample."""
    stop: tuple[str, ...] = ()
    """Texts at whose first occurrence the turn ends; they are not part of what is shown."""
    n: int = 1
    """Answers that are wanted; each is a branch."""
    retries: int = 0
    """How often the client says that it has sent this request before."""
    is_streamed: bool = False
    """The client is told tokens as they come, and not the whole answer."""
    constrained: str = ""
    """What forces the answer (a grammar, a tool choice, a logit bias); "" where nothing does."""
    turn_ids: Mapping[int, str] = field(default_factory=dict[int, str])
    """Turns that messages are of, by index, where the client sent an id of ours with them."""
    kept: tuple[ChatMessage, ...] | None = None
    """What is kept of the history for a client that will go on by the id of the answer alone: all
    but what such a client sends anew. None: nothing is."""

    @property
    def limits(self) -> str:
        """Where the answer ends at the latest, as text: equal for a retry of the request."""
        return json.dumps([self.max_tokens, *self.stop])


@dataclass(frozen=True)
class Begun:
    """The beginning of one answer."""

    choice: int
    """Which of the `n` answers."""
    turn: int
    """Number of the turn in its session: ids of its calls are `Session.call_id(turn, i)`."""
    opening: str
    """The thought that the template began before it; "" where it began none."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, those that the session had already sent."""


@dataclass(frozen=True)
class Said:
    """Text of a turn as it grows. A wire splits it into thought, content and calls (speech.py)."""

    choice: int
    """Which of the `n` answers."""
    text: str
    """What has been decoded since the last one; never half a character, nor a stop text."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token, at the sampling temperature."""


@dataclass(frozen=True)
class Waiting:
    """Nothing was said for a while: weights are being loaded, or the engine is busy."""


@dataclass(frozen=True)
class Ended:
    """The end of one answer."""

    choice: int
    reason: Literal["stop", "length"]
    sampled_tokens: int
    stop: str = ""
    """The text of `Asked.stop` at which it ended; "" where it ended otherwise."""


Event = Begun | Said | Waiting | Ended


class Session(Protocol):
    """One attempt, as wires see it."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def turn_reader(self) -> TurnReader:
        """Reader of its turns; whether one began in a thought, its `Begun` says."""
        ...

    def call_id(self, turn: int, call: int) -> str:
        """Return the id of a call of a turn, by which it is known when it comes back."""
        ...

    def turn_id(self, turn: int) -> str:
        """Return the id of a turn, by which wires name answers and their parts (`turn_id_in`)."""
        ...

    def said(self, turn_id: str) -> ChatMessage | None:
        """Return what a turn of this session said; None where there is none, or it has no end."""
        ...

    def is_kept(self, turn_id: str) -> bool:
        """Return whether parts of a turn may be referred to by their ids alone."""
        ...

    def dialogue(self, turn_id: str) -> Sequence[tuple[ChatMessage, str]] | None:
        """Return what was kept of the history of a turn, and what it said.

        Returns:
            the messages, each with the id of the turn that said it; None where nothing was kept.
        """
        ...

    def count_tokens(self, asked: Asked) -> int:
        """Return how many tokens the policy would read.

        Raises:
            WireError: the session has ended, or the request cannot be rendered.
        """
        ...

    def ask(self, asked: Asked) -> AsyncGenerator[Event]:
        """Let the policy write the next turn. Closing the iterator aborts what is being sampled.

        Raises:
            WireError: before the first event, the request is refused; after it, a fault of ours.
        """
        ...

    async def delivered(self, turn: int) -> None:
        """Say that the last byte of a turn's answer was handed to the client's connection."""
        ...

    def note_fault(self, fault: str) -> None:
        """Note what was ours, where a request could not be served."""
        ...

    def release(self, turn: int) -> None:
        """Say that a turn's answer is told no more, whether or not the client had all of it."""
        ...


class Sessions(Protocol):
    """The sessions of this gateway."""

    async def find(self, session_id: str, key: str) -> Session:
        """Return a session by its id and its key; wait while no gateway has taken it yet.

        Raises:
            WireError: there is none, or it has ended.
        """
        ...
