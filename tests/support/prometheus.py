"""A real Prometheus for tests, and a look at a run's metrics without one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from agent_r1.runtime.files.run_folder import live_token_file

OBSERVE = Path(__file__).resolve().parents[2] / "deploy" / "observe"
ANSWER_TIMEOUT_S = 60.0
JOBS = {"launcher", "learner", "rollout", "reward", "tools"}
TYPE = re.compile(r"^# TYPE (\S+) (\w+)$", re.MULTILINE)
NO_PROMETHEUS = "needs prometheus and promtool on PATH: the package prometheus of Debian has both"


def program(name: str) -> str | None:
    """Return the path of prometheus or promtool; None where it is not installed."""
    return shutil.which(name, path=os.pathsep.join((os.environ["PATH"], "/usr/local/bin")))


def launcher_url(run_dir: Path) -> str | None:
    """Return the URL under which the launcher of a live run serves metrics; None too early."""
    log = run_dir / "logs" / "launcher.log"
    text = log.read_text() if log.exists() else ""
    found = re.findall(r"launcher serves metrics url=(\S+)", text)
    return found[-1] if found else None


def scrape(run_dir: Path) -> dict[str, str]:
    """Return what the services of a live run answer to Prometheus, by job."""
    token_file = live_token_file(run_dir)
    assert token_file is not None
    headers = {"authorization": f"Bearer {token_file.read_text().strip()}"}
    pages: dict[str, str] = {}
    with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False, headers=headers) as client:
        for found in client.get(f"{launcher_url(run_dir)}/targets").raise_for_status().json():
            for target in found["targets"]:
                page = client.get(f"http://{target}/metrics").raise_for_status().text
                job = found["labels"]["job"]
                pages[job] = pages.get(job, "") + page
    return pages


def series_of(page: str) -> set[str]:
    """Return the names that a page exports, those without a value yet included."""
    names: set[str] = set()
    for name, kind in TYPE.findall(page):
        parts = ("_bucket", "_count", "_sum") if kind == "histogram" else ("",)
        names |= {name + part for part in parts}
    return names


def queries() -> list[str]:
    """Return the queries of every panel of every dashboard."""
    boards = [json.loads(file.read_text()) for file in OBSERVE.glob("grafana/dashboards/*.json")]
    return [
        target["expr"]
        for board in boards
        for panel in board["panels"]
        for target in panel["targets"]
    ]


def filled_in(query: str) -> str:
    """Return a query as Grafana sends it, with everything chosen."""
    return query.replace("$__rate_interval", "1m").replace("$run", ".*").replace("$tool", ".*")


class Prometheus:
    """A Prometheus that watches one run."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=ANSWER_TIMEOUT_S, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def get(self, path: str, **parameters: str) -> Any:
        """Return `data` of an answer of its API."""
        return (
            self._client.get(f"/api/v1/{path}", params=parameters).raise_for_status().json()["data"]
        )

    def look(self) -> dict[str, Any]:
        """Return `metadata` and `rules`, and the results of our dashboards' `queries`."""
        return {
            "metadata": self.get("metadata"),
            "rules": [rule for group in self.get("rules")["groups"] for rule in group["rules"]],
            "queries": {
                query: self.get("query", query=filled_in(query))["result"] for query in queries()
            },
        }

    def jobs_up(self) -> set[str]:
        """Return the jobs of which a target has answered."""
        with contextlib.suppress(httpx.HTTPError):  # it answers 503 until it has started
            targets = self.get("targets")["activeTargets"]
            return {one["labels"]["job"] for one in targets if one["health"] == "up"}
        return set()


@contextlib.contextmanager
def watching(
    run_dir: Path, folder: Path, wait_until: Callable[[Callable[[], bool], str], None]
) -> Iterator[Prometheus | None]:
    """Let a Prometheus watch a live run, with our alert rules; None where there is none.

    Args:
        run_dir: of the run.
        folder: gets its configuration and its data.
        wait_until: polls a condition that is named.
    """
    command = program("prometheus")
    if command is None:
        yield None
        return
    folder.mkdir()
    token_file = live_token_file(run_dir)
    assert token_file is not None
    token = folder / "token"
    token.write_text(token_file.read_text())
    credentials = {"type": "Bearer", "credentials_file": str(token)}
    discovery = {
        "url": f"{launcher_url(run_dir)}/targets",
        "authorization": credentials,
        "refresh_interval": "1s",
    }
    job = {
        "job_name": "agent-r1",
        "authorization": credentials,
        "http_sd_configs": [discovery],
    }
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(OBSERVE / "alerts.yml")],
        "scrape_configs": [job],
    }
    config = folder / "prometheus.yml"
    config.write_text(yaml.safe_dump(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "config.file": config,
        "storage.tsdb.path": folder / "data",
        "web.listen-address": f"127.0.0.1:{port}",
    }
    with (folder / "log").open("wb") as log:
        arguments = [command, *(f"--{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(arguments, stdout=log, stderr=log)
    found = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait_until(lambda: found.jobs_up() >= JOBS, "Prometheus to see every service")
        yield found
    finally:
        found.close()
        process.kill()
        process.wait()
