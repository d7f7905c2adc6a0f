"""Stopping in order: waits end, background failures surface, stubborn tasks are ended."""

from __future__ import annotations

import asyncio

import pytest

from agent_r1.learner.shutdown import StopRequested, StopSignal, cancel_and_wait


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("boom")


async def value() -> int:
    return 7


async def test_work_that_ends_gives_its_result():
    halt = StopSignal()
    assert await halt.unless_stopped(value()) == 7
    await halt.close()


async def test_a_stop_ends_a_wait():
    halt = StopSignal()
    asyncio.get_running_loop().call_soon(halt.request_stop, "SIGTERM")
    with pytest.raises(StopRequested, match="SIGTERM"):
        await asyncio.wait_for(halt.unless_stopped(forever()), 5)
    await halt.close()


async def test_a_stop_before_the_wait_is_not_lost():
    halt = StopSignal()
    halt.request_stop("SIGTERM")
    halt.request_stop("SIGINT")
    with pytest.raises(StopRequested, match="SIGTERM"):
        await asyncio.wait_for(halt.unless_stopped(forever()), 5)
    await halt.close()


async def test_a_failed_background_task_ends_a_wait_with_its_error():
    halt = StopSignal()
    halt.spawn(fail(), "background")
    with pytest.raises(ValueError, match="boom"):
        await asyncio.wait_for(halt.unless_stopped(forever()), 5)
    await halt.close()


async def test_an_error_of_the_work_itself_comes_first():
    halt = StopSignal()
    halt.request_stop("SIGTERM")
    with pytest.raises(ValueError, match="boom"):
        await halt.unless_stopped(fail())
    await halt.close()


async def test_closing_ends_background_tasks():
    halt = StopSignal()
    task = halt.spawn(forever(), "background")
    await asyncio.wait_for(halt.close(), 5)
    assert task.cancelled()
    await halt.close()


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
