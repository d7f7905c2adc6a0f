"""The Serve configuration of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.config import ReplicaConfig
from ray.serve.schema import RayActorOptionsSchema, ServeDeploySchema

from agent_r1.cli.main import main
from agent_r1.config.run import Config, ConfigError, load_config
from agent_r1_deploy.ray.applications import actor_options, serve_config
from agent_r1_deploy.ray.learner import RankLosses, final_status, learner_arguments
from agent_r1_deploy.ray.ranks import Ended
from agent_r1_deploy.ray.serve import Replica
from agent_r1_deploy.ray.up import cpus_of

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples" / "tiny_world" / "run.toml"
REDIS = 'redis.url="redis://redis:6379/0"'


def load(*options: str) -> Config:
    return load_config(EXAMPLE, [REDIS, *options], environ={}).config


def applications(*options: str) -> dict[str, dict[str, Any]]:
    return {one["args"]["service"]: one for one in serve_config(load(*options))["applications"]}


def test_there_is_an_application_for_every_service_but_the_learner():
    found = applications()
    assert list(found) == ["search", "reward", "rollout"]
    assert [one["name"] for one in found.values()] == [
        "tiny-world-search",
        "tiny-world-reward",
        "tiny-world-rollout",
    ]


def test_ray_accepts_the_configuration():
    parsed = ServeDeploySchema.model_validate(serve_config(load("ray.max_rollout_replicas=4")))
    assert len(parsed.applications) == 3


def test_the_committed_configuration_is_that_of_the_example():
    committed = REPOSITORY / "deploy" / "ray" / "serve.yaml"
    assert yaml.safe_load(committed.read_text()) == serve_config(load())


def test_the_command_prints_the_configuration(capsys: pytest.CaptureFixture[str]):
    assert main(["ray", "apps", str(EXAMPLE), "--set", REDIS]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == serve_config(load())


def test_a_changed_key_of_a_tool_changes_its_application_alone():
    before, after = applications(), applications("tools.search.top_k=3")
    assert [name for name in before if before[name] != after[name]] == ["search"]
    assert "tools.search.top_k=3" in after["search"]["args"]["options"]


def test_what_the_bundle_or_the_node_decides_is_no_option_of_a_tool():
    options = applications("tools.search.port=8400")["search"]["args"]["options"]
    assert not [one for one in options if "corpus" in one or "port" in one]


def test_rollout_servers_are_scaled_between_two_bounds():
    (deployment,) = applications("ray.max_rollout_replicas=4")["rollout"]["deployments"]
    assert "num_replicas" not in deployment
    scaling = deployment["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 4)


PARALLEL = ("rollout.tensor_parallel_size=4", "ray.rollout_resources={CPU = 8, GPU = 4, fast = 1}")


def test_a_server_of_several_gpus_asks_for_a_placement_group_of_all_of_them():
    (deployment,) = applications(*PARALLEL)["rollout"]["deployments"]
    assert deployment["placement_group_bundles"] == [{"CPU": 8, "GPU": 4, "fast": 1}]
    assert deployment["placement_group_strategy"] == "STRICT_PACK"  # on one node
    assert deployment["ray_actor_options"]["num_gpus"] == 4
    for others in (applications()["rollout"], applications(*PARALLEL)["search"]):
        assert not [key for key in others["deployments"][0] if "placement" in key]


def test_ray_can_place_a_server_of_several_gpus():
    serve = {"ray.max_rollout_replicas=4", *PARALLEL}
    parsed = ServeDeploySchema.model_validate(serve_config(load(*serve)))
    (deployment,) = next(a for a in parsed.applications if "rollout" in a.name).deployments
    options = deployment.ray_actor_options
    assert isinstance(options, RayActorOptionsSchema)
    # What a replica asks for must fit into the first bundle of its group.
    placed = ReplicaConfig.create(
        Replica,
        ray_actor_options=options.model_dump(exclude_unset=True),
        placement_group_bundles=deployment.placement_group_bundles,
        placement_group_strategy=deployment.placement_group_strategy,
    )
    assert placed.resource_dict == {"CPU": 8, "GPU": 4, "fast": 1}


def test_a_redis_that_nodes_cannot_find_or_with_a_password_is_refused():
    with pytest.raises(ConfigError, match="AGENT_R1__REDIS__URL"):
        serve_config(load_config(EXAMPLE, environ={}).config)
    with pytest.raises(ConfigError, match="holds a password"):
        serve_config(load('redis.url="redis://:secret@redis:6379/0"'))


AGENT = ('agent.command=["python3", "/app/agent.py"]', 'agent.env={API_KEY = "secret"}')


def test_a_run_with_an_agent_has_applications_for_it_and_for_the_gateway():
    found = applications(*AGENT)
    assert list(found) == ["search", "agents", "gateway", "reward", "rollout"]
    ServeDeploySchema.model_validate(serve_config(load(*AGENT)))
    for name in ("agents", "gateway"):
        # Neither where they listen, nor what may be a secret.
        options = found[name]["args"]["options"]
        assert options == ['agent.command=["python3", "/app/agent.py"]']
        assert load(*options).agent == load(AGENT[0]).agent


def test_a_changed_key_of_an_agent_changes_its_service_and_the_gateway_alone():
    before, after = applications(*AGENT), applications(*AGENT, "agent.timeout_s=20")
    assert [name for name in before if before[name] != after[name]] == ["agents", "gateway"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ray.max_rollout_replicas=0", "greater than 0"),
        ("ray.rollout_replicas=3", "max_rollout_replicas"),
        ("ray.rank_resources={GPU = 2}", "engine.ranks"),
        ("ray.rollout_resources={GPU = 2}", "tensor_parallel_size"),
    ],
)
def test_a_table_that_cannot_be_is_refused(option: str, message: str):
    with pytest.raises(ConfigError, match=message):
        load("ray.max_rollout_replicas=2", option)


def test_resources_are_options_of_an_actor():
    assert actor_options({"CPU": 2, "GPU": 1, "fast": 1}) == {
        "num_cpus": 2,
        "num_gpus": 1,
        "resources": {"fast": 1},
    }


def test_a_local_cluster_has_room_for_the_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    # 2 ranks of 1, 3 servers of 1, one tool and one reward worker of 0.5 each.
    options = ("engine.ranks=2", "ray.max_rollout_replicas=3")
    assert cpus_of(load(*options)) == 6
    # Agents and gateway are placed as tools are.
    assert cpus_of(load(*options, *AGENT)) == 7


def test_ranks_get_the_options_of_the_job_and_weights_travel_over_http():
    arguments = learner_arguments(load(), "run.toml", ["learner.steps=3"])
    assert arguments[:5] == ["serve", "learner", "run.toml", "--set", "learner.steps=3"]
    assert 'learner.transport="http"' in arguments
    assert arguments[-1] == "--resume-if-begun"


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        ([Ended(0, "finished"), Ended(0)], 0),
        ([Ended(3, "finished_with_losses"), None], 3),
        ([Ended(0, "interrupted"), None], None),  # the node of rank 1 was shut down
        ([Ended(1, "finished"), Ended(1)], None),  # the summary is of an earlier start
        ([None, Ended(1)], None),
        ([Ended(1), Ended(2)], 2),  # such as too few GPUs for rank 1
        ([], None),
    ],
)
def test_a_learner_is_started_again_until_it_has_finished_or_cannot(
    ended: list[Ended | None], status: int | None
):
    assert final_status(ended) == status


def test_losses_are_too_many_only_within_the_window():
    losses = RankLosses(most=2, window_s=100)
    assert [losses.too_many(now) for now in (0, 50, 99)] == [False, False, True]
    spread = RankLosses(most=2, window_s=100)
    assert not any(spread.too_many(now) for now in (0, 60, 120, 180))
