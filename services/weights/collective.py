"""Transport `collective`: the learner broadcasts a version from its memory to the servers.

publisher.py --invitation, over HTTP--> servers, which meet at the learner's store and form a group
with it --buckets--> a file of each server, which its engine then loads

Nothing is written on the learner, and every byte comes once to each server, from the learner or
from another server that has it, while it samples. A group is of those that came in time. One that
breaks or takes too long ends for all of its members: what they have of the version is discarded,
and the learner invites those that still answer once more, each to a group of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from agent_r1.runtime.files.own_folder import OwnFolder
from agent_r1.runtime.memory import MIB
from agent_r1.runtime.threads import in_thread
from agent_r1.weights.download import TransferError, reserve
from agent_r1.weights.http import ServedFiles, Server
from agent_r1.weights.ipc import SharedMemory, share
from agent_r1.weights.manifest import (
    MAX_MANIFEST_BYTES,
    Fetcher,
    Published,
    Transport,
    WeightsNotArrivedError,
    WeightsRefusedError,
    manifest_location,
    parse_manifest,
    time_limit_s,
)
from agent_r1.weights.snapshot import Weights, describe, safetensors_bytes
from agent_r1_proto.weights import (
    SHARED_FILE,
    SNAPSHOT_FILE,
    Backend,
    Invitation,
    NewestVersion,
    WeightManifest,
)

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store, TCPStore

Bytes = npt.NDArray[np.uint8]
Shared = tuple["torch.Tensor", SharedMemory]

SCHEME = "collective"
BUCKET_BYTES = 16 * MIB
MEET_S = 5.0
"""Time that servers have to come, once they are invited."""
SILENCE_S = 15.0
"""Longest that a group waits for one of its members, for each bucket: on a slower link than 10
Mbit/s, take another transport."""
ROOM_REMEDY = "set rollout.weights_dir to a folder with room for two versions"
_PREFIX = "agent_r1_weights_"
_CAME = b"came"
_SERVER_LIMIT = "rollout.weight_load_timeout_s"


class CollectiveTransport(Transport):
    """The learner's end: holds the newest version, and sends it to servers that it invites.

    Args:
        server: under whose host other machines reach this one; serves files to those that join.
        listen: address and port of the store; 0 takes a free port.
        backend: how bytes travel.
        timeout_s: longest a transfer may take, in seconds, and a second more for every 50 MB.
    """

    def __init__(
        self, server: Server, listen: tuple[str, int], backend: Backend, timeout_s: float
    ) -> None:
        self._server = server
        self._listen = listen
        self._backend: Backend = backend
        self._timeout_s = timeout_s
        self._host = urlsplit(server.url).hostname or listen[0]
        self._port = listen[1]
        self._store: TCPStore | None = None
        self._run_files = ServedFiles()
        self._held: tuple[WeightManifest, Weights, Shared | None] | None = None
        self._transfers: dict[asyncio.Future[None], threading.Event] = {}
        """Transfers, each with what ends it after the current bucket."""
        self._bytes_sent = 0

    async def __aenter__(self) -> Self:
        """Open the store in which servers meet.

        Raises:
            ValueError: the port is taken, this machine is advertised under an address that it does
                not have, or it lacks what the backend needs.
        """
        from torch._C._distributed_c10d import TCPStore

        if (problem := _backend_problem(self._backend)) is not None:
            raise ValueError(problem)
        self._run_files.add_run_route(self._server.app)
        try:
            own = socket.getaddrinfo(self._host, None)[0]
            with socket.socket(own[0], socket.SOCK_STREAM) as probe:
                probe.bind((own[4][0], 0))
        except OSError as exc:
            raise ValueError(
                f"learner.server.advertise_host ({self._host}) is no address of this machine "
                f'({exc.strerror}), and learner.transport = "{SCHEME}" needs one: set "auto"'
            ) from exc
        family = socket.AF_INET6 if ":" in self._listen[0] else socket.AF_INET
        try:
            listener = socket.create_server(self._listen, family=family)
        except OSError as exc:
            raise ValueError(
                f"learner.collective_port ({self._listen[1]}) cannot be bound on "
                f"{self._listen[0]}: {exc.strerror}; choose another one, or 0"
            ) from exc
        self._port = listener.getsockname()[1]
        self._store = TCPStore(
            self._listen[0],
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=SILENCE_S),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Let groups that are at work end with their bucket, and close the store.

        Nothing ends a bucket of gloo before its members or SILENCE_S do, and a process that ended
        meanwhile would be aborted.
        """
        for stop in self._transfers.values():
            stop.set()
        await asyncio.gather(*self._transfers, return_exceptions=True)  # whoever sent has been told
        self._store = None

    def hold(self, run_id: str, policy_version: int, weights: Weights, adapter: Any) -> Published:
        """Keep a version, which takes the place of the one before; blocks while it is copied.

        Args:
            run_id: of the run.
            policy_version: number of the version.
            weights: nothing changes them while they are held.
            adapter: as of `describe`.
        """
        location = f"{SCHEME}://{self._host}:{self._port}/v{policy_version}"
        manifest = describe(run_id, policy_version, weights, location, adapter=adapter)
        shared = share(weights, manifest.tensors) if self._backend == "ipc" else None
        self._held = manifest, weights, shared  # at once: a transfer may begin meanwhile
        return Published(location, manifest.size_bytes)

    def invite(self) -> Invitation:
        """Return the invitation to a new group, for the version that is held."""
        assert self._held is not None
        return Invitation(
            host=self._host,
            port=self._port,
            group=uuid.uuid4().hex,
            backend=self._backend,
            size_bytes=self._held[0].size_bytes,
            bucket_bytes=BUCKET_BYTES,
        )

    async def send(self, invitation: Invitation, servers: Sequence[str]) -> None:
        """Send the version that is held to those of the invited servers that come.

        Cancelled, it returns at once, and the transfer ends with the current bucket.

        Raises:
            TransferError: none came, or the group broke.
        """
        stop = threading.Event()
        sending = partial(self._send, invitation.group, servers, stop)
        transfer = asyncio.ensure_future(in_thread(sending))
        self._transfers[transfer] = stop
        transfer.add_done_callback(self._transfers.pop)
        try:
            await asyncio.shield(transfer)
        except asyncio.CancelledError:
            stop.set()
            transfer.add_done_callback(_take_error)
            raise

    async def expect_no_more(self, invitation: Invitation, server: str) -> None:
        """Let the others of a group begin without a server, which cannot be reached or refuses."""
        assert self._store is not None
        await asyncio.to_thread(self._store.set, f"{invitation.group}/{server}", "")

    def serve(self, paths: Mapping[str, Path]) -> str:
        """See `Transport.serve`."""
        for sha256, path in paths.items():
            self._run_files.add(sha256, path=path)
        return self._server.url

    def take_bytes_sent(self) -> int:
        """See `Transport.take_bytes_sent`."""
        sent, self._bytes_sent = self._bytes_sent, 0
        return sent

    def _send(self, name: str, servers: Sequence[str], stop: threading.Event) -> None:
        assert self._store is not None
        assert self._held is not None
        manifest, weights, shared = self._held
        limit_s = time_limit_s(self._timeout_s, manifest.size_bytes)
        deadline = time.monotonic() + limit_s
        store: TCPStore = cast(Any, self._store).clone()  # a connection of its own, which waits
        keys = {server: f"{name}/{server}" for server in servers}
        with contextlib.suppress(RuntimeError):  # not all of them came
            store.wait(list(keys.values()), timedelta(seconds=MEET_S))
        came = [server for server, key in keys.items() if store.check([key])]
        members = [server for server in came if store.get(keys[server]) == _CAME]
        store.set(f"{name}/members", json.dumps(members))
        if not members:
            raise TransferError(f"none of {len(servers)} invited servers came within {MEET_S:g} s")
        with _group(store, name, 0, len(members) + 1, self._host, self._backend) as group:
            group.send(manifest)
            if shared is not None:
                group.send(shared[1])
                return
            sums: list[int] = []
            for bucket in buckets(safetensors_bytes(weights)):
                if stop.is_set():
                    raise TransferError("the learner gave it up")
                _check_time(deadline, limit_s, "learner.push_timeout_s")
                sums.append(checksum(bucket))
                group.broadcast(bucket)
            group.broadcast(np.array(sums))
        # Servers that have a bucket send it on: the first of gloo's tree have it from here.
        copies = math.ceil(math.log2(len(members) + 1)) if self._backend == "gloo" else 1
        self._bytes_sent += manifest.size_bytes * copies


def _take_error(transfer: asyncio.Future[None]) -> None:
    """Take the error of a transfer that nobody waits for, which asyncio would log as forgotten."""
    if not transfer.cancelled():
        transfer.exception()


def _backend_problem(backend: Backend) -> str | None:
    """Say what this machine lacks for a backend; None: nothing."""
    import torch

    if backend == "gloo":
        return None
    if not torch.cuda.is_available():
        missing = "finds no GPU"
    elif backend == "nccl" and not torch.distributed.is_nccl_available():
        missing = "has no NCCL"
    else:
        return None
    return (
        f'learner.collective_backend ("{backend}") cannot be had: torch {torch.__version__} of '
        f'this machine {missing}; set "gloo", which goes through host memory'
    )


def _check_time(deadline: float, limit_s: float, key: str) -> None:
    if time.monotonic() > deadline:
        raise TransferError(f"it took longer than {limit_s:g} s ({key})")


def buckets(parts: Iterable[memoryview]) -> Iterator[Bytes]:
    """Yield parts of a file as buckets of BUCKET_BYTES; the same memory every time."""
    bucket, filled = np.empty(BUCKET_BYTES, np.uint8), 0
    for part in parts:
        rest = np.frombuffer(part, np.uint8)
        while rest.size:
            taken = min(rest.size, BUCKET_BYTES - filled)
            bucket[filled : filled + taken] = rest[:taken]
            rest, filled = rest[taken:], filled + taken
            if filled == BUCKET_BYTES:
                yield bucket
                filled = 0
    if filled:
        yield bucket[:filled]


def checksum(data: Bytes) -> int:
    """Return the sum of 64-bit words, modulo 2^64: cheap, beside those of TCP and the canary."""
    whole = data.size - data.size % 8
    rest = int.from_bytes(data[whole:].tobytes(), "little")
    total = int(data[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest
    return (total + 2**63) % 2**64 - 2**63  # as a signed number


class _Group:
    """A process group of one transfer."""

    def __init__(self, group: Any, *, sends: bool, on_device: torch.Tensor | None) -> None:
        self._group: Any = group
        self._sends = sends
        self._on_device = on_device
        """Bytes of a bucket where the group transfers from; None where that is host memory."""

    def broadcast(self, data: npt.NDArray[Any]) -> None:
        """Send from the learner, or receive, in place.

        Raises:
            TransferError: the group broke.
        """
        import torch

        content = torch.from_numpy(data.view(np.uint8))
        try:
            if self._on_device is None:
                self._group.broadcast(content, 0).wait()
                return
            for part in content.split(self._on_device.numel()):
                moved = self._on_device[: part.numel()]
                if self._sends:
                    moved.copy_(part)
                self._group.broadcast(moved, 0).wait()
                if not self._sends:
                    part.copy_(moved)
        except RuntimeError as exc:
            raise TransferError(f"the group broke: {str(exc).splitlines()[0]}") from exc

    def send(self, message: BaseModel) -> None:
        """Send a message from the learner."""
        content = np.frombuffer(bytearray(message.model_dump_json().encode()), np.uint8)
        self.broadcast(np.array([content.size]))
        self.broadcast(content)

    def receive(self) -> bytes:
        """Receive a message's JSON from the learner."""
        size = np.zeros(1, np.int64)
        self.broadcast(size)
        if not 0 < size[0] <= MAX_MANIFEST_BYTES:
            raise TransferError(f"a message has at most {MAX_MANIFEST_BYTES} bytes, not {size[0]}")
        content = np.zeros(size[0], np.uint8)
        self.broadcast(content)
        return content.tobytes()

    def leave(self) -> None:
        """Close the connections, at once: the others would wait as long as a traceback lives."""
        self._group = None


@contextlib.contextmanager
def _group(
    store: TCPStore, name: str, rank: int, size: int, host: str, backend: str
) -> Iterator[_Group]:
    """Join a process group, and leave it in the end.

    Args:
        store: in which the members meet.
        name: of the group; a new one for each.
        rank: of this member; 0 is the learner.
        size: number of members.
        host: address of this machine that the others reach.
        backend: of the group.

    Raises:
        TransferError: it was not complete in time.
    """
    from torch._C._distributed_c10d import PrefixStore

    join = _nccl if backend == "nccl" else _gloo
    try:
        group, on_device = join(PrefixStore(name, store), rank, size, host)
    except (ImportError, RuntimeError) as exc:
        raise TransferError(f"the group did not form: {str(exc).splitlines()[0]}") from exc
    member = _Group(group, sends=rank == 0, on_device=on_device)
    del group
    try:
        yield member
    finally:
        member.leave()


def _gloo(store: Store, rank: int, size: int, host: str) -> tuple[Any, None]:
    from torch._C._distributed_c10d import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # more than its stub says
    options = gloo._Options()
    options._timeout = timedelta(seconds=SILENCE_S)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options), None


def _nccl(store: Store, rank: int, size: int, host: str) -> tuple[Any, torch.Tensor]:
    import torch
    from torch._C._distributed_c10d import ProcessGroupNCCL

    # A broken group is to raise where it is waited for; by default it ends the process. It stays
    # set: groups form in several threads at once.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=SILENCE_S)
    group = ProcessGroupNCCL(store, rank, size, options)
    return group, torch.empty(BUCKET_BYTES, dtype=torch.uint8, device="cuda")


class CollectiveFetcher(Fetcher):
    """The server's end: comes when it is invited, and keeps what it is sent in a folder of its own.

    Args:
        run_id: snapshots of another run are refused.
        server_id: name of this server.
        parent: the folder is made in here; None is the system's folder for temporary files.
        timeout_s: longest a transfer may take, in seconds, and a second more for every 50 MB.
    """

    def __init__(self, run_id: str, server_id: str, parent: Path | None, timeout_s: float) -> None:
        self._run_id = run_id
        self._server_id = server_id
        self._timeout_s = timeout_s
        self._folder = OwnFolder(parent, _PREFIX)
        self._invitation: Invitation | None = None
        self._received: WeightManifest | None = None

    async def __aexit__(self, *exc_info: object) -> None:
        """Remove the folder."""
        await asyncio.to_thread(self._folder.remove)

    def check_location(self, location: str) -> None:
        """See `Fetcher.check_location`."""
        if urlsplit(location).scheme != SCHEME:
            raise WeightsRefusedError(
                f'this server has learner.transport = "{SCHEME}", and the learner another one; '
                "learner and rollout servers need the same"
            )

    def accept(self, invitation: Invitation | None) -> None:
        """See `Fetcher.accept`."""
        self._invitation = invitation

    async def fetch(self, newest: NewestVersion) -> WeightManifest:
        """See `Fetcher.fetch`; what of a version came before a group broke is discarded."""
        version = newest.policy_version
        self.check_location(manifest_location(newest))
        if self._received is not None and self._received.policy_version == version:
            return self._received
        invitation, self._invitation = self._invitation, None
        if invitation is None:
            raise WeightsRefusedError(
                f"version {version} comes from the learner, which sends it to servers that are "
                "announced, each by itself"
            )
        limit_s = time_limit_s(self._timeout_s, invitation.size_bytes)
        try:
            async with asyncio.timeout(limit_s):
                receiving = partial(self._receive, invitation, newest, limit_s)
                self._received = await in_thread(receiving)
        except TimeoutError as exc:
            raise WeightsNotArrivedError(
                f"weights of version {version} did not arrive within {limit_s:g} s "
                f"({_SERVER_LIMIT})"
            ) from exc
        except (TransferError, RuntimeError) as exc:
            raise WeightsNotArrivedError(f"weights of version {version}: {exc}") from exc
        return self._received

    def _receive(
        self, invitation: Invitation, newest: NewestVersion, limit_s: float
    ) -> WeightManifest:
        from torch._C._distributed_c10d import TCPStore

        deadline = time.monotonic() + limit_s
        path = self._folder.path / f"v{newest.policy_version}" / SNAPSHOT_FILE
        for other in self._folder.path.glob("v*"):
            shutil.rmtree(other, ignore_errors=True)  # what is in use is mapped
        path.parent.mkdir()
        if invitation.backend != "ipc":
            reserve(path, invitation.size_bytes, ROOM_REMEDY)
        if (problem := _backend_problem(invitation.backend)) is not None:
            raise WeightsRefusedError(problem)
        name, where = invitation.group, (invitation.host, invitation.port)
        patience = timedelta(seconds=2 * MEET_S)
        store = TCPStore(*where, is_master=False, wait_for_workers=False, timeout=patience)
        store.set(f"{name}/{self._server_id}", _CAME.decode())
        members = json.loads(store.get(f"{name}/members"))
        if self._server_id not in members:
            raise TransferError("this server came too late; the learner will invite it again")
        rank = members.index(self._server_id) + 1
        here = own_address(where)
        with _group(store, name, rank, len(members) + 1, here, invitation.backend) as group:
            manifest = parse_manifest(group.receive(), "of the learner", newest, self._run_id)
            if invitation.backend == "ipc":
                path = path.with_name(SHARED_FILE)
                path.write_bytes(group.receive())
                return manifest.model_copy(update={"location": str(path)})
            if manifest.size_bytes != invitation.size_bytes:
                raise TransferError(
                    f"{manifest.size_bytes} bytes come, and {invitation.size_bytes} were announced"
                )
            starts = range(0, manifest.size_bytes, invitation.bucket_bytes)
            sums = np.zeros(len(starts), np.int64)
            room = np.empty(invitation.bucket_bytes, np.uint8)
            with path.open("r+b", buffering=0) as file:  # mapping it would take longer than both
                for i, start in enumerate(starts):
                    _check_time(deadline, limit_s, _SERVER_LIMIT)
                    bucket = room[: manifest.size_bytes - start]
                    group.broadcast(bucket)
                    sums[i] = checksum(bucket)
                    file.write(bucket.data)
            expected = np.zeros_like(sums)
            group.broadcast(expected)
        if (sums != expected).any():
            raise TransferError("a bucket came with another checksum than it was sent with")
        return manifest.model_copy(update={"location": str(path)})


def own_address(peer: tuple[str, int]) -> str:
    """Return the address of this machine from which it reaches another one."""
    family, _, _, _, address = socket.getaddrinfo(*peer, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
