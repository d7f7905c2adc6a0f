"""The configuration of a resumed run: what it may be given again, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.training.train import load_resumed
from agent_r1.config.run import ConfigError, load_config, write_config
from tests.support.config_scene import write_scene


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    loaded = load_config(write_scene(tmp_path / "scene"), [f"run.dir={folder}"], {})
    write_config(loaded.config, folder / "config.json")
    return folder


def test_a_run_goes_on_with_its_own_configuration(run: Path):
    config = load_resumed(run, []).config
    assert config.learner.group_size == 4
    assert config.run.dir == run


@pytest.mark.parametrize(
    ("option", "read", "value"),
    [
        ("learner.steps=9", lambda c: c.learner.steps, 9),
        ("run.log_level=DEBUG", lambda c: c.run.log_level, "DEBUG"),
        ("evaluation.every=2", lambda c: c.evaluation.every, 2),
        ("placement.rollout_replicas=2", lambda c: c.placement.rollout_replicas, 2),
        (
            "engine.max_tokens_per_microbatch=512",
            lambda c: c.engine.max_tokens_per_microbatch,
            512,
        ),
        ("tools.search.port=8010", lambda c: c.tools["search"].port, 8010),
    ],
)
def test_what_may_change_does(run: Path, option: str, read, value):
    assert read(load_resumed(run, [option]).config) == value


def test_a_value_that_is_given_again_unchanged_is_no_change(run: Path):
    assert load_resumed(run, ["learner.group_size=4"]).config.learner.group_size == 4


def test_what_must_not_change_is_refused_key_by_key_with_both_values(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_R1__ENV__MAX_TURNS", "9")
    with pytest.raises(ConfigError) as caught:
        load_resumed(run, ["learner.group_size=8", "learner.steps=9", "tools.search.top_k=7"])
    assert str(caught.value).splitlines()[1:-1] == [
        "  env.max_turns: 5 in the run, 9 now [variable AGENT_R1__ENV__MAX_TURNS]",
        "  learner.group_size: 4 in the run, 8 now [--set learner.group_size]",
        "  tools.search.top_k: 2 in the run, 7 now [--set tools.search.top_k]",
    ]


def test_a_secret_that_the_environment_fills_in_again_is_no_change(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
):
    url, key = "rediss://me:hunter2@h:1/0", "env.chat_template_kwargs.api_key"
    given = load_config(run / "config.json", [f"{key}=abc123"], {"AGENT_R1__REDIS__URL": url})
    secrets = write_config(given.config, run / "config.json")
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    assert load_resumed(run, []).config.redis.url == url
