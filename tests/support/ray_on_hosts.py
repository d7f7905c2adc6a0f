"""A run of tiny_world on a Ray cluster whose nodes are hosts that share nothing.

`services` has Redis, an S3 server and alone the model and the data; `agent-r1 ray up` runs there.
`head` is the head of the cluster. Nodes come and go; what they are for is in their resources.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agent_r1.runs.store import StoredFile, stored_files
from tests.support.hosts import Host, Hosts
from tests.support.run_on_hosts import EXAMPLE, RUN_DIR, START_TIMEOUT_S, WORLD, RunOnHosts
from tests.support.runs import agent_r1
from tests.support.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY

SERVICES, HEAD = "services", "head"
RAY_TOKEN = "a-token-of-the-cluster-alone-0123456789"
RAY_PORT, API_PORT, S3_PORT = 6379, 8265, 9000
OBJECT_STORE_BYTES = 100_000_000
RANK = {"rank": 1}
SERVICE = {"rollout": 1, "tool": 1}
TABLE = {
    "rollout_replicas": 2,
    "tool_replicas": 2,
    "rank_resources": {"CPU": 1, "rank": 1},
    "rollout_resources": {"CPU": 1, "rollout": 1},
    "tool_resources": {"CPU": 0.5, "tool": 1},
    "stop_timeout_s": 60,
}


class RayOnHosts(RunOnHosts):
    """Starts the nodes of a cluster and one run on them.

    Args:
        hosts: with `services` and `head`.
        options: `KEY=VALUE` for `agent-r1 ray up`.
    """

    def __init__(self, hosts: Hosts, options: Sequence[str] = ()) -> None:
        super().__init__(hosts[SERVICES])
        self._hosts = hosts
        self._num_starts = 0
        table = [f"ray.{key}={_toml(value)}" for key, value in TABLE.items()]
        self._options = [
            *table,
            f"run.dir={RUN_DIR}",
            f"redis.url={self.redis_url}",
            f"learner.checkpoint_url=s3://{BUCKET}/checkpoints",
            "learner.checkpoint_every=1",
            "engine.ranks=2",
            "rollout.kv_cache_gib=0.5",
            *options,
        ]

    def start_services(self) -> None:
        """Start Redis and S3, and generate the world."""
        self.start_redis()
        host = self.learner
        command = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3_PORT)]
        self._start(host, "s3", command, {})
        bucket = f"u.Request('{self._s3}/{BUCKET}', method='PUT')"
        put = f"import urllib.request as u; u.urlopen({bucket})"
        self.wait(
            lambda: host.run([sys.executable, "-c", put], check=False).returncode == 0, "the bucket"
        )
        ignored = shutil.ignore_patterns("data", "__pycache__")
        shutil.copytree(EXAMPLE, host.inside(WORLD), ignore=ignored)
        generate = [sys.executable, WORLD / "generate.py", "--seed", "0", "--no-sft"]
        host.run([*generate, "--out", WORLD / "data"], timeout_s=START_TIMEOUT_S)

    @property
    def _head(self) -> str:
        return self._hosts[HEAD].address  # gRPC does not find a name that only /etc/hosts has

    @property
    def _s3(self) -> str:
        return f"http://{SERVICES}:{S3_PORT}"

    def start_head(self) -> None:
        """Start the head, which runs no part of the run but the job's driver."""
        options = ["--head", f"--port={RAY_PORT}", "--dashboard-host=0.0.0.0"]
        self._start_ray(self._hosts[HEAD], [*options, f"--dashboard-port={API_PORT}"], cpus=0)
        log = f"ray-{self._num_starts}"
        self.wait(lambda: "Ray runtime started" in self._hosts[HEAD].log(log), "the head")

    def add_node(self, resources: dict[str, int]) -> Host:
        """Let a new node join the cluster."""
        host = self._hosts.add(f"node-{self._num_starts}")
        self._start_ray(
            host,
            [f"--address={self._head}:{RAY_PORT}", f"--resources={json.dumps(resources)}"],
            cpus=4,
        )
        return host

    def _start_ray(self, host: Host, options: Sequence[str], *, cpus: int) -> None:
        ray = [str(Path(sys.executable).with_name("ray")), "start", "--block"]
        own = [f"--node-ip-address={host.address}", f"--num-cpus={cpus}", "--disable-usage-stats"]
        memory = f"--object-store-memory={OBJECT_STORE_BYTES}"
        self._num_starts += 1
        command = [*ray, *own, memory, *options]
        self._start(host, f"ray-{self._num_starts}", command, self._environment(host))

    def _environment(self, host: Host) -> dict[str, str]:
        folder = Path(sys.executable).parent
        return {
            **super()._environment(host),
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": RAY_TOKEN,
            "RAY_ADDRESS": f"http://{HEAD}:{API_PORT}" if host is self.learner else "",
            "RAY_memory_monitor_refresh_ms": "0",  # this machine's memory is not the cluster's
            "RAY_enable_open_telemetry": "0",
            "OMP_NUM_THREADS": "1",
            "AWS_ENDPOINT_URL": self._s3,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def up(self, *options: str, log: str = "up") -> None:
        """Start `agent-r1 ray up`."""
        self._start(
            self.learner, log, self._command("up", *options), self._environment(self.learner)
        )

    def last_line(self, log: str) -> str:
        """Wait until a command on the services' host has ended; return the last line it printed."""
        self.wait_for_end(self.learner, log, START_TIMEOUT_S)
        return self.learner.log(log).splitlines()[-1]

    def redeploy(self, *options: str) -> str:
        """Deploy applications whose configuration has changed; return what the command said."""
        command = [*self._command("up", *options), "--detach"]
        environment = self._environment(self.learner)
        return self.learner.run(
            command, env=environment, cwd=Path("/tmp"), timeout_s=START_TIMEOUT_S
        ).stdout

    def _command(self, action: str, *options: str) -> list[str]:
        sets = [part for option in (*self._options, *options) for part in ("--set", option)]
        return agent_r1("ray", action, WORLD / "run.toml", *sets)

    def kill(self, host: Host) -> None:
        """End a host as when its power fails."""
        self.let_end(host)
        host.kill()

    def let_end(self, host: Host) -> None:
        """Take no notice when what runs on a host ends."""
        for name in [name for name in self.processes if name.startswith(f"{host.name} ")]:
            del self.processes[name]

    def host_of_rank(self, rank: int) -> Host | None:
        """Return where a rank of the learner runs."""
        for host in self._hosts:
            for pid in host.pids():
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if b"agent_r1.cli.main" in words and f"RANK={rank}".encode() in variables:
                        return host
        return None

    def folders(self) -> list[Path]:
        """Return the run folders that rank 0 has had on its hosts, the last one last."""
        found = [host.inside(RUN_DIR) for host in self._hosts]
        return sorted(
            (one for one in found if (one / "metrics.jsonl").exists()),
            key=lambda one: (one / "metrics.jsonl").stat().st_mtime,
        )

    @property
    def folder(self) -> Path:
        """The last run folder."""
        return self.folders()[-1]

    def steps_done(self) -> int:
        """Return the last step that was trained."""
        return max((int(step["step"]) for step in self.metrics()), default=0)

    def metrics(self) -> list[dict[str, float]]:
        """Return the numbers of every step; of one that was trained again, the last."""
        steps: dict[float, dict[str, float]] = {}
        for folder in self.folders():
            for line in (folder / "metrics.jsonl").read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    numbers = json.loads(line)
                    steps[numbers["step"]] = numbers
        return [steps[step] for step in sorted(steps)]

    def trained(self) -> list[dict[str, Any]]:
        """Return the trajectories that were trained; of a step that was trained again, the last."""
        files: dict[str, StoredFile] = {}
        for folder in self.folders():
            files |= {one.path.name: one for one in stored_files(folder)}
        records = (one for file in files.values() for one in file.records())
        return [one for one in records if one["trained"]]

    def seconds_to_next_step(self, since: float, step: int, timeout_s: float) -> float:
        """Wait until a step after `step` was trained; return the seconds since a moment."""
        self.wait(lambda: self.steps_done() > step, f"step {step + 1}", timeout_s)
        return time.monotonic() - since


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inner}" for key, inner in value.items()) + "}"
    return str(value)
