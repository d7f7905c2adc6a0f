"""Servers of scorers on one machine: which are started, how, and what the reward service hears."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.launch.local_scorers import describe, scorer_servers
from agent_r1.launch.service import ServiceSpec
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from tests.support.config_scene import write_scene

COMPONENTS = {"exact_match": 1.0, "critic": 0.0, "reward_model": 0.0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    reward = RewardConfig.model_validate(
        {
            "components": COMPONENTS,
            "servers": {
                "critic": {"path": "critics/one", "model": "critic-1"},
                "reward_model": {"path": "verifier", "model": "verifier-1"},
            },
        }
    )
    config = load_config(write_scene(tmp_path / "example"), []).config
    return config.model_copy(update={"reward": reward})


def test_a_model_with_a_folder_and_no_server_is_served_and_the_reward_service_told(config: Config):
    model, critic = scorer_servers(config, 0)
    assert model.variable == ("AGENT_R1__REWARD__SERVERS__REWARD_MODEL__URL", f"{model.url}/v1")
    # Its route, /classify, is no part of OpenAI's API.
    assert critic.variable == ("AGENT_R1__REWARD__SERVERS__CRITIC__URL", critic.url)
    spec = describe(
        critic, config, lambda name, command, **more: ServiceSpec(name, command, **more)
    )
    assert (spec.name, spec.announce_dir) == ("reward-critic", None)
    *words, last = spec.command[4:]
    options = dict(zip(words[::2], words[1::2], strict=True))
    # Compiling takes a minute and a C++ compiler; the second is about an eager engine as well.
    assert last == "--enforce-eager"
    assert spec.environment["TORCHDYNAMO_DISABLE"] == "1"
    # One process for the engine, on whichever core is free.
    assert options["--distributed-executor-backend"].endswith(".UniProcExecutor")
    assert spec.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert spec.environment["OMP_NUM_THREADS"] == str(config.rollout.threads)
    assert options["--model"] == "critics/one"
    assert options["--served-model-name"] == "critic-1"
    assert options["--max-model-len"] == str(config.model.max_context)
    assert critic.url == f"http://127.0.0.1:{options['--port']}"


def test_a_named_server_is_not_started(config: Config):
    values = config.reward.model_dump()
    values["servers"]["critic"]["url"] = "http://elsewhere:1"
    reward = RewardConfig.model_validate(values)
    servers = scorer_servers(config.model_copy(update={"reward": reward}), 0)
    assert [server.component for server in servers] == ["reward_model"]


def test_a_machine_with_gpus_is_told_to_start_its_own(config: Config):
    with pytest.raises(
        ConfigError,
        match=r"reward.servers.critic.path .*this one has 2.*set reward.servers.critic.url",
    ):
        scorer_servers(config, 2)


def test_a_reward_service_without_a_launcher_needs_the_server(config: Config):
    with pytest.raises(
        ValueError,
        match=r"reward_model\.url is not set, and reward\.servers\.reward_model\.path",
    ):
        Scorer(config.reward)
