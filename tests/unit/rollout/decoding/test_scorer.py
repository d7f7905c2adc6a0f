"""The client of the reward service: what it sends, and what it makes of answers that are none."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agent_r1.rollout.decoding.scorer import RewardService
from agent_r1.rollout.turns import AttemptFailedError
from agent_r1.runtime.http.token import RunToken
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn, Value
from tests.support.fakes import asking_for

TOKEN = RunToken("0123456789abcdef")
INTERACTION = ScoreRequest(payload={}, turns=[ScoreTurn(text="so far")], status="TRUNCATED")


@contextlib.asynccontextmanager
async def reward_service(status: int, body: dict[str, Any], seen: list[Any]) -> AsyncIterator[str]:
    async def value(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(body, status=status)

    app = web.Application(middlewares=[asking_for(TOKEN)])
    app.router.add_post("/value", value)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/"
    finally:
        await runner.cleanup()


async def test_a_component_is_asked_with_the_runs_token():
    seen: list[Any] = []
    async with reward_service(200, {"value": 0.25, "tokens": 7}, seen) as url:
        service = RewardService(url, TOKEN)
        assert await service.value("judge", INTERACTION) == Value(value=0.25, tokens=7)
        await service.close()
    assert seen == [{"component": "judge", "interaction": INTERACTION.model_dump(mode="json")}]


async def test_an_answer_that_is_no_score_fails_the_attempt_and_says_why():
    async with reward_service(500, {"detail": "reward component 'judge' raised"}, []) as url:
        service = RewardService(url, TOKEN)
        with pytest.raises(AttemptFailedError, match=r"scorer_error: .*/value: 500: .*raised"):
            await service.value("judge", INTERACTION)
    with pytest.raises(AttemptFailedError, match="scorer_unreachable: "):
        await service.value("judge", INTERACTION)
    await service.close()
