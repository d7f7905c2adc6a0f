"""The Serve configuration of a run: one application for each service but the learner.

Config --> `serve_config` --> up.py, which deploys it, or a file for `serve deploy`. Imports no ray.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Set
from typing import Any

from agent_r1.config.host_settings import redis_option
from agent_r1.config.run import Config
from agent_r1.config.sources import ENV_PREFIX, ConfigError
from agent_r1.runtime.config import StrictConfig
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.run_bundle import TOOL_FILES

BUILD = "agent_r1_deploy.ray.serve:build"
AUTOSCALER = "agent_r1_deploy.ray.serve:count_servers"
DEPLOYMENT = "Replica"
STOP_MARGIN_S = 10.0
"""Time that Serve waits beyond what a service gets to end."""
HEALTH_PERIOD_S = 5.0
OF_A_HOST = {*TOOL_FILES, "host", "port", "advertise_host", "index_dir", "url", "settings"}
"""Keys of a tool's table that the bundle of the run or the node decides."""
OF_AN_AGENTS_HOST = {"gateway", "wire", "service", "env"}
"""The same of [agent]; `env` may hold secrets."""


def require_redis(config: Config) -> str:
    """Return the address of the run's Redis, without a password.

    Raises:
        ConfigError: there is none, or it holds a password.
    """
    if config.redis.url is None:
        raise ConfigError(
            "redis.url is not set; on Ray the Redis of a run is a server that every node reaches, "
            f"and that outlives them: set {ENV_PREFIX}REDIS__URL=redis://HOST:6379/0"
        )
    redis_option(config.redis.url)
    return config.redis.url


def serve_config(config: Config) -> dict[str, Any]:
    """Return what `serve deploy` reads, for all services of a run but the learner.

    Raises:
        ConfigError: Redis is not named, or with a password.
    """
    table = config.ray
    tools = [
        _application(config, name, table.tool_replicas, table.tool_resources, options)
        for name, options in tool_options(config).items()
    ]
    reward = _application(config, "reward", table.reward_replicas, table.reward_resources)
    rollout = _application(config, "rollout", table.rollout_replicas, table.rollout_resources)
    (deployment,) = rollout["deployments"]
    if config.rollout.tensor_parallel_size > 1:
        # One bundle: an actor sees the GPUs of its own bundle alone, and the engine needs them all.
        deployment["placement_group_bundles"] = [dict(table.rollout_resources)]
        deployment["placement_group_strategy"] = "STRICT_PACK"
    if table.max_rollout_replicas is not None:
        del deployment["num_replicas"]
        rollout["args"]["samples_per_server"] = table.samples_per_server
        deployment["autoscaling_config"] = {
            "min_replicas": table.rollout_replicas,
            "max_replicas": table.max_rollout_replicas,
            "policy": {"policy_function": AUTOSCALER},
        }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": table.api_port},
        "applications": [*tools, reward, rollout],
    }


def _application(
    config: Config,
    service: str,
    replicas: int,
    resources: Mapping[str, float],
    options: list[str] | None = None,
) -> dict[str, Any]:
    stop_timeout_s = config.ray.stop_timeout_s
    return {
        "name": f"{config.run.id}-{service}",
        "route_prefix": f"/{config.run.id}/{service}",
        "import_path": BUILD,
        "args": {
            "service": service,
            "run_id": config.run.id,
            "redis_url": require_redis(config),
            "options": options or [],
            "stop_timeout_s": stop_timeout_s,
        },
        "deployments": [
            {
                "name": DEPLOYMENT,
                "num_replicas": replicas,
                "ray_actor_options": actor_options(resources),
                "graceful_shutdown_timeout_s": stop_timeout_s + STOP_MARGIN_S,
                "health_check_period_s": HEALTH_PERIOD_S,
            }
        ],
    }


def tool_options(config: Config) -> dict[str, list[str]]:
    """Return the options of tools, and with [agent] of agents and gateway, by their names."""
    found = {
        name: _own_keys(f"tools.{name}", tool, OF_A_HOST)
        for name, tool in config.started_tools().items()
    }
    if config.agent is not None:
        keys = _own_keys("agent", config.agent, OF_AN_AGENTS_HOST)
        found |= dict.fromkeys((AGENTS, "gateway"), keys)
    return found


def _own_keys(table: str, values: StrictConfig, left_out: Set[str]) -> list[str]:
    """Return the keys that a table sets, so that changing one is a new version for Serve."""
    own = values.model_dump(mode="json", include=values.model_fields_set - left_out)
    return [f"{table}.{key}={json.dumps(value)}" for key, value in sorted(own.items())]


def actor_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as Ray's options for an actor: all of them are on one node."""
    others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        **({"resources": others} if others else {}),
    }
