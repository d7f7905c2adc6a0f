"""The language models that reward components ask, as all reward services of a run know them.

A reward service writes the version that it is configured with, `agent-r1 reward swap` a newer one.
The newest scores groups that nobody has scored yet; a group keeps the version that scored the first
of its samples, because advantages compare the rewards within it.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field

from agent_r1_proto.messages import Message
from agent_r1_proto.streams import Broker

PIN_EXPIRY_S = 6 * 3600
"""A group keeps its version for so long after it was first scored, in seconds."""


class ScoringModel(Message):
    """One version of the model that a component asks."""

    version: Annotated[str, Field(min_length=1)]
    """Version of the model, as its server names it."""
    url: str
    """URL of its server, as `reward.*.url`."""


class ScoringModels:
    """Model versions in a run's Redis. Every call waits with back-off while Redis is away."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._keys = broker.keys

    async def configure(self, component: str, model: ScoringModel) -> None:
        """Write what a service is configured with: the newest, unless the version is known."""
        versions, urls = self._keys.scoring_models(component)

        async def write() -> None:
            redis: Any = self._broker.redis
            await redis.hset(urls, model.version, model.url)
            if model.version.encode() not in await redis.lrange(versions, 0, -1):
                await redis.rpush(versions, model.version)

        await self._broker.retrying(write, "configure scoring model")

    async def swap(self, component: str, model: ScoringModel) -> None:
        """Make a model the newest of a component."""
        versions, urls = self._keys.scoring_models(component)

        def write(pipe: Any) -> None:
            pipe.hset(urls, model.version, model.url)
            pipe.lrem(versions, 0, model.version)
            pipe.rpush(versions, model.version)

        await self._broker.transact(write, "swap scoring model")

    async def read(self, component: str) -> list[ScoringModel]:
        """Return the versions of the model that a component asks; the last one is the newest."""
        names, urls = await self._broker.transact(
            lambda pipe: (
                pipe.lrange(self._keys.scoring_models(component)[0], 0, -1),
                pipe.hgetall(self._keys.scoring_models(component)[1]),
            ),
            "read scoring models",
        )
        # Two services that start at once may both append their version.
        once = dict.fromkeys(names)
        return [ScoringModel(version=n.decode(), url=urls[n].decode()) for n in once if n in urls]

    async def pin(self, component: str, group: str, version: str) -> str:
        """Return the version that scores a group: the given one, unless it has another already."""
        key = self._keys.scoring_pin(component, group)

        def write(pipe: Any) -> None:
            pipe.set(key, version, nx=True, ex=PIN_EXPIRY_S)
            pipe.get(key)

        kept: bytes = (await self._broker.transact(write, "pin scoring model"))[-1]
        return kept.decode()

    async def note_uses(self, uses: Collection[tuple[str, str]]) -> None:
        """Say that versions have just scored something: pairs of component and version."""
        if uses:
            now = time.time()
            mapping = {f"{component} {version}": now for component, version in uses}
            await self._broker.retrying(
                lambda: self._broker.redis.hset(self._keys.scoring_model_uses, mapping=mapping),
                "note scoring models",
            )

    async def last_used(self, component: str) -> dict[str, float]:
        """Return the Unix time in seconds at which each version scored last, by version."""
        found = await self._broker.retrying(
            lambda: self._broker.redis.hgetall(self._keys.scoring_model_uses),
            "read uses of scoring models",
        )
        named = ((*name.decode().split(" ", 1), float(at)) for name, at in found.items())
        return {version: at for owner, version, at in named if owner == component}
