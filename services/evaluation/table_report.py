"""Writes a results table: table.py --rows, estimates--> `{results}.md`, `.json`, two pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import JsonValue

from agent_r1.evaluation.answers import write_json
from agent_r1.evaluation.chart import line_chart
from agent_r1.evaluation.statistics import LEVEL, RESAMPLES, SEED
from agent_r1.evaluation.table import (
    MASKS,
    Estimated,
    Row,
    RowEstimates,
    SeedScores,
    estimate_row,
    goal_sentences,
    interval,
    mean_curve,
)
from agent_r1.evaluation.table_config import Part

HEADINGS: dict[Part, str] = {"methods": "Methods", "ablation": "Ablation of the masks"}
NOT_RUN = "not run"
PAPER_METHODS = """\
| method | HotpotQA | 2Wiki | MuSiQue | average |
|---|---|---|---|---|
| Base Tool Call | .1372 | .0891 | .0277 | .0847 |
| Naive RAG | .1916 | .1792 | .0277 | .1328 |
| PPO | .4136 | .5468 | .1552 | .3719 |
| GRPO | .4405 | .5741 | .1485 | .3877 |
| REINFORCE++ | .3768 | .4796 | .1336 | .3300 |
| REINFORCE++Baseline | .3966 | .5406 | .1485 | .3619 |
| RLOO | .4089 | .5641 | .1419 | .3716 |"""
PAPER_ABLATION = """\
| method | loss mask | advantage mask | HotpotQA | 2Wiki | MuSiQue | average |
|---|---|---|---|---|---|---|
| PPO | yes | yes | .4136 | .5468 | .1552 | .3719 |
| PPO | yes | no | .3630 | .4641 | .1138 | .3136 |
| PPO | no | no | .3429 | .4631 | .1005 | .3022 |
| GRPO | yes | n/a | .4405 | .5741 | .1485 | .3877 |
| GRPO | no | n/a | .4260 | .5485 | .1422 | .3722 |"""
PAPER = """\
Exact match as printed in tables 3 and 4 of [arXiv:2511.14460](https://arxiv.org/abs/2511.14460) v1:
Qwen2.5-3B-Instruct, search over KILT, 51,200 training questions, no seeds or intervals reported.
Model, questions and search here are others, so numbers cannot be compared, only their order."""


@dataclass(frozen=True)
class Results:
    """Everything a report says."""

    name: str
    rows: Sequence[Row]
    sets: Sequence[str]
    in_domain: Sequence[str]
    """Sets whose kind of question was trained on."""
    budget: str
    """What every trained row spends, in words."""
    command: str
    """The command that makes all of it again."""
    versions: Mapping[str, str]
    settings: Mapping[str, Mapping[str, JsonValue]]
    """Every key of the learner, per method."""


def picture(results: Path, part: Part) -> Path:
    """Return where the curves of one table go."""
    return results.with_name(f"{results.name}_{part}.svg")


def write_report(results: Results, out: Path) -> list[Path]:
    """Write the report.

    Args:
        results: what it says.
        out: the files without suffix.

    Returns:
        The files.

    Raises:
        ValueError: they cannot be written.
    """
    rows = [(row, estimate_row(row, results.sets)) for row in results.rows]
    markdown, numbers = out.with_name(f"{out.name}.md"), out.with_name(f"{out.name}.json")
    files = [markdown, numbers]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(numbers, record(results, rows))
        for part in get_args(Part):
            lines = {
                row.title: curve
                for row in results.rows
                if row.table == part and (curve := mean_curve(row.runs))
            }
            if lines:
                title = f"{HEADINGS[part]}: exact match of the training rollouts"
                text = line_chart(lines, title=title, x_label="step", y_label="exact match")
                files.append(picture(out, part))
                files[-1].write_text(text, encoding="utf-8")
        markdown.write_text(report(results, rows, out, files), encoding="utf-8")
    except OSError as exc:
        raise ValueError(
            f"the results ({out}) cannot be written: {exc.strerror}; name a --out"
        ) from exc
    return files


def record(results: Results, rows: Estimated) -> dict[str, Any]:
    """Return what the JSON file holds."""
    return {
        "name": results.name,
        "rows": [
            _scores(row, run, name) for row in results.rows for run in row.runs for name in run.em
        ],
        "estimates": [
            {
                "method": row.method,
                "table": row.table,
                "sets": {name: vars(estimate) for name, estimate in found.sets.items()},
                "average": vars(found.average),
            }
            for row, found in rows
            if found is not None
        ],
        "interval": {
            "method": "percentile bootstrap over seeds, then questions within each",
            "level": LEVEL,
            "resamples": RESAMPLES,
            "seed": SEED,
        },
        "goals": goal_sentences(rows, results.in_domain),
        "in_domain": list(results.in_domain),
        "command": results.command,
        "versions": dict(results.versions),
        "settings": {name: dict(values) for name, values in results.settings.items()},
    }


def _scores(row: Row, run: SeedScores, name: str) -> dict[str, Any]:
    em, f1 = run.em[name], run.f1[name]
    return {
        "method": row.method,
        "table": row.table,
        "set": name,
        "seed": run.seed,
        "em": sum(em) / len(em),
        "f1": sum(f1) / len(f1) if f1 else None,
        "n": len(em),
        "failed": run.failed.get(name, 0),
        "wall_s": None if run.wall_s is None else round(run.wall_s, 1),
    }


def report(results: Results, rows: Estimated, out: Path, files: Sequence[Path]) -> str:
    """Return the text of the Markdown file."""
    blocks = [f"# Results: {results.name}", _opening(results)]
    for part, heading in HEADINGS.items():
        members = [(row, found) for row, found in rows if row.table == part]
        if not members:
            continue
        blocks += [f"## {heading}", _table(members, results, masks=part == "ablation")]
        blocks += _failed([row for row, _ in members])
        curves = picture(out, part)
        if curves in files:
            shown = "Exact match of the training rollouts per step, mean over seeds"
            blocks.append(f"![{shown}]({curves.name})")
    goals = goal_sentences(rows, results.in_domain)
    if goals:
        blocks += ["## What the numbers say", "\n".join(f"- {goal}" for goal in goals)]
    blocks += ["## The paper's tables, for orientation", PAPER, PAPER_METHODS, PAPER_ABLATION]
    blocks += ["## How it was made", *_making(results)]
    return "\n\n".join(blocks) + "\n"


def _opening(results: Results) -> str:
    seeds = sorted({run.seed for row in results.rows for run in row.runs if run.seed is not None})
    return (
        "Written by `agent-r1 table`. Exact match on held-out questions; in brackets a "
        f"{LEVEL * 100:.0f} % interval (percentile bootstrap, {RESAMPLES:,} resamples, over seeds "
        f"and over the questions within each). Seeds: {', '.join(map(str, seeds)) or 'none'}; "
        f"baselines draw nothing and have one run. {results.budget}"
    )


def _table(members: Estimated, results: Results, *, masks: bool) -> str:
    titles = [
        f"{name}{'' if name in results.in_domain else ' (untrained kind)'}" for name in results.sets
    ]
    columns = ["method", *(["loss mask", "advantage mask"] if masks else []), *titles, "average"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for row, found in members:
        on = ["no" if row.settings.get(mask) is False else "yes" for mask in reversed(MASKS)]
        cells = [row.title, *(on if masks else []), *_cells(found, results.sets)]
        lines.append(_row(cells))
    return "\n".join(lines)


def _failed(rows: Sequence[Row]) -> list[str]:
    """Say of which rows questions failed; their means are of the others."""
    parts = [
        f"{row.title}{'' if run.seed is None else f' seed {run.seed}'}: {count} of {name}"
        for row in rows
        for run in row.runs
        for name, count in run.failed.items()
        if count
    ]
    return [f"Questions that failed, and count in no mean: {'; '.join(parts)}."] if parts else []


def _cells(found: RowEstimates | None, sets: Sequence[str]) -> list[str]:
    if found is None:
        return [NOT_RUN] * (len(sets) + 1)
    return [*(interval(found.sets[name]) for name in sets), interval(found.average)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _making(results: Results) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    lines = [_row(["method", "table", "settings", "wall time a run (s)"]), _row(["---"] * 4)]
    total, counted = 0.0, set[int]()
    for row in results.rows:
        walls = [run.wall_s for run in row.runs if run.wall_s is not None]
        shown = [f"{key} = {json.dumps(value)}" for key, value in row.settings.items()]
        lines.append(
            _row(
                [
                    row.title,
                    row.table,
                    f"`{', '.join(shown)}`" if shown else "",
                    ", ".join(f"{wall:.0f}" for wall in walls) or NOT_RUN,
                ]
            )
        )
        for run in row.runs:  # a run that two tables share took its time once
            if id(run) not in counted and run.wall_s is not None:
                counted.add(id(run))
                total += run.wall_s
    return [
        f"```\n{results.command}\n```",
        f"{versions}. All runs together took {total / 60:.0f} minutes.",
        "\n".join(lines),
    ]
