"""Run folders for tests of the console: configuration, steps, evaluations, failures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from agent_r1.config.run import load_config, write_config

HOSTILE = (
    '<img src=x onerror="alert(1)">',
    "</script><script>alert(1)</script>",
    "quote\"'&amp;%41%2F",
    "控制台 测试",
    "\u202egnp.elif \u05e9\u05dc\u05d5\u05dd",
    "line\nend\ttab\x1b[31mred",
    "carriage\rreturn",
)
"""Names that a page must show, link and choose as they are."""


def write_run(scene: Path, folder: Path, *options: str) -> Path:
    """Write a run folder with the configuration of `config_scene.write_scene`; return it."""
    folder.mkdir(parents=True)
    named = [f"run.dir={json.dumps(str(folder))}", *options]
    write_config(load_config(scene, named).config, folder / "config.json")
    return folder


def step_line(step: int, **more: float) -> dict[str, float]:
    """Return a step with the metrics that pages show; step s takes 2 s and samples 200 tokens."""
    values = {"reward/mean": step / 100, "time/step_s": 2.0, "throughput/tokens_per_s": 100.0}
    return {"step": step, "time/at": 1000.0 + step, **values, "push/servers": 1.0, **more}


def append_lines(file: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Append JSON lines to a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def answer_line(number: int, reward: float, of_set: str = "near") -> dict[str, object]:
    """Return a line of `evaluation_after.jsonl`."""
    scores = {"reward": reward, "em": reward, "f1": None, "components": {"exact_match": reward}}
    return {"id": f"q{number}", "set": of_set, "type": None, "failed": False, "calls": {}} | scores
