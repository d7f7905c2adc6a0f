"""A folder with everything a configuration can name, for tests of the configuration and the CLI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent_r1.config.findings import Findings
from agent_r1.config.run import Config
from agent_r1.learner.run_spec import RunSpec
from agent_r1.tools.search.config import SearchConfig

TINY_BASE = Path(__file__).resolve().parents[2] / "examples" / "tiny_world" / "base"

RUN_TOML = """
[run]
id = "demo"
dir = "runs/demo"

[model]
path = "model"
max_context = 512

[data]
train = ["train.jsonl"]

[env]
max_tokens_per_turn = 64

[tools.search]
corpus = "corpus.jsonl"
top_k = 2

[learner]
steps = 3
groups_per_batch = 2
group_size = 4

[evaluation.sets]
held_out = "held_out.jsonl"
"""


def load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out of every check what takes seconds: loading code and tokenizer elsewhere."""
    monkeypatch.setattr("agent_r1.config.checks.load_everything", lambda *_, **__: Findings())


def task_line(name: str, **changes: object) -> str:
    """Return one line of a task file."""
    task = {"id": name, "prompt": "Where?", "payload": {"answers": ["there"]}}
    return json.dumps({**task, **changes}) + "\n"


def write_scene(folder: Path, toml: str = RUN_TOML) -> Path:
    """Write a model directory, data, a corpus and `run.toml`; return the latter."""
    model = folder / "model"
    model.mkdir(parents=True)
    for file in TINY_BASE.iterdir():
        (model / file.name).symlink_to(file)
    (folder / "train.jsonl").write_text(task_line("a") + task_line("b"))
    (folder / "held_out.jsonl").write_text(task_line("c"))
    passage = {"id": "1", "title": "There", "text": "It is there."}
    (folder / "corpus.jsonl").write_text(json.dumps(passage) + "\n")
    config = folder / "run.toml"
    config.write_text(toml)
    return config


def run_spec(config: Config, *, resume: bool = False) -> RunSpec:
    """Return what the learner of a configuration starts from."""
    return RunSpec(
        run=config.run,
        model=config.model,
        redis=config.redis,
        prompts=config.prompt_order(),
        learner=config.learner,
        engine=config.engine,
        evaluation=config.evaluation,
        resolved_config={},
        resume=resume,
    )


def search_of(config: Config, name: str = "search") -> SearchConfig:
    """Return the table of a search tool."""
    table = config.tools[name]
    assert isinstance(table, SearchConfig)
    return table
