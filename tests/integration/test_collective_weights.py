"""Weights from the learner's memory to servers: group after group, whatever the members do."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import serve_learner
from agent_r1.learner.weights.publisher import make_transport
from agent_r1.weights import collective
from agent_r1.weights.collective import (
    CollectiveFetcher,
    CollectiveTransport,
    buckets,
    checksum,
)
from agent_r1.weights.download import TransferError
from agent_r1.weights.layout import ModelLayout
from agent_r1.weights.manifest import WeightsNotArrivedError, WeightsRefusedError
from agent_r1.weights.snapshot import Weights, safetensors_bytes, verify_snapshot
from agent_r1_proto.weights import AdapterHeader, Invitation, NewestVersion, WeightManifest
from tests.support.learner_fakes import eventually
from tests.support.sent_weights import slow_servers
from tests.support.snapshot_files import EMBEDDING, LM_HEAD

WAIT_S = 60.0
BUCKET = 1000
SHAPES = {EMBEDDING: (50, 20), "norm.weight": (20,)}
LAYOUT = ModelLayout(files=(), shapes=SHAPES, aliases={LM_HEAD: EMBEDDING})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collective, "BUCKET_BYTES", BUCKET)


def make_weights(version: int) -> Weights:
    torch.manual_seed(version)
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
    return Weights(tensors, {LM_HEAD: EMBEDDING})


def staged(store: Any, rank: int, size: int, host: str) -> tuple[Any, torch.Tensor]:
    """A group as one of GPUs: it transfers from memory of its own, of which it has less."""
    return collective._gloo(store, rank, size, host)[0], torch.empty(300, dtype=torch.uint8)


@pytest.fixture(params=["gloo"])
async def learner(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[CollectiveTransport]:
    if request.param == "nccl":  # which tests put something in the place of
        monkeypatch.setattr(collective, "_backend_problem", lambda backend: None)
    config = LearnerConfig(transport="collective", collective_backend=request.param)
    async with serve_learner(config.server, None) as server:
        transport = make_transport(config, server)
        assert isinstance(transport, CollectiveTransport)
        async with transport:
            yield transport


class Servers:
    """Servers of this process, each with its end."""

    def __init__(self, learner: CollectiveTransport, folder: Path) -> None:
        self._learner = learner
        self._folder = folder
        self._fetchers: dict[str, CollectiveFetcher] = {}
        self._open = AsyncExitStack()

    async def start(self, name: str) -> CollectiveFetcher:
        """Start one more."""
        fetcher = self._fetchers[name] = CollectiveFetcher("test", name, self._folder, WAIT_S)
        await self._open.enter_async_context(fetcher)
        return fetcher

    async def __aenter__(self) -> Servers:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._open.aclose()

    def hold(self, version: int) -> NewestVersion:
        """Let the learner hold a version."""
        published = self._learner.hold("test", version, make_weights(version), None)
        return NewestVersion(policy_version=version, manifest_location=published.location)

    async def send(self, newest: NewestVersion, *invited: str) -> list[WeightManifest]:
        """Let the learner invite servers; those of this process come."""
        invitation = self._learner.invite()
        for fetcher in self._fetchers.values():
            fetcher.accept(invitation)
        sending = self._learner.send(invitation, [*self._fetchers, *invited])
        fetching = [fetcher.fetch(newest) for fetcher in self._fetchers.values()]
        _, found = await asyncio.gather(sending, asyncio.gather(*fetching))
        return found

    async def try_to_send(self, newest: NewestVersion) -> list[Any]:
        """Return what became of the learner's part, and of each server's."""
        invitation = self._learner.invite()
        for fetcher in self._fetchers.values():
            fetcher.accept(invitation)
        fetching = [fetcher.fetch(newest) for fetcher in self._fetchers.values()]
        sending = self._learner.send(invitation, [*self._fetchers])
        return await asyncio.gather(sending, *fetching, return_exceptions=True)


@pytest.fixture
async def servers(learner: CollectiveTransport, tmp_path: Path) -> AsyncIterator[Servers]:
    async with Servers(learner, tmp_path) as all_servers:
        yield all_servers


def same_bytes(manifest: WeightManifest, version: int) -> bool:
    expected = b"".join(safetensors_bytes(make_weights(version)))
    return Path(manifest.location).read_bytes() == expected


@given(parts=st.lists(st.binary(max_size=3 * BUCKET), max_size=6))
def test_buckets_hold_the_parts_in_order(parts: list[bytes]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective, "BUCKET_BYTES", BUCKET)
        found = [bucket.tobytes() for bucket in buckets(map(memoryview, parts))]
    assert b"".join(found) == b"".join(parts)
    assert all(len(bucket) == BUCKET for bucket in found[:-1])


@given(data=st.binary(min_size=1, max_size=40), flip=st.integers(0, 7))
def test_a_checksum_tells_any_flipped_bit(data: bytes, flip: int):
    bucket = torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()
    before = checksum(bucket)
    words = [data[i : i + 8] for i in range(0, len(data), 8)]
    assert before % 2**64 == sum(int.from_bytes(word, "little") for word in words) % 2**64
    bucket[len(data) // 2] ^= 1 << flip
    assert checksum(bucket) != before


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c", "d"]])
async def test_every_server_gets_every_bit(
    learner: CollectiveTransport, servers: Servers, tmp_path: Path, names: list[str]
):
    for name in names:
        await servers.start(name)
    for version in (1, 2):  # one behind the other
        found = await servers.send(servers.hold(version))
        assert len(found) == len(names)
        for manifest in found:
            assert same_bytes(manifest, version)
            assert verify_snapshot(manifest, LAYOUT, "bfloat16") == Path(manifest.location)
        # The learner sends to the first of a tree: to 1, 2 and 3 of these.
        copies = {1: 1, 2: 2, 4: 3}[len(names)]
        assert learner.take_bytes_sent() == copies * found[0].size_bytes
    assert len(glob.glob(f"{tmp_path}/*/v*")) == len(names)  # what is replaced is removed


@pytest.mark.parametrize("learner", ["nccl"], indirect=True)
async def test_gpus_send_from_their_own_memory(servers: Servers, monkeypatch: pytest.MonkeyPatch):
    await servers.start("a")
    await servers.start("b")
    monkeypatch.setattr(collective, "_nccl", staged)
    for version in (1, 2):
        found = await servers.send(servers.hold(version))
        assert [same_bytes(manifest, version) for manifest in found] == [True, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has what it takes")
@pytest.mark.parametrize("backend", ["nccl", "ipc"])
async def test_a_machine_without_gpus_refuses_their_backends_at_both_ends(
    learner: CollectiveTransport, servers: Servers, backend: str
):
    expected = rf'collective_backend \("{backend}"\) cannot be had: .* finds no GPU; set "gloo"'
    config = LearnerConfig.model_validate(
        {"transport": "collective", "collective_backend": backend}
    )
    async with serve_learner(config.server, None) as server:
        with pytest.raises(ValueError, match=expected):
            await make_transport(config, server).__aenter__()
    server = await servers.start("a")
    newest = servers.hold(1)
    server.accept(learner.invite().model_copy(update={"backend": backend}))
    with pytest.raises(WeightsRefusedError, match=expected) as refused:
        await server.fetch(newest)
    assert not isinstance(refused.value, WeightsNotArrivedError)  # nor will it another time


async def test_a_version_of_another_size_than_announced_is_refused(
    learner: CollectiveTransport, servers: Servers
):
    server = await servers.start("a")
    newest = servers.hold(1)
    invitation = learner.invite()
    server.accept(invitation.model_copy(update={"size_bytes": invitation.size_bytes + 1}))
    _, refusal = await asyncio.gather(
        learner.send(invitation, ["a"]), server.fetch(newest), return_exceptions=True
    )
    assert f"bytes come, and {invitation.size_bytes + 1} were announced" in str(refusal)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setattr(collective, "BUCKET_BYTES", 10)  # over 200 of them
    return slow_servers(monkeypatch)


async def test_a_transfer_ends_at_the_limit_of_whoever_has_the_shorter_one(
    learner: CollectiveTransport, servers: Servers, slow: set[str]
):
    slow.add("slow")
    await servers.start("slow")
    good = await servers.start("good")
    newest = servers.hold(1)
    for ends, key in ((learner, "learner.push_timeout_s"), (good, "rollout.weight_load_timeout_s")):
        ends._timeout_s = 1.0
        sending, *fetching = await servers.try_to_send(newest)
        assert isinstance(sending, TransferError)
        assert all(isinstance(one, WeightsNotArrivedError) for one in fetching)
        assert any(key in str(one) for one in (sending, *fetching))
        ends._timeout_s = WAIT_S


async def test_a_larger_version_may_take_longer(
    learner: CollectiveTransport, servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.weights.manifest.SLOWEST_BYTES_PER_S", 50.0)
    server = await servers.start("one")
    server._timeout_s = learner._timeout_s = 1e-6
    [found] = await servers.send(servers.hold(1))
    assert same_bytes(found, 1)


async def test_a_learner_that_stops_does_not_wait_for_the_rest_of_a_transfer(
    learner: CollectiveTransport, servers: Servers, slow: set[str]
):
    slow.add("slow")
    await servers.start("slow")
    trying = asyncio.create_task(servers.try_to_send(servers.hold(1)))
    await eventually(lambda: bool(learner._transfers))
    started = time.monotonic()
    await learner.__aexit__(None, None, None)
    assert time.monotonic() - started < 20  # all buckets would take 40 s
    sending, fetching = await trying
    assert isinstance(sending, TransferError)
    assert isinstance(fetching, WeightsNotArrivedError)


async def test_an_adapter_is_sent_with_its_rank(learner: CollectiveTransport, servers: Servers):
    weights, header = Weights({"a.lora_A.weight": torch.ones(2, 3)}), AdapterHeader(rank=2, alpha=4)
    location = learner.hold("test", 1, weights, header).location
    newest = NewestVersion(policy_version=1, manifest_location=location)
    await servers.start("a")
    [found] = await servers.send(newest)
    assert (found.kind, found.adapter) == ("adapter", header)


async def test_who_does_not_come_is_left_out(
    learner: CollectiveTransport, servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    await servers.start("a")
    await servers.start("b")
    monkeypatch.setattr(collective, "MEET_S", 3.0)
    found = await servers.send(servers.hold(1), "gone")
    assert [same_bytes(manifest, 1) for manifest in found] == [True, True]
    with pytest.raises(TransferError, match="none of 1 invited servers came within 3 s"):
        await learner.send(learner.invite(), ["gone"])


async def test_who_comes_too_late_is_told_so(
    learner: CollectiveTransport, servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    late = await servers.start("late")
    newest = servers.hold(1)
    monkeypatch.setattr(collective, "MEET_S", 0.2)
    invitation = learner.invite()
    with pytest.raises(TransferError, match="none of 1"):
        await learner.send(invitation, ["late"])
    monkeypatch.setattr(collective, "MEET_S", WAIT_S)
    late.accept(invitation)
    with pytest.raises(WeightsRefusedError, match="came too late"):
        await late.fetch(newest)


@contextlib.asynccontextmanager
async def member(
    invitation: Invitation, newest: NewestVersion, name: str, folder: Path, *stop_at: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a server in a process of its own."""
    location = newest.manifest_location
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.collective_member"),
        *(invitation.model_dump_json(), str(newest.policy_version), str(location)),
        *(name, str(folder), *stop_at),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_group_that_breaks_ends_for_all_and_another_one_gets_the_version(
    learner: CollectiveTransport,
    servers: Servers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
):
    monkeypatch.setattr(collective, "SILENCE_S", 5.0 if fault == "frozen" else WAIT_S)
    monkeypatch.setattr(collective, "MEET_S", WAIT_S)
    good = await servers.start("good")
    newest = servers.hold(1)
    invitation = learner.invite()
    good.accept(invitation)
    # After manifest and its size, before the first of three buckets.
    async with member(invitation, newest, "bad", tmp_path, "2") as bad:
        sending = asyncio.create_task(learner.send(invitation, ["good", "bad"]))
        fetching = asyncio.create_task(good.fetch(newest))
        assert bad.stdout is not None
        assert await asyncio.wait_for(bad.stdout.readline(), WAIT_S) == b"stopped\n"
        if fault == "killed":
            bad.kill()
        with pytest.raises(WeightsRefusedError, match="the group broke"):
            await asyncio.wait_for(fetching, WAIT_S)
        with pytest.raises(TransferError, match="the group broke"):
            await asyncio.wait_for(sending, WAIT_S)
        with pytest.raises(WeightsRefusedError, match="announced, each by itself"):
            await good.fetch(newest)  # nothing of it is kept
        [found] = await servers.send(newest)
        assert same_bytes(found, 1)


LEARNER = """
import asyncio, os, sys
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.server import serve_learner
from agent_r1.learner.weights.publisher import make_transport
from agent_r1.weights import collective
from tests.integration.test_collective_weights import BUCKET, make_weights

collective.BUCKET_BYTES = BUCKET
collective.MEET_S = 60.0
{before}

async def main():
    config = LearnerConfig(transport="collective")
    async with serve_learner(config.server, None) as server:
        async with make_transport(config, server) as learner:
            location = learner.hold("test", 1, make_weights(1), None).location
            invitation = learner.invite()
            print(invitation.model_dump_json(), flush=True)
            print(location, flush=True)
            {send}

asyncio.run(main())
"""
ENDS_AFTER_THREE = """
broadcast, done = collective._Group.broadcast, 0

def some(group, data):
    global done
    if done == 3:
        os._exit(9)
    broadcast(group, data)
    done += 1

collective._Group.broadcast = some
"""


@contextlib.asynccontextmanager
async def started_learner(
    script: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Invitation, NewestVersion]]:
    """Run a learner's end in a process of its own."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    lines = [(await asyncio.wait_for(process.stdout.readline(), WAIT_S)).decode() for _ in "12"]
    newest = NewestVersion(policy_version=1, manifest_location=lines[1].strip())
    try:
        yield process, Invitation.model_validate(json.loads(lines[0])), newest
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def test_a_learner_that_ends_in_a_transfer_leaves_nothing_to_use(tmp_path: Path):
    send = 'await learner.send(invitation, ["a"])'
    script = LEARNER.format(before=ENDS_AFTER_THREE, send=send)
    async with (
        started_learner(script) as (process, invitation, newest),
        CollectiveFetcher("test", "a", tmp_path, WAIT_S) as fetcher,
    ):
        fetcher.accept(invitation)
        with pytest.raises(WeightsRefusedError, match="version 1: the group broke"):
            await asyncio.wait_for(fetcher.fetch(newest), WAIT_S)
        assert await process.wait() == 9


async def test_a_process_that_is_stopped_in_a_transfer_ends_in_order(tmp_path: Path):
    script = LEARNER.format(
        before="collective.SILENCE_S = 2.0",
        send="""
            sending = asyncio.create_task(learner.send(invitation, ["frozen"]))
            await asyncio.to_thread(sys.stdin.readline)
            sending.cancel()""",
    )
    async with (
        started_learner(script) as (process, invitation, newest),
        member(invitation, newest, "frozen", tmp_path, "2") as frozen,
    ):
        assert frozen.stdout is not None
        assert await asyncio.wait_for(frozen.stdout.readline(), WAIT_S) == b"stopped\n"
        assert process.stdin is not None
        process.stdin.write(b"stop\n")
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_a_damaged_bucket_is_refused(servers: Servers, monkeypatch: pytest.MonkeyPatch):
    await servers.start("a")
    newest = servers.hold(1)
    sums = iter(range(100))
    monkeypatch.setattr(collective, "checksum", lambda data: next(sums))
    with pytest.raises(WeightsRefusedError, match="another checksum than it was sent with"):
        await servers.send(newest)


async def test_what_is_not_the_version_asked_for_is_refused(servers: Servers):
    fetcher = await servers.start("a")
    newest = servers.hold(1)
    later = newest.model_copy(update={"policy_version": 2})
    _, refusal = await servers.try_to_send(later)  # the learner may see the group break first
    assert isinstance(refusal, WeightsRefusedError)
    assert "of another version than 2" in str(refusal)
    with pytest.raises(WeightsRefusedError, match=r'learner\.transport = "collective"'):
        fetcher.check_location("/weights/v1/manifest.json")


async def test_a_server_without_room_breaks_no_group(
    learner: CollectiveTransport, servers: Servers, monkeypatch: pytest.MonkeyPatch
):
    a, full = await servers.start("a"), await servers.start("full")
    newest = servers.hold(1)
    monkeypatch.setattr(collective, "MEET_S", 3.0)
    invitation = learner.invite()
    full.accept(invitation.model_copy(update={"size_bytes": 2**60}))
    a.accept(invitation)
    sending = learner.send(invitation, ["a", "full"])
    with pytest.raises(WeightsRefusedError, match="are free"):
        await full.fetch(newest)
    _, found = await asyncio.gather(sending, a.fetch(newest))
    assert same_bytes(found, 1)


async def test_what_servers_could_not_reach_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
):
    class Server:
        app: Any = None
        url = "http://127.0.0.1:9"

    monkeypatch.setattr(collective.ServedFiles, "add_run_route", lambda files, app: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"collective_port \({port}\) cannot be bound on 127"):
            await CollectiveTransport(Server(), ("127.0.0.1", port), "gloo", 9.0).__aenter__()
    monkeypatch.setattr(Server, "url", "http://192.0.2.1:9")  # of no machine
    with pytest.raises(ValueError, match=r"\(192\.0\.2\.1\) is no address of this machine"):
        await CollectiveTransport(Server(), ("0.0.0.0", 0), "gloo", 9.0).__aenter__()
