"""Keys of version 1: read in what a run has written, and named to users who still write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.config.run import ConfigError, load_config, write_config
from agent_r1.config.versions import translate_dotted
from tests.support.config_scene import write_scene


def test_what_a_run_of_version_1_has_written_is_read(tmp_path: Path):
    file = tmp_path / "config.json"
    write_config(load_config(write_scene(tmp_path / "example"), [], {}).config, file)
    values = json.loads(file.read_text())
    judge = {"url": "http://h/v1", "model": "m", "prompt": "p"}
    del values["reward"]["servers"]
    values["reward"] |= {"components": {"judge": 1.0}, "judge": judge, "model": None}
    values["learner"] |= values.pop("engine") | {"lr": 0.25}
    values["sft"] = {"data": ["d.jsonl"], "output": "out", "ranks": 2, "lr": 0.5}
    file.write_text(json.dumps(values | {"config_version": 1}))

    config = load_config(file, [], {}).config

    assert config.config_version == 2
    assert list(config.reward.servers.named()) == ["judge"]
    assert config.reward.servers.named()["judge"].model == "m"
    assert config.sft is not None
    assert (config.engine.lr, config.sft.engine.lr, config.sft.engine.ranks) == (0.25, 0.5, 2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("learner.ranks", "learner.ranks (--set learner.ranks) is called engine.ranks"),
        ("sft.lr", "sft.lr (--set sft.lr) is called sft.engine.lr"),
        (
            "reward.judge.url",
            "reward.judge (--set reward.judge.url) is called reward.servers.judge",
        ),
        ("reward.model", "reward.model (--set reward.model) is called reward.servers.reward_model"),
    ],
)
def test_users_are_told_the_new_name_of_a_key(tmp_path: Path, old: str, new: str):
    with pytest.raises(ConfigError) as caught:
        load_config(write_scene(tmp_path / "example"), [f"{old}=1"], {})
    assert f"{new} now" in str(caught.value)


def test_supervised_training_takes_what_it_does_not_set_itself_from_the_engine(tmp_path: Path):
    file = write_scene(tmp_path / "example")
    options = ['sft={data = ["d.jsonl"], output = "out"}', "sft.engine.ranks=2"]
    loaded = load_config(file, [*options, "engine.zero_stage=1", "engine.ranks=4"], {})
    sft = loaded.config.sft
    assert sft is not None
    assert (sft.engine.zero_stage, sft.engine.ranks, loaded.config.engine.ranks) == (1, 2, 4)
    assert loaded.origin(("sft", "engine", "zero_stage")) == "--set engine.zero_stage"
    assert loaded.origin(("sft", "engine", "ranks")) == "--set sft.engine.ranks"
    # Of a rate that neither table sets, the two defaults differ.
    assert (sft.engine.lr, loaded.config.engine.lr) == (1e-5, 1e-6)


def test_settings_by_dotted_key_are_translated_and_others_kept():
    found = translate_dotted({"reward.critic.model": "c", "reward.rule": "paper", "learner": {}})
    assert found == {"reward.servers.critic.model": "c", "reward.rule": "paper", "learner": {}}
