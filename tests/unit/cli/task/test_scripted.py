"""Scripted policies, played through the tools of a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.task.scripted import play_all
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import load_config
from agent_r1_proto.tasks import Task
from tests.support.config_scene import RUN_TOML, load_nothing, write_scene

PLAYED = """
from agent_r1 import Tool


class Once(Tool):
    name = "search"
    description = "Cannot be started a second time, as a pool of sandboxes."
    parameters = {"type": "object", "properties": {}}
    state = "new"

    async def start(self):
        assert self.state == "new"
        self.state = "started"

    async def stop(self):
        self.state = "stopped"

    async def call(self, arguments, context):
        return self.state


class Repeats:
    def __init__(self, task):
        pass

    def turn(self, observations):
        if not observations:
            return '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
        return f"<answer>{observations[0]}</answer>"
"""
SEARCH = 'corpus = "corpus.jsonl"\ntop_k = 2'
TOOL = 'type = "played_policies:Once"'
TABLES = """
[diagnose]
oracle = { type = "played_policies:Repeats" }
"""


def test_all_policies_and_sets_share_one_start_of_the_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    load_nothing(monkeypatch)
    toml = RUN_TOML.replace("[run]", '[run]\nplugins = ["."]').replace(SEARCH, TOOL) + TABLES
    file = write_scene(tmp_path / "example", toml)
    (file.parent / "played_policies.py").write_text(PLAYED)
    config = load_config(file).config
    use_plugins(config)
    oracle = config.diagnose.oracle
    assert oracle is not None
    task = Task(id="a", prompt="Go.", payload={"answers": ["started"]})
    scores = play_all(config, {"one": oracle, "other": oracle}, {"a": [task], "b": [task, task]})
    of_a_policy = {"a": [1.0], "b": [1.0, 1.0]}
    assert scores == {"one": of_a_policy, "other": of_a_policy}
