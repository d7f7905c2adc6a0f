"""Keys of version 1: read in what a run has written, and named to users who still write them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from agent_r1.config.run import ConfigError, load_config, write_config
from agent_r1.config.versions import put, translate_dotted
from agent_r1.rollout.envs import load_env_class
from agent_r1.runtime.user_code import MOVED_MODULES, new_code_name
from agent_r1.text.tool_formats import load_tool_format
from agent_r1.tools.loading import import_tool_class
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


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("0", r"must be 1 or 2; correct it or leave it out"),
        ("true", r"must be 1 or 2; correct it or leave it out"),
        ('"two"', r"must be 1 or 2; correct it or leave it out"),
        ("3", r"must be <= 2, the newest that this release of agent-r1 reads; upgrade it"),
    ],
)
def test_a_version_that_is_not_read_is_refused_in_every_source(
    tmp_path: Path, version: str, remedy: str
):
    file = write_scene(tmp_path / "example")
    variable = {"AGENT_R1__CONFIG_VERSION": version}
    for load in (
        lambda: load_config(file, [f"config_version={version}"], {}),
        lambda: load_config(file, [], variable),
        lambda: load_config(file_of_version(file, version), [], {}),
    ):
        with pytest.raises(ConfigError, match=rf"^config_version \(.*\) {remedy}$"):
            load()


def file_of_version(file: Path, version: str) -> Path:
    text = file.read_text()
    named = file.with_name("versioned.toml")
    named.write_text(f"config_version = {version}\n{text}")
    return named


@pytest.mark.parametrize("version", ["1", "2"])
def test_versions_that_are_read_may_be_named_in_every_source(tmp_path: Path, version: str):
    file = write_scene(tmp_path / "example")
    for loaded in (
        load_config(file, [f"config_version={version}"], {}),
        load_config(file, [], {"AGENT_R1__CONFIG_VERSION": version}),
        load_config(file_of_version(file, version), [], {}),
    ):
        assert loaded.config.config_version == 2


MOVED = {
    "env.type": ("agent_r1.rollout.envs.tool_env:ToolEnv", "agent_r1.rollout.envs.base:ToolEnv"),
    "env.tool_format": (
        "agent_r1.rollout.tool_formats.react:ReactFormat",
        "agent_r1.text.tool_formats.react:ReactFormat",
    ),
    "tools.search.type": (
        "agent_r1.tools.python_exec:PythonExec",
        "agent_r1.tools.sandbox.python_exec:PythonExec",
    ),
}


def test_built_in_classes_that_have_moved_are_found_where_an_older_run_names_them(tmp_path: Path):
    file = tmp_path / "config.json"
    scene = write_scene(tmp_path / "example")
    write_config(load_config(scene, [], {}).config, file)
    values = json.loads(file.read_text())
    for key, (old, _) in MOVED.items():
        put(values, tuple(key.split(".")), old)
    values["tools"]["search"] = {"type": MOVED["tools.search.type"][0]}
    file.write_text(json.dumps(values | {"config_version": 1}))
    config = load_config(file, [], {}).config
    found = {
        "env.type": config.env.type,
        "env.tool_format": config.env.tool_format,
        "tools.search.type": config.tools["search"].type,
    }
    assert found == {key: new for key, (_, new) in MOVED.items()}
    olds = {key: old for key, (old, _) in MOVED.items()}
    assert translate_dotted(olds) == found


def test_elsewhere_their_old_names_are_refused_with_the_new_ones():
    for load, key in (
        (load_env_class, "env.type"),
        (load_tool_format, "env.tool_format"),
        (lambda name: import_tool_class(name, "type"), "tools.search.type"),
    ):
        old, new = (name.partition(":")[0] for name in MOVED[key])
        with pytest.raises(ValueError, match="cannot be imported") as caught:
            load(MOVED[key][0])
        # A package that is gone is missed before its modules.
        assert f"is now {new.removesuffix('.react')}" in str(caught.value), old
        assert load(MOVED[key][1]) is not None


@pytest.mark.parametrize(("old", "new"), sorted(MOVED_MODULES.items()))
def test_every_module_that_has_moved_is_there(old: str, new: str):
    assert importlib.import_module(new).__name__ == new
    assert new_code_name(f"{old}:Name") == f"{new}:Name"


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
