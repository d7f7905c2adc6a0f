"""Applications over real sockets, in a thread of the test."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from fastapi import FastAPI

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import Server, bind, http_config
from agent_r1.runtime.http.token import RunToken

TOKEN = RunToken("0123456789abcdef")
WAIT_S = 60.0


@contextlib.contextmanager
def served(app: contextlib.AbstractAsyncContextManager[FastAPI]) -> Iterator[str]:
    """Serve an application as every service does, in a thread; yield its base URL."""
    listen = ListenConfig()
    listener = bind("test", listen, TOKEN)
    host, port = listener.getsockname()
    up = threading.Event()
    stop: list[Server] = []

    async def serve() -> None:
        async with app as made, made.router.lifespan_context(made):
            server = Server(http_config(made, listen, TOKEN), on_up=up.set)
            stop.append(server)
            await server.serve(sockets=[listener])

    thread = threading.Thread(target=asyncio.run, args=[serve()])
    thread.start()
    try:
        assert up.wait(WAIT_S)
        yield f"http://{host}:{port}"
    finally:
        stop[0].should_exit = True
        thread.join(WAIT_S)
