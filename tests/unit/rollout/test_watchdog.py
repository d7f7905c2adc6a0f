"""When an engine counts as wedged, and when its silence has another reason."""

from __future__ import annotations

import asyncio

import pytest

from agent_r1.rollout.watchdog import Silence, watch
from agent_r1.text.tokens import EngineDeadError
from tests.support.fakes import FakePolicy

LIMIT_S = 0.3
WAIT_S = 20.0


def silence() -> Silence:
    return Silence(30.0, longest_gap_s=2.0)


def checks(silence: Silence, *times: float) -> list[bool]:
    return [silence.check(now, answered=False, excused=False) for now in times]


def test_silence_as_long_as_the_limit_is_wedged():
    # Looks at 0, 1, ..., 30 s: 30 s have passed at the last one, and no earlier.
    assert checks(silence(), *range(31)) == [False] * 30 + [True]


def test_an_answer_begins_the_count_anew():
    subject = silence()
    checks(subject, *range(25))
    assert not subject.check(25, answered=True, excused=False)
    assert checks(subject, *range(26, 56)) == [False] * 29 + [True]


def test_a_load_excuses_silence_and_begins_the_count_anew():
    subject = silence()
    checks(subject, *range(25))
    assert not any(subject.check(now, answered=False, excused=True) for now in range(25, 400))
    assert checks(subject, *range(400, 430)) == [False] * 29 + [True]


def test_time_in_which_this_process_stood_still_does_not_count():
    subject = silence()
    # The machine slept between 1 and 1000 s; of it 2 s count. So 30 s have passed at 1027 s:
    # 1 before, 2 for the sleep, 27 after.
    assert checks(subject, 0, 1, 1000) == [False, False, False]
    assert checks(subject, *range(1001, 1028)) == [False] * 26 + [True]


def policy() -> FakePolicy:
    async def never(_: list[int], __: int) -> list[int]:
        await asyncio.Event().wait()
        return []

    return FakePolicy(never, eos_token_ids=[0])


async def until_probed(subject: FakePolicy, more: int) -> None:
    wanted = subject.num_probes + more
    async with asyncio.timeout(WAIT_S):
        while subject.num_probes < wanted:  # noqa: ASYNC110 - a counter of the fake
            await asyncio.sleep(0.005)


async def test_an_engine_that_answers_is_left_alone():
    subject = policy()
    watching = asyncio.create_task(watch(subject, LIMIT_S))
    await until_probed(subject, 14)  # 6 probes fit the limit, so this is over twice as long
    assert not watching.done()
    subject.answering.clear()
    with pytest.raises(EngineDeadError, match="engine_stall_timeout_s"):
        await asyncio.wait_for(watching, WAIT_S)
    assert subject.death is not None


async def test_an_engine_whose_weights_are_replaced_is_left_alone():
    subject = policy()
    subject.is_loading = True
    subject.answering.clear()
    watching = asyncio.create_task(watch(subject, LIMIT_S))
    done, _ = await asyncio.wait([watching], timeout=3 * LIMIT_S)
    assert not done
    subject.is_loading = False
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(watching, WAIT_S)


async def test_a_probe_behind_work_that_came_later_is_asked_anew():
    # The probe of the idle engine is never answered: it queues behind the request. The next one,
    # of the busy engine, is.
    subject = policy()
    subject.answering.clear()
    watching = asyncio.create_task(watch(subject, LIMIT_S))
    await until_probed(subject, 1)
    working = asyncio.create_task(
        subject.generate([1], max_tokens=1, temperature=1.0, seed=0, request_id="a/0")
    )
    await until_probed(subject, 1)
    subject.answering.set()
    await until_probed(subject, 14)
    assert not watching.done()
    for task in (watching, working):
        task.cancel()
    await asyncio.gather(watching, working, return_exceptions=True)
