"""A version sent from a learner's memory to one server, as the transport `collective` does it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import serve_learner
from agent_r1.learner.weights.publisher import make_transport
from agent_r1.weights import collective
from agent_r1.weights.collective import CollectiveFetcher, CollectiveTransport
from agent_r1.weights.snapshot import Weights
from agent_r1_proto.weights import AdapterHeader, Backend, NewestVersion, WeightManifest

TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def sent(
    weights: Weights,
    policy_version: int,
    folder: Path,
    adapter: AdapterHeader | None = None,
    *,
    backend: Backend = "gloo",
) -> AsyncIterator[WeightManifest]:
    """Send weights; yield the manifest of what came, which is there until the block ends.

    Args:
        weights: what is sent.
        policy_version: their number.
        folder: the server's folder is made in here.
        adapter: how they change the model.
        backend: how they travel.
    """
    config = LearnerConfig(transport="collective", collective_backend=backend)
    async with serve_learner(config.server, None) as server:
        transport = make_transport(config, server)
        assert isinstance(transport, CollectiveTransport)
        async with transport, CollectiveFetcher("test", "one", folder, TIMEOUT_S) as fetcher:
            location = transport.hold("test", policy_version, weights, adapter).location
            invitation = transport.invite()
            fetcher.accept(invitation)
            newest = NewestVersion(policy_version=policy_version, manifest_location=location)
            sending = transport.send(invitation, ["one"])
            _, manifest = await asyncio.gather(sending, fetcher.fetch(newest))
            yield manifest


def slow_servers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set to which names of servers can be added, which then take .2 s for each bucket."""
    names, slow_threads = set[str](), set[int]()
    receive, broadcast = CollectiveFetcher._receive, collective._Group.broadcast

    def receives(fetcher: CollectiveFetcher, *arguments: Any) -> WeightManifest:
        if fetcher._server_id in names:
            slow_threads.add(threading.get_ident())
        try:
            return receive(fetcher, *arguments)
        finally:
            slow_threads.discard(threading.get_ident())

    def broadcasts(group: collective._Group, data: Any) -> None:
        if threading.get_ident() in slow_threads:
            time.sleep(0.2)
        broadcast(group, data)

    monkeypatch.setattr(CollectiveFetcher, "_receive", receives)
    monkeypatch.setattr(collective._Group, "broadcast", broadcasts)
    return names
