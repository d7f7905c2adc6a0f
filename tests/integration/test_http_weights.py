"""Weights over HTTP: pulled whole, from learner and peers, whatever is cut, damaged or slow."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from aiohttp import web
from fastapi import FastAPI

from agent_r1.learner.config import LearnerConfig
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import advertised_url, bind, serving
from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1.weights import chunks, download
from agent_r1.weights.http import HttpFetcher, HttpTransport, describe_files
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.weights import NewestVersion, WeightManifest
from tests.support.learner_fakes import http_transport
from tests.support.snapshot_files import flip_byte, write_snapshot

TOKEN = RunToken("the-token-of-this-test")
CHUNK = 1000
WAIT_S = 60.0
RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is given up for its slowness, as on a machine that has time."""
    monkeypatch.setattr(download, "PATIENCE_S", WAIT_S)
    monkeypatch.setattr(download, "PEER_TIMEOUT_S", WAIT_S)


def publish_files(folder: Path, version: int, values: int = 10_000) -> Path:
    """Write a version of 4 bytes a value: 10,000 values are 40 chunks and a header."""
    value = np.random.default_rng(version).standard_normal(values).astype(np.float32)
    write_snapshot(folder / f"v{version}", {"weight": value}, version, aliases={})
    return folder / f"v{version}"


class Servers:
    """The registry's rollout servers, each with its fetcher, as they would be announced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.announced: list[RolloutServer] = []
        self._open = AsyncExitStack()

    async def rollout_servers(self) -> list[RolloutServer]:
        return self.announced

    def announce(self, server_id: str, url: str) -> None:
        server = RolloutServer(
            server_id=server_id, url=url, policy_version=0, pid=1, host="here", started_at=0.0
        )
        self.announced.append(server)

    async def start(self, server_id: str, *, timeout_s: float = WAIT_S) -> HttpFetcher:
        registry: Any = self
        fetcher = HttpFetcher(
            registry,
            run_id="test",
            server_id=server_id,
            parent=self.folder / "pulled",
            timeout_s=timeout_s,
            token=TOKEN,
        )
        await self._open.enter_async_context(fetcher)
        app = FastAPI()
        fetcher.add_routes(app)
        listen = ListenConfig()
        listener = bind(server_id, listen, TOKEN)
        await self._open.enter_async_context(serving(app, listener, listen, TOKEN))
        self.announce(server_id, advertised_url(server_id, listen, listener.getsockname()[1]))
        return fetcher

    async def __aenter__(self) -> Servers:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open.aclose()


@pytest.fixture
async def servers(tmp_path: Path) -> AsyncIterator[Servers]:
    async with Servers(tmp_path) as all_servers:
        yield all_servers


@pytest.fixture
async def learner() -> AsyncIterator[HttpTransport]:
    async with http_transport(LearnerConfig(), TOKEN) as transport:
        yield transport


async def publish(learner: HttpTransport, folder: Path, version: int) -> NewestVersion:
    location = (await learner.publish(version, publish_files(folder, version))).location
    return NewestVersion(policy_version=version, manifest_location=location)


def same_bytes(manifest: WeightManifest, folder: Path) -> bool:
    version = manifest.policy_version
    published = folder / f"v{version}" / "model.safetensors"
    return Path(manifest.location).read_bytes() == published.read_bytes()


def versions_kept(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*/v*")]


async def fetch(fetcher: HttpFetcher, newest: NewestVersion) -> WeightManifest:
    return await asyncio.wait_for(fetcher.fetch(newest), WAIT_S)


class Source:
    """A learner or peer of the test's: serves the files of a folder, and fails as it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.asked: Counter[int] = Counter()
        """Requests for each chunk."""
        self.cut: Counter[int] = Counter()
        """Chunks that the next so many answers break off in the middle."""
        self.damaged: set[int] = set()
        self.hanging = asyncio.Event()
        self.hanging.set()
        """Cleared: answers hang."""
        self.lacks: set[int] = set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        path = self.folder / f"v{request.match_info['version']}" / request.match_info["name"]
        wanted = RANGE.fullmatch(request.headers.get("Range", ""))
        if wanted is None:
            return web.Response(body=path.read_bytes())
        start, end = int(wanted[1]), int(wanted[2]) + 1
        index = start // CHUNK
        self.asked[index] += 1
        await self.hanging.wait()
        if index in self.lacks:
            return web.Response(status=404)
        data = path.read_bytes()[start:end]
        if index in self.damaged:
            data = bytes([data[0] ^ 1]) + data[1:]
        response = web.StreamResponse(status=206, headers={"Content-Length": str(end - start)})
        await response.prepare(request)
        if self.cut[index] > 0:
            self.cut[index] -= 1
            await response.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(data)
        return response

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Source]:
        app = web.Application()
        app.router.add_get("/weights/files/{version}/{name}", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            self.hanging.set()
            await runner.cleanup()

    def newest(self, version: int) -> NewestVersion:
        """Publish a version here."""
        describe_files(publish_files(self.folder, version))
        url = f"{self.url}/weights/files/{version}/manifest.json"
        return NewestVersion(policy_version=version, manifest_location=url)


async def test_a_pulled_version_has_the_same_bytes_and_takes_the_place_of_the_one_before(
    learner: HttpTransport, servers: Servers, tmp_path: Path
):
    fetcher = await servers.start("one")
    for version in (1, 2):
        manifest = await fetch(fetcher, await publish(learner, tmp_path, version))
        assert same_bytes(manifest, tmp_path)
        assert versions_kept(tmp_path / "pulled") == [f"v{version}"]
    await servers.__aexit__()
    assert list((tmp_path / "pulled").iterdir()) == []


async def test_what_a_killed_server_left_behind_is_removed_and_what_a_live_one_has_stays(
    servers: Servers, learner: HttpTransport, tmp_path: Path
):
    left = tmp_path / "pulled" / "agent_r1_weights_left"
    left.mkdir(parents=True)
    (left / "lock").touch()
    one = await servers.start("one")
    held = await fetch(one, await publish(learner, tmp_path, 1))
    await servers.start("two")
    assert not left.exists()
    assert same_bytes(held, tmp_path)


async def test_a_connection_that_is_cut_costs_one_chunk(servers: Servers, tmp_path: Path):
    async with Source(tmp_path).running() as source:
        source.cut.update({0: 1, 7: 2, 40: 1})
        fetcher = await servers.start("one")
        manifest = await fetch(fetcher, source.newest(1))
        assert same_bytes(manifest, tmp_path)
        repeated = {index: count for index, count in source.asked.items() if count > 1}
        assert repeated == {0: 2, 7: 3, 40: 2}


async def test_a_pull_that_ended_early_is_continued_by_the_next(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(download, "STALL_TIMEOUT_S", 0.0)
    async with Source(tmp_path).running() as source:
        source.cut.update({20: 1})
        fetcher = await servers.start("one")
        newest = source.newest(1)
        with pytest.raises(
            WeightsRefusedError, match=r"nothing of model.safetensors came.*learner\.server"
        ):
            await fetch(fetcher, newest)
        before = source.asked.copy()
        manifest = await fetch(fetcher, newest)
        assert same_bytes(manifest, tmp_path)
        assert len(before) >= 20
        # Four chunks at a time are on their way when the pull ends; the others are not repeated.
        assert sum(source.asked.values()) <= 41 + download.PARALLEL


async def test_a_learner_that_sends_other_bytes_than_its_manifest_says_is_refused(
    servers: Servers, tmp_path: Path
):
    async with Source(tmp_path).running() as source:
        source.damaged = {5}
        fetcher = await servers.start("one")
        with pytest.raises(WeightsRefusedError, match="another sha256 than the manifest says"):
            await fetch(fetcher, source.newest(1))


async def test_a_pull_that_takes_too_long_ends_and_says_so(servers: Servers, tmp_path: Path):
    async with Source(tmp_path).running() as source:
        source.hanging.clear()
        fetcher = await servers.start("one", timeout_s=0.2)
        said = r"within 0\.2 s and one more for every 50 MB \(rollout"
        with pytest.raises(WeightsRefusedError, match=said):
            await fetch(fetcher, source.newest(1))


async def test_a_larger_version_may_take_longer(
    servers: Servers, learner: HttpTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pull = HttpFetcher._pull

    async def pull_later(*arguments: Any) -> None:
        await asyncio.sleep(1.5)
        await pull(*arguments)

    monkeypatch.setattr("agent_r1.weights.manifest.SLOWEST_BYTES_PER_S", 1.0)
    monkeypatch.setattr(HttpFetcher, "_pull", pull_later)
    fetcher = await servers.start("one", timeout_s=1.0)
    assert same_bytes(await fetch(fetcher, await publish(learner, tmp_path, 1)), tmp_path)


async def test_a_version_for_which_there_is_no_room_is_refused_before_it_is_pulled(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with Source(tmp_path).running() as source:
        fetcher = await servers.start("one")
        newest = source.newest(1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
        with pytest.raises(WeightsRefusedError, match=r"0 MiB are free; .*rollout\.weights_dir"):
            await fetch(fetcher, newest)
        assert not source.asked


async def test_the_learner_sends_a_version_about_once_however_many_servers_pull_it(
    patient: None, learner: HttpTransport, servers: Servers, tmp_path: Path
):
    fetchers = [await servers.start(f"server-{number}") for number in range(5)]
    newest = await publish(learner, tmp_path, 1)
    manifests = await asyncio.gather(*(fetch(fetcher, newest) for fetcher in fetchers))
    assert all(same_bytes(manifest, tmp_path) for manifest in manifests)
    directory = tmp_path / "v1"
    snapshot = (directory / "model.safetensors").stat().st_size
    manifest = (directory / "manifest.json").stat().st_size
    assert learner.files.bytes_out - 5 * manifest <= 1.1 * snapshot


async def test_a_server_that_joins_takes_most_from_those_that_have_the_version(
    patient: None, learner: HttpTransport, servers: Servers, tmp_path: Path
):
    newest = await publish(learner, tmp_path, 1)
    for name in ("a", "b", "c"):
        await fetch(await servers.start(name), newest)
    before = learner.files.bytes_out
    assert same_bytes(await fetch(await servers.start("d"), newest), tmp_path)
    # Its own quarter of the chunks comes from the learner, which sends the manifest too.
    manifest = (tmp_path / "v1" / "manifest.json").stat().st_size
    size = (tmp_path / "v1" / "model.safetensors").stat().st_size
    assert learner.files.bytes_out - before - manifest <= 0.3 * size


@pytest.mark.parametrize("failure", ["damages", "is gone"])
async def test_the_chunks_of_a_peer_that_fails_are_shared_out(
    failure: str, patient: None, servers: Servers, tmp_path: Path
):
    async with Source(tmp_path).running() as source, Source(tmp_path).running() as peer:
        newest = source.newest(1)
        peer.damaged = set(range(41))
        servers.announce("bad", peer.url if failure == "damages" else "http://127.0.0.1:9")
        one, two = await servers.start("one"), await servers.start("two")
        manifests = await asyncio.gather(fetch(one, newest), fetch(two, newest))
        assert all(same_bytes(manifest, tmp_path) for manifest in manifests)
        # The learner sends each of the 41 chunks once, to one of the two.
        assert sum(source.asked.values()) == 41


@pytest.mark.parametrize("failure", ["hangs", "is slow"])
async def test_a_peer_that_hangs_or_is_slow_holds_up_no_one(
    failure: str, servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(download, "PEER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(download, "PATIENCE_S", 0.5)
    async with Source(tmp_path).running() as source, Source(tmp_path).running() as peer:
        newest = source.newest(1)
        if failure == "hangs":
            peer.hanging.clear()
        else:
            peer.lacks = set(range(3, 41))
        servers.announce("bad", peer.url)
        one, two = await servers.start("one"), await servers.start("two")
        manifests = await asyncio.gather(fetch(one, newest), fetch(two, newest))
        assert all(same_bytes(manifest, tmp_path) for manifest in manifests)


async def test_locations_of_another_transport_are_refused(servers: Servers, tmp_path: Path):
    fetcher = await servers.start("one")
    for location in ("/etc/passwd", "file:///etc/passwd", "ftp://host/manifest.json"):
        with pytest.raises(WeightsRefusedError, match=r'learner\.transport = "http"'):
            fetcher.check_location(location)
    fetcher.check_location("http://learner:7000/weights/files/1/manifest.json")


async def test_only_files_of_published_versions_are_served(learner: HttpTransport, tmp_path: Path):
    newest = await publish(learner, tmp_path, 1)
    (tmp_path / "v1" / "secret").write_text("secret")
    assert newest.manifest_location is not None
    base = newest.manifest_location.removesuffix("1/manifest.json")
    async with httpx.AsyncClient() as stranger:
        assert (await stranger.get(newest.manifest_location)).status_code == 401
    async with httpx.AsyncClient(headers=token_headers(TOKEN)) as client:

        async def status(path: str, headers: dict[str, str] | None = None) -> int:
            return (await client.get(base + path, headers=headers)).status_code

        assert await status("1/model.safetensors") == 200
        assert await status("1/model.safetensors", {"range": "bytes=10-19"}) == 206
        assert await status("1/model.safetensors", {"range": "bytes=99999999-"}) == 416
        assert await status("1/secret") == 404
        assert await status("1/..%2f..%2fv1%2fsecret") == 404
        assert await status("2/model.safetensors") == 404
        learner.withdraw(1)
        assert await status("1/model.safetensors") == 404


async def test_a_range_is_served_exactly(learner: HttpTransport, tmp_path: Path):
    newest = await publish(learner, tmp_path, 1)
    assert newest.manifest_location is not None
    url = newest.manifest_location.replace("manifest.json", "model.safetensors")
    async with httpx.AsyncClient(headers=token_headers(TOKEN)) as client:
        part = (await client.get(url, headers={"range": "bytes=1000-2999"})).content
    expected = (tmp_path / "v1" / "model.safetensors").read_bytes()[1000:3000]
    assert hashlib.sha256(part).digest() == hashlib.sha256(expected).digest()


def small_change(folder: Path, version: int) -> Path:
    """Write a version of which 10 of 10,000 values differ from the one before."""
    value = np.random.default_rng(1).standard_normal(10_000).astype(np.float32)
    value[:10] += version
    write_snapshot(folder / f"v{version}", {"weight": value}, version, aliases={})
    return folder / f"v{version}"


async def publish_change(learner: HttpTransport, folder: Path, version: int) -> NewestVersion:
    location = (await learner.publish(version, small_change(folder, version))).location
    return NewestVersion(policy_version=version, manifest_location=location)


@pytest.fixture
async def delta_learner() -> AsyncIterator[HttpTransport]:
    config = LearnerConfig(transport="http", push="delta", dense_every=4)
    async with http_transport(config, TOKEN) as transport:
        yield transport


async def test_who_holds_the_version_before_pulls_what_has_changed_and_others_pull_all(
    delta_learner: HttpTransport, tmp_path: Path
):
    sizes: list[int] = []
    newest = NewestVersion(policy_version=0)
    async with Servers(tmp_path) as servers:
        fetcher = await servers.start("one")
        for version in range(1, 7):
            before = delta_learner.files.bytes_out
            newest = await publish_change(delta_learner, tmp_path, version)
            assert same_bytes(await fetch(fetcher, newest), tmp_path)
            manifest = (tmp_path / f"v{version}" / "manifest.json").stat().st_size
            sizes.append(delta_learner.files.bytes_out - before - manifest)
    # 40,000 bytes of values; every 4th version has no delta.
    assert [size > 40_000 for size in sizes] == [True, False, False, False, True, False]
    assert max(size for size in sizes if size < 40_000) < 1_000
    async with Servers(tmp_path) as servers:
        late = await servers.start("late")
        assert same_bytes(await fetch(late, newest), tmp_path)


async def test_the_size_of_a_push_is_what_a_server_pulls(
    delta_learner: HttpTransport, servers: Servers, tmp_path: Path
):
    fetcher = await servers.start("one")
    for version in (1, 2):  # the second is a delta
        published = await delta_learner.publish(version, small_change(tmp_path, version))
        newest = NewestVersion(policy_version=version, manifest_location=published.location)
        assert same_bytes(await fetch(fetcher, newest), tmp_path)
        manifest = (tmp_path / f"v{version}" / "manifest.json").stat().st_size
        assert delta_learner.take_bytes_sent() == published.size_bytes + manifest
    assert published.size_bytes < 1_000 < 40_000
    assert delta_learner.take_bytes_sent() == 0


async def test_a_server_that_missed_a_version_pulls_the_next_whole(
    delta_learner: HttpTransport,
    servers: Servers,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    fetcher = await servers.start("one")
    await fetch(fetcher, await publish_change(delta_learner, tmp_path, 1))
    await publish_change(delta_learner, tmp_path, 2)
    before = delta_learner.files.bytes_out
    newest = await publish_change(delta_learner, tmp_path, 3)
    assert same_bytes(await fetch(fetcher, newest), tmp_path)
    assert delta_learner.files.bytes_out - before > 40_000
    assert "the delta cannot be used" not in caplog.text  # it is of another base, and not tried


async def test_a_delta_that_cannot_be_used_costs_a_whole_pull(
    delta_learner: HttpTransport, servers: Servers, tmp_path: Path
):
    fetcher = await servers.start("one")
    first = await fetch(fetcher, await publish_change(delta_learner, tmp_path, 1))
    flip_byte(Path(first.location))  # the base is no longer what it was
    newest = await publish_change(delta_learner, tmp_path, 2)
    assert same_bytes(await fetch(fetcher, newest), tmp_path)
