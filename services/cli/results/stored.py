"""Stored trajectories of a run folder: which files there are, and their records.

The learner's `trajectory_log.py` writes them; `agent-r1 show` and `agent-r1 rescore` read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.config.sources import ConfigError
from agent_r1.learner.checkpoints.checkpoint import STEP_NAME
from agent_r1.runtime.files.json_lines import split_lines
from agent_r1.runtime.files.run_folder import TRAJECTORIES_DIR

EVAL_FILE = re.compile(r"^eval_(.+)$")


def step_files(run_folder: Path) -> dict[int, Path]:
    """Return the files of trained trajectories by learner step, in its order.

    Raises:
        ConfigError: the folder has no trajectories.
    """
    found = _files(run_folder, STEP_NAME)
    return {step: found[number] for step, number in sorted((int(n), n) for n in found)}


def eval_files(run_folder: Path) -> dict[str, Path]:
    """Return the files of stored evaluations by name.

    Raises:
        ConfigError: the folder has no trajectories.
    """
    return _files(run_folder, EVAL_FILE)


def _files(run_folder: Path, pattern: re.Pattern[str]) -> dict[str, Path]:
    if not (run_folder / TRAJECTORIES_DIR).is_dir():
        raise ConfigError(
            f"{run_folder} has no folder {TRAJECTORIES_DIR}; name a run folder, such as runs/demo"
        )
    found = {path.stem: path for path in (run_folder / TRAJECTORIES_DIR).glob("*.jsonl")}
    return {m[1]: path for stem, path in sorted(found.items()) if (m := pattern.match(stem))}


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of one file.

    Raises:
        ConfigError: a line is not JSON; file and line are named.
    """
    for number, line in enumerate(split_lines(path.read_text(encoding="utf-8")), start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as exc:
            raise ConfigError(f"{path}:{number}: not a JSON line: {exc.msg}") from exc
