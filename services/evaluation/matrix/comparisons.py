"""Comparisons of two ways to decode that a matrix file fixes beforehand: cells --> verdicts.

Questions are compared one by one and drawn whole, with what every model made of them, so that
neither hard questions nor strong models count as a difference. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agent_r1.evaluation.matrix.cells import Cell
from agent_r1.evaluation.matrix.config import ComparisonEntry
from agent_r1.evaluation.statistics import Estimate, bootstrap_mean

ALL = "all models"


def compare(
    entry: ComparisonEntry, name: str, cells: Mapping[str, Mapping[str, Cell]]
) -> dict[str, Any]:
    """Return what the JSON file holds of a comparison on one set.

    Args:
        entry: which ways, and what is expected.
        name: of the set.
        cells: by model, and by the name of the way.
    """
    found: dict[str, Any] = {
        **entry.model_dump(mode="json", exclude={"sets"}),
        "set": name,
        "rows": [],
        "missing": [
            f"{model}: {way}"
            for model, ways in cells.items()
            for way in (entry.first, entry.second)
            if way not in ways
        ],
        "without_scores": [
            f"{model}: {way}"
            for model, ways in cells.items()
            for way in (entry.first, entry.second)
            if way in ways and not ways[way].scores
        ],
        "reached": None,
    }
    if found["missing"] or found["without_scores"]:
        return found
    pairs = {model: (ways[entry.first], ways[entry.second]) for model, ways in cells.items()}
    for model, (first, second) in pairs.items():
        greedy = cells[model].get("greedy")
        score = None if greedy is None else greedy.score[0]
        found["rows"].append({**_row(model, [(first, second)]), "greedy": score})
    found["rows"].append({**_row(ALL, list(pairs.values())), "greedy": None})
    found["reached"] = reached(entry, Estimate(*found["rows"][-1]["difference"]))
    return found


def reached(entry: ComparisonEntry, difference: Estimate) -> bool:
    """Say whether a difference is what was expected."""
    if entry.goal == "better":
        return difference.mean >= entry.margin and difference.low > 0
    return difference.mean >= -entry.margin or difference.high >= 0


def _row(model: str, pairs: Sequence[tuple[Cell, Cell]]) -> dict[str, Any]:
    shared = set.intersection(*(set(cell.scores) for pair in pairs for cell in pair))
    ids = sorted(shared)
    found = bootstrap_mean(
        [fmean(second.scores[i] - first.scores[i] for first, second in pairs) for i in ids]
    )
    firsts, seconds = zip(*pairs, strict=True)
    return {
        "model": model,
        "n": len(ids),
        "first": _mean(firsts, ids),
        "second": _mean(seconds, ids),
        "difference": [round(value, 4) for value in (found.mean, found.low, found.high)],
        "tokens": [round(fmean(c.sampled_tokens[0] for c in of), 1) for of in (firsts, seconds)],
        "candidates": [cell.candidates for cell in firsts],
    }


def _mean(cells: Sequence[Cell], ids: Sequence[str]) -> float:
    return round(fmean(cell.scores[i] for cell in cells for i in ids), 4)
