"""Findings of a table, in sentences of its report, and how numbers are written there.

estimates.py --rows--> here --> table_report.py. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.estimates import Row, RowEstimates, estimate_row
from agent_r1.evaluation.statistics import LEVEL, Estimate, least_sign_flip_p

NEVER_RIGHT = 0.01
"""A set on which every row has a lower mean is said to tell nothing."""
MASKS = ("learner.advantage_mask", "learner.loss_mask")
Estimated = Sequence[tuple[Row[TableCell], RowEstimates | None]]


def goal_sentences(rows: Estimated, in_domain: Sequence[str]) -> list[str]:
    """Say what the numbers show, one sentence a goal."""
    return [*_baseline_goal(rows, in_domain), *_seeds_alone(rows), *_mask_goals(rows), *_best(rows)]


def _baseline_goal(rows: Estimated, in_domain: Sequence[str]) -> list[str]:
    baselines = [(row, found) for row, found in rows if row.baseline and found is not None]
    trained = [
        (row, found)
        for row, found in rows
        if row.table == "methods" and not row.baseline and found is not None
    ]
    if not baselines or not trained:
        return []
    question = (
        f"Does every trained row beat {listed([row.title for row, _ in baselines])} on "
        f"{listed(in_domain)}, by a difference whose interval is above 0? "
    )
    exceptions = [
        f"{row.title} against {other.title} on {name} ({share(found.means[name])} and "
        f"{share(least.means[name])}, difference {signed(above)})"
        for row, found in trained
        for other, least in baselines
        for name in in_domain
        if (above := found.above(least, name)).low <= 0
    ]
    missing = [row.title for row, found in rows if row.table == "methods" and found is None]
    note = f" Not run: {', '.join(missing)}." if missing else ""
    answer = "Yes." if not exceptions else f"No: {'; '.join(exceptions)}."
    return [question + answer + note]


def _seeds_alone(rows: Estimated) -> list[str]:
    """Say by how much each seed of a trained row is above the baselines, where it is the only one:
    a table of one method asks whether it learns every time."""
    methods = [(row, found) for row, found in rows if row.table == "methods" and found is not None]
    trained = [row for row, _ in methods if not row.baseline]
    if len(trained) != 1 or len(trained[0].runs) < 2:
        return []
    sets = list(trained[0].runs[0].scores)
    alone = [estimate_row(replace(trained[0], runs=[run]), sets) for run in trained[0].runs]
    return [
        f"Seed by seed, {trained[0].title} differs from {row.title}, average over all sets, by "
        f"{listed([signed(one.above(base)) for one in alone if one is not None])}."
        for row, _ in methods
        if row.baseline and (base := estimate_row(row, sets)) is not None
    ]


def _mask_goals(rows: Estimated) -> list[str]:
    """Compare every row without a mask with the one that differs in nothing but the masks."""
    sentences: list[str] = []
    ablation = [(row, found) for row, found in rows if row.table == "ablation"]
    for row, found in ablation:
        if all(row.settings.get(mask, True) for mask in MASKS):
            continue
        full = next(
            (
                (other, estimates)
                for other, estimates in ablation
                if all(other.settings.get(mask, True) for mask in MASKS)
                and _without_masks(other) == _without_masks(row)
            ),
            None,
        )
        if full is None or found is None or full[1] is None:
            continue
        difference = full[1].above(found)
        apart = difference.low > 0 or difference.high < 0
        sentences.append(
            f"{full[0].title} against {row.title}, average: {full[1].means[None]:.3f} against "
            f"{found.means[None]:.3f}, difference {signed(difference)}; the interval "
            f"{'does not hold' if apart else 'holds'} 0."
        )
    return sentences


def _without_masks(row: Row[TableCell]) -> dict[str, JsonValue]:
    return {key: value for key, value in row.settings.items() if key not in MASKS}


def _best(rows: Estimated) -> list[str]:
    """Name the best row where it is above every other one, else those that may be it."""
    found = [(row, e) for row, e in rows if row.table == "methods" and e is not None]
    if len(found) < 2:
        return []
    best_row, best = max(found, key=lambda pair: pair[1].means[None])
    above = [(row, best.above(e)) for row, e in found if row is not best_row]
    close = [row for row, difference in above if difference.low <= 0]
    if not close:
        nearest, least = min(above, key=lambda pair: pair[1].mean)
        return [
            f"The highest average is that of {best_row.title}, {interval(best.of())}; the "
            "interval of its difference from every other row is above 0. From the next one, "
            f"{nearest.title}, it differs by {signed(least)}."
        ]
    among = [(row, e.means[None]) for row, e in found if row is best_row or row in close]
    means = [mean for _, mean in among]
    return [
        f"No row is clearly the best: the averages of {', '.join(row.title for row, _ in among)} "
        f"are from {share(min(means))} to {share(max(means))}, and their differences from the "
        "highest have intervals that hold 0."
    ]


def domain_notes(
    rows: Estimated, sets: Sequence[str], in_domain: Sequence[str], *, named: bool = False
) -> list[str]:
    """Say what the average is over, and what no row could score on.

    Args:
        rows: of both tables.
        sets: all of them.
        in_domain: those of the average.
        named: the table file names them; else their kinds of question were trained on.
    """
    if not in_domain or set(sets) <= set(in_domain):
        return []
    reason = "" if named else ", whose kinds of question were trained on"
    notes = [f"The average is over {listed(in_domain)}{reason}."]
    for name in sets:
        means = [found.means[name] for _, found in rows if found is not None]
        if name not in in_domain and means and max(means) < NEVER_RIGHT:
            notes.append(
                f"No row answers more than {share(max(means))} of {name}, so that column does not "
                "tell methods apart."
            )
    return notes


def least_p(nums_seeds: set[int]) -> list[str]:
    """Say how small a p-value over seeds can be, and where that tells nothing apart."""
    if not nums_seeds:
        return []
    least = {number: least_sign_flip_p(number) for number in sorted(nums_seeds)}
    each = [f"{_power(p)} with {_seeds(number)}" for number, p in least.items()]
    text = f"The exact sign-flip test over n seeds has no p-value below 2^(1-n): {listed(each)}"
    few = [_seeds(number) for number, p in least.items() if p > 1 - LEVEL]
    if few:
        text += (
            f". So no difference over {listed(few)} is significant at {1 - LEVEL:.2f}, whatever "
            "its interval"
        )
    return [f"{text}."]


def _seeds(number: int) -> str:
    return f"{number} seed{'' if number == 1 else 's'}"


def _power(p: float) -> str:
    """Render a power of one half with two digits that count: `.25`, `.0078`."""
    text = f"{p:.2g}"
    return text[1:] if text.startswith("0.") else text


def listed(names: Sequence[str]) -> str:
    """Render names as `a, b and c`."""
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def interval(estimate: Estimate) -> str:
    """Render an estimate as `.954 [.930, .972]`."""
    return f"{share(estimate.mean)} [{share(estimate.low)}, {share(estimate.high)}]"


def signed(difference: Estimate) -> str:
    """Render a difference as `+0.020 [-0.004, +0.043]`."""
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"


def share(value: float) -> str:
    """Render a number from 0 to 1 with three digits, as the paper does: `.954`."""
    text = f"{value:.3f}"
    return text[1:] if text.startswith("0.") else text
