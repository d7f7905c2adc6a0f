"""The examples of docs/data.md, read as they stand there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from agent_r1.learner.config import DataConfig, EvaluationConfig
from agent_r1_proto.tasks import Task

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def test_every_configuration_of_the_page_is_valid():
    tables = [tomllib.loads(block) for block in blocks("toml")]
    weights = [
        source.weight
        for table in tables
        for source in DataConfig.model_validate(table["data"]).train
    ]
    assert weights == [1.0, 1.0, 0.5, 1.0]
    sets = EvaluationConfig.model_validate(tables[0]["evaluation"]).sets
    assert sets["test"].max_items == 200


def test_the_task_of_the_page_is_one_and_its_table_has_every_field():
    (line,) = blocks("json")
    assert Task.model_validate_json(line).payload == {"answers": ["Jane Austen"]}
    assert set(re.findall(r"^\| `(\w+)` \|", DOCUMENT, re.M)) == set(Task.model_fields)
