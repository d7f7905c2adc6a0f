"""Comparisons that were fixed before the first run: of methods, and of ways to decode.

Contrasts of a table take the difference of two methods seed by seed. Comparisons of a matrix take
that of two ways to decode question by question, and draw a question whole, with what every model
made of it, so that neither hard questions nor strong models count as a difference. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from agent_r1.evaluation.experiments.cell import MatrixCell, TableCell
from agent_r1.evaluation.experiments.config import ComparisonEntry
from agent_r1.evaluation.statistics import Estimate, bootstrap_mean, holm, sign_flip_exact


def seed_differences(
    first: Sequence[TableCell], second: Sequence[TableCell], sets: Sequence[str]
) -> list[float]:
    """Return the mean score of second minus first over some sets, by seed."""
    means = [
        {run.seed: fmean(_mean(run.scores[name]) for name in sets) for run in runs}
        for runs in (first, second)
    ]
    shared = [seed for seed in means[0] if seed in means[1]]
    return [means[1][seed] - means[0][seed] for seed in shared]


def _mean(scores: Sequence[float | None]) -> float:
    return fmean(score for score in scores if score is not None)


def judge_contrasts(pairs: Sequence[tuple[str, str, str, list[float]]]) -> list[dict[str, Any]]:
    """Test every contrast, and adjust the p-values for their number.

    Args:
        pairs: first, second, what is compared, and the differences by seed, second minus first.

    Returns:
        What the JSON file holds of each: besides, the mean of the differences, the p-value of the
        exact sign-flip test (two-sided), and that adjusted for the number of contrasts that have
        seeds; None without seeds.
    """
    p_values = {i: sign_flip_exact(pair[3]) for i, pair in enumerate(pairs) if pair[3]}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return [
        {
            "first": first,
            "second": second,
            "of": of,
            "differences": differences,
            "mean": fmean(differences) if differences else None,
            "p": p_values.get(i),
            "p_holm": adjusted.get(i),
        }
        for i, (first, second, of, differences) in enumerate(pairs)
    ]


ALL = "all models"


def compare(
    entry: ComparisonEntry, name: str, cells: Mapping[str, Mapping[str, MatrixCell]]
) -> dict[str, Any]:
    """Return what the JSON file holds of a comparison on one set.

    Args:
        entry: which ways, and what is expected.
        name: of the set.
        cells: by model, and by the name of the way.
    """
    wanted = [(model, way) for model in cells for way in (entry.first, entry.second)]
    found: dict[str, Any] = {
        **entry.model_dump(mode="json", exclude={"sets"}),
        "set": name,
        "rows": [],
        "missing": [f"{m}: {way}" for m, way in wanted if way not in cells[m]],
        "without_scores": [
            f"{m}: {way}" for m, way in wanted if way in cells[m] and not cells[m][way].scores
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
    return difference.mean >= -entry.margin and difference.high >= 0


def _row(model: str, pairs: Sequence[tuple[MatrixCell, MatrixCell]]) -> dict[str, Any]:
    shared = set.intersection(*(set(cell.scores) for pair in pairs for cell in pair))
    ids = sorted(shared)
    found = bootstrap_mean(
        [fmean(second.scores[i] - first.scores[i] for first, second in pairs) for i in ids]
    )
    firsts, seconds = zip(*pairs, strict=True)
    return {
        "model": model,
        "n": len(ids),
        "first": _mean_of(firsts, ids),
        "second": _mean_of(seconds, ids),
        "difference": [round(value, 4) for value in (found.mean, found.low, found.high)],
        "tokens": [round(fmean(c.sampled_tokens[0] for c in of), 1) for of in (firsts, seconds)],
        "candidates": [cell.candidates for cell in firsts],
    }


def _mean_of(cells: Sequence[MatrixCell], ids: Sequence[str]) -> float:
    return round(fmean(cell.scores[i] for cell in cells for i in ids), 4)
