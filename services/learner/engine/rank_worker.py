"""A rank other than 0: it joins the others and carries out rank 0's commands until they end.

rank_group.py (rank 0) --rank_wire.py--> `follow` --> RankEngine (rank_engine.py)

It ends when rank 0 says so in the store, or ends itself, however that ended.
"""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.rank_group import END, build_engine, error_key, left_key
from agent_r1.learner.engine.rank_join import Pulse, connect, join
from agent_r1.learner.engine.rank_messages import EngineSetup
from agent_r1.learner.engine.rank_place import RankPlace
from agent_r1.learner.engine.rank_wire import BUILD, RESULTS, receive, send
from agent_r1_service.files.writing import DiskFullError

logger = logging.getLogger(__name__)

GATHERED = ("score", "values")
"""Commands whose results rank 0 waits for."""


def follow(place: RankPlace, setups: Iterable[EngineSetup]) -> NoReturn:
    """Be a rank other than 0 until the ranks end; the process ends with them.

    Args:
        place: this rank's.
        setups: of the engines that rank 0 builds, as this rank's own configuration has them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all ranks; rank 0 decides
    logger.info("learner rank starts rank=%d ranks=%d", place.rank, place.size)
    store: Any = None
    try:
        store = connect(place)
        rank = _Follower(place, iter(setups))
        rank.serve(store)
    except BaseException as exc:  # noqa: BLE001 - the boundary of a rank: rank 0 reports it
        _end(place, store, exc)


class _Follower:
    def __init__(self, place: RankPlace, setups: Iterator[EngineSetup]) -> None:
        self._place = place
        self._setups = setups
        self._next = next(setups)
        self._engine: Any = None
        self._pulse = Pulse(place.rank, [0], connect(place), self._check_rank_0)

    def serve(self, store: Any) -> NoReturn:
        self._pulse.start()
        control = join(self._place, store, self._next.config)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to all ranks
        while True:
            method, argument = receive(0, control)
            if method == BUILD:
                self._build(argument)
                continue
            call = getattr(self._engine, method)
            result = call() if argument is None else call(argument)
            if method in GATHERED:
                send(0, control, RESULTS, result)

    def _build(self, wanted: EngineSetup) -> None:
        own, self._next = self._next, next(self._setups, self._next)
        if own.without_paths() != wanted.without_paths():
            raise EngineError(
                "its configuration differs from rank 0's; give every rank the same file and --set"
            )
        self._engine = build_engine(self._place, own)

    def _check_rank_0(self, store: Any) -> bool:
        if store.check([END]):
            store.set(left_key(self._place.rank), "")
            os._exit(0)
        if self._pulse.silent() is not None:
            logger.critical("learner rank ends: rank 0 is silent rank=%d", self._place.rank)
            os._exit(1)
        return True


def _end(place: RankPlace, store: Any, error: BaseException) -> NoReturn:
    """Tell rank 0 why this rank failed, where it can be told; end."""
    text = str(error)
    if not isinstance(error, (EngineError, DiskFullError)):
        text = f"{type(error).__name__}: {error}"
    try:
        if store is not None and not store.check([END]):
            logger.error("learner rank failed rank=%d: %s", place.rank, traceback.format_exc())
            store.set(error_key(place.rank), text)
    except RuntimeError:  # the store went with rank 0
        logger.error("learner rank ends with rank 0 rank=%d reason=%s", place.rank, text)
    os._exit(1)
