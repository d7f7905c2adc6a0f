"""Writes the results of a matrix: cells --> `{results}.md`, `.json` and up to two pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from agent_r1.evaluation.answers import write_json
from agent_r1.evaluation.matrix.cells import Cell
from agent_r1.evaluation.matrix.comparisons import compare
from agent_r1.evaluation.matrix.config import ComparisonEntry
from agent_r1.evaluation.matrix.data_sets import FAMILIES, OWN, family_of, title_of
from agent_r1.evaluation.matrix.picture import Point, Series, curves, trade_off
from agent_r1.evaluation.statistics import LEVEL, RESAMPLES, SEED
from agent_r1.runtime.files.writing import write_atomically

NOT_RUN = "not run"
COMPARISON_COLUMNS = (
    *("model", "greedy", "first", "second", "difference"),
    *("answers chosen from", "tokens of first", "of second", "questions"),
)
SCORED = (
    "Scored is the share of questions about which the scorer was asked: of the others, a search "
    "had no two turns to choose from."
)
COMPARED = (
    "The matrix file fixed these before the first run; nothing else on this page is tested. "
    "Differences are of exact match, question by question; a resample draws questions, each with "
    "what all models made of it. So an interval is about other questions for these same models: it "
    "says nothing of models that were trained with other seeds."
)
EXTRA_TITLES = {"f1": "F1", "tests_passed": "tests passed"}


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


@dataclass(frozen=True)
class Results:
    """Everything a report says."""

    name: str
    cells: Mapping[CellKey, Cell | str]
    """What was measured, or why there is nothing."""
    models: Mapping[str, str]
    """What each model is, as the matrix file names it."""
    series: Mapping[str, str]
    """By the name of a way to decode: what it has in common with others that cost more or less."""
    comparisons: Sequence[ComparisonEntry]
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
    curve = out.with_name(f"{out.name}_curves.svg")
    points, panels = points_of(results.cells), panels_of(results)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if points:
            write_atomically(picture, trade_off(points))
            files.append(picture)
        if panels:
            write_atomically(curve, curves(panels))
            files.append(curve)
        found = record(results, picture.name if points else None, curve.name if panels else None)
        write_atomically(files[0], report(found))
        write_json(files[1], found)
    except OSError as exc:
        raise ValueError(
            f"the results ({out}) cannot be written: {exc.strerror}; name a --out"
        ) from exc
    return files


def record(results: Results, picture: str | None, curve: str | None) -> dict[str, Any]:
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
        "comparisons": [
            compare(entry, name, _ways(results.cells, name))
            for entry in results.comparisons
            for name in entry.sets
        ],
        "picture": picture,
        "curve": curve,
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
    if any(cell.get("scored_share") is not None for cell in found["cells"]):
        blocks.append(SCORED)
    if found["picture"]:
        shown = "Score against tokens and seconds a question, mean over the data sets of a kind"
        blocks.append(f"![{shown}]({found['picture']})")
    if found["curve"]:
        blocks.append(f"![Score over sampled tokens, mean over the models]({found['curve']})")
    if found["comparisons"]:
        blocks += ["## Comparisons", COMPARED]
        blocks += [_comparison(one) for one in found["comparisons"]]
    for name in dict.fromkeys(cell["set"] for cell in found["cells"]):
        members = [cell for cell in found["cells"] if cell["set"] == name]
        blocks += [f"## {title_of(name)}", _table(name, members)]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    models = "; ".join(f"`{name}` is {policy}" for name, policy in found["models"].items())
    blocks += [
        "## How it was made",
        f"Models: {models}.",
        f"```sh\n{found['command']}\n```",
        f"{versions}.",
    ]
    return "\n\n".join(blocks) + "\n"


def _comparison(found: Mapping[str, Any]) -> str:
    margin = found["margin"]
    expected = f"at least {margin:+.3f}, with an interval above 0"
    if found["goal"] == "not_worse":
        expected = f"not below {-margin:+.3f} with an interval below 0"
    head = (
        f"**{found['name']}** on `{found['set']}`: `{found['second']}` minus `{found['first']}`, "
        f"expected {expected}"
    )
    if found["missing"]:
        return f"{head}. Not run: {', '.join(found['missing'])}."
    if found.get("without_scores"):  # a report of an older version has no such cell
        return (
            f"{head}. Not compared, because these cells are of an older version and keep no score "
            f"of each question: {', '.join(found['without_scores'])}. Remove their files, and the "
            "command asks them again."
        )
    lines = [_row(COMPARISON_COLUMNS), _row(["---"] * len(COMPARISON_COLUMNS))]
    for row in found["rows"]:
        mean, low, high = row["difference"]
        chosen = ", ".join("" if n is None else str(n) for n in row["candidates"])
        tokens = [f"{value:.0f}" for value in row["tokens"]]
        shown = [row["model"], _greedy(row["greedy"], found["greedy_between"])]
        shown += [f"{row['first']:.3f}", f"{row['second']:.3f}"]
        shown += [f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", chosen, *tokens, str(row["n"])]
        lines.append(_row(shown))
    verdict = "This is so." if found["reached"] else "This is **not** so."
    return "\n".join([f"{head}. {verdict}", "", *lines])


def _greedy(score: float | None, between: Sequence[float] | None) -> str:
    if score is None:
        return ""
    if between is None or between[0] <= score <= between[1]:
        return f"{score:.3f}"
    return f"{score:.3f} (outside {between[0]:g} to {between[1]:g})"


def _table(name: str, members: Sequence[Mapping[str, Any]]) -> str:
    reasons = {cell["missing"] for cell in members}
    if len(reasons) == 1 and "" not in reasons:
        return f"{reasons.pop()}."
    family = family_of(name)
    extra = [] if family.extra is None else [EXTRA_TITLES[family.extra]]
    columns = ["model", "method", "decode", family.measure, *extra]
    asked = any(cell.get("scorer_tokens") for cell in members)
    shares = any(cell.get("scored_share") is not None for cell in members)
    scorer = [*(["scorer tokens"] if asked else []), *(["scored"] if shares else [])]
    columns += ["tokens", *scorer, "calls", "seconds", "questions"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for cell in members:
        shown = [cell["model"], cell["method"], cell["decode"]]
        if cell["missing"]:
            lines.append(_row([*shown, cell["missing"], *[""] * (len(columns) - 4)]))
            continue
        failed = f" ({cell['failed']} failed)" if cell["failed"] else ""
        shown += [_interval(cell["score"]), *[_interval(cell["extra"]) for _ in extra]]
        shown.append(f"{cell['sampled_tokens'][0]:.0f}")
        if asked:
            read = cell["scorer_tokens"]
            shown.append("" if read is None else f"{read[0]:.0f}")
        if shares:
            share = cell["scored_share"]
            shown.append("" if share is None else f"{share:.0%}")
        shown.append(f"{cell['calls'][0]:.1f}")
        shown += [f"{cell['seconds'][0]:.2f}", f"{cell['n']}{failed}"]
        lines.append(_row(shown))
    return "\n".join([*lines, *_without_scores(members)])


def _without_scores(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the ways whose cells are too old to be paired with others."""
    old = [cell["decode"] for cell in members if not cell["missing"] and not cell.get("scores")]
    if not old:
        return []
    return [
        "",
        f"Cells of an older version keep no score of each question: {', '.join(dict.fromkeys(old))}"
        ". Their differences from others cannot be paired, so they have no interval here.",
    ]


def points_of(cells: Mapping[CellKey, Cell | str]) -> list[Point]:
    """Return the points of the picture: means over the sets of a family.

    A way to answer stands in it only if it has every set that another way has, because means over
    different sets cannot be compared.
    """
    points: list[Point] = []
    for family in FAMILIES:
        ways: dict[tuple[str, str, str], dict[str, Cell]] = {}
        for place, cell in cells.items():
            if family_of(place.set) is family and isinstance(cell, Cell):
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


def panels_of(results: Results) -> dict[str, list[Series]]:
    """Return the curves of each task file: means over the models, where all of them are there."""
    panels: dict[str, list[Series]] = {}
    for name in dict.fromkeys(p.set for p in results.cells if family_of(p.set) is OWN):
        by_model = list(_ways(results.cells, name).values())
        series: dict[str, list[tuple[float, float]]] = {}
        for way in results.series:
            cells = [ways[way] for ways in by_model if way in ways]
            if cells and len(cells) == len(by_model):
                tokens = fmean(cell.sampled_tokens[0] for cell in cells)
                score = fmean(cell.score[0] for cell in cells)
                series.setdefault(results.series[way], []).append((tokens, score))
        if series:
            panels[name] = [Series(of, sorted(points)) for of, points in series.items()]
    return panels


def _ways(cells: Mapping[CellKey, Cell | str], name: str) -> dict[str, dict[str, Cell]]:
    """Return the finished cells of a set, by model and by the name of the way to decode."""
    found: dict[str, dict[str, Cell]] = {}
    for place, cell in cells.items():
        if place.set == name:
            ways = found.setdefault(place.model, {})
            if isinstance(cell, Cell):
                ways[place.decode] = cell
    return found


def _interval(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.3f} [{numbers[1]:.3f}, {numbers[2]:.3f}]"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
