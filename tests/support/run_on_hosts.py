"""A run of tiny_world on hosts that share nothing: which commands run where, and what came of it.

The first host has Redis, rank 0 of the learner, and alone the data. Hosts of other ranks have the
configuration and the model. All others get an address, a password and a token, and join.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.config.redis_server import find_redis_server
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.runs.store import stored_files
from agent_r1.runtime.files.private import write_private
from tests.support.hosts import REPOSITORY, Host
from tests.support.runs import agent_r1

EXAMPLE = REPOSITORY / "examples" / "tiny_world"
RUN_ID = "tiny-world"
TOKEN = "a-token-of-the-hosts-alone"
PASSWORD = "a-password-of-the-hosts-alone"
TOKEN_FILE = Path("/tmp/secrets/token")
PASSWORD_FILE = Path("/tmp/secrets/redis-password")
RUN_DIR = Path("/tmp/run")
WORLD = Path("/tmp/world")
RANKS_PORT = 29500
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
POLL_S = 0.1


class RunOnHosts:
    """Starts the services of one run.

    Args:
        learner: the host of Redis and the learner, or of its rank 0.
        options: `KEY=VALUE` for the learner's `--set`, which all others get from it.
        other_ranks: the hosts of the learner's further ranks, in their order.
    """

    def __init__(
        self, learner: Host, options: Sequence[str] = (), other_ranks: Sequence[Host] = ()
    ) -> None:
        self.learner = learner
        self._rank_hosts = [learner, *other_ranks]
        self._options = [
            'learner.transport="http"',
            "learner.server.host=0.0.0.0",
            f"learner.server.advertise_host={learner.name}",
            "learner.server.port=8100",
            "rollout.kv_cache_gib=0.5",
            f"engine.ranks={len(self._rank_hosts)}",
            f"run.dir={RUN_DIR}",
            *options,
        ]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        """By `HOST SERVICE`."""

    @property
    def redis_url(self) -> str:
        """Address for every host; the password is in a variable."""
        return f"redis://{self.learner.name}:6379/0"

    @property
    def folder(self) -> Path:
        """The run folder, as the test sees it."""
        return self.learner.inside(RUN_DIR)

    def start_redis(self) -> None:
        """Start Redis on the learner's host, for all."""
        folder = self.learner.inside("/tmp/redis")
        folder.mkdir()
        settings = ("bind 0.0.0.0", "dir /tmp/redis", "save ''", f"requirepass {PASSWORD}")
        (folder / "redis.conf").write_text("\n".join(settings) + "\n")
        self._start(self.learner, "redis", [find_redis_server(), "/tmp/redis/redis.conf"], {})
        self.wait(lambda: "eady to accept" in self.learner.log("redis"), "Redis")

    def start_learner(self) -> None:
        """Generate the world on the learner's host, and start the learner's ranks, one a host."""
        for host in self._rank_hosts:
            ignored = shutil.ignore_patterns("data", "__pycache__")
            shutil.copytree(EXAMPLE, host.inside(WORLD), ignore=ignored)
        generate = [sys.executable, WORLD / "generate.py", "--seed", "0", "--no-sft"]
        self.learner.run([*generate, "--out", WORLD / "data"], timeout_s=START_TIMEOUT_S)
        options = [part for option in self._options for part in ("--set", option)]
        command = agent_r1("serve", "learner", WORLD / "run.toml", *options)
        size = len(self._rank_hosts)
        for rank, host in enumerate(self._rank_hosts):
            place = RankPlace(rank, size, 0, self.learner.name, RANKS_PORT)
            env = place.environment() if size > 1 else {}
            if rank == 0:  # the others have nothing to do with Redis and the services
                env |= {**self._environment(host), "AGENT_R1__REDIS__URL": self.redis_url}
            self._start(host, "learner", command, env)

    def join(self, host: Host, service: str, *options: str) -> None:
        """Let a service of another host join."""
        sets = [part for option in options for part in ("--set", option)]
        where = ("--join", RUN_ID, "--redis", self.redis_url)
        command = agent_r1("serve", service, *where, *sets)
        self._start(host, service, command, self._environment(host))

    def drain(self, host: Host, server_id: str) -> str:
        """Drain a rollout server by a command on some host; return what the command said."""
        drain = ("rollout", "drain", server_id, "--timeout-s", 30)
        return self._ask(host, *drain, "--redis", self.redis_url, "--id", RUN_ID)

    def drain_tool(self, host: Host, tool: str, instance: str) -> str:
        """Drain an instance of a tool by a command on some host; return what the command said."""
        drain = ("tools", "drain", tool, "--instance", instance)
        return self._ask(host, *drain, "--redis", self.redis_url, "--pool", RUN_ID)

    def _ask(self, host: Host, *command: object) -> str:
        environment = self._environment(host)
        return host.run(agent_r1(*command), env=environment, timeout_s=STOP_TIMEOUT_S).stdout

    def _start(
        self, host: Host, service: str, command: Sequence[str | Path], env: Mapping[str, str]
    ) -> None:
        env = {"PYTHONUNBUFFERED": "1", **env}
        process = host.start(command, log=service, env=env, cwd=Path("/tmp"))
        self.processes[f"{host.name} {service}"] = process

    def _environment(self, host: Host) -> dict[str, str]:
        host.inside(TOKEN_FILE.parent).mkdir(mode=0o700, exist_ok=True)
        for place, secret in ((TOKEN_FILE, TOKEN), (PASSWORD_FILE, PASSWORD)):
            write_private(host.inside(place), secret)
        return {
            "AGENT_R1__RUN__TOKEN_FILE": str(TOKEN_FILE),
            "AGENT_R1__REDIS__PASSWORD_FILE": str(PASSWORD_FILE),
        }

    def steps_done(self) -> int:
        """Return how many steps the learner has written down."""
        file = self.folder / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """Wait until something holds, while every process that was started lives.

        Raises:
            AssertionError: it took too long, or a process has ended; its log is shown.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended with {process.poll()}"
            assert time.monotonic() < deadline, f"{what} took longer than {timeout_s:g} s"
            time.sleep(POLL_S)

    def wait_for_end(self, host: Host, service: str, timeout_s: float) -> int:
        """Wait until a process ends by itself, and return its exit status."""
        return self.processes.pop(f"{host.name} {service}").wait(timeout_s)

    def stop_one(self, host: Host, service: str) -> int:
        """Stop a service in order, and return its exit status."""
        self.processes[f"{host.name} {service}"].terminate()
        return self.wait_for_end(host, service, STOP_TIMEOUT_S)

    def stop(self) -> dict[str, int]:
        """Stop the services that are left, Redis last; return the exit statuses by name."""
        for name in sorted(self.processes, key=lambda name: name.endswith(" redis")):
            process = self.processes[name]
            process.terminate()
            process.wait(STOP_TIMEOUT_S)
        return {name: process.returncode for name, process in self.processes.items()}

    def summary(self) -> dict[str, Any]:
        """Return the run's `summary.json`."""
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self) -> list[dict[str, float]]:
        """Return the numbers of every step."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def trained(self) -> list[dict[str, Any]]:
        """Return the trajectories that were trained, as far as the run keeps them."""
        records = (one for file in stored_files(self.folder) for one in file.records())
        return [one for one in records if one["trained"]]

    def problems(self, batch: int, wanted_score: float) -> list[str]:
        """Say what is wrong unless all samples were trained once and the model has learned.

        Args:
            batch: samples of a step.
            wanted_score: exact match that the model must reach.
        """
        summary = self.summary()
        samples = Counter((one["group_id"], one["sample_index"]) for one in self.trained())
        wanted, score = summary["steps"] * batch, summary["em_after"]
        return [
            *([] if summary["status"] == "finished" else [f"the run is {summary['status']}"]),
            *([] if len(samples) == wanted else [f"{len(samples)} of {wanted} samples trained"]),
            *(f"{sample} was trained {n} times" for sample, n in samples.items() if n > 1),
            *([] if score >= wanted_score else [f"the score, {score}, is below {wanted_score}"]),
        ]
