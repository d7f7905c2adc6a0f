"""Stopping in order: waits end, background failures surface, stubborn tasks are ended."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from agent_r1.learner.shutdown import StopRequested, StopSignal, cancel_and_wait


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("boom")


async def value() -> int:
    return 7


async def test_work_that_ends_gives_its_result():
    stop_signal = StopSignal()
    assert await stop_signal.unless_stopped(value()) == 7
    await stop_signal.close()


async def test_a_stop_ends_a_wait():
    stop_signal = StopSignal()
    asyncio.get_running_loop().call_soon(stop_signal.request_stop, "SIGTERM")
    with pytest.raises(StopRequested, match="SIGTERM"):
        await asyncio.wait_for(stop_signal.unless_stopped(forever()), 5)
    await stop_signal.close()


async def test_a_stop_before_the_wait_is_not_lost():
    stop_signal = StopSignal()
    stop_signal.request_stop("SIGTERM")
    stop_signal.request_stop("SIGINT")
    with pytest.raises(StopRequested, match="SIGTERM"):
        await asyncio.wait_for(stop_signal.unless_stopped(forever()), 5)
    await stop_signal.close()


async def test_a_failed_background_task_ends_a_wait_with_its_error():
    stop_signal = StopSignal()
    stop_signal.spawn(fail(), "background")
    with pytest.raises(ValueError, match="boom"):
        await asyncio.wait_for(stop_signal.unless_stopped(forever()), 5)
    await stop_signal.close()


async def test_an_error_of_the_work_itself_comes_first():
    stop_signal = StopSignal()
    stop_signal.request_stop("SIGTERM")
    with pytest.raises(ValueError, match="boom"):
        await stop_signal.unless_stopped(fail())
    await stop_signal.close()


async def test_closing_ends_background_tasks():
    stop_signal = StopSignal()
    task = stop_signal.spawn(forever(), "background")
    await asyncio.wait_for(stop_signal.close(), 5)
    assert task.cancelled()
    await stop_signal.close()


async def test_a_task_that_loses_a_cancellation_is_cancelled_again():
    lost = 0

    async def stubborn() -> None:
        nonlocal lost
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
                if lost == 2:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel_and_wait({task}), 5)
    assert task.cancelled()
    assert lost == 2


async def test_a_second_background_failure_is_not_printed_after_the_reason():
    printed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: printed.append(context))
    stop_signal = StopSignal()

    async def break_off(why: str) -> None:
        raise ConnectionError(why)

    tasks = {
        stop_signal.spawn(break_off("first"), "collect"),
        stop_signal.spawn(break_off("second"), "watch"),
    }
    await asyncio.wait(tasks)
    with pytest.raises(ConnectionError, match="first"):
        await stop_signal.unless_stopped(asyncio.Event().wait())
    await stop_signal.close()
    tasks.clear()
    gc.collect()  # asyncio prints an error when its task is collected
    assert printed == []
