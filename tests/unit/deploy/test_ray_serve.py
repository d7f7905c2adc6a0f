"""What Serve asks of the applications, and the commands where Ray is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from pydantic import ValidationError
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve.config import AutoscalingContext

from agent_r1.cli.main import main
from agent_r1_deploy.ray.serve import WANTED, build, count_servers


def context(reported: Sequence[float], now: int) -> AutoscalingContext:
    """Return what Serve knows when `now` servers have reported these numbers."""
    deployment = DeploymentID("Replica", "run-rollout")
    replicas = [ReplicaID(str(number), deployment) for number in range(now)]
    return AutoscalingContext(
        deployment_id=deployment,
        deployment_name="Replica",
        app_name="run-rollout",
        current_num_replicas=now,
        target_num_replicas=now,
        running_replicas=replicas,
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={WANTED: dict(zip(replicas, reported, strict=False))},
        raw_metrics={},
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=None,
    )


@pytest.mark.parametrize(
    ("reported", "now", "wanted"),
    [
        ([2.1, 2.1], 2, 3),  # 2.1 servers' worth of samples, which every server reports
        ([2.0], 1, 2),
        ([0.5, 0.25], 2, 1),  # one has looked earlier than the other
        ([], 3, 3),  # nobody has reported yet
    ],
)
def test_there_are_as_many_servers_as_the_samples_need(
    reported: list[float], now: int, wanted: int
):
    assert count_servers(context(reported, now))[0] == wanted


def test_a_misspelt_argument_of_an_application_is_refused():
    arguments = {"service": "reward", "run_id": "run", "redis_url": "redis://redis:6379/0"}
    build(arguments)
    with pytest.raises(ValidationError, match="optoins"):
        build({**arguments, "optoins": []})


@pytest.mark.parametrize("action", ["up", "down", "train"])
def test_without_ray_the_command_says_what_to_install(
    action: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name in [name for name in sys.modules if name.startswith("agent_r1_deploy.ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", action, "examples/tiny_world/run.toml"]) == 2
    assert "pip install 'agent-r1[ray]'" in capsys.readouterr().err
