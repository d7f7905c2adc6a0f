"""The ranks of the learner as rank 0 sees them: it starts the others, and sends them commands.

policy_engine.py --command, one payload a rank--> RankGroup --> rank_worker.py, in its own process

Rank 0 is the learner's own process and carries its part out itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.rank_messages import EngineSetup

if TYPE_CHECKING:
    from agent_r1.learner.engine.rank_engine import RankEngine

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
LOOPBACK = "lo"
IDLE_TIMEOUT = timedelta(days=30)
"""Longest between two commands: rollouts may take any time; a lost peer is noticed by its exit."""
JOIN_TIMEOUT_S = 300.0
WORKER_END_S = 10.0
FAILURE_GRACE_S = 15.0
"""A collective with a lost peer must have failed within this time, else the process is ended."""
FATAL_EXIT_CODE = 70
BUILD = "build"
"""The one command that is not a method of RankEngine."""

T = TypeVar("T")

# torch's stubs hide this public class.
_TcpStore: Any = dist.__dict__["TCPStore"]


@dataclass(frozen=True)
class Invitation:
    """What a worker rank reads from stdin before anything else."""

    rank: int
    port: int
    """Of rank 0's store."""
    config: EngineConfig
    log_level: int
    import_path: list[str]
    """Rank 0's, for the user's own losses."""


def choose_device(config: EngineConfig, rank: int) -> torch.device:
    """Return the device of a rank.

    Raises:
        ValueError: GPUs are asked for and there are too few.
    """
    gpus = torch.cuda.device_count()
    if config.device == "cpu" or (config.device == "auto" and gpus == 0):
        return torch.device("cpu")
    if rank >= gpus:
        raise ValueError(
            f"ranks ({config.ranks}) must be <= the {gpus} GPUs of this machine; lower ranks or "
            'set device = "cpu"'
        )
    return torch.device("cuda", rank)


class RankGroup:
    """The ranks, driven from rank 0: joined once, then `build` gives each its part of an engine.

    Args:
        config: gives ranks, device, threads and timeout.

    Raises:
        ValueError: the machine has too few GPUs, or this process leads other ranks already.
        EngineError: a rank could not join.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._ranks = config.ranks
        self._engine: RankEngine | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        """The processes of ranks 1 and above."""
        self._closing = False
        self._busy = threading.Lock()
        self._failure: str | None = None
        for rank in range(self._ranks):
            choose_device(config, rank)
        if dist.is_initialized():
            if self._ranks != 1 or dist.get_world_size() != 1:
                raise ValueError(
                    f"this process already leads {dist.get_world_size()} rank(s); an engine of "
                    f"{self._ranks} ranks needs a process of its own"
                )
            self._store: Any = None
        else:
            self._store = _listening_store(self._ranks)
        try:
            if self._ranks > 1:
                self._start_workers()
            with self.guard():
                self._control = join(0, self._store, config)
        except BaseException:
            self.close()
            raise

    def build(self, setup: EngineSetup) -> None:
        """Build an engine over all ranks, in place of the one before.

        Raises:
            ValueError: the model cannot be loaded or trained.
            EngineError: a rank failed.
        """
        with self.guard():
            self.send(BUILD, [setup] * self._ranks)
            self._engine = build_engine(0, setup)

    @property
    def engine(self) -> RankEngine:
        """Rank 0's part."""
        assert self._engine is not None
        return self._engine

    def send(
        self, method: str, payloads: Sequence[Any] | None = None, *, gathers: bool = False
    ) -> None:
        """Let the other ranks call a method of their RankEngine; use inside `guard`.

        Args:
            method: its name; rank 0 calls its own part's next, since both may hold collectives.
            payloads: its one argument, per rank; None calls it without arguments.
            gathers: they hand their results to `gather`.
        """
        if self._ranks > 1:
            arguments = [()] * self._ranks if payloads is None else [(one,) for one in payloads]
            commands = [(method, given, gathers) for given in arguments]
            dist.scatter_object_list([None], commands, src=0, group=self._control)

    def gather(self, own: T) -> list[T]:
        """Return what every rank's call came to, rank 0's first."""
        return gather_on_first(own, 0, self._ranks, self._control)

    @contextmanager
    def guard(self, *, fatal: bool = True) -> Iterator[None]:
        """Give the block the ranks; an error in it ends them and is reported with their own.

        Args:
            fatal: an error leaves even a single rank in an undefined state. Several ranks are
                out of step after any error.

        Raises:
            EngineError: a rank failed, now or in an earlier block.
        """
        if self._failure is not None:
            raise EngineError(self._failure)
        with self._busy:
            try:
                yield
            except BaseException as exc:
                if not fatal and self._ranks == 1:
                    raise
                told = self._workers_error()
                own = exc if isinstance(exc, EngineError) else f"{type(exc).__name__}: {exc}"
                self._failure = f"the training engine ended: {told or own}"
                self._end_workers()
                if told is not None:
                    raise EngineError(self._failure) from exc
                raise

    def fail(self, why: str) -> NoReturn:
        """End the other ranks; this and every further call raise the reason.

        Raises:
            EngineError: always.
        """
        self._failure = f"the training engine ended: {why}"
        self._end_workers()
        raise EngineError(self._failure)

    # The other ranks

    def _start_workers(self) -> None:
        for rank in range(1, self._ranks):
            process = subprocess.Popen(
                [sys.executable, "-m", "agent_r1.learner.engine.rank_worker"],
                stdin=subprocess.PIPE,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None,
            )
            self.workers.append(process)
            invitation = Invitation(
                rank,
                self._store.port,
                self._config,
                logging.getLogger().level,
                sys.path,
            )
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(invitation))
            process.stdin.flush()
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait for a worker rank's end; one that comes unasked ends a call that hangs on it."""
        code = process.wait()
        if self._closing:
            return
        logger.error("learner rank ended rank=%d exit_code=%d", rank, code)
        # The lock is free when no call waits on the lost rank, or when its collective failed.
        if not self._busy.acquire(timeout=FAILURE_GRACE_S):
            logger.critical("learner rank lost and a collective hangs on it rank=%d", rank)
            os._exit(FATAL_EXIT_CODE)
        try:
            told = self._workers_error() or f"rank {rank} ended with exit code {code}"
            self._failure = self._failure or f"the training engine ended: {told}"
        finally:
            self._busy.release()

    def _workers_error(self) -> str | None:
        """Return what a failed worker rank left in the store, or how one ended; None: all live."""
        if not self.workers or self._store is None:
            return None
        for rank, process in enumerate(self.workers, start=1):
            key = f"error/{rank}"
            if self._store.check([key]):
                return f"rank {rank}: {self._store.get(key).decode()}"
            if process.poll() is not None:
                return f"rank {rank} ended with exit code {process.returncode}"
        return None

    def _end_workers(self) -> None:
        self._closing = True
        for process in self.workers:
            if process.stdin is not None and not process.stdin.closed:
                process.stdin.close()
        for process in self.workers:
            try:
                process.wait(timeout=WORKER_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self) -> None:
        """End the worker ranks; may be called twice."""
        if self._closing:
            return
        self._end_workers()
        self._failure = self._failure or "the training engine is closed"
        if self._ranks > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _has_descriptor(stream: Any) -> bool:
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


def join(rank: int, store: Any, config: EngineConfig) -> Any:
    """Join the process group; return the group that commands travel through."""
    ranks = config.ranks
    device = choose_device(config, rank)
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    for library in ("GLOO", "NCCL"):  # all ranks are on this machine: nobody else need reach them
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", LOOPBACK)
    threads = config.torch_threads
    if threads == 0 and ranks > 1 and device.type == "cpu":
        threads = max(1, (os.cpu_count() or 1) // ranks)
    if threads:
        torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=config.collective_timeout_s),
        )
    return dist.new_group(backend="gloo", timeout=IDLE_TIMEOUT) if ranks > 1 else None


def _listening_store(ranks: int) -> Any:
    """Open the ranks' store on the loopback interface; by itself it listens on every one."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return _TcpStore(
        HOST, port, ranks, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def reach_store(invitation: Invitation) -> Any:
    """Connect to rank 0's store."""
    timeout = timedelta(seconds=JOIN_TIMEOUT_S)
    return _TcpStore(HOST, invitation.port, invitation.config.ranks, False, timeout=timeout)


def build_engine(rank: int, setup: EngineSetup) -> RankEngine:
    """Build this rank's part; imports DeepSpeed, after the accelerator was chosen."""
    from agent_r1.learner.engine.rank_engine import RankEngine

    return RankEngine(setup, choose_device(setup.config, rank))


def gather_on_first(own: T, rank: int, ranks: int, control: Any) -> list[T]:
    """Collect every rank's value on rank 0; [] elsewhere."""
    if ranks == 1:
        return [own]
    values: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(own, values, dst=0, group=control)
    return values or []
