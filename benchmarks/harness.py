"""The harness of the benchmarks: options, rounds that alternate, ratios with goals, the report.

A case is a module of this folder: `make bench CASE=NAME`. It writes runs/bench/NAME.json, whose
rows are a table; scripts/benchmark_page makes those of docs/benchmarks.md from such files.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from scripts.generated import as_table

ROOT = Path(__file__).resolve().parent.parent
OUT = Path(os.environ.get("BENCH_OUT", ROOT / "runs" / "bench"))
Row = dict[str, Any]
"""A line of a table, by column."""
Found = TypeVar("Found")


def read_options(about: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command line of a case.

    Args:
        about: What the case measures.
        defaults: The options. A tuple takes any number of values, of the type of its first one.
    """
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=layout)
    for name, default in defaults.items():
        many: dict[str, Any] = {"nargs": "*"} if isinstance(default, tuple) else {}
        one = (*default, "")[0] if many else default
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(one), default=default, **many)
    return parser.parse_args()


def alternate(sides: dict[str, Callable[[], Found]], rounds: int) -> dict[str, list[Found]]:
    """Call the sides by turns, so that other work on the machine disturbs them alike."""
    found: dict[str, list[Found]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in reversed(sides) if number % 2 else sides:
            found[name].append(sides[name]())
            print(f"round {number + 1}, {name}: {found[name][-1]}", flush=True)
    return found


def compare(
    what: str, ours: Sequence[float], other: Sequence[float], goal: str | None = None
) -> Row:
    """Return the row of two sides whose rounds were pairs: medians, and the ratios of the pairs.

    Args:
        what: Was measured.
        ours: The figure of each round.
        other: That of the other side.
        goal: Of the ratio, such as "≥ 5" or "≤ 0.1"; the row says whether it is met.
    """
    ratios = sorted(a / b for a, b in zip(ours, other, strict=True))
    row: Row = {"what": what, "ours": statistics.median(ours), "other": statistics.median(other)}
    row |= {"ratio": statistics.median(ratios)}
    row |= {"smallest": ratios[0], "largest": ratios[-1]} if len(ratios) > 1 else {}
    return row if goal is None else row | {"goal": f"{goal}, {_judge(row['ratio'], goal)}"}


def _judge(ratio: float, goal: str) -> str:
    sign, bound = goal.split()
    is_met = ratio >= float(bound) if sign == "≥" else ratio <= float(bound)
    return "met" if is_met else "missed"


def write_report(case: str, rows: Sequence[Row], **more: Any) -> None:
    """Print the table of a case, and write runs/bench/CASE.json."""
    file = OUT / f"{case}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rows": rows, **more}, indent=1) + "\n", encoding="utf-8")
    print(f"{as_table(rows)}written to {file}")
