"""A rank other than 0: it joins the others and carries out rank 0's commands until they end.

group.py (rank 0) --wire.py--> `follow` --> RankEngine (engine.py)

Runs until rank 0 tells it to stop, with rank 0's reason, or dies.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.ranks.group import build_engine
from agent_r1.learner.engine.ranks.heartbeat import END, LOST, STOP, Lifeline
from agent_r1.learner.engine.ranks.join import check_machine, join
from agent_r1.learner.engine.ranks.messages import EngineSetup
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.engine.ranks.rendezvous import connect, meet_rank_0, refuse
from agent_r1.learner.engine.ranks.wire import BUILD, GATHERED, RESULTS, receive, send
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_FAILED, EXIT_INTERRUPTED, STOP_SIGNALS
from agent_r1.runtime.files.writing import DiskFullError

logger = logging.getLogger(__name__)

VERDICT_S = 3.0
"""A rank that has failed waits so long for rank 0 to say what came first; then its own end lets
collectives fail that other ranks wait in."""
SELF_EXPLANATORY_ERRORS = (EngineError, DiskFullError)
"""Errors whose text says all."""


def follow(place: RankPlace, setups: Iterable[EngineSetup]) -> NoReturn:
    """Be a rank other than 0 until the ranks end; the process ends with them.

    Args:
        place: this rank's.
        setups: of the engines that rank 0 builds, as this rank's own configuration has them.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # torch looks for rank 0 outside of Python
    logger.info("learner rank starts rank=%d ranks=%d", place.rank, place.size)
    remaining = iter(setups)
    setup = next(remaining)
    store: Any = None
    try:
        store = connect(place, setup.config.rank_join_timeout_s)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.default_int_handler)  # until it has joined
        check_machine(setup.config, [place.local_rank])
        meet_rank_0(place, store, setup)
        groups = join(place, store, setup.config)
        rank = _Follower(place, groups.life[place.rank])
    except BaseException as exc:  # noqa: BLE001 - the boundary of a rank
        why = str(exc) if isinstance(exc, ValueError) else _describe(exc)
        if store is not None:
            refuse(place, store, why)
        _exit_process(why)
    rank.serve(groups.control, setup, remaining)


class _Follower:
    def __init__(self, place: RankPlace, group: Any) -> None:
        self._place = place
        self._why = self._trace = ""
        # The main thread may wait for a command, outside of Python, when a signal arrives.
        self._signals, wakes = socket.socketpair()
        wakes.setblocking(False)
        self._wakes = wakes
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)
        self._lifeline = Lifeline(place.rank, 0, group, self._next_word, self._on_word)
        self._lifeline.start()

    def serve(self, control: Any, setup: EngineSetup, remaining: Iterator[EngineSetup]) -> NoReturn:
        """Carry out commands, until the lifeline ends the process or one fails."""
        engine: Any = None
        try:
            while True:
                method, argument = receive(0, control)
                if method == BUILD:
                    engine = build_engine(self._place, setup)
                    setup = next(remaining, setup)
                    continue
                call = getattr(engine, method)
                result = call() if argument is None else call(argument)
                if method in GATHERED:
                    send(0, control, RESULTS, result)
        except BaseException as exc:  # noqa: BLE001 - the boundary of a rank: rank 0 reports it
            if not isinstance(exc, SELF_EXPLANATORY_ERRORS):
                self._trace = traceback.format_exc()
            self._why = _describe(exc)
            self._lifeline.join(VERDICT_S)
            self._on_word(0, self._why)

    def _next_word(self) -> str:
        if self._why:
            return self._why
        try:
            return STOP if self._signals.recv(1, socket.MSG_DONTWAIT) else ""
        except BlockingIOError:
            return ""

    def _on_word(self, rank: int, word: str) -> NoReturn:
        if self._trace and word.endswith(self._why):  # not because of another rank
            logger.error("learner rank failed rank=%d\n%s", self._place.rank, self._trace)
        _exit_process(word.removeprefix(END).removeprefix(LOST))


def _describe(error: BaseException) -> str:
    """Return what to say of an error: its text where that is the whole story."""
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    told = isinstance(error, SELF_EXPLANATORY_ERRORS)
    return str(error) if told else f"{type(error).__name__}: {error}"


def _exit_process(why: str) -> NoReturn:
    """End this process, from any thread."""
    failed = why not in ("", STOP)
    if failed:
        print(f"{ERROR_PREFIX}{why}", file=sys.stderr)  # noqa: T201 - the last words of a rank
    logging.shutdown()
    sys.stderr.flush()
    os._exit(EXIT_FAILED if failed else EXIT_INTERRUPTED if why else 0)
