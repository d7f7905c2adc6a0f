"""Delivery of a version to rollout servers: who is asked to load it, and who is waited for.

publisher.py --a version, announced servers--> `Delivery` --LoadRequest, over HTTP--> servers, to
which a transport that sends from memory sends meanwhile
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.shutdown import cancel_and_wait
from agent_r1.learner.weights.canary import CanaryPrompt, CanaryReading
from agent_r1.learner.weights.servers import ServerClient, ServerError
from agent_r1.weights.collective import CollectiveTransport
from agent_r1.weights.manifest import Transport, time_limit_s
from agent_r1.weights.snapshot import Weights
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.weights import Invitation, LoadReply, LoadRequest

logger = logging.getLogger(__name__)

OTHERS_GRACE_S = 1.0
"""Time that the other servers have once one has the new version."""
AskCanary = Callable[[RolloutServer, Sequence[CanaryPrompt], int], Awaitable[CanaryReading | None]]
"""Compares a server's log-probabilities with the learner's, at a version."""


@dataclass
class PushReport:
    """One push, and what it took."""

    policy_version: int
    weights: Weights | None = None
    """Weights that are pushed, until they are delivered."""
    started: float = field(default_factory=time.monotonic)
    """`time.monotonic` when it began."""
    canary: Sequence[CanaryPrompt] = ()
    """Prompts on which servers are compared with the learner; empty is no comparison."""
    canary_floor: float | None = None
    """Mean |difference| at version 0, in nats; None: not measured."""
    size_bytes: int = 0
    """Bytes for a server that holds the version before."""
    bytes_sent: int = 0
    """Bytes that the learner has sent to servers since the push before."""
    gather_s: float = 0.0
    """Time until the weights were in memory of their own."""
    write_s: float = 0.0
    """Time to write and hash them, and to announce them."""
    wait_s: float = 0.0
    """Time that the learner trained nothing because of pushes: this one, and the end of the one
    before."""
    fetch_s: float = 0.0
    """Longest time a server took to fetch and verify it, while it went on generating."""
    total_s: float = 0.0
    pause_s: float = 0.0
    """Longest time a server's generation stood still."""
    servers: int = 0
    """Servers that had the version when the learner went on."""
    readings: list[CanaryReading] = field(default_factory=list)
    predict_s: float = 0.0
    """Time the learner took to compute the canary's tokens."""
    score_s: float = 0.0
    """Longest time a server took to score them."""


@dataclass
class _Push:
    """One version on its way to several servers."""

    names: dict[asyncio.Task[CanaryReading | None], str]
    """Server of each load."""
    invitations: dict[str, Invitation | None]
    """Invitation of each server, where the version is sent from memory."""
    sendings: dict[asyncio.Task[None], list[str]]
    """Transfers that have not ended, and the servers they go to."""
    pending: set[asyncio.Task[CanaryReading | None]]
    """Loads that have not ended."""
    errors: dict[str, ServerError] = field(default_factory=dict)
    """Failed loads, by server."""
    broken: bool = False
    """Whether a transfer has failed."""

    def note_transfers(self, done: Set[asyncio.Task[Any]]) -> None:
        """Note which transfers have ended, and whether one failed."""
        for sending in [one for one in self.sendings if one in done]:
            self.broken |= sending.exception() is not None
            del self.sendings[sending]

    async def give_up_unsent(self) -> None:
        """Cancel the transfers, and the loads that wait for them."""
        for sending in self.sendings:
            sending.cancel()
        unsent = {name for invited in self.sendings.values() for name in invited}
        given_up = {task for task in self.pending if self.names[task] in unsent}
        self.pending -= given_up  # a push that begins now may invite them
        await cancel_and_wait(given_up)


class Delivery:
    """Brings versions to rollout servers.

    Args:
        config: limits of the requests.
        servers: client of their routes.
        transport: of the versions.
        ask: called for every server that has loaded a version with a canary.
    """

    def __init__(
        self, config: LearnerConfig, servers: ServerClient, transport: Transport, ask: AskCanary
    ) -> None:
        self._config = config
        self._servers = servers
        self._transport = transport
        self._ask = ask
        self.stragglers: dict[asyncio.Task[Any], str] = {}
        """Loads of earlier pushes that still go on, and their servers."""
        self.slow: set[str] = set()
        """Servers that took no version when it was sent to them alone; in no group until they do.
        Nobody knows which member has broken a group."""

    async def close(self) -> None:
        """Give up on servers that are still loading."""
        await cancel_and_wait(set(self.stragglers))

    async def load_on(
        self,
        servers: Sequence[RolloutServer],
        report: PushReport,
        location: str,
        *,
        alone: bool = False,
        until_sent: bool = False,
    ) -> tuple[dict[str, ServerError], bool]:
        """POST a version to all servers at once; return once one has it and all had a chance.

        Servers that take longer continue in the background; their failures surface at the next
        push. Cancelled, it gives up what is not yet sent, at once.

        Args:
            servers: that are to have it.
            report: of the push; what the servers took is noted there.
            location: of the version's manifest.
            alone: what is sent from memory is sent to each by itself, so that none waits for
                another.
            until_sent: return when it is sent, whoever has loaded it.

        Returns:
            What went wrong by the server's id, and whether a transfer to several broke, or has not
            ended.
        """
        push = self._begin(servers, report, location, alone=alone)
        try:
            while push.pending and not (until_sent and not push.sendings):
                had_their_chance = report.servers or (push.broken and not push.sendings)
                done, _ = await asyncio.wait(
                    {*push.pending, *push.sendings},
                    timeout=OTHERS_GRACE_S if had_their_chance else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    break
                push.note_transfers(done)
                await self._note_loads(push, done, report)
            if alone:
                self.slow |= {push.names[task] for task in push.pending} | push.errors.keys()
        except asyncio.CancelledError:
            await push.give_up_unsent()
            raise
        finally:
            self.stragglers |= {task: push.names[task] for task in push.pending}
        return push.errors, (push.broken or bool(push.sendings)) and not alone

    def _begin(
        self, servers: Sequence[RolloutServer], report: PushReport, location: str, *, alone: bool
    ) -> _Push:
        """Ask servers to load a version, and begin to send what goes from memory."""
        invitations, sendings = self._invite(servers, alone=alone)
        names = {
            asyncio.create_task(
                self._load_one(server, report, location, invitation)
            ): server.server_id
            for server, invitation in invitations
        }
        of_server = {server.server_id: invitation for server, invitation in invitations}
        return _Push(names, of_server, sendings, pending=set(names))

    async def _note_loads(
        self, push: _Push, done: Set[asyncio.Task[Any]], report: PushReport
    ) -> None:
        """Note what came of the loads that have ended."""
        for task in done & push.pending:
            push.pending.discard(task)
            name = push.names[task]
            try:
                reading = task.result()
            except ServerError as exc:
                push.errors[name] = exc
                logger.warning("push failed server_id=%s error=%s", name, exc)
                await self._expect_no_more(push.invitations[name], name)
                continue
            report.servers += 1
            if reading is not None:
                report.readings.append(reading)

    def _invite(
        self, servers: Sequence[RolloutServer], *, alone: bool
    ) -> tuple[list[tuple[RolloutServer, Invitation | None]], dict[asyncio.Task[None], list[str]]]:
        """Begin to send from memory, where the transport does; else nobody is invited."""
        if not isinstance(self._transport, CollectiveTransport):
            return [(server, None) for server in servers], {}
        # One that is frozen would hold up the others every time.
        busy = {name for task, name in self.stragglers.items() if not task.done()}
        servers = [server for server in servers if server.server_id not in busy]
        invitations: list[tuple[RolloutServer, Invitation | None]] = []
        sendings: dict[asyncio.Task[None], list[str]] = {}
        for group in [[server] for server in servers] if alone else [servers] if servers else []:
            invitation = self._transport.invite()
            invitations += [(server, invitation) for server in group]
            invited = [server.server_id for server in group]
            sending = asyncio.create_task(self._transport.send(invitation, invited))
            sending.add_done_callback(_log_failure)  # also where all servers answer before it ends
            sendings[sending] = invited
        return invitations, sendings

    async def _expect_no_more(self, invitation: Invitation | None, server_id: str) -> None:
        if invitation is not None and isinstance(self._transport, CollectiveTransport):
            await self._transport.expect_no_more(invitation, server_id)

    def raise_stragglers(self) -> None:
        """Raise what went wrong in the background since the last push, if it must end the run."""
        done = [task for task in self.stragglers if task.done()]
        for task in done:
            del self.stragglers[task]
            error = task.exception()
            if isinstance(error, ServerError):
                logger.warning("late push failed error=%s", error)
            elif error is not None:
                raise error

    async def _load_one(
        self,
        server: RolloutServer,
        report: PushReport,
        location: str,
        invitation: Invitation | None,
    ) -> CanaryReading | None:
        version = report.policy_version
        request = LoadRequest(
            manifest_location=location, policy_version=version, invitation=invitation
        )
        limit_s = time_limit_s(self._config.push_timeout_s, report.size_bytes)
        reply = await self._servers.post(server, "/weights/load", request, LoadReply, limit_s)
        if reply.policy_version < version:
            raise ServerError(
                f"server {server.server_id} stayed at policy version {reply.policy_version}",
                refused=True,
            )
        self.slow.discard(server.server_id)
        report.fetch_s = max(report.fetch_s, reply.fetch_s)
        report.pause_s = max(report.pause_s, reply.pause_s)
        if not report.canary:
            return None
        started = time.monotonic()
        reading = await self._ask(server, report.canary, version)
        report.score_s = max(report.score_s, time.monotonic() - started)
        return reading


def _log_failure(sending: asyncio.Task[None]) -> None:
    if not sending.cancelled() and (error := sending.exception()) is not None:
        logger.warning("a transfer failed error=%s", error)
