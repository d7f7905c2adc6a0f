"""The report of a matrix: cells --> numbers, `matrix.md.jinja`, and up to two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.evaluation.experiments.cell import MatrixCell
from agent_r1.evaluation.experiments.config import MatrixFile
from agent_r1.evaluation.experiments.contrasts import compare
from agent_r1.evaluation.experiments.data_sets import FAMILIES, OWN, Family, family_of, title_of
from agent_r1.evaluation.experiments.drawing import Panel, Picture, Series
from agent_r1.evaluation.experiments.report import render, write_report
from agent_r1.evaluation.statistics import interval_record

COSTS = {"tokens a question": "sampled_tokens", "seconds a question": "seconds"}
COMPARISON_COLUMNS = [
    *("model", "greedy", "first", "second", "difference"),
    *("answers chosen from", "tokens of first", "of second", "questions"),
]
SHARES = {"scored": "scored_share", "searched": "searched_share"}
"""Columns with shares of questions, and what cells call them."""
EXTRA_TITLES = {"f1": "F1", "tests_passed": "tests passed"}
PICTURE, CURVE = "", "_curves"
"""Ends of the pictures' file names, behind the name of the results."""


@dataclass(frozen=True)
class CellKey:
    """One cell of the matrix."""

    model: str
    set: str
    method: str
    decode: str

    @property
    def name(self) -> str:
        """Name the cell for people and in files."""
        return f"{self.set}-{self.model}-{self.method}-{self.decode}"


Cells = Mapping[CellKey, MatrixCell | str]
"""Cells that were measured, or the reason why there is nothing."""


@dataclass(frozen=True)
class MatrixResults:
    """Everything the report of a matrix says."""

    name: str
    matrix: MatrixFile
    cells: Cells
    command: str
    """The command that makes all of it again."""
    versions: Mapping[str, str]

    def write(self, out: Path) -> list[Path]:
        """Write the report; `out` names its files without suffix.

        Raises:
            ValueError: they cannot be written.
        """
        return write_report(out, self.record, report, self.pictures())

    def pictures(self) -> dict[str, Picture]:
        """Return score against costs of public data sets, and against tokens of the user's."""
        found: dict[str, Picture] = {}
        if rows := trade_off(self.cells):
            found[PICTURE] = "Score against what it costs", rows
        if panels := self._curves():
            found[CURVE] = "Score over sampled tokens", [panels]
        return found

    def record(self, pictures: Mapping[str, str]) -> dict[str, Any]:
        """Return what the JSON file holds: all that the report says.

        Args:
            pictures: names of their files, by what distinguishes them.
        """
        return {
            "name": self.name,
            "cells": [
                {**vars(place), "missing": cell}
                if isinstance(cell, str)
                else {**vars(place), "missing": "", **cell.model_dump(mode="json")}
                for place, cell in self.cells.items()
            ],
            "interval": interval_record("percentile bootstrap over questions"),
            "comparisons": [
                compare(entry, name, finished(self.cells, name))
                for entry in self.matrix.comparisons
                for name in entry.sets
            ],
            "remarks": self.matrix.remarks.strip(),
            "picture": pictures.get(PICTURE),
            "curve": pictures.get(CURVE),
            "models": {entry.name: entry.policy for entry in self.matrix.models},
            "command": self.command,
            "versions": dict(self.versions),
        }

    def _curves(self) -> list[Panel]:
        """Return a panel for each task file: means over the models, where all of them are there.

        Lines join ways to decode that differ in what they may cost alone.
        """
        series = {entry.label: entry.series for entry in self.matrix.decode}
        colours = list(dict.fromkeys(series.values()))
        panels: list[Panel] = []
        for name in dict.fromkeys(p.set for p in self.cells if family_of(p.set) is OWN):
            by_model = list(finished(self.cells, name).values())
            points: dict[str, list[tuple[float, float]]] = {}
            for way, of in series.items():
                cells = [ways[way] for ways in by_model if way in ways]
                if cells and len(cells) == len(by_model):
                    tokens = fmean(cell.sampled_tokens[0] for cell in cells)
                    points.setdefault(of, []).append((tokens, fmean(c.score[0] for c in cells)))
            if points:
                lines = [
                    Series(of, sorted(them), colours.index(of), marker=0)
                    for of, them in points.items()
                ]
                panels.append(Panel("tokens a question", lines, "score", name, costs=True))
        return panels


def trade_off(cells: Cells) -> list[list[Panel]]:
    """Return score against each cost, a row for each kind of data set: means over its sets.

    A way to answer stands in it only if it has every set that another way has, because means over
    different sets cannot be compared.
    """
    rows: list[list[Panel]] = []
    for family in FAMILIES:
        ways: dict[tuple[str, str], dict[str, MatrixCell]] = {}
        for place, cell in cells.items():
            if family_of(place.set) is family and isinstance(cell, MatrixCell):
                way = (place.method, f"{place.model}, {place.decode}")
                ways.setdefault(way, {})[place.set] = cell
        sets = {name for of_way in ways.values() for name in of_way}
        whole = {way: [*of.values()] for way, of in ways.items() if of.keys() == sets}
        if whole:
            rows.append([_cost_panel(family, whole, *cost) for cost in COSTS.items()])
    return rows


def _cost_panel(
    family: Family, ways: Mapping[tuple[str, str], Sequence[MatrixCell]], label: str, cost: str
) -> Panel:
    """Return score against one cost: methods differ in colour, models and decodings in shape."""
    methods, shapes = (list(dict.fromkeys(way[i] for way in ways)) for i in (0, 1))
    series = [
        Series(
            f"{method}: {shape}",
            [(_mean(found, cost), _mean(found, "score"))],
            methods.index(method),
            shapes.index(shape),
            line=False,
        )
        for (method, shape), found in ways.items()
    ]
    return Panel(label, series, "score", family.title, costs=True)


def _mean(cells: Sequence[MatrixCell], number: str) -> float:
    return fmean(getattr(cell, number)[0] for cell in cells)


def finished(cells: Cells, name: str) -> dict[str, dict[str, MatrixCell]]:
    """Return the finished cells of a set, by model and by the name of the way to decode."""
    found: dict[str, dict[str, MatrixCell]] = {}
    for place, cell in cells.items():
        if place.set == name:
            ways = found.setdefault(place.model, {})
            if isinstance(cell, MatrixCell):
                ways[place.decode] = cell
    return found


def report(found: Mapping[str, Any]) -> str:
    """Return the text of the Markdown file, from what the JSON file holds."""
    by_set: dict[str, list[Mapping[str, Any]]] = {}
    for cell in found["cells"]:
        by_set.setdefault(cell["set"], []).append(cell)
    return render(
        "matrix.md.jinja",
        found,
        shares={key for key in SHARES.values() if _any(key, found["cells"])},
        comparison_rows=[_comparison_rows(one) for one in found["comparisons"]],
        sets=[_set(name, members) for name, members in by_set.items()],
    )


def _comparison_rows(found: Mapping[str, Any]) -> list[list[str]]:
    rows = [COMPARISON_COLUMNS]
    for row in found["rows"]:
        chosen = ", ".join(str(n) for n in row["candidates"] if n is not None)
        tokens = [f"{value:.0f}" for value in row["tokens"]]
        mean, low, high = row["difference"]
        shown = [row["model"], _greedy(row["greedy"], found["greedy_between"])]
        shown += [f"{row['first']:.3f}", f"{row['second']:.3f}"]
        rows.append([*shown, f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", chosen, *tokens])
        rows[-1].append(str(row["n"]))
    return rows


def _greedy(score: float | None, between: Sequence[float] | None) -> str:
    if score is None:
        return ""
    if between is None or between[0] <= score <= between[1]:
        return f"{score:.3f}"
    return f"{score:.3f} (outside {between[0]:g} to {between[1]:g})"


def _set(name: str, members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the report shows of a data set: its cells, or why there are none."""
    reasons = {cell["missing"] for cell in members}
    old = [cell["decode"] for cell in members if not cell["missing"] and not cell.get("scores")]
    return {
        "title": title_of(name),
        "reason": reasons.pop() if len(reasons) == 1 else "",
        "rows": _cell_rows(name, members),
        "old": list(dict.fromkeys(old)),
    }


def _cell_rows(name: str, members: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    family = family_of(name)
    asked = any(cell.get("scorer_tokens") for cell in members)
    shares = {title: key for title, key in SHARES.items() if _any(key, members)}
    extra = [] if family.extra is None else [EXTRA_TITLES[family.extra]]
    search = [*(["scorer tokens"] if asked else []), *shares]
    columns = ["model", "method", "decode", family.measure, *extra, "tokens", *search]
    rows = [[*columns, "calls", "seconds", "questions"]]
    for cell in members:
        shown = [cell["model"], cell["method"], cell["decode"]]
        if cell["missing"]:
            rows.append([*shown, cell["missing"], *[""] * (len(rows[0]) - 4)])
            continue
        shown += [_interval(cell["score"]), *[_interval(cell["extra"]) for _ in extra]]
        shown.append(f"{cell['sampled_tokens'][0]:.0f}")
        if asked:
            shown.append(f"{cell['scorer_tokens'][0]:.0f}" if cell["scorer_tokens"] else "")
        found = [cell.get(key) for key in shares.values()]
        shown += ["" if share is None else f"{share:.0%}" for share in found]
        failed = f" ({cell['failed']} failed)" if cell["failed"] else ""
        shown += [f"{cell['calls'][0]:.1f}", f"{cell['seconds'][0]:.2f}", f"{cell['n']}{failed}"]
        rows.append(shown)
    return rows


def _any(key: str, cells: Sequence[Mapping[str, Any]]) -> bool:
    return any(cell.get(key) is not None for cell in cells)


def _interval(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.3f} [{numbers[1]:.3f}, {numbers[2]:.3f}]"
