"""What `agent-r1 ray up` and `down` ask of a cluster, whose clients are fakes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus

from agent_r1.config.run import Config, ConfigError, load_config
from agent_r1_deploy.ray import up

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny_world" / "run.toml"


def load(run_id: str) -> Config:
    options = [f"run.id={run_id}", 'redis.url="redis://redis:6379/0"']
    return load_config(EXAMPLE, options, environ={}).config


class FakeServe:
    """Keeps what was deployed, as Serve does: the whole list is replaced."""

    def __init__(self) -> None:
        self.applications: list[dict[str, Any]] = []

    def get_serve_details(self) -> dict[str, Any]:
        found = {
            one["name"]: {"status": "RUNNING", "message": "", "deployed_app_config": one}
            for one in self.applications
        }
        return {"applications": found}

    def deploy_applications(self, config: dict[str, Any]) -> None:
        self.applications = config["applications"]

    def names(self) -> list[str]:
        return sorted(one["name"] for one in self.applications)


class FakeJobs:
    """Keeps jobs by id."""

    def __init__(self) -> None:
        self.jobs: dict[str, SimpleNamespace] = {}

    def submit_job(self, **given: Any) -> str:
        name = f"job-{len(self.jobs)}"
        self.jobs[name] = SimpleNamespace(
            submission_id=name, status=JobStatus.RUNNING, given=given, **given
        )
        return name

    def list_jobs(self) -> list[SimpleNamespace]:
        return list(self.jobs.values())


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> FakeServe:
    serve = FakeServe()
    monkeypatch.setattr(up, "ServeSubmissionClient", lambda address: serve)
    return serve


@pytest.fixture(autouse=True)
def jobs(monkeypatch: pytest.MonkeyPatch) -> FakeJobs:
    jobs = FakeJobs()
    monkeypatch.setattr(up, "JobSubmissionClient", lambda address: jobs)
    return jobs


def test_the_applications_of_other_runs_stay(serve: FakeServe):
    one, other = up.Cluster("http://head", load("demo")), up.Cluster("http://head", load("demo-2"))
    one.deploy()
    other.deploy()
    both = serve.names()
    assert len(both) == 6
    assert sorted(one.states()) == ["demo-reward", "demo-rollout", "demo-search"]
    one.remove_applications()
    assert serve.names() == ["demo-2-reward", "demo-2-rollout", "demo-2-search"]
    one.deploy()
    assert serve.names() == both


def test_a_job_runs_the_configuration_that_is_sent_with_it(serve: FakeServe, jobs: FakeJobs):
    cluster = up.Cluster("http://head", load("demo"))
    assert cluster.running_job() is None
    name = cluster.submit(EXAMPLE, ['data.train=["a b.jsonl"]'])
    given = jobs.jobs[name].given
    command = "agent-r1 ray train run.toml --set 'data.train=[\"a b.jsonl\"]'"
    assert given["entrypoint"] == command
    assert given["runtime_env"]["working_dir"] == str(EXAMPLE.parent)
    assert cluster.running_job() == name
    assert up.Cluster("http://head", load("demo-2")).running_job() is None
    jobs.jobs[name].status = JobStatus.STOPPED
    assert cluster.running_job() is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConnectionError("refused"), "no Ray cluster answers at http://head"),
        (RuntimeError("not found"), "no Ray cluster answers at http://head"),
        (AuthenticationError("no"), "http://head refuses .* RAY_AUTH_TOKEN_PATH"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
):
    def refuse(address: str) -> None:
        raise error

    monkeypatch.setattr(up, "JobSubmissionClient", refuse)
    with pytest.raises(ConfigError, match=message):
        up.Cluster("http://head", load("demo"))


def test_without_a_cluster_there_is_nothing_to_detach_from(monkeypatch: pytest.MonkeyPatch):
    for name in up.ADDRESS_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RAY_ADDRESS is not set"):
        up.up(load("demo"), EXAMPLE, [], detach=True)
    with pytest.raises(ConfigError, match="RAY_ADDRESS is not set"):
        up.down(load("demo"))
