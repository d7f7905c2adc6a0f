"""Who can call what a run listens on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

import httpx
import psutil

from agent_r1.runtime.http.guard import is_loopback

ANSWER_TIMEOUT_S = 10.0


def free_port() -> int:
    """Return a port of the loopback address that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def listening(pids: Iterable[int]) -> list[tuple[str, int, int]]:
    """Return address, port and process of every TCP socket that the processes listen on."""
    found: list[tuple[str, int, int]] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.append((one.laddr[0], one.laddr[1], pid))
    return found


def is_exposed(address: str, port: int, *, group: str | None = None) -> bool:
    """Say whether other machines may use what listens there without the run's token.

    Args:
        address: that it is bound to.
        port: TCP port.
        group: the interface that a run of several machines is configured to use for the ports of
            its learner's process group; None where all ranks are on one machine.
    """
    return not (is_loopback(address) or address == group or _asks_for_a_token(port))


def _asks_for_a_token(port: int) -> bool:
    """Say whether an HTTP service on this machine answers 401 to who has no token."""
    paths = ("/spec", "/openapi.json", "/mcp", "/metrics", "/score", "/weights/load")
    try:
        with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            url = f"http://127.0.0.1:{port}"
            asked = [client.request(m, url + path) for path in paths for m in ("GET", "POST")]
    except httpx.HTTPError:
        return False
    return all(answer.status_code == httpx.codes.UNAUTHORIZED for answer in asked)
