"""One session: an agent asks for turns, the policy samples them, and a forest keeps them.

wires/*.py hand in `Asked` and write what comes out; servers.py samples; what happens is in the
journal before the agent sees it. A gateway that takes the session over replays the journal, and
goes on where the other one ended.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from agent_r1.gateway import journal as log
from agent_r1.gateway.forest import Forest, Place, TurnNode
from agent_r1.gateway.growing_text import GrowingText
from agent_r1.gateway.prompts import Prompt, PromptWriter
from agent_r1.gateway.servers import RequestRefusedError, RolloutServers, ServerError
from agent_r1.gateway.speech import said_message
from agent_r1.gateway.wire import Asked, Begun, Ended, Event, Said, Waiting, WireError
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.reading import TurnReader
from agent_r1.text.tokens import turn_seed
from agent_r1_proto.generation import FinishReason, GeneratedPart, GenerateRequest
from agent_r1_proto.session_log import SessionTakenError
from agent_r1_proto.tasks import ChatMessage, RolloutTask
from agent_r1_proto.trajectory import ToolCallRecord

logger = logging.getLogger(__name__)

PING_S = 5.0
GIVE_UP_S = 120.0
"""How long a turn waits for a server that samples, before the attempt fails."""
RETRY_S = 0.2
STREAM_S, WHOLE_S = 0.05, 0.5
"""Tokens come and are written down together that were sampled within so many seconds, where the
client is told them as they come, and where it waits for the whole answer: each part costs a line of
HTTP and a write to Redis. What a server that dies had sampled since is sampled again."""
MAX_QUEUED = 64
"""Events of an answer that wait for a client that reads slowly."""
NO_LIMIT = 1 << 30
MODEL = "policy"
"""What the model is called in sessions."""


@dataclass(frozen=True)
class SessionRules:
    """Limits and choices of sessions, from `[agent]`, `[env]` and `[model]`."""

    run_seed: int = 0
    max_context: int = 4096
    max_tokens_per_turn: int = 1024
    max_session_tokens: int = 1 << 20
    max_requests: int = 1000
    """Answers of one session and its calls of tools, in all."""
    max_in_flight: int = 16
    """Answers of one session at a time."""
    keeps_thoughts: bool = True
    """Thoughts of earlier turns stay, whatever the client keeps."""
    allows_constrained: bool = False
    volatile: Sequence[str] = ()
    answer_pattern: str | None = None


class AgentSession:
    """The session of one attempt.

    Args:
        rollout: the attempt.
        session_id: its name, the same at every gateway.
        journal: of this session.
        chat: the model's template.
        servers: that sample.
        rules: limits and choices.
    """

    def __init__(
        self,
        rollout: RolloutTask,
        session_id: str,
        journal: log.Journal,
        chat: ChatFormat,
        servers: RolloutServers,
        rules: SessionRules,
    ) -> None:
        self.rollout = rollout
        self.session_id = session_id
        self.journal = journal
        self.key = ""
        self.started_at = 0.0
        self.called: str | None = None
        """The instance that runs the agent."""
        self.over: log.AttemptEnded | None = None
        self.forest = Forest(session_id[:8], rules.volatile)
        self.fault = ""
        """What was ours, where a request could not be served."""
        self.spent = ""
        """Name of the limit that refused a request."""
        self.has_moved = False
        """Another gateway had it before."""
        self.requests = 0
        self.tools: dict[str, str] = {}
        """Tools of the run that were called, and who holds the session with each; "": nobody."""
        self.opening: dict[str, asyncio.Task[None]] = {}
        """What opens a session with a tool just now, by the tool's name."""
        self.tool_answers: list[log.ToolAnswered] = []
        self.prompts = PromptWriter(
            chat, rules.max_context, rules.keeps_thoughts, rules.answer_pattern, self.call_id
        )
        self._chat = chat
        self._servers = servers
        self._rules = rules
        self._server: str | None = None
        """Where the prefix is cached."""
        self._sampling: set[int] = set()
        """Numbers of the turns that are being sampled, or told."""
        self._tool_calls = 0
        self._tries = 0
        self._in_flight = 0
        self.is_closed = False

    # -- opening and closing ---------------------------------------------------------------------

    async def open(self) -> None:
        """Take the session, and restore what another gateway left of it."""
        for event in await self.journal.read():
            self._restore(event)
        self.requests = len(self.forest.turns) + self._tool_calls
        self.has_moved = self.called is not None
        if not self.key:
            self.key, self.started_at = secrets.token_urlsafe(24), time.time()
            await self.journal.write(log.SessionOpened(key=self.key, started_at=self.started_at))

    def close(self, over: log.AttemptEnded | None = None) -> None:
        """Refuse requests from now on.

        Args:
            over: how the attempt ended; None where another gateway goes on with it.
        """
        self.is_closed = True
        self.over = over or self.over

    def _restore(self, event: log.Event) -> None:
        turns = self.forest.turns
        match event:
            case log.SessionOpened():
                self.key, self.started_at = event.key, event.started_at
            case log.TurnBegun():
                given = {"event", "parent", "root", "replies", "kept"}
                fields = event.model_dump(exclude=given)
                parent = None if event.parent is None else turns[event.parent]
                turn = TurnNode(parent=parent, replies=event.replies, kept=event.kept, **fields)
                self.forest.begin(turn, event.root)
            case log.VolatileSeen():
                self.forest.first_seen[event.history] = event.message
            case log.TokensSampled():
                turns[event.turn].add(event.part)
            case log.TurnEnded():
                turns[event.turn].shown = event.shown
                self._end(turns[event.turn], event.reason)
            case log.TurnDelivered():
                turns[event.turn].delivered = True
            case log.AttemptCalled():
                self.called = event.instance
            case log.ToolCalled():
                self.tools[event.tool] = event.instance
                self._tool_calls += 1
            case log.ToolAnswered():
                self.tool_answers.append(event)
            case log.LimitReached():
                self.spent = event.limit
            case log.FaultNoted():
                self.fault = event.fault
            case log.AttemptEnded():
                self.over = event

    # -- what wires see --------------------------------------------------------------------------

    @property
    def model(self) -> str:
        """Name of the model."""
        return MODEL

    @property
    def turn_reader(self) -> TurnReader:
        """Reader of turns; whether one began in a thought, its beginning says."""
        return self.prompts.turn_reader

    def call_id(self, turn: int, call: int) -> str:
        """Return the id of a call of a turn."""
        return self.forest.call_id(turn, call)

    def turn_id(self, turn: int) -> str:
        """Return the id of a turn."""
        return self.forest.turn_id(turn)

    def said(self, turn_id: str) -> ChatMessage | None:
        """Return what a turn said; None where there is none, or it has no end."""
        turn = self.forest.turn_of(turn_id)
        return None if turn is None else turn.said

    def is_kept(self, turn_id: str) -> bool:
        """Return whether a turn is kept for clients that send its id alone."""
        turn = self.forest.turn_of(turn_id)
        return turn is not None and turn.kept is not None

    def dialogue(self, turn_id: str) -> list[tuple[ChatMessage, str]] | None:
        """Return what was kept of a turn's history and what it said; None where nothing was."""
        turn = self.forest.turn_of(turn_id)
        return None if turn is None else self.forest.dialogue(turn)

    def count_tokens(self, asked: Asked) -> int:
        """Return how many tokens the policy would read.

        Raises:
            WireError: the session has ended, or the request cannot be rendered.
        """
        self.count_requests(0)
        asked = self.forest.with_turns_whole(asked)
        place = self.forest.place(asked)
        return self.prompts.write(asked, place).length

    async def delivered(self, turn: int) -> None:
        """Say that the client's connection has all of a turn's answer."""
        node = self.forest.turns[turn]
        if not node.delivered:
            node.delivered = True
            await self.journal.write(log.TurnDelivered(turn=turn))

    def note_fault(self, fault: str) -> None:
        """Note what was ours, where a request could not be served."""
        self.fault = fault
        self.journal.note(log.FaultNoted(fault=fault))

    async def note_tool(self, tool: str, instance: str) -> None:
        """Note a call of a tool of the run, and who holds the session with it."""
        self.tools[tool] = instance
        await self.journal.write(log.ToolCalled(tool=tool, instance=instance))

    async def tool_answered(self, record: ToolCallRecord) -> None:
        """Note what a tool of the run answered, with the turn that asked for it."""
        answered = log.ToolAnswered(
            turn=self.forest.asked_for(record, self.tool_answers), record=record
        )
        self.tool_answers.append(answered)
        await self.journal.write(answered)

    def release(self, turn: int) -> None:
        """Say that nobody is told a turn any more, so that a retry may be."""
        self._sampling.discard(turn)

    async def ask(self, asked: Asked) -> AsyncGenerator[Event]:
        """Let the policy write the next turn; closing the iterator aborts what is sampled.

        Raises:
            WireError: the request is refused, or cannot be served.
        """
        self._refuse(asked)
        self.count_requests(asked.n)
        self._in_flight += asked.n
        queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(MAX_QUEUED)
        work: list[asyncio.Task[None]] = []
        nodes: list[TurnNode] = []
        told: set[int] = set()
        try:
            nodes = await self._begin(asked)
            work = [
                asyncio.create_task(self._answer(node, i, asked, queue))
                for i, node in enumerate(nodes)
            ]
            left = len(work)
            while left:
                try:
                    async with asyncio.timeout(PING_S):
                        event = await queue.get()
                except TimeoutError:
                    yield Waiting()
                    continue
                if isinstance(event, BaseException):
                    raise event
                left -= event is None
                if isinstance(event, Begun):
                    told.add(event.turn)
                if event is not None:
                    yield event
        except SessionTakenError as exc:
            raise WireError("unavailable", f"{exc}; send the request again") from exc
        finally:
            try:
                for task in work:
                    task.cancel()
                await asyncio.gather(*work, return_exceptions=True)
            finally:  # a client may go away just now
                # Until its client has had it, or has gone (`release`), an ended turn is no retry's.
                ended = {node.number for node in nodes if node.finish_reason is not None}
                self._sampling -= {node.number for node in nodes} - (ended & told)
                self._in_flight -= asked.n

    # -- placing a request -----------------------------------------------------------------------

    def _refuse(self, asked: Asked) -> None:
        """Raise where a request is not served."""
        rules = self._rules
        if asked.constrained and not rules.allows_constrained:
            raise WireError(
                "invalid_request",
                f"{asked.constrained} forces what the policy writes, which cannot be trained; "
                "leave it out, or set agent.allow_constrained = true, which leaves it untrained",
                param=asked.constrained.partition(" ")[0],
            )
        if asked.n > rules.max_in_flight:
            raise WireError(
                "invalid_request",
                f"n ({asked.n}) must be at most {rules.max_in_flight} (agent.max_in_flight)",
                param="n",
            )
        if self._in_flight + asked.n > rules.max_in_flight:
            raise WireError(
                "busy",
                f"{self._in_flight} answers of this session are in flight; at most "
                f"{rules.max_in_flight} may be (agent.max_in_flight): wait for one to end",
                retry_after_s=1.0,
            )

    def count_requests(self, count: int) -> None:
        """Count requests against the limits of the session: answers, and calls of tools.

        Args:
            count: how many; 0 asks for what uses nothing up, and is refused alike.

        Raises:
            WireError: the session has ended, or used a limit.
        """
        if self.is_closed and self.over is None:
            raise WireError(
                "unavailable",
                "the session goes on at another gateway; send the request again",
                retry_after_s=1.0,
            )
        if self.is_closed:
            raise WireError("ended", "the session has ended, and its agent is to stop")
        rules = self._rules
        used = sum(len(turn.prompt) + len(turn.token_ids) for turn in self.forest.turns)
        for name, value, limit in (
            ("max_requests", self.requests + count - 1, rules.max_requests),
            ("max_session_tokens", used, rules.max_session_tokens),
        ):
            if value >= limit:
                if count and not self.spent:  # an agent may go on asking, thousands of times
                    self.spent = name
                    self.journal.note(log.LimitReached(limit=name))
                raise WireError("ended", f"the session has used its {limit} (agent.{name})")
        self.requests += count

    async def _begin(self, asked: Asked) -> list[TurnNode]:
        """Return the turns that answer a request: told again, gone on with, or begun now."""
        asked, first_seen = self.forest.as_first_seen(self.forest.with_turns_whole(asked))
        place = self.forest.place(asked)
        asked = self.forest.with_own_ids(asked, place.own)
        again = [
            turn
            for turn in place.again
            if turn.number not in self._sampling and (asked.retries or not turn.delivered)
        ]
        # A client sends again what it has not had, and else what it asked last.
        again.sort(key=lambda turn: (not turn.delivered, turn.number))
        nodes = again[-asked.n :]
        missing = asked.n - len(nodes)
        prompt = self.prompts.write(asked, place) if missing else None
        if prompt is not None:
            self.prompts.check_room(prompt.length)
        self.forest.first_seen |= first_seen
        events: list[log.Event] = [
            log.VolatileSeen(history=history, message=message)
            for history, message in first_seen.items()
        ]
        for turn in {turn.number: turn for turn in place.own.values()}.values():
            if turn.finish_reason is not None and not turn.delivered:
                turn.delivered = True
                events.append(log.TurnDelivered(turn=turn.number))
        for _ in range(missing):
            assert prompt is not None
            node = self._new_turn(asked, place, prompt)
            self.forest.begin(node, place.root)
            nodes.append(node)
            fields = {k: getattr(node, k) for k in log.TurnBegun.model_fields if hasattr(node, k)}
            parent = None if node.parent is None else node.parent.number
            events.append(log.TurnBegun(**{**fields, "parent": parent, "root": place.root}))
        numbers = {node.number for node in nodes}
        self._sampling |= numbers
        try:
            await self.journal.write(*events)
        except BaseException:
            self._sampling -= numbers
            raise
        return nodes

    def _new_turn(self, asked: Asked, place: Place, prompt: Prompt) -> TurnNode:
        kept, kept_whole = _kept(asked, place)
        return TurnNode(
            number=len(self.forest.turns),
            parent=place.parent,
            lineage=place.lineage,
            asked=place.asked,
            begins=prompt.begins,
            prompt=prompt.token_ids,
            opening=prompt.opening,
            replies=_replies(asked.messages, place),
            constrained=asked.constrained,
            kept=kept,
            kept_whole=kept_whole,
            limits=asked.limits,
            instructions=place.instructions,
            offered=place.offered,
        )

    # -- sampling --------------------------------------------------------------------------------

    async def _answer(
        self,
        node: TurnNode,
        choice: int,
        asked: Asked,
        queue: asyncio.Queue[Event | BaseException | None],
    ) -> None:
        """Put one answer on the queue, from its first token; None ends it."""
        try:
            text = GrowingText(self._chat, asked.stop)
            length = len(node.context())
            cached = length - len(node.prompt)
            await queue.put(Begun(choice, node.number, node.opening, length, cached))
            if node.token_ids:
                shown = text.add(node.token_ids)
                await queue.put(Said(choice, shown, tuple(node.token_ids), tuple(node.logprobs)))
            if node.finish_reason is None:
                async for part in self._sample(node, asked):
                    node.add(part)
                    shown = text.add(part.token_ids)
                    events: list[log.Event] = [log.TokensSampled(turn=node.number, part=part)]
                    reason = "stop" if text.is_stopped else part.finish_reason
                    if reason is not None:  # with its last token, so that nothing is sampled behind
                        node.shown = text.cut
                        self._end(node, reason)
                        events.append(
                            log.TurnEnded(turn=node.number, reason=reason, shown=node.shown)
                        )
                    await self.journal.write(*events)
                    await queue.put(
                        Said(choice, shown, tuple(part.token_ids), tuple(part.logprobs))
                    )
                    if reason is not None:
                        break
            rest = text.finish()
            if rest:
                await queue.put(Said(choice, rest))
            assert node.finish_reason is not None
            sampled = len(node.token_ids)
            await queue.put(Ended(choice, node.finish_reason, sampled, text.stopped_by))
            await queue.put(None)
        except Exception as exc:  # noqa: BLE001 - the reader of the queue raises it
            await queue.put(exc)

    async def _sample(self, node: TurnNode, asked: Asked) -> AsyncGenerator[GeneratedPart]:
        """Sample a turn to its end; what is yielded is part of it when the next is asked for.

        Raises:
            WireError: no server samples.
        """
        context = node.context()
        room = self._rules.max_context - len(context)
        limit = min(self._rules.max_tokens_per_turn, room, asked.max_tokens or NO_LIMIT)
        deadline = time.monotonic() + GIVE_UP_S
        problem = "no rollout server is announced"
        while len(node.token_ids) < limit:
            server = self._servers.choose(self._server)
            if server is not None:
                self._note_server(server.server_id)
                try:
                    async for part in self._servers.stream(
                        server, self._request(node, context, limit, asked.is_streamed)
                    ):
                        deadline = time.monotonic() + GIVE_UP_S
                        for piece in part.split() if asked.stop else [part]:  # it may end there
                            yield piece
                    return
                except ServerError as exc:
                    problem = str(exc)
                    logger.warning("turn goes on elsewhere session=%s why=%s", self.session_id, exc)
                except RequestRefusedError as exc:
                    self.note_fault(f"policy_error: {exc}")
                    raise WireError("unavailable", str(exc)) from exc
            if time.monotonic() > deadline:
                self.note_fault(
                    f"rollout_unavailable: nothing sampled for {GIVE_UP_S:g} s: {problem}"
                )
                raise WireError("unavailable", self.fault)
            await asyncio.sleep(RETRY_S)
        yield GeneratedPart(finish_reason="length")

    def _note_server(self, server_id: str) -> None:
        self._servers.moves += self._server is not None and self._server != server_id
        self._server = server_id

    def _request(
        self, node: TurnNode, context: list[int], limit: int, is_streamed: bool
    ) -> GenerateRequest:
        self._tries += 1
        done = len(node.token_ids)
        return GenerateRequest(
            request_id=f"{self.session_id}/{node.number}/{self._tries}",
            token_ids=[*context, *node.token_ids],
            max_tokens=limit - done,
            temperature=self.rollout.sampling.temperature,
            seed=turn_seed(self._rules.run_seed, self.rollout, *self._place_of(node, done)),
            every_s=STREAM_S if is_streamed else WHOLE_S,
        )

    def _place_of(self, node: TurnNode, done: int) -> tuple[int, str]:
        """Return the number of a turn in its dialogue, and the path that tells branches apart.

        The first dialogue of a session has the seeds of the same dialogue in the agent loop.
        """
        depth, is_first, turn = 0, node.lineage == 0, node
        while True:
            roots = [one for one in self.forest.turns if one.parent is None]
            siblings = turn.parent.children if turn.parent else roots
            is_first = is_first and siblings[0] is turn
            if turn.parent is None:
                break
            depth, turn = depth + 1, turn.parent
        path = "" if is_first else f"turn-{node.number}"
        return depth, f"{path}+{done}" if done else path

    def _end(self, node: TurnNode, reason: FinishReason) -> None:
        """Note that a turn has ended, and what it says."""
        text = self._chat.decode_turn(node.token_ids)
        reader = self.prompts.reader(node)
        said = said_message(
            text[: node.shown], node.opening, reader, lambda i: self.call_id(node.number, i)
        )
        self.forest.end(node, reason, reader.read(text), said)


def _replies(messages: Sequence[ChatMessage], place: Place) -> list[ChatMessage]:
    """Return what the policy has not read before a turn."""
    first = place.first_new
    if not place.is_continued:
        said = [i for i, message in enumerate(messages) if message.role == "assistant"]
        first = said[-1] + 1 if said else len(messages)
    return list(messages[first:])


def _kept(asked: Asked, place: Place) -> tuple[list[ChatMessage] | None, bool]:
    """Return what is kept of a history for a later request, and whether it is all of it."""
    if asked.kept is None:
        return None, True
    if place.is_continued and place.parent is not None and place.parent.kept is not None:
        return list(asked.messages[place.first_new :]), False
    return list(asked.kept), True
