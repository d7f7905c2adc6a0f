"""Steps that go on side by side, of which all must succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(steps: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all to their end; the first error cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
