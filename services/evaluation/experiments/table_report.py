"""The report of a table: cells of every method --> numbers, `table.md.jinja`, two pictures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import JsonValue

from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.config import EXACT_MATCH, Part, TableFile
from agent_r1.evaluation.experiments.contrasts import judge_contrasts, seed_differences
from agent_r1.evaluation.experiments.drawing import Picture, curves
from agent_r1.evaluation.experiments.estimates import (
    WINDOW,
    Row,
    RowEstimates,
    estimate_row,
    mean_curve,
    measure_progress,
)
from agent_r1.evaluation.experiments.findings import (
    MASKS,
    domain_notes,
    goal_sentences,
    interval,
    least_p,
    share,
)
from agent_r1.evaluation.experiments.report import (
    NOT_RUN,
    render,
    write_report,
)
from agent_r1.evaluation.statistics import LEVEL, Estimate, interval_record

HEADINGS: dict[Part, str] = {"methods": "Methods", "ablation": "Ablation of the masks"}
METHOD = "percentile bootstrap over seeds, and over questions that all seeds and rows share"
TOO_NARROW = "percentile bootstrap over seeds, then questions within each"
"""The method of older versions: with S seeds, intervals are up to sqrt(S) times too narrow."""
OLDER: dict[str, Any] = {
    "measure": EXACT_MATCH,
    "threshold": None,
    "window": WINDOW,
    "contrasts": [],
    "remarks": "",
}
"""Values that a JSON file of an older version leaves out."""


@dataclass(frozen=True)
class TableResults:
    """Everything the report of a table says."""

    name: str
    table: TableFile
    rows: Sequence[Row[TableCell]]
    sets: Sequence[str]
    in_domain: Sequence[str]
    """Sets whose kind of question was trained on."""
    budget: str
    """Budget of every trained row, in words."""
    command: str
    """The command that makes all of it again."""
    versions: Mapping[str, str]
    settings: Mapping[str, Mapping[str, JsonValue]]
    """Keys of the learner, per method."""

    @property
    def averaged(self) -> Sequence[str]:
        """Sets that the average is over."""
        return self.table.average or self.in_domain or self.sets

    def write(self, out: Path) -> list[Path]:
        """Write the report; `out` names its files without suffix.

        Raises:
            ValueError: they cannot be written.
        """
        return write_report(out, self.record, report, self.pictures())

    def pictures(self) -> dict[str, Picture]:
        """Return the curves of each of the two tables that has some."""
        measure, found = measure_title(self.table.measure), dict[str, Picture]()
        for part, heading in HEADINGS.items():
            rows = [row for row in self.rows if row.table == part]
            if lines := {r.title: curve for r in rows if (curve := mean_curve(r.runs))}:
                title = f"{heading}: {measure} in the training rollouts"
                found[f"_{part}"] = title, [[curves(lines, "step", measure)]]
        return found

    def record(self, pictures: Mapping[str, str]) -> dict[str, Any]:
        """Return what the JSON file holds: all that the report says.

        Args:
            pictures: names of their files, by what distinguishes them.
        """
        rows = [(row, estimate_row(row, self.sets, self.averaged)) for row in self.rows]
        runs = [(row, run) for row in self.rows for run in row.runs]
        # A run that two tables share took its time once.
        walls = {id(run): run.wall_s or 0.0 for _, run in runs}
        named = bool(self.table.average)
        return {
            "name": self.name,
            "measure": self.table.measure,
            "rows": [_scores(row, run, name) for row, run in runs for name in run.scores],
            "estimates": [self._estimates(row, found) for row, found in rows],
            "interval": interval_record(METHOD),
            "goals": goal_sentences(rows, self.averaged),
            "contrasts": self._contrasts(),
            "threshold": self.table.threshold,
            "window": WINDOW,
            "notes": domain_notes(rows, self.sets, self.averaged, named=named),
            "sets": list(self.sets),
            "in_domain": list(self.in_domain),
            "seeds": sorted({run.seed for _, run in runs if run.seed is not None}),
            "budget": self.budget,
            "chosen_on": self.table.chosen_on.strip(),
            "remarks": self.table.remarks.strip(),
            "command": self.command,
            "versions": dict(self.versions),
            "wall_s": round(sum(walls.values()), 1),
            "pictures": {key.removeprefix("_"): name for key, name in pictures.items()},
            "settings": {name: dict(values) for name, values in self.settings.items()},
        }

    def _estimates(self, row: Row[TableCell], found: RowEstimates | None) -> dict[str, Any]:
        """Describe one row; the estimates are None where it has not been run."""
        progress = measure_progress(row.runs, self.table.threshold)
        return {
            "method": row.name,
            "title": row.title,
            "table": row.table,
            "set": dict(row.settings),
            "wall_s": [round(run.wall_s, 1) for run in row.runs if run.wall_s is not None],
            "sets": found and {name: vars(found.of(name)) for name in self.sets},
            "average": found and vars(found.of()),
            "f1": self._mean([run.f1 for run in row.runs]),
            "calls": self._mean([run.calls for run in row.runs]),
            "progress": None if progress is None else vars(progress),
        }

    def _mean(self, runs: Sequence[Mapping[str, float]]) -> float | None:
        """Average over the sets of the average, then over the seeds; None where one has none."""
        if not runs or any(name not in of_run for of_run in runs for name in self.averaged):
            return None
        return fmean(fmean(of_run[name] for name in self.averaged) for of_run in runs)

    def _contrasts(self) -> list[dict[str, Any]]:
        """Return the contrasts of the table, over the seeds that both methods have."""
        runs = {row.name: row.runs for row in self.rows}
        pairs: list[tuple[str, str, str, list[float]]] = []
        for c in self.table.contrasts:
            sets = list(self.averaged) if c.set is None else [c.set]
            differences = seed_differences(runs[c.first], runs[c.second], sets)
            pairs.append((c.first, c.second, c.set or "average", differences))
        return judge_contrasts(pairs)


def measure_title(measure: str) -> str:
    """Return a measure in words: `trials:all_tests_passed` is `all tests passed`."""
    return measure.rpartition(":")[2].replace("_", " ")


def _scores(row: Row[TableCell], run: TableCell, name: str) -> dict[str, Any]:
    scores = [score for score in run.scores[name] if score is not None]
    failed = run.failed.get(name, 0)
    return {
        "method": row.name,
        "table": row.table,
        "set": name,
        "seed": run.seed,
        "score": fmean(scores),
        "f1": run.f1.get(name),
        "calls": run.calls.get(name),
        "n": len(scores),
        "failed": failed,
        # A cell of an older version leaves out what failed, so its list is shorter.
        "failed_known": run.scores[name].count(None) >= failed,
        "wall_s": None if run.wall_s is None else round(run.wall_s, 1),
    }


def report(found: Mapping[str, Any]) -> str:
    """Return the text of the Markdown file, from what the JSON file holds."""
    found = OLDER | dict(found)
    seeds = {(row["method"], row["seed"]) for row in found["rows"] if row["seed"] is not None}
    nums_seeds = {*Counter(method for method, _ in seeds).values()}
    tested = {n for contrast in found["contrasts"] if (n := len(contrast["differences"]))}
    return render(
        "table.md.jinja",
        found,
        title=measure_title(found["measure"]),
        too_narrow=TOO_NARROW,
        most_seeds=max(nums_seeds, default=1),
        level=LEVEL,
        parts=[part for name in HEADINGS if (part := _part(name, found))],
        least_p=least_p(nums_seeds),
        tested_least_p=least_p(tested),
        contrast_rows=_contrast_rows(found["contrasts"]),
        not_told_apart=[
            f"{one['first']} and {one['second']} ({one['of']})"
            for one in found["contrasts"]
            if one["p_holm"] is not None and one["p_holm"] > 1 - LEVEL
        ],
        making=_making_rows(found),
    )


def _part(name: Part, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the report shows of one of the two tables; nothing of one without rows."""
    members = [row for row in found["estimates"] if row["table"] == name]
    if not members:
        return {}
    failed = [row for row in found["rows"] if row["table"] == name and row["failed"]]
    return {
        "heading": HEADINGS[name],
        "scores": _score_rows(members, found, masks=name == "ablation"),
        "failed": _failed(failed, members),
        "failed_known": all(row.get("failed_known", True) for row in failed),
        "has_f1": any(member.get("f1") is not None for member in members),
        "spending": _spending_rows(members, found["threshold"]),
        "picture": found["pictures"].get(name),
    }


Rows = list[list[str]]
"""Rows of a Markdown table; the first one has the names of the columns."""


def _score_rows(members: Sequence[Mapping[str, Any]], found: Any, *, masks: bool) -> Rows:
    trained = found["in_domain"]
    titles = [name if name in trained else f"{name} (untrained kind)" for name in found["sets"]]
    rows = [["method", *(["loss mask", "advantage mask"] if masks else []), *titles, "average"]]
    for member in members:
        on = ["no" if member["set"].get(mask) is False else "yes" for mask in reversed(MASKS)]
        estimates = [NOT_RUN] * (len(titles) + 1)
        if member["sets"] is not None:
            of_row = [*(member["sets"][name] for name in found["sets"]), member["average"]]
            estimates = [interval(Estimate(**estimate)) for estimate in of_row]
        rows.append([member["title"], *(on if masks else []), *estimates])
    return rows


def _failed(rows: Sequence[Mapping[str, Any]], members: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of which rows questions failed; their means are of the others."""
    titles = {member["method"]: member["title"] for member in members}
    parts: list[str] = []
    for row in rows:
        seed = "" if row["seed"] is None else f" seed {row['seed']}"
        which = "" if row.get("failed_known", True) else " (the cell does not say which)"
        parts.append(f"{titles[row['method']]}{seed}: {row['failed']} of {row['set']}{which}")
    return parts


def _spending_rows(members: Sequence[Mapping[str, Any]], threshold: float | None) -> Rows:
    """Return what answers cost, and how fast they were learned; an older version wrote none."""
    if not any(member.get("progress") for member in members):
        return []
    with_f1 = any(member["f1"] is not None for member in members)
    columns = ["method", "seeds", *(["F1"] if with_f1 else [])]
    columns += ["calls a question", "area under the curve"]
    columns += [] if threshold is None else ["reached", f"sampled tokens to {share(threshold)}"]
    rows = [columns]
    for member in members:
        f1, calls, progress = member["f1"], member["calls"], member["progress"]
        cells = [member["title"], str(len(member["wall_s"]))]
        cells += [_known(f1, share)] if with_f1 else []
        cells += [_known(calls, "{:.1f}".format), _known(progress and progress["area"], share)]
        if threshold is not None:
            cells += ["-", "-"] if progress is None else _reached(progress)
        rows.append(cells)
    return rows


def _known(value: float | None, shown: Any) -> str:
    return "-" if value is None else shown(value)


def _reached(progress: Mapping[str, Any]) -> list[str]:
    middle = progress["median_tokens"]
    tokens = "censored" if middle is None else f"{middle:,.0f}"
    return [f"{progress['reached']} of {progress['runs']}", tokens]


def _contrast_rows(contrasts: Sequence[Mapping[str, Any]]) -> Rows:
    rows = [["first", "second", "of", "seeds", "second minus first", "p", "p (Holm)"]]
    for one in contrasts:
        seeds, shown = len(one["differences"]), [NOT_RUN, "", ""]
        if seeds:
            shown = [f"{one['mean']:+.3f}", f"{one['p']:.4f}", f"{one['p_holm']:.4f}"]
        rows.append([one["first"], one["second"], one["of"], str(seeds), *shown])
    return rows


def _making_rows(found: Mapping[str, Any]) -> Rows:
    rows = [["method", "table", "settings", "wall time a run (s)"]]
    for row in found["estimates"]:
        shown = ", ".join(f"{key} = {json.dumps(value)}" for key, value in row["set"].items())
        walls = ", ".join(f"{wall:.0f}" for wall in row["wall_s"])
        rows.append([row["title"], row["table"], f"`{shown}`" if shown else "", walls or NOT_RUN])
    return rows
