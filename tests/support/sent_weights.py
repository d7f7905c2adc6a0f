"""A version sent from a learner's memory to one server, as the transport `collective` does it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import serve_learner
from agent_r1.learner.weights.publisher import make_transport
from agent_r1.weights.collective import CollectiveFetcher, CollectiveTransport
from agent_r1.weights.snapshot import Weights
from agent_r1_proto.weights import AdapterHeader, NewestVersion, WeightManifest

TIMEOUT_S = 60.0


@contextlib.asynccontextmanager
async def sent(
    weights: Weights, policy_version: int, folder: Path, adapter: AdapterHeader | None = None
) -> AsyncIterator[WeightManifest]:
    """Send weights; yield the manifest of what came, which is there until the block ends.

    Args:
        weights: what is sent.
        policy_version: their number.
        folder: the server's folder is made in here.
        adapter: how they change the model.
    """
    config = LearnerConfig(transport="collective")
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
