"""Which version a load ends with when pushes come late, or while others are under way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_r1.rollout.policy import LoadTiming
from agent_r1.rollout.weight_versions import WeightVersions
from agent_r1.weights.file import FileFetcher
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.weights import LoadRequest, NewestVersion, ScoredPrompt, WeightManifest
from tests.support.fakes import FakePolicy
from tests.support.snapshot_files import chunks_of

WAIT_S = 20.0


class Published:
    """What the learner has published; keeps the files of the newest version only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: NewestVersion | None = None
        self.asked = asyncio.Event()
        self.delays: list[asyncio.Event] = []
        """Of the next answers; each is what was true when it was asked for."""

    def publish(self, version: int) -> LoadRequest:
        for old in self.folder.glob("v*.json"):
            old.unlink()
        path = self.folder / f"v{version}.json"
        manifest = WeightManifest(
            run_id="run",
            policy_version=version,
            location=str(self.folder / "model.safetensors"),
            size_bytes=0,
            chunks=chunks_of(b""),
            tensors=[],
        )
        path.write_text(manifest.model_dump_json())
        self.newest = NewestVersion(policy_version=version, manifest_location=str(path))
        return LoadRequest(manifest_location=str(path), policy_version=version)

    async def newest_version(self) -> NewestVersion | None:
        value, delay = self.newest, self.delays.pop(0) if self.delays else None
        self.asked.set()
        if delay is not None:
            await delay.wait()
        return value


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


def versions_of(policy: FakePolicy, published: Published) -> WeightVersions:
    registry: Any = published
    return WeightVersions(policy, registry, FileFetcher(published.folder, "run"))


async def test_a_push_is_overtaken_by_the_next_one(published: Published):
    policy = FakePolicy([[0]], eos_token_ids=[0])
    versions = versions_of(policy, published)
    answer = asyncio.Event()
    published.delays.append(answer)
    late = asyncio.create_task(versions.load(published.publish(1)))
    await asyncio.wait_for(published.asked.wait(), WAIT_S)
    next_one = asyncio.create_task(versions.load(published.publish(2)))
    await asyncio.wait([next_one], timeout=0.2)  # it may wait for the first, or overtake it
    answer.set()
    replies = await asyncio.wait_for(asyncio.gather(late, next_one), WAIT_S)
    assert [reply.policy_version for reply in replies] == [2, 2]
    assert policy.loaded == [2]


async def test_a_version_that_is_deleted_while_it_is_caught_up_with_gives_way_to_the_next(
    published: Published,
):
    policy = FakePolicy([[0]], eos_token_ids=[0])
    versions = versions_of(policy, published)
    published.publish(1)
    seen = published.newest
    assert seen is not None
    published.publish(2)  # deletes version 1, which the worker is about to read
    await versions.catch_up(seen)
    assert (versions.held, policy.loaded) == (2, [2])


async def test_the_version_after_the_newest_is_not_published(published: Published):
    policy = FakePolicy([[0]], eos_token_ids=[0])
    versions = versions_of(policy, published)
    request = published.publish(1)
    await versions.load(request)
    with pytest.raises(WeightsRefusedError, match=r"\(2\) is not published; .* knows is 1\."):
        await versions.load(request.model_copy(update={"policy_version": 2}))
    assert (versions.held, policy.loaded) == (1, [1])


async def test_scores_wait_for_weights_that_are_being_loaded(published: Published):
    """Else a canary would be compared on weights of which half are new."""
    may_load, loading = asyncio.Event(), asyncio.Event()

    class LoadsSlowly(FakePolicy):
        async def load_weights(self, manifest: WeightManifest) -> LoadTiming:
            loading.set()
            await may_load.wait()
            return await super().load_weights(manifest)

    versions = versions_of(LoadsSlowly([[0]], eos_token_ids=[0]), published)
    load = asyncio.create_task(versions.load(published.publish(1)))
    await asyncio.wait_for(loading.wait(), WAIT_S)
    score = asyncio.create_task(versions.score([ScoredPrompt([5, 7], [1])]))
    for _ in range(10):  # more turns of the loop than an answer takes
        await asyncio.sleep(0)
    assert not score.done()
    may_load.set()
    assert await asyncio.wait_for(score, WAIT_S) == (1, [-7.0])
    await load
