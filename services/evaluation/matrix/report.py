"""Writes the results of a matrix: cells --> `{results}.md`, `.json` and one picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.evaluation.answers import write_json
from agent_r1.evaluation.matrix.cells import Cell
from agent_r1.evaluation.matrix.config import SET_NAMES, SetName
from agent_r1.evaluation.matrix.data_sets import DATA_SETS, FAMILIES
from agent_r1.evaluation.matrix.picture import Point, trade_off
from agent_r1.evaluation.statistics import LEVEL, RESAMPLES, SEED
from agent_r1_service.files.writing import write_atomically

NOT_RUN = "not run"
EXTRA_TITLES = {"f1": "F1", "tests_passed": "tests passed"}


@dataclass(frozen=True)
class Place:
    """One cell of the matrix."""

    model: str
    set: SetName
    method: str
    decode: str

    @property
    def name(self) -> str:
        """Name the cell for people and in files."""
        return f"{self.set}-{self.model}-{self.method}-{self.decode}"


@dataclass(frozen=True)
class Results:
    """Everything a report says."""

    name: str
    cells: Mapping[Place, Cell | str]
    """What was measured, or why there is nothing."""
    models: Mapping[str, str]
    """What each model is, as the matrix file names it."""
    command: str
    """The command that makes all of it again."""
    versions: Mapping[str, str]


def write_report(results: Results, out: Path) -> list[Path]:
    """Write the report; `out` names its files without suffix.

    Returns:
        The files.

    Raises:
        ValueError: they cannot be written.
    """
    files = [out.with_name(f"{out.name}{suffix}") for suffix in (".md", ".json")]
    picture = out.with_name(f"{out.name}.svg")
    points = points_of(results.cells)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if points:
            write_atomically(picture, trade_off(points))
            files.append(picture)
        found = record(results, picture.name if points else None)
        write_atomically(files[0], report(found))
        write_json(files[1], found)
    except OSError as exc:
        raise ValueError(
            f"the results ({out}) cannot be written: {exc.strerror}; name a --out"
        ) from exc
    return files


def record(results: Results, picture: str | None) -> dict[str, Any]:
    """Return what the JSON file holds: all that the report says."""
    return {
        "name": results.name,
        "cells": [
            {
                **vars(place),
                "missing": cell if isinstance(cell, str) else "",
                **({} if isinstance(cell, str) else cell.model_dump(mode="json")),
            }
            for place, cell in results.cells.items()
        ],
        "interval": {
            "method": "percentile bootstrap over questions",
            "level": LEVEL,
            "resamples": RESAMPLES,
            "seed": SEED,
        },
        "picture": picture,
        "models": dict(results.models),
        "command": results.command,
        "versions": dict(results.versions),
    }


def report(found: Mapping[str, Any]) -> str:
    """Return the text of the Markdown file, from what `record` returned or the JSON file holds."""
    bootstrap = found["interval"]
    blocks = [
        f"# Results: {found['name']}",
        "Written by `agent-r1 matrix`. In brackets is a "
        f"{bootstrap['level'] * 100:.0f} % interval ({bootstrap['method']}, "
        f"{bootstrap['resamples']:,} resamples). Tokens, calls and seconds are means over "
        "questions. Calls are those that tools answered. Tokens and calls count those of branches "
        "that were not chosen. Seconds are those of a question beside the others in flight, so "
        "they depend on the machine and its load.",
    ]
    if found["picture"]:
        shown = "Score against tokens and seconds a question, mean over the data sets of a kind"
        blocks.append(f"![{shown}]({found['picture']})")
    for name in SET_NAMES:
        members = [cell for cell in found["cells"] if cell["set"] == name]
        blocks += [f"## {DATA_SETS[name].title}", _table(name, members)] if members else []
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    models = "; ".join(f"`{name}` is {policy}" for name, policy in found["models"].items())
    blocks += [
        "## How it was made",
        f"Models: {models}.",
        f"```sh\n{found['command']}\n```",
        f"{versions}.",
    ]
    return "\n\n".join(blocks) + "\n"


def _table(name: SetName, members: Sequence[Mapping[str, Any]]) -> str:
    reasons = {cell["missing"] for cell in members}
    if len(reasons) == 1 and "" not in reasons:
        return f"{reasons.pop()}."
    family = DATA_SETS[name].family
    extra = [] if family.extra is None else [EXTRA_TITLES[family.extra]]
    columns = ["model", "method", "decode", family.measure, *extra]
    columns += ["tokens", "calls", "seconds", "questions"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for cell in members:
        shown = [cell["model"], cell["method"], cell["decode"]]
        if cell["missing"]:
            lines.append(_row([*shown, cell["missing"], *[""] * (len(columns) - 4)]))
            continue
        failed = f" ({cell['failed']} failed)" if cell["failed"] else ""
        shown += [_interval(cell["score"]), *[_interval(cell["extra"]) for _ in extra]]
        shown += [f"{cell['sampled_tokens'][0]:.0f}", f"{cell['calls'][0]:.1f}"]
        shown += [f"{cell['seconds'][0]:.2f}", f"{cell['n']}{failed}"]
        lines.append(_row(shown))
    return "\n".join(lines)


def points_of(cells: Mapping[Place, Cell | str]) -> list[Point]:
    """Return the points of the picture: means over the sets of a family.

    A way to answer stands in it only if it has every set that another way has, because means over
    different sets cannot be compared.
    """
    points: list[Point] = []
    for family in FAMILIES:
        ways: dict[tuple[str, str, str], dict[str, Cell]] = {}
        for place, cell in cells.items():
            if DATA_SETS[place.set].family is family and isinstance(cell, Cell):
                way = (place.model, place.method, place.decode)
                ways.setdefault(way, {})[place.set] = cell
        sets = {name for of_way in ways.values() for name in of_way}
        for (model, method, decode), of_way in ways.items():
            if of_way.keys() == sets:
                found = of_way.values()
                points.append(
                    Point(
                        family=family.title,
                        colour=method,
                        shape=f"{model}, {decode}",
                        score=fmean(cell.score[0] for cell in found),
                        tokens=fmean(cell.sampled_tokens[0] for cell in found),
                        seconds=fmean(cell.seconds[0] for cell in found),
                    )
                )
    return points


def _interval(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.3f} [{numbers[1]:.3f}, {numbers[2]:.3f}]"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
