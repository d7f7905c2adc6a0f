"""Settings of this host, for a run that another one began: its Redis, and its own address.

Reads `AGENT_R1__` variables, `--set` and `--redis`; commands that reach or join a run, and the
replicas of deploy/ray, ask for them.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from agent_r1.config.run import OUTPUT_KEYS, Config
from agent_r1.config.sources import ConfigError, collect, explain
from agent_r1.runtime.config import REDIS_PASSWORD_VARIABLE, RedisConfig, hide_password

REDIS_PORT = 6379


def given_redis(url: str) -> str:
    """Return the URL to connect to for the option --redis.

    Password and certificates are where the variables of `[redis]` say.

    Raises:
        ConfigError: the URL holds a password.
    """
    return redis_of_this_host(own_settings([redis_option(url)])).connection_url()


def redis_option(url: str) -> str:
    """Return the `KEY=VALUE` that the option --redis stands for.

    Raises:
        ConfigError: the URL holds a password.
    """
    if hide_password(url) != url:
        raise ConfigError(
            f"--redis ({hide_password(url)}) holds a password, which every user of this machine "
            f"can read in the list of processes; set the variable {REDIS_PASSWORD_VARIABLE} "
            "instead, or name the run's folder with --run"
        )
    return f"redis.url={json.dumps(url)}"


def own_settings(options: Sequence[str]) -> dict[str, Any]:
    """Return what this host's `AGENT_R1__` variables and options set, as nested tables."""
    return collect(Config, file=None, environ=os.environ, options=options, outputs=OUTPUT_KEYS)[0]


def redis_of_this_host(settings: Mapping[str, Any]) -> RedisConfig:
    """Return the table `[redis]` of such settings.

    Raises:
        ConfigError: a value is not allowed.
    """
    try:
        return RedisConfig.model_validate(settings.get("redis", {}))
    except ValidationError as exc:
        raise ConfigError(explain(exc, {})) from exc


def own_address(redis_url: str) -> str:
    """Return the address of this host on the network where it reaches Redis."""
    parts = urlsplit(redis_url)
    if parts.hostname is None:  # unix://
        return "127.0.0.1"
    try:
        (family, _, _, _, where), *_ = socket.getaddrinfo(parts.hostname, parts.port or REDIS_PORT)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(where)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as exc:
        raise ConfigError(
            f"redis.url ({hide_password(redis_url)}) leads nowhere from here: {exc.strerror}; "
            "correct it"
        ) from exc
