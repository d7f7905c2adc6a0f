"""What tests of the rollout server need: servers of one run, and a look at their work.

Redis, HTTP and the tools are real; only the sampler is scripted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, serve_policy
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.tokens import EngineDeadError
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion, TransportName, WeightManifest
from tests.support.builders import rollout_task
from tests.support.fakes import FakePolicy, FakeToolServer, build_tokenizer, call_text
from tests.support.snapshot_files import chunks_of

WAIT_S = 60.0
POLL_S = 0.005
ANSWER = "<think>done</think><answer>Ada</answer>"
SEARCH = "<think>look</think>" + call_text(query="Ada")


@dataclass
class Bench:
    """What a test needs to start servers of one run and to look at their work."""

    broker: Broker
    registry: Registry
    chat: ChatFormat
    end_id: int
    redis_url: str
    folder: Path

    @classmethod
    def of(cls, broker: Broker, redis_url: str, folder: Path) -> Bench:
        """Bring a tokenizer along."""
        tokenizer: Any = build_tokenizer()
        end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
        chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id])
        return cls(broker, Registry(broker), chat, end_id, redis_url, folder)

    def policy(self, *turns: str, **options: Any) -> FakePolicy:
        """A model that writes these turns."""
        script = [[*self.chat.encode(turn), self.end_id] for turn in turns]
        return FakePolicy(script, eos_token_ids=[self.end_id], **options)

    def gated_policy(self, gate: asyncio.Event, text: str = ANSWER) -> FakePolicy:
        """A model that answers once the gate is open."""

        async def script(_: list[int], __: int) -> list[int]:
            await gate.wait()
            return [*self.chat.encode(text), self.end_id]

        return FakePolicy(script, eos_token_ids=[self.end_id])

    @asynccontextmanager
    async def server(
        self,
        policy: FakePolicy,
        *tools: FakeToolServer,
        env: dict[str, Any] | None = None,
        rollout: dict[str, Any] | None = None,
        transport: TransportName = "file",
        lease_s: float = 60.0,
    ) -> AsyncIterator[asyncio.Task[None]]:
        """Run a server until the block ends; it is then stopped in order."""
        settings = RolloutSettings(
            run=RunConfig(id=self.run_id),
            model=ModelConfig(path="scripted"),
            redis=RedisConfig(url=self.redis_url, lease_s=lease_s),
            env=EnvConfig.model_validate({"tool_retries": 0} | (env or {})),
            rollout=RolloutConfig.model_validate(rollout or {}),
            tools={tool.name: tool.url for tool in tools},
            weights_dir=self.folder,
            transport=transport,
            announce_dir=self.folder,
        )
        serving = asyncio.create_task(serve_policy(policy, self.chat, settings))
        try:
            await until(lambda: (self.folder / "rollout.json").exists() or serving.done())
            yield serving
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError, EngineDeadError):
                await serving
            (self.folder / "rollout.json").unlink(missing_ok=True)

    @property
    def run_id(self) -> str:
        """Id of the run."""
        return self.broker.keys.prefix.split(":")[1]

    async def left(self) -> bool:
        """Whether no server is announced."""
        return await self.registry.rollout_servers() == []

    async def num_pending(self) -> int:
        """Number of samples that a server has taken and not finished."""
        group = await self.broker.redis.xpending(self.broker.keys.tasks, "rollout")
        return int(group["pending"])

    @property
    def url(self) -> str:
        """Base URL of the server that announced itself last."""
        return json.loads((self.folder / "rollout.json").read_text())["url"]

    async def submit(self, *tasks: RolloutTask) -> None:
        """Put samples on the stream."""
        await self.broker.publish_many(self.broker.keys.tasks, tasks)

    async def trajectories(self, count: int) -> list[Trajectory]:
        """Take this many results from the stream."""
        taken: list[Trajectory] = []
        async with (
            asyncio.timeout(WAIT_S),
            self.broker.consumer(
                self.broker.keys.trajectories, Trajectory, group="reward", consumer="test"
            ) as consumer,
        ):
            while len(taken) < count:
                for entry in await consumer.read(count - len(taken), 1.0):
                    taken.append(entry.message)
                    await consumer.finish(entry)
        return sorted(taken, key=lambda trajectory: trajectory.rollout_id)

    async def publish(self, version: int, **options: Any) -> str:
        """Write a manifest, make its version the newest, and return its path."""
        location = self.manifest(version, **options)
        newest = NewestVersion(policy_version=version, manifest_location=location)
        await self.registry.set_newest_version(newest)
        return location

    def manifest(self, version: int, *, run_id: str | None = None, named: int | None = None) -> str:
        """Write a manifest of a version, in the file of version `named`, and return its path."""
        path = self.folder / f"v{version if named is None else named}.json"
        manifest = WeightManifest(
            run_id=run_id or self.run_id,
            policy_version=version,
            location=str(self.folder / "model.safetensors"),
            size_bytes=0,
            chunks=chunks_of(b""),
            tensors=[],
        )
        path.write_text(manifest.model_dump_json())
        return str(path)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition of this process holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - what changes is not ours to signal
            await asyncio.sleep(POLL_S)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until a condition that must be asked for holds."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - Redis changes, not this process
            await asyncio.sleep(POLL_S)


async def until_empty(bench: Bench) -> None:
    """Wait until every sample is finished and deleted."""

    async def is_empty() -> bool:
        return await bench.broker.depth(bench.broker.keys.tasks) == 0

    await until_true(is_empty)


def keys(trajectories: Sequence[Trajectory]) -> list[tuple[int, int, int, int]]:
    """Return incarnation, group, sample and attempt of each."""
    found = [trajectory.rollout.key for trajectory in trajectories]
    return [(k.incarnation, k.group_id, k.sample_index, k.attempt) for k in found]


def task(bench: Bench, **fields: Any) -> RolloutTask:
    """Return a sample of the bench's run."""
    return rollout_task(bench.run_id, **fields)
