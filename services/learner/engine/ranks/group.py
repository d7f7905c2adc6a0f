"""The ranks of the learner as rank 0 sees them: it sends them commands and notices their end.

policy_engine.py --command, one argument a rank--> RankGroup --wire.py--> worker.py, in
each other rank's process

Rank 0 is the learner's own process and carries its part out itself. The other ranks were started by
whoever set the environment (rank_env.py); on one machine without a launcher, by rank 0.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.ranks.heartbeat import BEAT_S, END, LOST, STOP, Lifeline
from agent_r1.learner.engine.ranks.join import Groups, check_machine, choose_device, join
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.engine.ranks.rendezvous import connect, listen, meet_others
from agent_r1.learner.engine.ranks.wire import BUILD, GATHERED, receive, send
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_FAILED
from agent_r1.runtime.imports import quick_imports

if TYPE_CHECKING:
    from agent_r1.learner.engine.ranks.engine import RankEngine

logger = logging.getLogger(__name__)

STDERR = 2
WORKER_END_S = 10.0
FAILURE_GRACE_S = 15.0
"""A collective with a lost peer must have failed within this time, else the process is ended."""
SETTLE_S = 4 * BEAT_S
"""Wait before blaming, to hear of all: when one rank fails, others fail because of it."""


class RankGroup:
    """The ranks, driven from rank 0: joined once, then `build` gives each its part of an engine.

    Args:
        setup: of the first engine; gives ranks, device, threads and timeouts, and must be equal on
            all ranks.
        place: rank 0's; None, or one without a port, starts the other ranks on this machine: the
            command of this process once more for each, with `place.VARIABLES` set.

    Raises:
        ValueError: the machine has too few GPUs, the store cannot listen, or this process leads
            other ranks already.
        EngineError: a rank could not join.
    """

    def __init__(self, setup: EngineSetup, place: RankPlace | None = None) -> None:
        self._place = place or RankPlace(size=setup.config.ranks)
        self._ranks = self._place.size
        self._engine: RankEngine | None = None
        self.workers: list[subprocess.Popen[bytes]] = []
        """The processes of ranks 1 and above, where this one started them."""
        self._lifelines: list[Lifeline] = []
        self._word = ""
        """What the other ranks are told; see heartbeat.py."""
        self._errors: dict[int, str] = {}
        """By rank: why it ended or failed."""
        self._was_stopped = False
        self._busy = threading.Lock()
        """Held by a call of the engine."""
        self._failure: str | None = None
        alone = self._place.port != 0
        check_machine(setup.config, [self._place.local_rank] if alone else range(self._ranks))
        if dist.is_initialized() and (self._ranks != 1 or dist.get_world_size() != 1):
            raise ValueError(
                f"this process already leads {dist.get_world_size()} rank(s); an engine of "
                f"{self._ranks} ranks needs a process of its own"
            )
        try:
            groups = self._join(setup)
        except BaseException:
            self.close()
            raise
        self._control = groups.control
        for rank, group in groups.life.items():
            self._lifelines.append(Lifeline(0, rank, group, lambda: self._word, self._on_word))
            self._lifelines[-1].start()

    def _join(self, setup: EngineSetup) -> Groups:
        if self._ranks == 1:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            return join(self._place, store, setup.config)
        if self._place.attempt is not None:
            store = connect(self._place, setup.config.rank_join_timeout_s)
        else:
            store, port = listen(self._place, setup.config.rank_interface)
            starts_others = self._place.port == 0
            self._place = dataclasses.replace(self._place, port=port)
            if starts_others:
                self._start_workers()
        meet_others(self._place, store, setup, self._check_workers)
        return join(self._place, store, setup.config)

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
                stdout=STDERR,  # what this process prints may be read by a program
            )
            self.workers.append(process)

    def _check_workers(self) -> None:
        for rank, process in enumerate(self.workers, start=1):
            if (code := process.poll()) is not None:
                raise EngineError(f"rank {rank} ended with exit code {code}")

    def build(self, setup: EngineSetup) -> None:
        """Build an engine over all ranks, in place of the one before: the next of their setups.

        Raises:
            ValueError: the model cannot be loaded or trained.
            EngineError: a rank failed.
        """
        with self._guard():
            self._send(BUILD)
            self._engine = build_engine(self._place, setup)

    @property
    def engine(self) -> RankEngine:
        """Rank 0's part."""
        assert self._engine is not None
        return self._engine

    # Commands

    def call(
        self, method: str, arguments: Sequence[Any] | None = None, *, fatal: bool = True
    ) -> Any:
        """Call a method of every rank's RankEngine; rank 0's too, since they hold collectives.

        Args:
            method: its name.
            arguments: its one argument, per rank; None calls it without.
            fatal: an error leaves even a single rank in an undefined state. Several ranks are
                out of step after any error.

        Returns:
            What rank 0's came to; of a method in GATHERED, what every rank's came to.

        Raises:
            EngineError: a rank failed, now or in an earlier call.
        """
        with self._guard(fatal):
            self._send(method, arguments)
            own = getattr(self.engine, method)(*([] if arguments is None else arguments[:1]))
            if method not in GATHERED:
                return own
            return [own, *(receive(rank, self._control)[1] for rank in range(1, self._ranks))]

    def _send(self, method: str, arguments: Sequence[Any] | None = None) -> None:
        for rank in range(1, self._ranks):
            send(rank, self._control, method, None if arguments is None else arguments[rank])

    @contextmanager
    def _guard(self, fatal: bool = True) -> Iterator[None]:
        """Give the block the ranks; an error in it ends them and is reported with their own."""
        with self._busy:
            self.check()
            try:
                yield
            except BaseException as exc:
                if not fatal and self._ranks == 1:
                    raise
                # A peer's end reaches rank 0 as a broken connection before anything says why.
                broken = isinstance(exc, RuntimeError) and not isinstance(exc, EngineError)
                told = self._cause(FAILURE_GRACE_S if broken else 0)
                own = exc if isinstance(exc, EngineError) else f"{type(exc).__name__}: {exc}"
                self._end(STOP if isinstance(exc, KeyboardInterrupt) else told or str(own))
                if told is not None:
                    raise EngineError(self._failure) from exc
                raise

    def check(self) -> None:
        """Look for a failure; at once, from any thread.

        Raises:
            EngineError: a rank has failed or ended, or all were ended.
        """
        if self._failure is not None:
            raise EngineError(self._failure)

    def fail(self, why: str) -> NoReturn:
        """End the other ranks; this and every further call raise the reason.

        Raises:
            EngineError: always.
        """
        self._end(why)
        raise EngineError(self._failure)

    # The other ranks' life

    def _on_word(self, rank: int, word: str) -> None:
        """Take what a rank says, in its lifeline's thread."""
        if word == STOP and not self._was_stopped:
            self._was_stopped = True
            logger.info("a learner rank was asked to stop, so all do rank=%d", rank)
            os.kill(os.getpid(), signal.SIGTERM)
        elif word != STOP and rank not in self._errors:
            self._errors[rank] = word
            threading.Thread(target=self._end_after_loss, daemon=True, name="loss").start()

    def _end_after_loss(self) -> None:
        # The lock is free when no call waits on the lost rank, or when its collective failed.
        deadline = time.monotonic() + FAILURE_GRACE_S
        while not (idle := self._busy.acquire(timeout=BEAT_S)) and time.monotonic() < deadline:
            if self._word:
                return  # they end already
        self._end(self._cause() or "")
        if idle:
            self._busy.release()
        else:
            # Where the call waits, which nobody can ask any more.
            faulthandler.dump_traceback(STDERR)
            print(f"{ERROR_PREFIX}{self._failure}", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(EXIT_FAILED)

    def _cause(self, timeout_s: float = 0) -> str | None:
        """Return which rank's end or failure came first; None where all are well in time."""
        deadline = time.monotonic() + timeout_s
        while not self._errors and time.monotonic() < deadline:
            time.sleep(BEAT_S)
        if not self._errors:
            return None
        time.sleep(SETTLE_S)
        # First those that could not say why: others fail because of them.
        lost = {rank: word for rank, word in self._errors.items() if word.startswith(LOST)}
        rank, word = min((lost or self._errors).items())
        if rank not in lost:
            return f"rank {rank}: {word}"
        code = self.workers[rank - 1].poll() if self.workers else None
        return word.removeprefix(LOST) + ("" if code is None else f" with exit code {code}")

    def _end(self, why: str) -> None:
        """Let the other ranks end, and tell them why, STOP or ""; may be called twice."""
        if self._word:
            return
        in_order = why in ("", STOP)
        self._failure = "the engine is closed" if in_order else f"the training engine ended: {why}"
        self._word = END + (why if in_order else self._failure)
        deadline = time.monotonic() + WORKER_END_S
        for lifeline in self._lifelines:
            lifeline.join(max(0.0, deadline - time.monotonic()))
        for process in self.workers:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def close(self, why: str = "") -> None:
        """End the other ranks; may be called twice.

        Args:
            why: what they say on their way out; "" when the work is done, STOP when it was stopped.
        """
        self._end(why)
        ended = not any(lifeline.is_alive() for lifeline in self._lifelines)
        if self._ranks > 1 and dist.is_initialized() and ended:
            dist.destroy_process_group()


def build_engine(place: RankPlace, setup: EngineSetup) -> RankEngine:
    """Build one rank's part; imports DeepSpeed, after the accelerator was chosen."""
    with quick_imports():
        from agent_r1.learner.engine.ranks.engine import RankEngine

    return RankEngine(setup, choose_device(setup.config, place.local_rank))
