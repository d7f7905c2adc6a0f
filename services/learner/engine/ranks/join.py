"""Entry of a rank into the process group, with a device and a network interface of its machine.

RankPlace, store (rendezvous.py) --> `join` --Groups--> group.py (rank 0), worker.py (the others).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.ranks.heartbeat import LOST_AFTER_S
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_FAILED
from agent_r1.runtime.files.disk_space import require_shared_memory

IDLE_TIMEOUT = timedelta(days=30)
"""Longest between two commands: rollouts may take any time; heartbeat.py notices a lost peer."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Groups(NamedTuple):
    """Process groups through which ranks talk, apart from the collectives of the engine."""

    control: Any
    """Commands and results."""
    life: dict[int, Any]
    """Pairs of rank 0 and each other rank, by rank, from 1. A lost rank closes its own pair
    only."""


def join(place: RankPlace, store: Any, config: EngineConfig) -> Groups:
    """Join the process group, on one interface, and the groups that ranks talk through.

    A rank that cannot reach the others in time ends its process with the reason.
    """
    device = _take_device(config, place)
    with _limit(config.rank_join_timeout_s, _use_interface(config, place)):
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


# The machine


def check_machine(config: EngineConfig, local_ranks: Iterable[int]) -> None:
    """Make sure that this machine has what its ranks need, before they meet.

    Raises:
        ValueError: there are too few GPUs, or too little shared memory for several.
    """
    devices = [choose_device(config, local_rank) for local_rank in local_ranks]
    if config.ranks > 1 and devices[0].type == "cuda":
        require_shared_memory(f"{config.ranks} learner ranks")


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


def _take_device(config: EngineConfig, place: RankPlace) -> torch.device:
    """Choose the device of this process and set it up, with its share of the CPU's threads."""
    device = choose_device(config, place.local_rank)
    os.environ.update(DS_ACCELERATOR=device.type, LOCAL_RANK=str(place.local_rank))
    threads = config.torch_threads
    if threads == 0 and place.size > 1 and device.type == "cpu":
        threads = max(1, (os.cpu_count() or 1) // place.size)
    if threads:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if config.gpu_memory_share is not None:
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_share, device)
    return device


def _use_interface(config: EngineConfig, place: RankPlace) -> str | None:
    """Let gloo and NCCL listen on one interface; return the one that gloo uses, if it is known."""
    interface = config.rank_interface or _interface_to(place.address)
    if interface is not None and place.size > 1:
        for variable in INTERFACE_VARIABLES:
            os.environ.setdefault(variable, interface)
    return os.environ.get(INTERFACE_VARIABLES[0])


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface.

    Raises:
        ValueError: it has none.
    """
    addresses = _addresses()
    found = next((address for name, address in addresses if name == interface), None)
    if found is None:
        raise ValueError(
            f"rank_interface ({interface!r}) has no IPv4 address on this machine; its interfaces "
            f"are {', '.join(dict(addresses))}"
        )
    return found


def _interface_to(address: str) -> str | None:
    """Name the interface of this machine that reaches an address; None where it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    return next((name for name, given in _addresses() if given == own), None)


def _addresses() -> list[tuple[str, str]]:
    """Return interfaces with their IPv4 addresses."""
    found = psutil.net_if_addrs().items()
    return [(n, one.address) for n, given in found for one in given if one.family == socket.AF_INET]
