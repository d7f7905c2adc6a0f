"""How a rank meets the others: the store, the process group, and the signs of life in the store.

RankPlace --> `open_store`, `join` --> rank_group.py (rank 0), rank_worker.py (the others)
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.rank_place import RankPlace

logger = logging.getLogger(__name__)

IDLE_TIMEOUT = timedelta(days=30)
"""Longest between two commands: rollouts may take any time; a lost peer is noticed by its pulse."""
JOIN_TIMEOUT = timedelta(seconds=300)
BEAT_S = 0.25
FATAL_EXIT_CODE = 70
LOST_AFTER_S = 60.0
"""A rank without a sign of life for this long is lost."""

# torch's stubs hide these public classes.
_TcpStore: Any = dist.__dict__["TCPStore"]
_PrefixStore: Any = dist.__dict__["PrefixStore"]


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


def connect(place: RankPlace) -> Any:
    """Connect to the store, which rank 0 or torchrun holds."""
    store = _TcpStore(place.address, place.port, None, False, timeout=JOIN_TIMEOUT)
    # torchrun's store outlives the ranks it restarts.
    return store if place.attempt is None else _PrefixStore(place.attempt, store)


def join(place: RankPlace, store: Any, config: EngineConfig) -> Any:
    """Join the process group; return the group that commands travel through."""
    device = choose_device(config, place.local_rank)
    os.environ.update(DS_ACCELERATOR=device.type, LOCAL_RANK=str(place.local_rank))
    interface = config.rank_interface or _interface_to(place.address)
    if interface is not None:
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
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=config.collective_timeout_s),
        )
    return dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) if place.size > 1 else None


def _interface_to(address: str) -> str | None:
    """Name the interface of this machine that reaches an address; None where it is not known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 1))  # sends nothing
        except OSError:
            return None
        own = probe.getsockname()[0]
    found = psutil.net_if_addrs().items()
    return next((name for name, given in found if own in {one.address for one in given}), None)


def _address(interface: str) -> str:
    known = psutil.net_if_addrs()
    for one in known.get(interface, []):
        if one.family == socket.AF_INET:
            return one.address
    raise ValueError(
        f"rank_interface ({interface!r}) has no IPv4 address on this machine; its interfaces are "
        f"{', '.join(known)}"
    )


class Pulse:
    """Shows in the store that this rank lives, and notices others that do not.

    Args:
        rank: this one.
        watched: the ranks whose signs of life are followed.
        store: a connection of its own, since another one may be blocked by a wait.
        every_beat: called with the store after each sign of life; False ends them.
    """

    def __init__(
        self, rank: int, watched: Iterable[int], store: Any, every_beat: Callable[[Any], bool]
    ) -> None:
        self._rank = rank
        self._store = store
        self._every_beat = every_beat
        self._last = dict.fromkeys(watched, (0, time.monotonic()))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat_forever, daemon=True, name="pulse")

    def start(self) -> None:
        """Begin; `every_beat` is called in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End, from any thread; may be called twice."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def silent(self, seconds: float = LOST_AFTER_S) -> int | None:
        """Return a watched rank that has shown no life for so long; None: all have."""
        late = time.monotonic() - seconds
        return next((rank for rank, (_, seen) in self._last.items() if seen < late), None)

    def seen_all(self) -> bool:
        """Whether every watched rank has shown life at least once."""
        return all(count for count, _ in self._last.values())

    def _beat_forever(self) -> None:
        try:
            while self._beat() and not self._stopped.wait(BEAT_S):
                pass
        except RuntimeError as exc:  # of the store: whoever held it has ended
            logger.critical("learner rank ends: the ranks' store is gone (%s)", exc)
            os._exit(FATAL_EXIT_CODE)

    def _beat(self) -> bool:
        self._store.add(_pulse_key(self._rank), 1)
        for rank, (count, _) in self._last.items():
            if (found := self._store.add(_pulse_key(rank), 0)) != count:
                self._last[rank] = (found, time.monotonic())
        return self._every_beat(self._store)


def _pulse_key(rank: int) -> str:
    return f"pulse/{rank}"
