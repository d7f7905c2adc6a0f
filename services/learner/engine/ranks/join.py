"""How the ranks meet: their store, the check that all have the same configuration, their groups.

RankPlace --> `meet_others` (rank 0), `meet_rank_0`; then `join` --Groups--> group.py (rank 0),
worker.py (the others). The store is needed until then; afterwards ranks talk in groups.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import version
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.ranks.life import LOST_AFTER_S
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.learner.engine.ranks.place import RankPlace
from agent_r1_service.exit_status import ERROR_PREFIX, EXIT_FAILED
from agent_r1_service.files.room import require_shared_memory

IDLE_TIMEOUT = timedelta(days=30)
"""Longest between two commands: rollouts may take any time; a lost peer is noticed by life.py."""
POLL_S = 0.1
HEARD_S = 10.0
"""Longest that rank 0 waits for the others to read why they cannot begin."""
VERDICT = "verdict"
"""Key of the store: "" when all ranks have come, else why they cannot begin."""
REFUSAL = "error"
"""Of what a rank leaves in the store, in place of its configuration: why it cannot take part."""

# torch's stubs hide these public classes.
_TcpStore: Any = dist.__dict__["TCPStore"]
_PrefixStore: Any = dist.__dict__["PrefixStore"]


class Groups(NamedTuple):
    """What ranks talk through, apart from the collectives of the engine."""

    control: Any
    """Commands and results."""
    life: dict[int, Any]
    """By rank, from 1: the pair of rank 0 and that rank. A lost rank closes its own pair only."""


def choose_device(config: EngineConfig, local_rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        ValueError: GPUs are asked for and there are too few.
    """
    gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    if local_rank >= gpus:
        raise ValueError(
            f"ranks ({config.ranks}) must be <= the {gpus} GPUs of this machine, or be on more "
            'machines; lower ranks or set device = "cpu"'
        )
    return torch.device("cuda", local_rank)


def check_machine(config: EngineConfig, local_ranks: Iterable[int]) -> None:
    """Make sure that this machine has what its ranks need, before they meet.

    Raises:
        ValueError: there are too few GPUs, or too little shared memory for several.
    """
    devices = [choose_device(config, local_rank) for local_rank in local_ranks]
    if config.ranks > 1 and devices[0].type == "cuda":
        require_shared_memory(f"{config.ranks} learner ranks")


# The store


def listen(place: RankPlace, interface: str | None) -> tuple[Any, int]:
    """Open the ranks' store on one address, where by itself it listens on every one.

    Returns:
        The store and its port.

    Raises:
        ValueError: the address or the port cannot be had.
    """
    host = place.address if interface is None else _address(interface)
    try:
        listener = socket.create_server((host, place.port))
    except OSError as exc:
        raise ValueError(
            f"the ranks' store cannot listen on {host}:{place.port} ({exc.strerror}); MASTER_ADDR "
            "must be an address of rank 0's machine, or rank_interface name the interface behind "
            "it, and MASTER_PORT be free"
        ) from exc
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    store = _TcpStore(host, port, None, True, wait_for_workers=False, master_listen_fd=descriptor)
    return store, port


def connect(place: RankPlace, timeout_s: float) -> Any:
    """Connect to the store, which rank 0 or torchrun holds.

    Raises:
        EngineError: there was none in time.
    """
    try:
        store = _TcpStore(
            place.address, place.port, None, False, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as exc:
        raise EngineError(
            f"rank 0 was not at {place.address}:{place.port} within {timeout_s:g} s (rank_join_"
            "timeout_s); start the same command for rank 0 too, and let this machine reach it"
        ) from exc
    # torchrun's store outlives the ranks it restarts.
    return store if place.attempt is None else _PrefixStore(place.attempt, store)


def _identity(setup: EngineSetup) -> dict[str, Any]:
    return {"version of agent-r1": version("agent-r1"), **setup.shared()}


def meet_others(
    place: RankPlace, store: Any, setup: EngineSetup, check_started: Callable[[], None]
) -> None:
    """Wait, as rank 0, until every other rank has come with the same configuration.

    Args:
        place: rank 0's.
        store: the ranks'.
        setup: rank 0's.
        check_started: raises if a rank that this process has started has ended.

    Raises:
        EngineError: one refused, was given another configuration, or did not come in time.
    """
    timeout_s = setup.config.rank_join_timeout_s
    deadline = time.monotonic() + timeout_s
    own = json.loads(json.dumps(_identity(setup)))
    missing = list(range(1, place.size))
    try:
        while missing:
            for rank in [rank for rank in missing if store.check([_key(rank)])]:
                _compare(rank, own, json.loads(store.get(_key(rank))))
                missing.remove(rank)
            check_started()
            if missing and time.monotonic() > deadline:
                raise EngineError(
                    f"rank {', '.join(map(str, missing))} of {place.size} did not come to "
                    f"{place.address}:{place.port} within {timeout_s:g} s (rank_join_timeout_s); "
                    "start the same command for every rank, and let it reach that address"
                )
            time.sleep(POLL_S if missing else 0)
    except BaseException as exc:
        store.set(VERDICT, str(exc) or type(exc).__name__)
        came = [rank for rank in range(1, place.size) if store.check([_key(rank)])]
        with suppress(RuntimeError):  # the store ends with this process: let them read it
            store.wait([_heard(rank) for rank in came], timedelta(seconds=HEARD_S))
        raise
    store.set(VERDICT, "")


def _compare(rank: int, own: dict[str, Any], found: dict[str, Any]) -> None:
    if REFUSAL in found:
        raise EngineError(f"rank {rank}: {found[REFUSAL]}")
    if differences := list(_differences(own, found)):
        raise EngineError(
            f"rank {rank} has another configuration than rank 0: {', '.join(differences)}; give "
            "every rank the same file and --set"
        )


def _differences(own: dict[str, Any], found: dict[str, Any], under: str = "") -> Iterator[str]:
    for key in sorted(own.keys() | found.keys()):
        ours, theirs = own.get(key), found.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from _differences(ours, theirs, f"{under}{key}.")
        elif ours != theirs:
            yield f"{under}{key} is {theirs}, not {ours}"


def meet_rank_0(place: RankPlace, store: Any, setup: EngineSetup) -> None:
    """Say, as another rank, that this one has come; wait until all have.

    Raises:
        EngineError: the ranks cannot begin; the message is rank 0's.
    """
    timeout_s = 2 * setup.config.rank_join_timeout_s  # longer than rank 0, which can say more
    deadline = time.monotonic() + timeout_s
    try:
        store.set(_key(place.rank), json.dumps(_identity(setup)))
        while not store.check([VERDICT]):
            if time.monotonic() > deadline:
                raise EngineError(f"rank 0 did not begin within {timeout_s:g} s")
            time.sleep(POLL_S)
        verdict = store.get(VERDICT).decode()
        store.set(_heard(place.rank), "")
    except dist.DistError as exc:
        raise EngineError("rank 0 ended") from exc
    if verdict:
        raise EngineError(verdict)


def refuse(place: RankPlace, store: Any, why: str) -> None:
    """Say, as a rank other than 0, that this one cannot take part."""
    with suppress(RuntimeError):  # the store may have gone with rank 0
        store.set(_key(place.rank), json.dumps({REFUSAL: why}))
        store.set(_heard(place.rank), "")


def _key(rank: int) -> str:
    return f"rank/{rank}"


def _heard(rank: int) -> str:
    return f"heard/{rank}"


# The groups


def join(place: RankPlace, store: Any, config: EngineConfig) -> Groups:
    """Join the process group, on one interface, and the groups that ranks talk through.

    A rank that cannot reach the others in time ends its process with the reason.
    """
    device = choose_device(config, place.local_rank)
    os.environ.update(DS_ACCELERATOR=device.type, LOCAL_RANK=str(place.local_rank))
    interface = config.rank_interface or _interface_to(place.address)
    if interface is not None and place.size > 1:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
    threads = config.torch_threads
    if threads == 0 and place.size > 1 and device.type == "cpu":
        threads = max(1, (os.cpu_count() or 1) // place.size)
    if threads:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.gpu_memory_share is not None:
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_share, device)
    with _limit(config.rank_join_timeout_s, os.environ.get("GLOO_SOCKET_IFNAME")):
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                store=store,
                rank=place.rank,
                world_size=place.size,
                timeout=timedelta(seconds=config.collective_timeout_s),
            )
        control = dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) if place.size > 1 else None
        lost_after = timedelta(seconds=LOST_AFTER_S)
        life = {
            rank: dist.new_group([0, rank], lost_after, backend="gloo")
            for rank in range(1, place.size)
        }
    return Groups(control, life)


@contextmanager
def _limit(seconds: float, interface: str | None) -> Iterator[None]:
    """End the process if the block takes longer: torch waits for the collectives' timeout.

    Raises:
        EngineError: a connection was refused.
    """
    message = (
        f"the ranks have met, but could not connect to each other within {seconds:g} s (rank_join_"
        f"timeout_s); let them reach every TCP port of each other on the interface {interface}"
    )

    def end() -> None:
        print(f"{ERROR_PREFIX}{message}", file=sys.stderr, flush=True)  # noqa: T201 - the end
        os._exit(EXIT_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as exc:
        raise EngineError(message) from exc
    finally:
        timer.cancel()


def _interface_to(address: str) -> str | None:
    """Name the interface of this machine that reaches an address; None where it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, given in _addresses() if given == own), None)


def _address(interface: str) -> str:
    for name, address in _addresses():
        if name == interface:
            return address
    raise ValueError(
        f"rank_interface ({interface!r}) has no IPv4 address on this machine; its interfaces are "
        f"{', '.join(dict(_addresses()))}"
    )


def _addresses() -> list[tuple[str, str]]:
    """Return interfaces with their IPv4 addresses."""
    found = psutil.net_if_addrs().items()
    return [(n, one.address) for n, given in found for one in given if one.family == socket.AF_INET]
