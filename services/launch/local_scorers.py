"""Servers of the models that reward components ask, where a table names a folder and no URL.

local_services.py starts one vLLM server for each, beside the reward service, and tells that service
the address.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError, variable_of
from agent_r1.launch.local_redis import free_port
from agent_r1.launch.service import ServiceSpec, answers
from agent_r1.reward.config import CriticConfig, ModelServerConfig
from agent_r1.runtime.memory import GIB


@dataclass(frozen=True)
class ScorerServer:
    """A model that is to be served, and where."""

    component: str
    """The component that asks it."""
    config: ModelServerConfig
    url: str

    @property
    def variable(self) -> tuple[str, str]:
        """The environment variable that tells the reward service the address."""
        suffix = "" if isinstance(self.config, CriticConfig) else "/v1"
        return variable_of(("reward", "servers", self.component, "url")), self.url + suffix


def scorer_servers(config: Config, num_gpus: int) -> list[ScorerServer]:
    """Return the servers that a configuration asks for.

    Raises:
        ConfigError: this machine has GPUs, which the engines of the policy take.
    """
    tables = config.reward.to_serve()
    if tables and num_gpus:
        table = min(tables)
        raise ConfigError(
            f"reward.servers.{table}.path ({tables[table].path}) is served on machines without "
            f"GPUs only; this one has {num_gpus}: start vLLM on one that [placement] leaves free, "
            f"and set reward.servers.{table}.url"
        )
    return [
        ScorerServer(name, table, f"http://127.0.0.1:{free_port()}")
        for name, table in tables.items()
    ]


def describe(server: ScorerServer, config: Config, spec: Callable[..., ServiceSpec]) -> ServiceSpec:
    """Return how to run a server.

    Args:
        server: which one.
        config: of the run.
        spec: makes a service of a name, a command and more.
    """
    _, _, port = server.url.rpartition(":")
    options: Mapping[str, Any] = {
        "model": server.config.path,
        "served-model-name": server.config.model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": config.model.dtype,
        "kv-cache-memory-bytes": int(config.rollout.kv_cache_gib * GIB),
        # By default a CPU engine puts its one worker into a third process, which waits in a loop.
        "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    }
    if isinstance(server.config, CriticConfig):
        options = {**options, "max-model-len": config.model.max_context}
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    # Compiling takes a minute, and a compiler for C++.
    command.append("--enforce-eager")
    environment = {
        "TORCHDYNAMO_DISABLE": "1",
        # Otherwise it would keep to the first cores, which the other services use as well.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.rollout.threads),
    }

    async def is_up(_: str) -> bool:
        return await answers(f"{server.url}/health")

    name = f"reward-{server.component}"
    return spec(name, command, environment=environment, announce_dir=None, probe=is_up)
