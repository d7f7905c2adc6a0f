"""The weight versions of this server: the one it samples with, and loading newer ones.

app.py hands in the learner's `LoadRequest`s; attempts/worker.py asks to catch up with the
registry's newest version before it starts samples. Both end in `Policy.load_weights`, one at a
time. What is loaded is always the version that the registry calls the newest: a request only says
that it is time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agent_r1.rollout.policy import Policy
from agent_r1.weights.manifest import Fetcher, WeightsRefusedError
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.weights import LoadReply, LoadRequest, NewestVersion, ScoredPrompt

logger = logging.getLogger(__name__)

REGISTRY_TIMEOUT_S = 10.0
"""Longest a load waits for Redis to say which version is the newest."""


class OlderVersionError(ValueError):
    """A load was asked for of a version older than the one in use, which is not the newest."""


@dataclass(eq=False)
class WeightVersions:
    """The policy's weights as numbered versions."""

    policy: Policy
    """Loads weights and scores tokens."""
    registry: Registry
    """Knows the newest version."""
    fetcher: Fetcher
    """Brings versions to this machine."""

    def __post_init__(self) -> None:
        self._lock = asyncio.Lock()
        self._swap_lock = asyncio.Lock()
        """Scores wait for it, and not for a version that is still on its way."""
        self._last_load: LoadReply | None = None
        self._changed = asyncio.Event()
        """Event that is set after every load, for the announcement."""
        self.on_load: Callable[[LoadReply], None] = lambda load: None
        """Callback after every load."""

    @property
    def held(self) -> int:
        """Version in use."""
        return self.policy.policy_version

    async def announce_until_drained(
        self, *, server_id: str, url: str, expiry_s: float, on_beat: Callable[[], Awaitable[None]]
    ) -> float:
        """Keep the server in the registry: renewed in time, and at once when its version changes.

        Args:
            server_id: name of the server.
            url: base URL of its routes.
            expiry_s: seconds after which an announcement disappears.
            on_beat: awaited at every renewal.

        Returns:
            when the server is told to drain: the seconds it gets to finish its samples.
        """
        started_at = time.time()
        while True:
            self._changed.clear()
            server = RolloutServer(
                server_id=server_id,
                url=url,
                policy_version=self.held,
                pid=os.getpid(),
                host=socket.gethostname(),
                started_at=started_at,
            )
            drain_s = await self.registry.announce_rollout_server(server, expiry_s)
            if drain_s is not None:
                return drain_s
            await on_beat()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(expiry_s / 3):
                    await self._changed.wait()

    async def load(self, request: LoadRequest) -> LoadReply:
        """Bring the server to the newest version, which is at least the one asked for.

        A request that comes late asks for a version that newer ones have replaced, and whose files
        may be gone; it is answered with the newest. For a version in use already the answer is
        what its load took.

        Raises:
            OlderVersionError: the server holds a version newer than any that is published.
            WeightsRefusedError: the version is not published, or manifest or snapshot cannot be
                used; the old weights stay in use.
            TimeoutError: Redis did not say what the newest version is.
            EngineDeadError: the engine failed.
        """
        await asyncio.to_thread(self.fetcher.check_location, request.manifest_location)
        async with self._lock:
            self.fetcher.accept(request.invitation)
            # Read under the lock: what is held now was published before.
            newest = await self.newest()
            self._check_published(request.policy_version, newest)
            if newest is not None and newest.policy_version > self.held:
                if newest.policy_version > request.policy_version:
                    logger.info(
                        "push came late, loading the newest policy_version=%d newest=%d",
                        request.policy_version,
                        newest.policy_version,
                    )
                await self._load_newest(newest)
            return self._last_load or LoadReply(policy_version=self.held, fetch_s=0.0, pause_s=0.0)

    def _check_published(self, policy_version: int, newest: NewestVersion | None) -> None:
        published = -1 if newest is None else newest.policy_version
        if policy_version > published:
            known = "none" if newest is None else published
            raise WeightsRefusedError(
                f"policy_version ({policy_version}) is not published; the newest that Redis knows "
                f"is {known}. A learner publishes a version before it asks for it"
            )
        if published < self.held:
            raise OlderVersionError(
                f"policy_version ({policy_version}) is older than {self.held}, which this server "
                "holds; versions are never reused within a run, so publish a higher one"
            )

    async def catch_up(self, newest: NewestVersion) -> None:
        """Load the newest version if the server is behind it.

        Raises:
            WeightsRefusedError, TimeoutError, EngineDeadError: as `load`.
        """
        if newest.policy_version <= self.held:
            return
        async with self._lock:
            if newest.policy_version > self.held:  # else a push came in between
                logger.info(
                    "server is behind held=%d policy_version=%d", self.held, newest.policy_version
                )
                await self._load_newest(newest)

    async def _load_newest(self, newest: NewestVersion) -> None:
        """Load a version; where a newer one took its place meanwhile, that one."""
        while True:
            try:
                started = time.monotonic()
                manifest = await self.fetcher.fetch(newest)
                fetch_s = time.monotonic() - started
                async with self._swap_lock:
                    timing = await self.policy.load_weights(manifest)
                break
            except WeightsRefusedError:
                later = await self.newest()
                if later is None or later.policy_version <= newest.policy_version:
                    raise
                # The learner keeps the newest versions only: this one may be deleted by now.
                logger.info(
                    "version was replaced before it was loaded policy_version=%d newest=%d",
                    newest.policy_version,
                    later.policy_version,
                )
                newest = later
        self._last_load = LoadReply(
            policy_version=self.held, fetch_s=fetch_s + timing.fetch_s, pause_s=timing.pause_s
        )
        self.on_load(self._last_load)
        self._changed.set()

    async def score(self, prompts: Sequence[ScoredPrompt]) -> tuple[int, list[float]]:
        """Return the version in use and its log-probabilities of the wanted tokens, in order."""
        async with self._swap_lock:
            scores = await asyncio.gather(*(self._score(prompt) for prompt in prompts))
            return self.held, [logprob for scored in scores for logprob in scored]

    async def _score(self, prompt: ScoredPrompt) -> list[float]:
        first = prompt.wanted[0]
        logprobs = await self.policy.score(prompt.token_ids, first)
        return [logprobs[position - first] for position in prompt.wanted]

    async def newest(self) -> NewestVersion | None:
        """Return the version that the registry calls the newest; None before there is one.

        Raises:
            TimeoutError: Redis did not answer.
        """
        try:
            async with asyncio.timeout(REGISTRY_TIMEOUT_S):
                return await self.registry.newest_version()
        except TimeoutError as exc:
            raise TimeoutError(
                f"Redis did not say within {REGISTRY_TIMEOUT_S:g} s which version is the newest"
            ) from exc
