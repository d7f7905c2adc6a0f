"""Work for a client that may leave: `app.py` runs calls for as long as somebody waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import HTTPException, Request

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""The status that proxies log for a client that has gone; nobody reads the answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it when the client of a request (its body is read) disconnects.

    Raises:
        HTTPException: the client has gone.
    """
    answer = asyncio.create_task(work)
    departure = asyncio.create_task(_wait_for_departure(request))
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise HTTPException(CLIENT_CLOSED_REQUEST, "the client has closed the connection")
    finally:
        answer.cancel()
        departure.cancel()
        await asyncio.gather(answer, departure, return_exceptions=True)


async def _wait_for_departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
