"""Starts the reward service: the stream worker and the HTTP side in one process.

cli/training/train.py calls `serve` with the tables of one run.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from agent_r1.reward.app import create_app
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import READ_BLOCK_S, STOP_GRACE_S, RewardWorker
from agent_r1.runtime.announcements import make_consumer_name
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.runtime.http.serving import serve_app
from agent_r1.runtime.http.token import RunToken, find_token
from agent_r1.text.reading import TurnReader
from agent_r1_proto.streams import Broker

logger = logging.getLogger(__name__)

NAME = "reward"
_WORKER_STOP_TIMEOUT_S = READ_BLOCK_S + STOP_GRACE_S + 1.0
_CANCEL_TIMEOUT_S = 1.0


def serve(
    *,
    run: RunConfig,
    redis: RedisConfig,
    reward: RewardConfig,
    reader: TurnReader,
    announce_dir: Path | None,
) -> None:
    """Score the run's trajectories, and requests over HTTP, until SIGTERM or SIGINT.

    `reader` reads turns that do not say what they are.

    Raises:
        ValueError: redis.url is not set, or one of the user's own components is wrong; the text
            says what to do.
    """
    scorer = Scorer(reward, reader)
    asyncio.run(_serve(run, redis, reward, scorer, find_token(run), announce_dir))


async def _serve(
    run: RunConfig,
    redis: RedisConfig,
    reward: RewardConfig,
    scorer: Scorer,
    token: RunToken | None,
    announce_dir: Path | None,
) -> None:
    consumer_name = make_consumer_name(NAME, announce_dir)
    broker = await Broker.connect(
        redis.connection_url(),
        run.id,
        lease_s=redis.lease_s,
        max_processing_failures=redis.max_processing_failures,
    )
    async with broker:
        worker = RewardWorker(
            broker, scorer, consumer_name=consumer_name, max_concurrent=reward.max_concurrent
        )
        stop = asyncio.Event()
        working = asyncio.create_task(worker.run(stop))
        logger.info(
            "reward serves consumer=%s run_id=%s components=%s",
            consumer_name,
            run.id,
            ",".join(reward.components),
        )

        async def stop_worker() -> None:
            stop.set()
            await asyncio.wait({working}, timeout=_WORKER_STOP_TIMEOUT_S)

        try:
            await serve_app(
                create_app(scorer, worker),
                name=NAME,
                listen=reward,
                token=token,
                announce_dir=announce_dir,
                before_stop=stop_worker,
                until=working,
            )
        finally:
            # Twice: with Redis away, giving entries back waits for it too.
            for _ in range(2):
                if not working.done():
                    working.cancel()
                    await asyncio.wait({working}, timeout=_CANCEL_TIMEOUT_S)
            await scorer.close()
        if not working.cancelled():
            await working
