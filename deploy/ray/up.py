"""`agent-r1 ray up|down`: a run on the cluster of RAY_ADDRESS, or on one that is started here.

Configuration --> the learner's job and the Serve applications, over the HTTP of Ray's head, so that
this process needs neither to be on the cluster nor to stay.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.dashboard.utils import get_address_for_submission_client
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from agent_r1.config.run import Config, ConfigError
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, STOP_SIGNALS
from agent_r1_deploy.ray.applications import require_redis, serve_config, tool_options

ADDRESS_VARIABLES = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")
RUN_KEY = "agent_r1_run"
"""Key in a job's metadata: the run that it trains."""
RUNNING = (JobStatus.PENDING, JobStatus.RUNNING)
OBJECT_STORE_BYTES = 256 << 20
"""Bytes of the object store of a cluster that is started here: no samples and no weights pass
through it."""
LOOK_S = 2.0
END_MARGIN_S = 120.0
"""Time that the end of a job takes beyond what a rank gets."""


class Cluster:
    """A Ray cluster, as one run uses it.

    Args:
        address: of the head's HTTP server.
        config: of the run.

    Raises:
        ConfigError: nothing answers there.
    """

    def __init__(self, address: str, config: Config) -> None:
        self.address = address
        self._config = config
        try:
            self._jobs = JobSubmissionClient(address)
            self._serve = ServeSubmissionClient(address)
        except AuthenticationError as exc:
            raise ConfigError(
                f"the Ray cluster at {address} refuses this command without its token; set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file that holds it"
            ) from exc
        except (ConnectionError, RuntimeError) as exc:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({exc}); start it, or correct RAY_ADDRESS"
            ) from exc

    def running_job(self) -> str | None:
        """Return the id of the job that trains the run."""
        run_id = self._config.run.id
        for job in self._jobs.list_jobs():
            if (job.metadata or {}).get(RUN_KEY) == run_id and job.status in RUNNING:
                return job.submission_id
        return None

    def submit(self, file: Path, options: Sequence[str]) -> str:
        """Submit the learner's job, with the folder of the configuration; return its id."""
        command = ["agent-r1", "ray", "train", file.name]
        for option in options:
            command += ["--set", option]
        variables = {
            "PYTHONUNBUFFERED": "1",
            "RAY_DEDUP_LOGS": "0",
            # Ray kills a job that takes longer to stop.
            "RAY_JOB_STOP_WAIT_TIME_S": str(round(self._config.ray.stop_timeout_s + END_MARGIN_S)),
        }
        return self._jobs.submit_job(
            entrypoint=shlex.join(command),
            runtime_env={"working_dir": str(file.resolve().parent), "env_vars": variables},
            metadata={RUN_KEY: self._config.run.id},
        )

    def deploy(self) -> None:
        """Deploy the run's applications: those that are new, or whose configuration changed."""
        self._put(serve_config(self._config))

    def remove_applications(self) -> None:
        """Delete the run's applications; their replicas end in order."""
        self._put({**serve_config(self._config), "applications": []})

    def _put(self, wanted: dict[str, Any]) -> None:
        # The server takes the whole list: other runs' applications must be in it.
        others = [one["deployed_app_config"] for one in self._applications(of_the_run=False)]
        applications = [*others, *wanted["applications"]]
        self._serve.deploy_applications({**wanted, "applications": applications})

    def _applications(self, *, of_the_run: bool) -> list[dict[str, Any]]:
        """Return what Serve says of the applications of the run, or of all others."""
        found = self._serve.get_serve_details().get("applications", {}).values()
        run_id = self._config.run.id
        return [
            one
            for one in found
            if (config := one.get("deployed_app_config"))
            and ((config.get("args") or {}).get("run_id") == run_id) == of_the_run
        ]

    def states(self) -> dict[str, str]:
        """Return the state of each of the run's applications, with what is wrong with it."""
        return {
            one["deployed_app_config"]["name"]: " ".join([one["status"], *one["message"].split()])
            for one in self._applications(of_the_run=True)
        }

    async def follow(self, job: str) -> int:
        """Print the job's log, and what becomes of the applications, until the job has ended.

        Returns:
            The job's exit status.

        Raises:
            ConfigError: the cluster no longer answers.
        """
        watching = asyncio.create_task(self._watch_applications())
        try:
            async for text in self._jobs.tail_job_logs(job):
                print(text, end="", flush=True)
            info = await asyncio.to_thread(self._jobs.get_job_info, job)
        except (ConnectionError, RuntimeError, OSError) as exc:
            raise ConfigError(
                f"the cluster at {self.address} no longer answers ({exc}); when it is back, the "
                "same command continues the run"
            ) from exc
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if info.status in RUNNING:
            raise ConfigError(
                f"the log of job {job} has ended before the job; the same command follows it again"
            )
        status = info.driver_exit_code
        if status is None:
            print(f"the job has ended as {info.status}: {info.message}", flush=True)
        return EXIT_FAILED if status is None else status

    async def _watch_applications(self) -> None:
        shown: dict[str, str] = {}
        while True:
            with suppress(ConnectionError, RuntimeError):
                states = await asyncio.to_thread(self.states)
                for name, state in states.items():
                    if shown.get(name) != state:
                        print(f"{name}: {state}", flush=True)
                shown = states
            await asyncio.sleep(LOOK_S)

    def stop(self, job: str) -> None:
        """Let the learner write a checkpoint and end.

        Raises:
            ConfigError: it did not in time.
        """
        self._jobs.stop_job(job)
        deadline = time.monotonic() + self._config.ray.stop_timeout_s + 2 * END_MARGIN_S
        while self._jobs.get_job_status(job) in RUNNING:
            if time.monotonic() > deadline:
                raise ConfigError(f"job {job} does not stop; see its log with `ray job logs {job}`")
            time.sleep(LOOK_S)


def up(config: Config, file: Path, options: Sequence[str], *, detach: bool) -> int:
    """Train a run on a cluster, or continue or follow it there.

    Args:
        config: of the run.
        file: where it was read; its folder goes with the job to every rank.
        options: `KEY=VALUE` texts that it was read with.
        detach: return when everything is submitted.

    Returns:
        Exit status (`agent_r1.runtime.exit_status`).

    Raises:
        ConfigError: the cluster or the configuration cannot be used; the text says what to do.
    """
    redis = f"redis.url={json.dumps(require_redis(config))}"
    folder = f"run.dir={json.dumps(str(config.run.folder().absolute()))}"
    with _cluster(config, may_start=not detach) as cluster:
        job = cluster.running_job()
        if job is None:
            job = cluster.submit(file, [*options, redis, folder])
        print(f"job {job} on {cluster.address}", flush=True)
        cluster.deploy()
        if detach:
            return 0
        try:
            status = asyncio.run(_until_interrupted(cluster.follow(job)))
        except KeyboardInterrupt:
            print("stopping the learner and the services", flush=True)
            cluster.stop(job)
            status = EXIT_INTERRUPTED
        cluster.remove_applications()
        return status


async def _until_interrupted(work: Any) -> int:
    """Do the work; SIGTERM interrupts it as Ctrl-C does."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def down(config: Config) -> int:
    """Stop a run on a cluster in order: its job, then its applications.

    Returns:
        Exit status.

    Raises:
        ConfigError: no cluster is named, or it does not answer.
    """
    with _cluster(config, may_start=False) as cluster:
        job = cluster.running_job()
        if job is not None:
            print(f"stopping job {job}", flush=True)
            cluster.stop(job)
        cluster.remove_applications()
    print(f"the services of the run {config.run.id} end on {cluster.address}")
    return 0


@contextmanager
def _cluster(config: Config, *, may_start: bool) -> Iterator[Cluster]:
    """Connect to the cluster that a variable names, or start one for as long as the context lasts.

    Raises:
        ConfigError: there is none, and none is to be started.
    """
    if any(name in os.environ for name in ADDRESS_VARIABLES):
        yield Cluster(get_address_for_submission_client(None), config)
        return
    if not may_start:
        raise ConfigError("RAY_ADDRESS is not set; set it to http://HEAD:8265")
    folder = Path(sys.executable).parent  # the job calls `agent-r1`
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    context = ray.init(
        num_cpus=cpus_of(config),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=True,
        log_to_driver=False,
    )
    try:
        yield Cluster(f"http://{context.dashboard_url}", config)
    finally:
        ray.shutdown()


def cpus_of(config: Config) -> int:
    """Return how many CPUs a cluster needs for a run, of those that Ray counts."""
    table, tools = config.ray, len(tool_options(config))
    servers = max(table.rollout_replicas, table.max_rollout_replicas or 0)
    parts = (
        (config.engine.ranks, table.rank_resources),
        (servers, table.rollout_resources),
        (table.tool_replicas * tools, table.tool_resources),
        (table.reward_replicas, table.reward_resources),
    )
    cpus = sum(count * resources.get("CPU", 0) for count, resources in parts)
    return max(math.ceil(cpus), os.cpu_count() or 1)
