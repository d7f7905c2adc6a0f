"""A run as the arguments of a command name it: by its folder, or by its Redis and id."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from agent_r1.config.host_settings import given_redis
from agent_r1.config.live_run import check_redis, redis_of, run_config
from agent_r1.config.sources import ConfigError
from agent_r1.runtime.config import RunConfig
from agent_r1_proto.streams import Broker

T = TypeVar("T")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Let a command take a run that is running: its folder, or its Redis and id."""
    parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
    add_redis(parser)


def add_redis(parser: argparse.ArgumentParser) -> None:
    """Let a command take the Redis and the id of a run whose folder is elsewhere."""
    parser.add_argument("--redis", metavar="URL", help="Redis of the run (default: of RUN)")
    parser.add_argument("--id", metavar="RUN_ID", help="run.id (default: of RUN)")


def redis_and_name(
    arguments: argparse.Namespace, option: str, name_in: Callable[[RunConfig], str]
) -> tuple[str, str]:
    """Return the URL of Redis, and the name below which a command finds its keys there.

    Args:
        arguments: with `run_folder`, `redis` and the option.
        option: the option that gives the name; without it the run's own is taken.
        name_in: returns the run's own.

    Raises:
        ConfigError: neither a live run nor both options were given.
    """
    folder: Path | None = arguments.run_folder
    name: str | None = getattr(arguments, option)
    if folder is None:
        if arguments.redis is None or name is None:
            raise ConfigError(f"name a run folder, or give both --redis and --{option}")
        return given_redis(arguments.redis), name
    config = run_config(folder)
    url = redis_of(folder, config) if arguments.redis is None else given_redis(arguments.redis)
    if url is None:
        raise ConfigError(f"the run in {folder} is not running, and its Redis has stopped with it")
    return url, name or name_in(config.run)


def ask(
    url: str, name: str, question: Callable[[Broker], Awaitable[T]], setting: str = "--redis"
) -> T:
    """Return the answer of a Redis to a question.

    Args:
        url: its URL.
        name: of the run whose keys are asked for.
        question: is called with a connection.
        setting: what to correct where no Redis answers.

    Raises:
        ConfigError: none does.
    """

    async def asked() -> T:
        await check_redis(url, name, setting)
        async with await Broker.connect(url, name) as broker:
            return await question(broker)

    return asyncio.run(asked())


def ask_run(arguments: argparse.Namespace, question: Callable[[Broker], Awaitable[T]]) -> T:
    """Return the answer of the Redis of a run, which --run names, or --redis and --id.

    Raises:
        ConfigError: they name none, or it does not answer.
    """
    return ask(*redis_and_name(arguments, "id", lambda run: run.id), question)
