"""The runs in a folder: their names, configurations and states, as the pages list them.

`agent-r1 ui` names the folder; each run is a folder of it with a `config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_r1.config.live_run import run_config
from agent_r1.config.run import Config
from agent_r1.config.sources import flat_leaves
from agent_r1.console.run_state import RunState, read_run_state
from agent_r1.launch.local_view import total_steps
from agent_r1.learner.outcome import read_summary
from agent_r1.runs.remote import Mirror
from agent_r1.runtime.files.run_folder import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
)
from agent_r1.runtime.files.state import last_object, read_object
from agent_r1.runtime.unicode import repair_text

KEPT_CONFIGS = 256
NOT_SET = "not set"
DAMAGE = (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""Errors of reading a file whose values have other types than this program writes."""


class UnknownRunError(ValueError):
    """A name that no run of the folder has."""


@dataclass(frozen=True)
class Run:
    """One run, as the pages show it."""

    name: str
    """Name of its folder."""
    folder: Path
    config: Config | None
    """None where its file cannot be read."""
    problem: str
    """What is wrong with its files; "" where nothing is."""
    state: RunState
    total_steps: int
    """0 where it is not known."""

    @property
    def step(self) -> str:
        """Last step of all."""
        number = self.state.metrics.get("step")
        if number is None:
            return "-"
        return f"{number} of {self.total_steps}" if self.total_steps else str(number)

    @property
    def values(self) -> list[tuple[str, str]]:
        """What is shown of the last step, as (name, value)."""
        return [] if self.config is None else self.state.values(self.config, self.total_steps)

    @property
    def rate(self) -> str:
        """Sampled tokens a second, and seconds a step."""
        tokens = self.state.metrics.get("throughput/tokens_per_s")
        seconds = self.state.metrics.get("time/step_s")
        if tokens is None or seconds is None:
            return "-"
        return f"{tokens:,.0f} tokens/s, {seconds:.1f} s a step"

    @property
    def reward(self) -> float | None:
        """Mean reward of the last step."""
        return self.state.metrics.get("reward/mean")

    @property
    def score(self) -> float | None:
        """Mean of `evaluation.score` in the last evaluation, over the sets that are trained on."""
        return last_object(self.folder / EVALUATIONS_FILE).get("score")


class Runs:
    """The runs of a folder, or one run where the folder is that of a run.

    Args:
        folder: is read again and again.
        mirror: fills the folder; None where the runs write it themselves.
    """

    def __init__(self, folder: Path, mirror: Mirror | None = None) -> None:
        folder = folder.resolve()
        self.mirror = mirror
        self._only = folder.name if (folder / CONFIG_FILE).is_file() else None
        self.root = folder.parent if self._only is not None else folder

    def names(self) -> list[str]:
        """Return the names of the runs, the one that was written to last first."""
        if self._only is not None:
            return [self._only]
        try:
            found = [path for path in self.root.iterdir() if (path / CONFIG_FILE).is_file()]
        except OSError:
            return []
        names = [path.name for path in sorted(found, key=_written_at, reverse=True)]
        return [name for name in names if repair_text(name) == name]  # the others have no URL

    def folder(self, name: str) -> Path:
        """Return the folder of a run.

        Raises:
            UnknownRunError: there is no such run.
        """
        known = name == self._only if self._only is not None else _is_a_name(name)
        if not known or not (self.root / name / CONFIG_FILE).is_file():
            raise UnknownRunError(f"there is no run {name!r} in {self.root}")
        return self.root / name

    def run(self, name: str) -> Run:
        """Read one run.

        Raises:
            UnknownRunError: there is no such run.
        """
        folder = self.folder(name)
        try:
            status = (folder / CONFIG_FILE).stat()
            config, total, problem = _configuration(folder, status.st_mtime_ns, status.st_size)
            at_work = None if self.mirror is None else self.mirror.at_work(name)
            problem = problem or _problem_of_summary(folder)
            return Run(name, folder, config, problem, read_run_state(folder, at_work), total)
        except DAMAGE as exc:  # of this run alone: the pages of all runs must not end with it
            problem = f"a file of {folder} cannot be read: {exc!r}"
            return Run(name, folder, None, problem, RunState("damaged", "", {}, None, ()), 0)

    def some(self, names: Iterable[str]) -> list[Run]:
        """Read several runs."""
        return [self.run(name) for name in names]


def _problem_of_summary(folder: Path) -> str:
    try:
        read_summary(folder)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as exc:
        return f"{folder / SUMMARY_FILE} cannot be read, so how it ended is not known: {exc}"
    return ""


def _is_a_name(name: str) -> bool:
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def _written_at(folder: Path) -> float:
    for name in (METRICS_FILE, CONFIG_FILE):
        try:
            return (folder / name).stat().st_mtime
        except OSError:
            continue
    return 0.0


@lru_cache(KEPT_CONFIGS)
def _configuration(folder: Path, modified_ns: int, size: int) -> tuple[Config | None, int, str]:
    """Return configuration, total steps and problem; it takes milliseconds, so it is kept."""
    try:
        config = run_config(folder)
    except ValueError as exc:
        return None, 0, str(exc)
    try:
        return config, total_steps(config), ""
    except (OSError, ValueError):  # the prompts are elsewhere
        return config, 0, ""


def configuration_differences(runs: Iterable[Run]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, each with the value of every run."""
    leaves = [dict(flat_leaves(_written_config(run.folder))) for run in runs]
    keys = dict.fromkeys(key for one in leaves for key in one)
    rows = [(key, [_shown(one, key) for one in leaves]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _written_config(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / CONFIG_FILE)
    except (OSError, ValueError):
        return {}


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    if key not in leaves:
        return NOT_SET
    value = leaves[key]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
