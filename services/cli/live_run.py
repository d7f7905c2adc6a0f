"""A run as other commands reach it: the configuration in its folder, and its Redis."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from agent_r1.config.host_settings import given_redis
from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.runtime.config import RunConfig, hide_password
from agent_r1.runtime.files.run_folder import CONFIG_FILE, live_redis_url
from agent_r1_proto.connection import Keys
from agent_r1_proto.redis_trouble import find_trouble
from agent_r1_proto.streams import Broker

T = TypeVar("T")

ANSWER_TIMEOUT_S = 10.0
"""Longest wait for Redis or a service to answer: over a link that loses packets, each lost one
costs seconds."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Let a command take a run that is running: its folder, or its Redis and id."""
    parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
    add_redis(parser)


def add_redis(parser: argparse.ArgumentParser) -> None:
    """Let a command take the Redis and the id of a run whose folder is elsewhere."""
    parser.add_argument("--redis", metavar="URL", help="Redis of the run (default: of RUN)")
    parser.add_argument("--id", metavar="RUN_ID", help="run.id (default: of RUN)")


def run_config(folder: Path) -> Config:
    """Load the configuration of a run folder.

    Raises:
        ConfigError: it is not one.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"{folder} has no {CONFIG_FILE}; name a run folder, such as runs/demo")
    return load_config(file).config


def redis_of(folder: Path, config: Config) -> str | None:
    """Return the URL of the run's Redis; None when it ended with the run."""
    live = live_redis_url(folder)
    return live or (None if config.redis.url is None else config.redis.connection_url())


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


async def check_redis(url: str, name: str, setting: str) -> None:
    """Check that a Redis can be used.

    Args:
        url: its URL.
        name: of the run whose keys are used.
        setting: where the URL comes from.

    Raises:
        ConfigError: it cannot; the text says why, and names the setting.
    """
    trouble = await find_trouble(url, Keys(name).probe, ANSWER_TIMEOUT_S)
    if trouble is not None:
        text = trouble.of(f"Redis ({hide_password(url)})")
        raise ConfigError(text.replace("redis.url", setting))


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
