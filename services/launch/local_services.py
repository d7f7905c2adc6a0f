"""The services of one run on one machine: which processes, in which order, with which settings.

local.py --Config--> LocalServices --ServiceSpec--> supervisor.py. Order: Redis first; then the
learner, the reward worker and the tools side by side (the learner waits for a rollout server by
itself); the rollout servers as soon as the tools have told their URLs. They stop the other way
round, the learner first, so that it can checkpoint while everything it talks to is still there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from agent_r1.config.machine import usable_gpus
from agent_r1.config.placement import Place, place
from agent_r1.config.run import Config
from agent_r1.config.sources import ENV_PREFIX
from agent_r1.launch import local_redis
from agent_r1.launch.local_scorers import describe, scorer_servers
from agent_r1.launch.service import ServiceSpec
from agent_r1.launch.supervisor import ServiceError, Supervisor
from agent_r1.runtime.config import REDIS_PASSWORD_VARIABLE, split_password
from agent_r1.runtime.exit_status import EXIT_LOSSES
from agent_r1.runtime.files.own_folder import OwnFolder
from agent_r1.runtime.files.private import write_private
from agent_r1.runtime.files.run_folder import (
    CONFIG_FILE,
    LIVE_DIR,
    LOGS_DIR,
    REDIS_PASSWORD_FILE,
    REDIS_URL_FILE,
    TOKEN_FILE,
)
from agent_r1.runtime.http.token import TOKEN_VARIABLE, write_token
from agent_r1.runtime.together import run_together
from agent_r1_proto.agents import AGENTS
from agent_r1_proto.streams import Broker

LEARNER_RANK, ROLLOUT_RANK, TOOL_RANK = 0, 1, 2
REDIS_START_TRIES = 3
PORT_TAKEN = "Address already in use"
REDIS_URL_VARIABLE = f"{ENV_PREFIX}REDIS__URL"
IN_PRIVATE_FILES = (TOKEN_VARIABLE, REDIS_PASSWORD_VARIABLE)
"""Variables that no service gets: an environment reaches the programs of user code."""
SOCKET_NAME_LENGTH = 36
"""Letters of vLLM's names; a socket's whole path has 107 at most."""
TEMPORARY_PREFIX = "agent-r1-tmp-"


def tool_variable(name: str, key: str) -> str:
    """Return the environment variable of one key of a tool's table."""
    return f"{ENV_PREFIX}TOOLS__{name.upper().replace('-', '_')}__{key}"


def cache_folder() -> Path:
    """Return the folder of what is compiled, which outlives runs."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "agent-r1"


def holds_sockets(folder: Path) -> bool:
    """Say whether engines can make sockets in a folder: its path is short, its disk knows them."""
    path = folder / ("s" * SOCKET_NAME_LENGTH)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
    except OSError:
        return False
    path.unlink()
    return True


DEADLY_TIMEOUT_S = 2.0


class LocalServices:
    """Starts and stops the services of one run."""

    def __init__(
        self,
        config: Config,
        *,
        folder: Path,
        secrets: Mapping[str, str],
        report: Callable[[str], None],
        trains: bool = True,
    ) -> None:
        """Prepare; starts nothing, and writes the run's token into the private folder.

        Args:
            config: the configuration of the run.
            folder: has the same as `config.json`, without its secrets, which every service reads;
                `logs/`; and `live/`, private to this start, for announcements and passwords.
            secrets: environment variables that hold what config.json leaves out.
            report: called with each line the user must see.
            trains: a learner will be started.

        Raises:
            ValueError: this machine lacks what `[placement]` names.
        """
        self._config = config
        self._config_file = folder / CONFIG_FILE
        self._state_dir = folder.absolute() / LIVE_DIR
        # Redis's is passed on in a file; see `_redis_environment`.
        self._secrets = {n: text for n, text in secrets.items() if n != REDIS_URL_VARIABLE}
        self._report = report
        num_gpus = usable_gpus()
        self._placement = place(config, num_gpus=num_gpus, trains=trains)
        self._scorers = scorer_servers(config, num_gpus)
        self._own_temporary: OwnFolder | None = None
        self._token_file = self._state_dir / TOKEN_FILE
        write_token(config.run, self._token_file)
        self.redis_url = ""
        """URL of Redis, set once it answers."""
        self.holds_run_id = False
        """Whether the run's keys in Redis belong to these services."""
        self.tool_urls: dict[str, str] = {}
        """URLs of the tools that were started, by name; set once they are up."""
        self.reward_url = ""
        """URL of the reward service, set once it is up."""
        placement = config.placement
        self.supervisor = Supervisor(
            folder / LOGS_DIR,
            max_restarts=placement.max_restarts,
            restart_window_s=placement.restart_window_s,
            report=report,
            environment=self._base_environment(),
            explained=self._count_deadly,
        )
        replicas = len(self._placement.rollout)
        names = ["rollout"] if replicas == 1 else [f"rollout-{i}" for i in range(replicas)]
        self._rollout_places = dict(zip(names, self._placement.rollout, strict=True))
        gateway = ["gateway"] * (config.agent is not None)
        self.supervisor.expect(*config.served_tools(), "reward", *gateway, *names)

    async def _count_deadly(self) -> int:
        """Return how many entries were dead-lettered because they end processes."""
        try:
            async with (
                asyncio.timeout(DEADLY_TIMEOUT_S),
                await Broker.connect(self.redis_url, self._config.run.id) as broker,
            ):
                return await broker.deadly_count()
        except (TimeoutError, OSError, ValueError):  # Redis's own death among them
            return 0

    def _base_environment(self) -> dict[str, str]:
        # config.json holds what the variables said; above it they would beat --set.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.upper().startswith(ENV_PREFIX) and name not in IN_PRIVATE_FILES
        }
        defaults = {
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # By default below TMPDIR, which ends with the run; vLLM and Triton use the home folder.
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "torchinductor"),
        }
        return {**defaults, **inherited, **self._temporary_folder(), **self._secrets}

    def _temporary_folder(self) -> dict[str, str]:
        """Return variables that let services use a folder which ends with the run.

        Engines leave a socket in it at each start, and processes that are killed leave more.
        """
        folder = self._state_dir / "tmp"
        folder.mkdir()
        if not holds_sockets(folder):
            self._own_temporary = OwnFolder(None, TEMPORARY_PREFIX)
            folder = self._own_temporary.path
        return {"TMPDIR": str(folder)}

    async def stop(self) -> None:
        """Stop every service, and remove their temporary files."""
        await self.supervisor.stop()
        if self._own_temporary is not None:
            self._own_temporary.remove()

    async def start_redis(self) -> str:
        """Start this run's own Redis unless one is configured; return its URL."""
        configured = self._config.redis
        if configured.url is None:
            self.redis_url = await self._start_own_redis()
        else:
            self.redis_url = configured.connection_url()
            await local_redis.wait_for_redis(self.redis_url, self._config.run.id, self._report)
        write_private(self._state_dir / REDIS_URL_FILE, self.redis_url)
        _, password = split_password(self.redis_url)
        write_private(self._state_dir / REDIS_PASSWORD_FILE, password or "")
        return self.redis_url

    async def _start_own_redis(self) -> str:
        for attempt in range(1, REDIS_START_TRIES + 1):
            spec, url = local_redis.local_redis(self._state_dir, self._config.redis.maxmemory_mb)
            try:
                await self.supervisor.start(spec)
                return url
            except ServiceError as exc:
                # Another process may have taken the port since it was found free.
                if PORT_TAKEN not in str(exc) or attempt == REDIS_START_TRIES:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def start_all(self, *, learner: bool, resume: bool) -> None:
        """Start everything but Redis, as much side by side as the order allows.

        Raises:
            ServiceError: a service did not come up.
        """
        steps: list[Coroutine[Any, Any, object]] = [self._start_servers()]
        if learner and self._placement.shares_gpus:
            # An engine counts the memory that a learner takes meanwhile as its own.
            await run_together(steps)
            steps = []
        if learner:
            steps.append(self.supervisor.start(self._learner(resume)))
        await run_together(steps)

    async def start_tools(self) -> None:
        """Start the tools alone.

        Raises:
            ServiceError: a tool did not come up.
        """
        tools = self._config.served_tools()
        urls = await run_together(self.supervisor.start(self._tool(name)) for name in tools)
        self.tool_urls = dict(zip(tools, urls, strict=True))

    async def _start_servers(self) -> None:
        scorers = [describe(server, self._config, self._spec) for server in self._scorers]
        _, self.reward_url, *_ = await run_together(
            [
                self.start_tools(),
                self.supervisor.start(self._reward()),
                *(self.supervisor.start(scorer) for scorer in scorers),
            ]
        )
        samplers = [self._rollout(name, where) for name, where in self._rollout_places.items()]
        if self._config.agent is not None:
            samplers.append(self._gateway())
        await run_together(map(self.supervisor.start, samplers))

    def served(self) -> Config:
        """Return the configuration for a client of the services: how to reach and enter them."""
        config = self._config
        redis = config.redis.model_copy(update={"url": config.redis.url or self.redis_url})
        run = config.run.model_copy(update={"token_file": self._token_file})
        return config.model_copy(update={"redis": redis, "run": run})

    async def run_learner(self, folder: Path, *, resume: bool) -> None:
        """Run the learner of another run folder on these services until it exits in order.

        Raises:
            ServiceError: the learner did not come up; `supervisor.wait` raises what comes later.
        """
        learner = dataclasses.replace(
            self._learner(resume, folder / CONFIG_FILE),
            ends_run=False,
            is_job=True,
            log_dir=folder / LOGS_DIR,
        )
        await self.supervisor.start(learner)
        await self.supervisor.finished(learner.name)

    def command(
        self, service: str, name: str, *options: str, config_file: Path | None = None
    ) -> list[str]:
        """Return the command line of a service's process."""
        return [
            # -P: the folder the command runs in must not shadow installed packages.
            *(sys.executable, "-P", "-m", "agent_r1.cli.main", "serve", service),
            *(str(config_file or self._config_file), "--announce-dir"),
            str(self.announce_dir(name)),
            *options,
        ]

    def announce_dir(self, name: str) -> Path:
        """Return the folder in which a service announces itself."""
        return self._state_dir / "announce" / name

    def _spec(self, name: str, command: list[str], **more: Any) -> ServiceSpec:
        return ServiceSpec(
            name=name,
            command=command,
            start_timeout_s=self._config.placement.start_timeout_s,
            stop_timeout_s=self._config.placement.stop_timeout_s,
            **{
                "announce_dir": self.announce_dir(name),
                "environment": self._environment(),
                **more,
            },
        )

    def _environment(self) -> dict[str, str]:
        token = {f"{ENV_PREFIX}RUN__TOKEN_FILE": str(self._token_file)}
        return {**token, **self._redis_environment()}

    def _redis_environment(self) -> dict[str, str]:
        """Return how services reach Redis, where config.json does not say so."""
        given = self._config.redis.url
        url, password = split_password(given or self.redis_url)
        if given is not None and password is None and not os.environ.get(REDIS_PASSWORD_VARIABLE):
            return {}
        file = self._state_dir / REDIS_PASSWORD_FILE
        return {REDIS_URL_VARIABLE: url, f"{ENV_PREFIX}REDIS__PASSWORD_FILE": str(file)}

    def _model_environment(self, where: Place) -> dict[str, str]:
        return {**self._environment(), **where.environment(os.environ)}

    def _tool(self, name: str) -> ServiceSpec:
        command = self.command("tool", name, "--name", name)
        is_agents = name == AGENTS
        port = f"{ENV_PREFIX}AGENT__SERVICE__PORT" if is_agents else tool_variable(name, "PORT")
        return self._spec(name, command, port_variable=port, stop_rank=TOOL_RANK)

    def _reward(self) -> ServiceSpec:
        command = self.command("reward", "reward")
        port = f"{ENV_PREFIX}REWARD__PORT"
        return self._spec(
            "reward",
            command,
            environment=self._environment() | dict(s.variable for s in self._scorers),
            port_variable=port,
            stop_rank=ROLLOUT_RANK,
        )

    def _rollout(self, name: str, where: Place) -> ServiceSpec:
        environment = self._model_environment(where)
        if self._config.rollout.scorer_url is None and self.reward_url:
            environment[f"{ENV_PREFIX}ROLLOUT__SCORER_URL"] = self.reward_url
        return self._spec(
            name,
            self.command("rollout", name),
            environment=environment,
            cores=where.cores,
            gpus=where.gpus,
            stop_rank=ROLLOUT_RANK,
        )

    def _gateway(self) -> ServiceSpec:
        return self._spec("gateway", self.command("gateway", "gateway"), stop_rank=ROLLOUT_RANK)

    def _learner(self, resume: bool, config_file: Path | None = None) -> ServiceSpec:
        command = self.command("learner", "learner", config_file=config_file)
        again = [*command, "--resume-if-begun"]
        where, share = self._placement.learner, self._placement.learner_share
        environment = self._model_environment(where)
        if share is not None:
            environment[f"{ENV_PREFIX}ENGINE__GPU_MEMORY_SHARE"] = str(share)
        return self._spec(
            "learner",
            again if resume else command,
            environment=environment,
            cores=where.cores,
            gpus=where.gpus,
            probe=None,  # it has no routes; it announces itself once the model is loaded
            restart_command=again,
            # An empty Redis has lost the version and the tasks; a resumed learner sets them anew.
            restarts_with=("redis",),
            ends_run=True,
            done_codes=(0, EXIT_LOSSES),
            stop_rank=LEARNER_RANK,
        )
