"""Meeting point of the ranks: a store with each one's configuration, which rank 0 compares.

group.py (rank 0) --`listen` or `connect`, `meet_others`--> store <--`connect`, `meet_rank_0`--
worker.py (the others). All begin, or none: rank 0 leaves its verdict there. Then join.py takes the
store to form the process group; nothing else is in it.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch.distributed as dist

from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.ranks.join import address_of
from agent_r1.learner.engine.ranks.messages import EngineSetup, differences
from agent_r1.learner.engine.ranks.rank_env import RankPlace

POLL_S = 0.1
HEARD_S = 10.0
"""Longest that rank 0 waits for the others to read why they cannot begin."""
VERDICT = "verdict"
"""Key: "" when all ranks have come, else why they cannot begin."""
REFUSAL = "error"
"""Key of what a rank leaves in place of its configuration: why it cannot take part."""

# torch's stubs hide these public classes.
_TcpStore: Any = dist.__dict__["TCPStore"]
_PrefixStore: Any = dist.__dict__["PrefixStore"]


def listen(place: RankPlace, interface: str | None) -> tuple[Any, int]:
    """Open the store on one address, where by itself it listens on every one.

    Returns:
        The store and its port.

    Raises:
        ValueError: the address or the port cannot be had.
    """
    host = place.address if interface is None else address_of(interface)
    try:
        listener = socket.create_server((host, place.port))
    except OSError as exc:
        raise ValueError(
            f"the ranks' store cannot listen on {host}:{place.port} ({exc.strerror}); MASTER_ADDR "
            "must be an address of rank 0's machine, or rank_interface must name the interface "
            "behind it, and MASTER_PORT must be free"
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
    timeout = timedelta(seconds=timeout_s)
    try:
        store = _TcpStore(place.address, place.port, None, False, timeout=timeout)
    except RuntimeError as exc:
        raise EngineError(
            f"rank 0 was not at {place.address}:{place.port} within {timeout_s:g} s (rank_join_"
            "timeout_s); start the same command for rank 0 too, and let this machine reach it"
        ) from exc
    # torchrun's store outlives the ranks it restarts.
    return store if place.attempt is None else _PrefixStore(place.attempt, store)


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
    others = range(1, place.size)
    missing = list(others)

    def all_came() -> bool:
        for rank in [rank for rank in missing if store.check([_key(rank)])]:
            _compare(rank, _identity(setup), json.loads(store.get(_key(rank))))
            missing.remove(rank)
        check_started()
        return not missing

    try:
        if not _until(all_came, timeout_s):
            raise EngineError(
                f"rank {', '.join(map(str, missing))} of {place.size} did not come to "
                f"{place.address}:{place.port} within {timeout_s:g} s (rank_join_timeout_s); "
                "start the same command for every rank, and let it reach that address"
            )
    except BaseException as exc:
        store.set(VERDICT, str(exc) or type(exc).__name__)
        with suppress(RuntimeError):  # the store ends with this process: let them read it
            came = [_heard(rank) for rank in others if store.check([_key(rank)])]
            store.wait(came, timedelta(seconds=HEARD_S))
        raise
    store.set(VERDICT, "")


def meet_rank_0(place: RankPlace, store: Any, setup: EngineSetup) -> None:
    """Say, as another rank, that this one has come; wait until all have.

    Raises:
        EngineError: the ranks cannot begin; the message is rank 0's.
    """
    timeout_s = 2 * setup.config.rank_join_timeout_s  # longer than rank 0, which can say more
    try:
        store.set(_key(place.rank), json.dumps(_identity(setup)))
        if not _until(lambda: store.check([VERDICT]), timeout_s):
            raise EngineError(f"rank 0 did not begin within {timeout_s:g} s")
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


def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition, in steps between which a signal is heard; False if it never held."""
    deadline = time.monotonic() + timeout_s
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return held


def _identity(setup: EngineSetup) -> dict[str, Any]:
    """Return what must be equal on every rank, as JSON has it."""
    return json.loads(json.dumps({"version of agent-r1": version("agent-r1"), **setup.shared()}))


def _compare(rank: int, own: dict[str, Any], found: dict[str, Any]) -> None:
    if REFUSAL in found:
        raise EngineError(f"rank {rank}: {found[REFUSAL]}")
    told = [f"{key} is {theirs}, not {ours}" for key, ours, theirs in differences(own, found)]
    if told:
        raise EngineError(
            f"rank {rank} is configured differently from rank 0: {', '.join(told)}; give every "
            "rank the same file and --set"
        )
