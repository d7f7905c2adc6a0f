"""A run as commands and the console reach it: the configuration in its folder, and its Redis."""

from __future__ import annotations

from pathlib import Path

from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.runtime.config import hide_password
from agent_r1.runtime.files.run_folder import CONFIG_FILE, live_redis_url
from agent_r1_proto.connection import Keys
from agent_r1_proto.redis_trouble import find_trouble

ANSWER_TIMEOUT_S = 10.0
"""Longest wait for Redis or a service to answer: over a link that loses packets, each lost one
costs seconds."""


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
