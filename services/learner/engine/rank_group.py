"""The ranks of the learner as rank 0 sees them: it sends them commands and notices their end.

policy_engine.py --command, one argument a rank--> RankGroup --rank_wire.py--> rank_worker.py, in
each other rank's process

Rank 0 is the learner's own process and carries its part out itself. The other ranks were started by
whoever set the environment (rank_place.py); on one machine without a launcher, by rank 0.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import EngineError, FloatArray
from agent_r1.learner.engine.rank_join import (
    BEAT_S,
    FATAL_EXIT_CODE,
    JOIN_TIMEOUT,
    LOST_AFTER_S,
    Pulse,
    choose_device,
    connect,
    join,
    listen,
)
from agent_r1.learner.engine.rank_messages import EngineSetup
from agent_r1.learner.engine.rank_place import RankPlace
from agent_r1.learner.engine.rank_wire import BUILD, receive, send

if TYPE_CHECKING:
    from agent_r1.learner.engine.rank_engine import RankEngine

logger = logging.getLogger(__name__)

WORKER_END_S = 10.0
FAILURE_GRACE_S = 15.0
"""A collective with a lost peer must have failed within this time, else the process is ended."""
SILENT_AFTER_FAILURE_S = 3.0
"""After a failed collective, a rank without a sign of life for this long is its reason."""
END = "end"
"""Set in the store when the ranks are to end."""


def error_key(rank: int) -> str:
    """Return where in the store a rank leaves why it failed."""
    return f"error/{rank}"


def left_key(rank: int) -> str:
    """Return where in the store a rank says that it has ended as asked."""
    return f"left/{rank}"


class RankGroup:
    """The ranks, driven from rank 0: joined once, then `build` gives each its part of an engine.

    Args:
        config: gives ranks, device, threads and timeout.
        place: rank 0's; None, or one without a port, starts the other ranks on this machine: the
            command of this process once more for each, with `rank_place.VARIABLES` set.

    Raises:
        ValueError: the machine has too few GPUs, the store cannot listen, or this process leads
            other ranks already.
        EngineError: a rank could not join.
    """

    def __init__(self, config: EngineConfig, place: RankPlace | None = None) -> None:
        self._place = place or RankPlace(size=config.ranks)
        self._ranks = self._place.size
        self._engine: RankEngine | None = None
        self._store: Any = None
        self._pulse: Pulse | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        """The processes of ranks 1 and above, where this one started them."""
        self._closing = False
        self._busy = threading.Lock()
        self._failure: str | None = None
        starts_others = self._place.port == 0
        for local_rank in range(self._ranks) if starts_others else [self._place.local_rank]:
            choose_device(config, local_rank)
        if dist.is_initialized() and (self._ranks != 1 or dist.get_world_size() != 1):
            raise ValueError(
                f"this process already leads {dist.get_world_size()} rank(s); an engine of "
                f"{self._ranks} ranks needs a process of its own"
            )
        try:
            self._open_store(config)
            with self.guard():
                self._wait_for_others()
                self._control = join(self._place, self._store, config)
        except BaseException:
            self.close()
            raise

    def _open_store(self, config: EngineConfig) -> None:
        if self._ranks == 1:
            self._store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            return
        if self._place.attempt is not None:
            self._store = connect(self._place)
        else:
            starts_others = self._place.port == 0
            self._store, port = listen(self._place, config.rank_interface)
            self._place = dataclasses.replace(self._place, port=port)
            if starts_others:
                self._start_workers()
        pulse_store = connect(self._place)
        self._pulse = Pulse(0, range(1, self._ranks), pulse_store, self._check_others)
        self._pulse.start()

    def build(self, setup: EngineSetup) -> None:
        """Build an engine over all ranks, in place of the one before.

        Raises:
            ValueError: the model cannot be loaded or trained.
            EngineError: a rank failed, or reads another configuration.
        """
        with self.guard():
            self.send(BUILD, [setup] * self._ranks)
            self._engine = build_engine(self._place, setup)

    @property
    def engine(self) -> RankEngine:
        """Rank 0's part."""
        assert self._engine is not None
        return self._engine

    def send(self, method: str, arguments: Sequence[Any] | None = None) -> None:
        """Let the other ranks call a method of their RankEngine; use inside `guard`.

        Args:
            method: its name; rank 0 calls its own part's next, since both may hold collectives.
            arguments: its one argument, per rank; None calls it without.
        """
        for rank in range(1, self._ranks):
            send(rank, self._control, method, None if arguments is None else arguments[rank])

    def gather(self, own: list[FloatArray]) -> list[list[FloatArray]]:
        """Return what every rank's call of `score` or `values` came to, rank 0's first."""
        return [own, *(receive(rank, self._control)[1] for rank in range(1, self._ranks))]

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
                told = self._why_it_failed(exc)
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
        if "WORLD_SIZE" in os.environ:
            raise ValueError(
                "this process is a rank that was started by another one; give its engine the place "
                "that `read_place` returns"
            )
        for rank in range(1, self._ranks):
            place = dataclasses.replace(self._place, rank=rank, local_rank=rank)
            process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env={**os.environ, **place.environment()},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else None,
            )
            self.workers.append(process)

    def _wait_for_others(self) -> None:
        """Wait until all ranks have shown life.

        Raises:
            EngineError: one ended before, or did not come in time.
        """
        deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
        while self._pulse is not None and not self._pulse.seen_all():
            if (lost := self._find_loss()) is not None:
                raise EngineError(lost)
            if time.monotonic() > deadline:
                raise EngineError(
                    f"not all of the {self._ranks} ranks came to {self._place.address}:"
                    f"{self._place.port} within {JOIN_TIMEOUT.total_seconds():.0f} s; start the "
                    "same command for every rank, and let them reach that address"
                )
            time.sleep(BEAT_S)

    def _check_others(self, store: Any) -> bool:
        """Look for a lost rank; one that was lost unasked ends a call that hangs on it."""
        lost = self._find_loss()
        if lost is None or self._closing:
            return not self._closing
        logger.error("learner rank lost: %s", lost)
        # The lock is free when no call waits on the lost rank, or when its collective failed.
        deadline = time.monotonic() + FAILURE_GRACE_S
        while not self._busy.acquire(timeout=BEAT_S):
            if self._closing:
                return False
            if time.monotonic() > deadline:
                logger.critical("a collective hangs on the lost learner rank: %s", lost)
                os._exit(FATAL_EXIT_CODE)
        try:
            self._failure = self._failure or f"the training engine ended: {lost}"
        finally:
            self._busy.release()
        return False

    def _find_loss(self, silent_s: float = LOST_AFTER_S) -> str | None:
        """Say which rank has ended or failed, and how; None: all live."""
        told: dict[int, str] = {}
        if self._pulse is None:
            return None
        for rank in range(1, self._ranks):
            if self._store.check([error_key(rank)]):
                told[rank] = f"rank {rank}: {self._store.get(error_key(rank)).decode()}"
        # First those that could not say why: others fail because of them.
        for rank, process in enumerate(self.workers, start=1):
            if process.poll() is not None and rank not in told:
                return f"rank {rank} ended with exit code {process.returncode}"
        if told:
            return min(told.items())[1]
        silent = self._pulse.silent(silent_s)
        return None if silent is None else f"rank {silent} gave no sign of life for {silent_s:g} s"

    def _why_it_failed(self, error: BaseException) -> str | None:
        """Return which rank an error here comes from; None where it is rank 0's own."""
        lost = self._find_loss()
        # A peer's end reaches rank 0 as a broken connection before anything says why.
        broken = isinstance(error, RuntimeError) and not isinstance(error, EngineError)
        deadline = time.monotonic() + (FAILURE_GRACE_S if broken and self._ranks > 1 else 0)
        while lost is None and time.monotonic() < deadline:
            time.sleep(BEAT_S)
            lost = self._find_loss(SILENT_AFTER_FAILURE_S)
        return lost

    def _end_workers(self) -> None:
        self._closing = True
        if self._ranks == 1 or self._store is None:
            return
        if self._pulse is not None:
            self._pulse.stop()
        self._store.set(END, "")
        deadline = time.monotonic() + WORKER_END_S
        for process in self.workers:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        others = [] if self.workers else [left_key(rank) for rank in range(1, self._ranks)]
        while not self._store.check(others) and time.monotonic() < deadline:
            time.sleep(BEAT_S)

    def close(self) -> None:
        """End the other ranks; may be called twice."""
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


def build_engine(place: RankPlace, setup: EngineSetup) -> RankEngine:
    """Build one rank's part; imports DeepSpeed, after the accelerator was chosen."""
    from agent_r1.learner.engine.rank_engine import RankEngine

    return RankEngine(setup, choose_device(setup.config, place.local_rank))
