"""`agent-r1 chat`: which task is asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.cli.evaluation.chat import named_task
from agent_r1.config.run import load_config
from agent_r1.config.sources import ConfigError
from tests.support.config_scene import write_scene


def test_a_task_of_a_file_is_asked_with_its_payload(tmp_path: Path):
    config = load_config(write_scene(tmp_path / "example"), [], {}).config
    file = tmp_path / "tasks: mine.jsonl"
    rows = [{"id": f"level:{i}", "prompt": "Play.", "payload": {"goal": i}} for i in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Both the name of the file and the id may hold colons.
    assert named_task(config, f"{file}:level:2").payload == {"goal": 2}
    with pytest.raises(ConfigError, match="has no task 'level:9'; did you mean 'level:"):
        named_task(config, f"{file}:level:9")
    for wrong in ("nowhere.jsonl:x", str(tmp_path / "tasks"), ""):
        with pytest.raises(ConfigError, match="must be FILE:ID"):
            named_task(config, wrong)


def test_a_file_of_the_configuration_is_read_with_its_columns(tmp_path: Path):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"key": "a", "question": "Who?", "level": 3}) + "\n")
    columns = '{id = "key", prompt = "question", "payload.level" = "level"}'
    options = [f'evaluation.sets={{mine = {{source = "{file}", columns = {columns}}}}}']
    config = load_config(write_scene(tmp_path / "example"), options, {}).config
    task = named_task(config, f"{file}:a")
    assert (task.prompt, task.payload) == ("Who?", {"level": 3})
