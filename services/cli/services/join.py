"""`agent-r1 serve SERVICE --join RUN_ID`: the configuration of a run that is new to this host.

Reads in Redis where the run's learner serves its bundle (`JoinOffer`), has pull_bundle.py bring
what the service needs, and returns the configuration with those files in it. This host's own
`AGENT_R1__` variables and `--set` options stand above the run's.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from agent_r1.cli.services.pull_bundle import BundlePart, BundlePuller, read_bundle
from agent_r1.config.host_settings import (
    own_address,
    own_settings,
    redis_of_this_host,
    redis_option,
)
from agent_r1.config.live_run import check_redis
from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ENV_PREFIX, ConfigError
from agent_r1.runtime.config import ListenConfig, RedisConfig, RunConfig
from agent_r1.runtime.files.own_folder import OwnFolder
from agent_r1.runtime.files.run_folder import CONFIG_FILE
from agent_r1.runtime.files.writing import write_atomically
from agent_r1.runtime.fingerprint import software_version
from agent_r1.runtime.http.guard import is_loopback
from agent_r1.runtime.http.serving import require_token
from agent_r1.runtime.http.token import RunToken, find_token
from agent_r1.weights.download import pull_client
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.registry import Registry
from agent_r1_proto.run_bundle import (
    TOOL_FILES,
    JoinOffer,
    RunBundle,
    adapter_part,
    model_part,
    plugin_part,
    tool_part,
)
from agent_r1_proto.streams import Broker

OFFER_TIMEOUT_S = 600.0
"""Longest wait for the learner, which loads the model before it says how to join."""
LOUD_S = 15.0
POLL_S = 0.5
FOLDER_PREFIX = "agent_r1_join_"
OTHER_HOSTS_KEYS = ("url", "password_file", "ca_file")
"""Keys of `[redis]` that hold for the host where they were written."""


def join(run_id: str, service: str, redis_url: str | None, options: Sequence[str]) -> Config:
    """Return the configuration with which a service joins a run; its files go with this process.

    Args:
        run_id: of the run.
        service: rollout, reward, gateway, agents, or the name of a tool; `tool` where the run
            starts only one.
        redis_url: address without a password; None where a variable or an option has it.
        options: `KEY=VALUE` texts, as given to `--set`.

    Raises:
        ConfigError: the run cannot be joined from here; the text says why and what to do.
    """
    if redis_url is not None:
        options = [*options, redis_option(redis_url)]
    own = own_settings(options)
    redis = redis_of_this_host(own)
    if redis.url is None:
        raise ConfigError(
            "--join needs the address of the run's Redis; give --redis URL, or set the variable "
            f"{ENV_PREFIX}REDIS__URL"
        )
    token = find_token(RunConfig.model_validate({**own.get("run", {}), "id": run_id}))
    address = own_address(redis.url)
    require_token(service, ListenConfig(host=address), token)
    folder = OwnFolder(None, FOLDER_PREFIX)
    atexit.register(folder.remove)
    config = asyncio.run(_bring(run_id, service, redis, token, own, folder.path, address))
    file = folder.path / CONFIG_FILE
    write_atomically(file, json.dumps(config))
    return load_config(file, options).config


async def _bring(
    run_id: str,
    service: str,
    redis: RedisConfig,
    token: RunToken | None,
    own: Mapping[str, Any],
    folder: Path,
    address: str,
) -> dict[str, Any]:
    """Pull what the service needs; return the run's configuration for this host."""
    url = redis.connection_url()
    await check_redis(url, run_id, "--redis")
    async with await Broker.connect(url, run_id) as broker, pull_client(token) as client:
        offer, bundle = await _find_bundle(Registry(broker), client, run_id, address)
        service = _served(bundle.config, service)
        config = _for_this_host(bundle.config, service, folder, address)
        say(f"joining the run {run_id}, whose learner has agent_r1 {offer.software}")
        puller = BundlePuller(client, str(offer.url), bundle, own, folder)
        for part in _needed(bundle.config, service):
            await puller.bring(part, config)
    return config


async def _find_bundle(
    registry: Registry, client: httpx.AsyncClient, run_id: str, address: str
) -> tuple[JoinOffer, RunBundle]:
    """Wait until the learner says how to join, and read what it gives.

    Raises:
        ConfigError: it does not within OFFER_TIMEOUT_S, or this host cannot join.
    """
    started = next_word = time.monotonic()
    while True:
        offer = await registry.join_offer()
        problem = f"no learner says how to join the run {run_id!r}; start it, or correct --join"
        if offer is not None:
            url = _usable(offer, address)
            try:
                return offer, await read_bundle(client, url, offer, run_id)
            except httpx.HTTPError as exc:  # it may be of a learner that is started again
                problem = (
                    f"the learner's server {url} cannot be read ({type(exc).__name__} {exc}); "
                    "check that the learner is running and that this host can reach that port"
                )
        now = time.monotonic()
        if now - started > OFFER_TIMEOUT_S:
            raise ConfigError(f"{problem} (waited {OFFER_TIMEOUT_S:g} s)")
        if now >= next_word:
            say(f"waiting: {problem}")
            next_word = now + LOUD_S
        await asyncio.sleep(POLL_S)


def say(text: str) -> None:
    """Tell the person who started the service; logs follow once it is configured."""
    print(text, flush=True)


def _usable(offer: JoinOffer, address: str) -> str:
    """Return the URL of an offer.

    Raises:
        ConfigError: this host cannot use it.
    """
    own = software_version()
    if offer.software != own:
        raise ConfigError(
            f"the run's learner has agent_r1 {offer.software}, and this host has {own}; install "
            "the same release, without changes, on both"
        )
    if offer.url is None:
        raise ConfigError(offer.refusal or "the run takes no services from other hosts")
    if is_loopback(urlsplit(offer.url).hostname or "") and not is_loopback(address):
        raise ConfigError(
            f"the learner serves at {offer.url}, where only its own host reaches it; set "
            "learner.server.host there to an address of the network"
        )
    return offer.url


def _served(config: Mapping[str, Any], service: str) -> str:
    """Return the service that is meant: rollout, reward, gateway, agents, or the name of a tool.

    Raises:
        ConfigError: the run has none of that name.
    """
    started = sorted(name for name, tool in config["tools"].items() if tool.get("url") is None)
    if service == "tool" and len(started) == 1:
        return started[0]
    if config.get("agent") is not None:
        started += [AGENTS, "gateway"]
    if service not in ("rollout", "reward", *started):
        raise ConfigError(
            f"--join cannot serve {service!r}; a host can join as rollout, as reward, or as one of "
            f"the tools that the run starts ({', '.join(started) or 'it starts none'})"
        )
    return service


def _needed(config: Mapping[str, Any], service: str) -> list[BundlePart]:
    """Return the parts of the bundle that a service needs."""
    plugins = enumerate(config["run"]["plugins"])
    parts = [BundlePart(plugin_part(i), ("run", "plugins", i), entry) for i, entry in plugins]
    if service == "gateway":  # for the tokenizer
        parts.append(BundlePart(model_part(), ("model", "path"), left_out=(".safetensors", ".bin")))
    if service == "rollout":
        parts.append(BundlePart(model_part(), ("model", "path")))
        if (config["model"].get("lora") or {}).get("path") is not None:
            parts.append(BundlePart(adapter_part(), ("model", "lora", "path")))
    for key in TOOL_FILES:
        if config["tools"].get(service, {}).get(key) is not None:
            parts.append(BundlePart(tool_part(service, key), ("tools", service, key)))
    return parts


def _for_this_host(
    config: Mapping[str, Any], service: str, folder: Path, address: str
) -> dict[str, Any]:
    """Return the configuration without what holds for another host."""
    changed = copy.deepcopy(dict(config))
    for key in OTHER_HOSTS_KEYS:
        changed["redis"].pop(key, None)
    changed["run"] |= {"dir": str(folder / "run"), "token_file": None}
    for name, tool in changed["tools"].items():
        if name != service:
            tool.pop("settings", None)  # they may be secrets, which the bundle has not
    if service != AGENTS:
        agent = changed.get("agent") or {}
        agent.pop("env", None)  # for the same reason
        agent.pop("show", None)  # what it names must be there
    for table in _listening(changed, service):
        table |= {"host": address, "advertise_host": None}
    if service == "rollout":
        changed["rollout"]["server_id"] = None
    return changed


def _listening(config: dict[str, Any], service: str) -> list[dict[str, Any]]:
    """Return the tables that say where a service listens."""
    if service == AGENTS:
        return [config["agent"]["service"]]
    if service == "gateway":
        return [config["agent"]["gateway"], config["agent"]["wire"]]
    return [config["tools"].get(service) or config[service]]
