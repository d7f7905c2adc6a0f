"""A session as a forest: every turn that was sampled, what it was sampled after, and what joins it.

session.py asks where a request goes (`place`) and applies what it journals; trajectory.py makes a
`Trajectory` of the whole. Pure: no clock, no network, no model.

A turn goes on with the sequence of its parent, or begins one of its own: at the root of a lineage,
where a client has rewritten the history, and where the template does. A request is joined to the
turn whose history and answer it begins with, by the ids of our calls first, then by what messages
say. A history is named by the digest of its messages, so that joining costs one look per message.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pydantic import JsonValue

from agent_r1.gateway.journal import ToolAnswered
from agent_r1.gateway.wire import Asked, turn_id_in
from agent_r1.text.reading import TurnText
from agent_r1_proto.generation import FinishReason, GeneratedPart
from agent_r1_proto.parts import shown_text
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import ToolCallRecord, VersionSpan

TELLING_CHARS = 20
"""A shorter answer is repeated by chance."""


@dataclass(eq=False)
class TurnNode:
    """One turn of the policy. P = tokens of its prompt, N = sampled tokens."""

    number: int
    """In the order in which turns were begun."""
    parent: TurnNode | None
    """The turn whose answer its history has last, of the same lineage; None without one."""
    lineage: int
    """Number of the lineage, in the order in which lineages began."""
    asked: str
    """Digest of the history that it answers."""
    begins: bool
    """Its prompt is a sequence of its own; otherwise it stands behind its parent's last token."""
    prompt: list[int]
    """[P] tokens before it: a whole sequence where it begins one, else those since its parent."""
    opening: str = ""
    """The thought that the template began for it."""
    replies: list[ChatMessage] = field(default_factory=list[ChatMessage])
    """What the policy read since the parent's turn."""
    kept: list[ChatMessage] | None = None
    """Its history, where a client may go on by the id of its answer: after the parent's answer
    where `kept_whole` is False. None: not kept."""
    kept_whole: bool = True
    constrained: str = ""
    """What forced it; "" where the policy was free."""
    limits: str = ""
    """Where the client ends it; see `Asked.limits`."""
    instructions: str = ""
    """System text that its history begins with, without what is volatile; kept where it has no
    parent."""
    offered: list[str] = field(default_factory=list[str])
    """Names of the tools that it might call, sorted; kept where it has no parent."""
    token_ids: list[int] = field(default_factory=list[int])
    """[N] as they were sampled."""
    logprobs: list[float] = field(default_factory=list[float])
    """[N] natural-log probability of each, at the sampling temperature."""
    version_spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    """Which weights sampled which of them; start and end count from the first."""
    finish_reason: FinishReason | None = None
    """None while it is being sampled, and where that was cut off."""
    shown: int | None = None
    """Characters of it that were shown, where a stop text cut it; None: all."""
    read: TurnText | None = None
    """What it says, once it has ended."""
    said: ChatMessage | None = None
    """What the client was told, once it has ended."""
    delivered: bool = False
    """The client has had all of it: its last byte was written, or a later request repeats it."""
    children: list[TurnNode] = field(default_factory=list["TurnNode"])

    def root(self) -> TurnNode:
        """Return the turn with which its dialogue began."""
        turn = self
        while turn.parent is not None:
            turn = turn.parent
        return turn

    def context(self) -> list[int]:
        """Return the tokens before its first sampled token, to the beginning of its sequence."""
        pieces = [self.prompt]
        node = self
        while not node.begins:
            assert node.parent is not None
            node = node.parent
            pieces += [node.token_ids, node.prompt]
        return [token for piece in reversed(pieces) for token in piece]

    def add(self, part: GeneratedPart) -> None:
        """Append tokens that were sampled after those it has."""
        start = len(self.token_ids)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        for span in part.version_spans:  # they count from where a server began
            end = start + span.end - span.start
            last = self.version_spans[-1] if self.version_spans else None
            if last is not None and last.policy_version == span.policy_version:
                start = self.version_spans.pop().start
            self.version_spans.append(
                VersionSpan(policy_version=span.policy_version, start=start, end=end)
            )
            start = end


@dataclass(frozen=True)
class Place:
    """Where a request goes."""

    asked: str
    """Digest of its history."""
    again: list[TurnNode]
    """Turns that answer the same request and may be told once more: retries of the client."""
    parent: TurnNode | None
    lineage: int
    """Of the turn; one that is not there yet begins with it."""
    root: str
    """What the lineage is known by."""
    first_new: int
    """Index of the first message that the parent has not read and not said; 0 without one."""
    is_continued: bool
    """The request begins with the history and the answer of the parent."""
    own: dict[int, TurnNode]
    """Messages of the request that turns of this session have said, by index, in order."""
    instructions: str
    """As in `TurnNode`."""
    offered: list[str]
    """As in `TurnNode`."""


class Forest:
    """The turns of a session.

    Args:
        nonce: 8 hexadecimal digits that ids of this session's calls have.
        volatile: patterns of text that a client changes on every call; it is shown as first seen.
    """

    def __init__(self, nonce: str, volatile: Sequence[str] = ()) -> None:
        self.nonce = nonce
        self.turns: list[TurnNode] = []
        self._volatile = [re.compile(pattern) for pattern in volatile]
        self.first_seen: dict[str, ChatMessage] = {}
        """Messages with volatile text as they came first, by the history that ends with them."""
        self._asked: dict[str, list[TurnNode]] = {}
        """Turns by the history that they answer."""
        self._said: dict[str, list[TurnNode]] = {}
        """Turns by the history that ends with their answer."""
        self._texts: dict[str, list[TurnNode]] = {}
        """Turns by what they said."""
        self._roots: dict[str, int] = {}
        """Lineages by what was said before their first answer, without system messages."""
        self.changed_texts = 0
        """Messages that were shown as first seen, though the client had changed them."""

    # -- joining ---------------------------------------------------------------------------------

    def place(self, asked: Asked) -> Place:
        """Say where a request goes; nothing changes."""
        digests = self._digests(asked)
        parent, first_new = None, 0
        for i in reversed(range(len(asked.messages))):
            named = self._by_id(asked, i)
            found = _heard(self._said.get(digests[i + 1], []), asked.messages[i], named)
            if found:
                parent, first_new = named if named in found else _best(found), i + 1
                break
        roots = self._roots_of(asked)
        known = [self._roots[root] for root in roots if root in self._roots]
        new = 1 + max(self._roots.values(), default=-1)
        if parent is not None:
            lineage = parent.lineage
        else:
            lineage = next(iter(known), self._lineage_that_said(asked, new))
        own = self._own(asked, digests, lineage)
        is_continued = parent is not None
        equals = self._asked.get(digests[-1], [])
        if parent is None and equals:
            parent, lineage = equals[0].parent, equals[0].lineage
        elif parent is None:  # rewritten: it comes after the last turn that it still has
            still = [turn for turn in own.values() if _may_go_on(turn, asked)]
            parent = still[-1] if still else None
            lineage = lineage if parent is None else parent.lineage
        wanted = asked.limits, asked.constrained
        return Place(
            asked=digests[-1],
            again=[turn for turn in equals if (turn.limits, turn.constrained) == wanted],
            parent=parent,
            lineage=lineage,
            root=roots[0],
            first_new=first_new,
            is_continued=is_continued,
            own=own,
            instructions="" if parent else self._instructions(asked),
            offered=[] if parent else sorted(tool.name for tool in asked.tools),
        )

    def _instructions(self, asked: Asked) -> str:
        head = itertools.takewhile(lambda message: message.role == "system", asked.messages)
        return "\n".join(self._lasting(message) for message in head)

    def _lineage_that_said(self, asked: Asked, new: int) -> int:
        """Return the lineage of the last answer in a history whose beginning nobody knows: a client
        may send only the end of it. `new` where no answer is known, or it may be a coincidence."""
        for message in reversed(asked.messages):
            if message.role == "assistant" and len(message.shown()) >= TELLING_CHARS:
                said = self._texts.get(_spoken_key(message), [])
                turns = [turn for turn in said if _may_go_on(turn, asked)]
                if turns:
                    return turns[-1].lineage
        return new

    def _own(self, asked: Asked, digests: Sequence[str], lineage: int) -> dict[int, TurnNode]:
        """Return which turns said the messages of a request, from the last message to the first: of
        turns that said the same, an earlier message is of an earlier one."""
        own: dict[int, TurnNode] = {}
        later = len(self.turns)
        for i, message in reversed(list(enumerate(asked.messages))):
            if message.role != "assistant":
                continue
            turn = self._by_id(asked, i)
            same = self._said.get(digests[i + 1])
            if not same:
                spoken = self._texts.get(_spoken_key(message), [])
                same = [turn for turn in spoken if turn.lineage == lineage]
                same = [turn for turn in same if turn.number < later] or same
            same = _heard(same, message, turn)
            if turn is not None or same:
                own[i] = turn or _best(same or ())
                later = own[i].number
        return dict(sorted(own.items()))

    def _by_id(self, asked: Asked, index: int) -> TurnNode | None:
        """Return the turn that ids of ours name, which came with a message; None without any."""
        calls = asked.messages[index].tool_calls
        for one in (asked.turn_ids.get(index, ""), *(turn_id_in(call.id) for call in calls)):
            found = self.turn_of(one)
            if found is not None:
                return found
        return None

    def turn_id(self, turn: int) -> str:
        """Return the id of a turn."""
        return f"{self.nonce}_{turn}"

    def turn_of(self, turn_id: str) -> TurnNode | None:
        """Return a turn by its id; None where that is not of this session."""
        nonce, _, number = turn_id.partition("_")
        if nonce != self.nonce or int(number) >= len(self.turns):
            return None
        return self.turns[int(number)]

    def dialogue(self, turn: TurnNode) -> list[tuple[ChatMessage, str]] | None:
        """Return what is kept of the history of a turn, and what it said, with ids of turns."""
        if turn.kept is None or turn.said is None:
            return None
        before = None if turn.kept_whole or turn.parent is None else self.dialogue(turn.parent)
        if before is None and not turn.kept_whole:
            return None
        since = [(message, "") for message in turn.kept]
        return [*(before or ()), *since, (turn.said, self.turn_id(turn.number))]

    def with_turns_whole(self, asked: Asked) -> Asked:
        """Return a request with the calls of a turn in one message: some clients send each in a
        message of its own, with its result behind it."""
        messages: list[ChatMessage] = []
        turn_ids: dict[int, str] = {}
        last: TurnNode | None = None
        said_at = 0
        for i, message in enumerate(asked.messages):
            turn = self._by_id(asked, i) if message.role == "assistant" else None
            if turn is not None and turn is last:
                calls = [*messages[said_at].tool_calls, *message.tool_calls]
                messages[said_at] = messages[said_at].model_copy(update={"tool_calls": calls})
                continue
            if message.role != "tool":
                last, said_at = turn, len(messages)
            if i in asked.turn_ids:
                turn_ids[len(messages)] = asked.turn_ids[i]
            messages.append(message)
        return replace(asked, messages=tuple(messages), turn_ids=turn_ids)

    def as_first_seen(self, asked: Asked) -> tuple[Asked, dict[str, ChatMessage]]:
        """Return a request with each message as it was when its history came first, and those that
        came now, by that history, for `first_seen`.

        Of what it differs from, only volatile text has changed.
        """
        new: dict[str, ChatMessage] = {}
        if not self._volatile:
            return asked, new
        messages: list[ChatMessage] = []
        for digest, message in zip(self._digests(asked)[1:], asked.messages, strict=True):
            seen = message
            if message.role != "assistant" and self._lasting(message) != shown_text(
                message.content
            ):
                first = self.first_seen.get(digest)
                if first is None:
                    first = new[digest] = message
                seen = message.model_copy(update={"content": first.content})
            self.changed_texts += seen != message
            messages.append(seen)
        return replace(asked, messages=tuple(messages)), new

    def with_own_ids(self, asked: Asked, own: Mapping[int, TurnNode]) -> Asked:
        """Return a request whose results name our calls, whatever ids the client has given them.

        Ids of ours say which call is meant, in whatever order and number they come back; the others
        stand for the calls that are left, in order.
        """
        messages = list(asked.messages)
        ours: dict[str, str] = {}
        for i, message in enumerate(messages):
            if message.role == "assistant":
                ours = self._named_calls(message, own.get(i))
            elif message.tool_call_id in ours:
                update = {"tool_call_id": ours[message.tool_call_id]}
                messages[i] = message.model_copy(update=update)
        return replace(asked, messages=tuple(messages))

    def _named_calls(self, message: ChatMessage, turn: TurnNode | None) -> dict[str, str]:
        """Return our ids of the calls that a client has given ids of its own."""
        if turn is None or turn.said is None:
            return {}
        known = [call.id for call in turn.said.tool_calls]
        sent = [call.id for call in message.tool_calls]
        left = [one for one in known if one not in sent]
        return dict(zip((one for one in sent if one not in known), left, strict=False))

    def asked_for(self, record: ToolCallRecord, answered: Iterable[ToolAnswered]) -> int:
        """Return the number of the last turn with such a call that is still open, or of the last
        turn, since the agent's own program may call a tool of the run; 0 before any turn.

        Args:
            record: the call, and what was answered.
            answered: earlier answers.
        """
        asked = record.tool, record.arguments
        had = Counter(
            one.turn for one in answered if (one.record.tool, one.record.arguments) == asked
        )
        made = (
            turn.number
            for turn in reversed(self.turns)
            if turn.read
            and [(call.name, call.arguments) for call in turn.read.calls].count(asked)
            > had[turn.number]
        )
        return next(made, max(len(self.turns) - 1, 0))

    def call_id(self, turn: int, call: int) -> str:
        """Return the id of a call."""
        return f"call_{self.turn_id(turn)}_{call}"

    def _digests(self, asked: Asked) -> list[str]:
        """Return the digests of the history before each message, and of all of it."""
        offered = [tool.as_function() for tool in asked.tools]
        digests = [_digest("", self._without_volatile(json.dumps(offered, sort_keys=True)))]
        places: dict[str, int] = {}  # of the calls that were made last, by their ids
        for i, message in enumerate(asked.messages):
            key = self._key(message)
            if message.role == "assistant":
                same = self._said.get(_digest(digests[-1], key), [])
                turn = self._by_id(asked, i) or next(iter(same), None)
                key = key if turn is None else _turn_key(turn)
                places = {call.id: k for k, call in enumerate(message.tool_calls)}
            elif message.role == "tool":
                key = f"{places.get(message.tool_call_id, '')} {key}"
            digests.append(_digest(digests[-1], key))
        return digests

    def _key(self, message: ChatMessage) -> str:
        if message.role == "assistant":
            return _spoken_key(message)
        return f"{message.role} {self._lasting(message)}"

    def _lasting(self, message: ChatMessage) -> str:
        """Return what a message says, without what is volatile."""
        return self._without_volatile(shown_text(message.content))

    def _without_volatile(self, text: str) -> str:
        for pattern in self._volatile:
            text = pattern.sub("", text)
        return text

    def _roots_of(self, asked: Asked) -> list[str]:
        """Return what a lineage may be known by: what was said before the first answer.

        The longest beginning comes first: agents of one program may share their first message, and
        an agent that shortens its history has its first messages and others behind them.
        """
        digests: list[str] = []
        for message in asked.messages:
            if message.role == "assistant" and digests:
                break
            if message.role != "system":
                digests.append(_digest(digests[-1] if digests else "", self._key(message)))
            if message.role == "assistant":
                break
        return digests[::-1] or [_digest("", self._key(asked.messages[0]))]

    # -- what happens ----------------------------------------------------------------------------

    def begin(self, turn: TurnNode, root: str) -> None:
        """Add a turn that is to be sampled.

        Args:
            turn: has the next number.
            root: what its lineage is known by.
        """
        assert turn.number == len(self.turns)
        self.turns.append(turn)
        self._asked.setdefault(turn.asked, []).append(turn)
        if turn.parent is not None:
            turn.parent.children.append(turn)
        self._roots.setdefault(root, turn.lineage)

    def end(self, turn: TurnNode, reason: FinishReason, read: TurnText, said: ChatMessage) -> None:
        """Note the end of a turn, and what the client was told."""
        turn.finish_reason, turn.read, turn.said = reason, read, said
        same = self._said.setdefault(_digest(turn.asked, _spoken_key(said)), [])
        same.append(turn)
        for key in {_turn_key(turn), _turn_key(same[0])}:
            self._said.setdefault(_digest(turn.asked, key), []).append(turn)
        self._texts.setdefault(_spoken_key(said), []).append(turn)


def _heard(
    turns: Sequence[TurnNode], message: ChatMessage, named: TurnNode | None
) -> list[TurnNode]:
    """Return which of the turns that say what a message says the client has had; an empty message
    is no sign of it, since clients write some themselves."""
    return [turn for turn in turns if turn.delivered or turn is named or message.shown()]


def _may_go_on(turn: TurnNode, asked: Asked) -> bool:
    """Return whether a request may be of the dialogue of a turn that its history has: one without
    tools, such as a summary, is quoted by an agent that has some, and not gone on with."""
    return not asked.tools or bool(turn.root().offered)


def _best(turns: Sequence[TurnNode]) -> TurnNode:
    """Return which of the turns with one history and one answer goes on: the last delivered one."""
    return next((turn for turn in reversed(turns) if turn.delivered), turns[-1])


def _turn_key(turn: TurnNode) -> str:
    """Return what names an answer in a history, whether or not the client sent its id."""
    return f"turn {turn.number}"


def _digest(before: str, what: str) -> str:
    data = f"{before}\0{what}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _as_doubles(value: JsonValue) -> JsonValue:
    """Return a value with its numbers as JavaScript has them, of which 1.0 and 1 are one."""
    if isinstance(value, dict):
        return {key: _as_doubles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_doubles(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return float(value) + 0.0  # -0.0 is written as 0
    except OverflowError:
        return value


def _spoken_key(message: ChatMessage) -> str:
    """Return what an assistant's message says, however white space and arguments are written."""
    calls = [[call.name, _as_doubles(call.arguments)] for call in message.tool_calls]
    text = " ".join(shown_text(message.content).split())
    return "assistant " + json.dumps([text, calls], sort_keys=True)
