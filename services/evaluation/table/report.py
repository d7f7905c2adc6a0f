"""Writes a results table: run.py --rows, estimates--> `{results}.md`, `.json`, two pictures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from pydantic import JsonValue

from agent_r1.evaluation.answers import write_json
from agent_r1.evaluation.statistics import (
    LEVEL,
    RESAMPLES,
    SEED,
    Estimate,
    least_sign_flip_p,
)
from agent_r1.evaluation.table import paper
from agent_r1.evaluation.table.chart import line_chart
from agent_r1.evaluation.table.config import EXACT_MATCH, ContrastConfig, Part, measure_title
from agent_r1.evaluation.table.contrasts import Contrast, judge_contrasts, seed_differences
from agent_r1.evaluation.table.progress import WINDOW, measure_progress
from agent_r1.evaluation.table.run import (
    MASKS,
    Row,
    RowEstimates,
    SeedScores,
    domain_notes,
    estimate_row,
    goal_sentences,
    interval,
    listed,
    mean_curve,
    share,
)
from agent_r1.runtime.files.writing import write_atomically

HEADINGS: dict[Part, str] = {"methods": "Methods", "ablation": "Ablation of the masks"}
NOT_RUN = "not run"
METHOD = "percentile bootstrap over seeds, and over questions that all seeds and rows share"
TOO_NARROW = "percentile bootstrap over seeds, then questions within each"
"""The method of older versions: with S seeds, intervals are up to sqrt(S) times too narrow."""
NOT_KNOWN = (
    "The table file does not say which choices, such as the learning rate, were made while looking "
    "at these questions (`chosen_on`); scores on questions that influenced choices are too high."
)


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
    chosen_on: str
    """Which choices were made while looking at which questions; empty is not known."""
    command: str
    """The command that makes all of it again."""
    versions: Mapping[str, str]
    settings: Mapping[str, Mapping[str, JsonValue]]
    """Every key of the learner, per method."""
    measure: str = EXACT_MATCH
    """The reward component that is compared."""
    remarks: str = ""
    """Sentences of the table file that no number says."""
    contrasts: Sequence[ContrastConfig] = ()
    """Comparisons that are tested."""
    threshold: float | None = None
    """Mean measure until which the sampled tokens of training are counted."""
    average: Sequence[str] = ()
    """Sets of the average that the table file names."""

    @property
    def averaged(self) -> Sequence[str]:
        """Sets that the average is over."""
        return self.average or self.in_domain or self.sets


def picture(results: Path, part: Part) -> Path:
    """Return where the curves of one table go."""
    return results.with_name(f"{results.name}_{part}.svg")


def write_report(results: Results, out: Path) -> list[Path]:
    """Write the report; `out` names its files without suffix.

    Returns:
        The files.

    Raises:
        ValueError: they cannot be written.
    """
    markdown, numbers = out.with_name(f"{out.name}.md"), out.with_name(f"{out.name}.json")
    files = [markdown, numbers]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        pictures: dict[str, str] = {}
        for part in get_args(Part):
            lines = {
                row.title: curve
                for row in results.rows
                if row.table == part and (curve := mean_curve(row.runs))
            }
            if lines:
                measure = measure_title(results.measure)
                title = f"{HEADINGS[part]}: {measure} in the training rollouts"
                text = line_chart(lines, title=title, x_label="step", y_label=measure)
                files.append(picture(out, part))
                write_atomically(files[-1], text)
                pictures[part] = files[-1].name
        found = record(results, pictures)
        write_json(numbers, found)
        write_atomically(markdown, report(found))
    except OSError as exc:
        raise ValueError(
            f"the results ({out}) cannot be written: {exc.strerror}; name a --out"
        ) from exc
    return files


def record(results: Results, pictures: Mapping[str, str]) -> dict[str, Any]:
    """Return what the JSON file holds: all that the report says."""
    rows = [(row, estimate_row(row, results.sets, results.averaged)) for row in results.rows]
    # A run that two tables share took its time once.
    walls = {id(run): run.wall_s or 0.0 for row in results.rows for run in row.runs}
    return {
        "name": results.name,
        "measure": results.measure,
        "rows": [
            _scores(row, run, name)
            for row in results.rows
            for run in row.runs
            for name in run.scores
        ],
        "estimates": [_estimates(row, found, results) for row, found in rows],
        "interval": {
            "method": METHOD,
            "level": LEVEL,
            "resamples": RESAMPLES,
            "seed": SEED,
        },
        "goals": goal_sentences(rows, results.averaged),
        "contrasts": [vars(found) for found in tested(results)],
        "threshold": results.threshold,
        "window": WINDOW,
        "notes": domain_notes(rows, results.sets, results.averaged, named=bool(results.average)),
        "sets": list(results.sets),
        "in_domain": list(results.in_domain),
        "seeds": sorted(
            {run.seed for row in results.rows for run in row.runs if run.seed is not None}
        ),
        "budget": results.budget,
        "chosen_on": results.chosen_on.strip(),
        "remarks": results.remarks.strip(),
        "command": results.command,
        "versions": dict(results.versions),
        "wall_s": round(sum(walls.values()), 1),
        "pictures": dict(pictures),
        "settings": {name: dict(values) for name, values in results.settings.items()},
    }


def _estimates(row: Row, found: RowEstimates | None, results: Results) -> dict[str, Any]:
    """Describe one row of a table; the estimates are None where it has not been run."""
    progress = measure_progress(row.runs, results.threshold)
    walls = [round(run.wall_s, 1) for run in row.runs if run.wall_s is not None]
    return {
        "method": row.method,
        "title": row.title,
        "table": row.table,
        "set": dict(row.settings),
        "wall_s": walls,
        "sets": None if found is None else {name: vars(e) for name, e in found.sets.items()},
        "average": None if found is None else vars(found.average),
        "f1": _mean_over_sets([run.f1 for run in row.runs], results),
        "calls": _mean_over_sets([run.calls for run in row.runs], results),
        "progress": None if progress is None else vars(progress),
    }


def _mean_over_sets(runs: Sequence[Mapping[str, float]], results: Results) -> float | None:
    """Average over the sets of the average, then over the seeds; None where nothing was scored."""
    names = results.averaged
    if not runs or any(name not in of_run for of_run in runs for name in names):
        return None
    return fmean(fmean(of_run[name] for name in names) for of_run in runs)


def _scores(row: Row, run: SeedScores, name: str) -> dict[str, Any]:
    scores = [score for score in run.scores[name] if score is not None]
    return {
        "method": row.method,
        "table": row.table,
        "set": name,
        "seed": run.seed,
        "score": fmean(scores),
        "f1": run.f1.get(name),
        "calls": run.calls.get(name),
        "n": len(scores),
        "failed": run.failed.get(name, 0),
        # A cell of an older version leaves out what failed, so its list is shorter.
        "failed_known": run.scores[name].count(None) >= run.failed.get(name, 0),
        "wall_s": None if run.wall_s is None else round(run.wall_s, 1),
    }


def report(found: Mapping[str, Any]) -> str:
    """Return the text of the Markdown file, from what `record` returned or the JSON file holds."""
    blocks = [f"# Results: {found['name']}", _opening(found), _chosen(found)]
    for part, heading in HEADINGS.items():
        members = [row for row in found["estimates"] if row["table"] == part]
        if not members:
            continue
        blocks += [f"## {heading}", _table(members, found, masks=part == "ablation")]
        blocks += [" ".join(found["notes"])] if found["notes"] else []
        blocks += _failed([row for row in found["rows"] if row["table"] == part], members)
        blocks += _spending(members, found)
        if part in found["pictures"]:
            shown = f"{_capital(found)} in the training rollouts per step, mean over seeds"
            blocks.append(f"![{shown}]({found['pictures'][part]})")
    if said := [*found["goals"], *_least_p(_nums_seeds(found))]:
        blocks += ["## What the numbers say", "\n".join(f"- {sentence}" for sentence in said)]
    blocks += _contrasts(found)
    # A table written by an older version has none.
    blocks += ["## Remarks", found["remarks"]] if found.get("remarks") else []
    if _measure(found) == EXACT_MATCH:
        blocks += ["## The paper's tables, for orientation"]
        blocks += [paper.WORDS, paper.METHODS, paper.ABLATION]
    blocks += ["## How it was made", *_making(found)]
    return "\n\n".join(blocks) + "\n"


def _measure(found: Mapping[str, Any]) -> str:
    # A table written by an older version compares exact match without saying so.
    return found.get("measure", EXACT_MATCH)


def _capital(found: Mapping[str, Any]) -> str:
    """Return the measure in words, as a sentence begins."""
    title = measure_title(_measure(found))
    return title[:1].upper() + title[1:]


def tested(results: Results) -> list[Contrast]:
    """Return the contrasts of a table, over the seeds that both methods have."""
    runs = {row.method: row.runs for row in results.rows}
    average = list(results.averaged)
    return judge_contrasts(
        [
            (
                c.first,
                c.second,
                "average" if c.set is None else c.set,
                seed_differences(runs[c.first], runs[c.second], [c.set] if c.set else average),
            )
            for c in results.contrasts
        ]
    )


def _contrasts(found: Mapping[str, Any]) -> list[str]:
    if not found.get("contrasts"):  # a table written by an older version has none
        return []
    columns = ["first", "second", "of", "seeds", "second minus first", "p", "p (Holm)"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for contrast in found["contrasts"]:
        cells = [contrast["first"], contrast["second"], contrast["of"]]
        if not contrast["differences"]:
            lines.append(_row([*cells, "0", NOT_RUN, "", ""]))
            continue
        numbers = [contrast["mean"], contrast["p"], contrast["p_holm"]]
        shown = [f"{numbers[0]:+.3f}", *(f"{number:.4f}" for number in numbers[1:])]
        lines.append(_row([*cells, str(len(contrast["differences"])), *shown]))
    text = (
        "Fixed before the first run. The difference of the means is taken seed by seed; "
        "p is that of the exact sign-flip test over seeds (two-sided), and its last column is "
        "adjusted for the number of contrasts by Holm's procedure."
    )
    tested = {n for contrast in found["contrasts"] if (n := len(contrast["differences"]))}
    text = " ".join([text, *_least_p(tested)])
    return ["## Contrasts", text, "\n".join(lines), *_not_told_apart(found["contrasts"])]


def _not_told_apart(contrasts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the contrasts whose adjusted p-value is too high for their difference to be real."""
    pairs = [
        f"{contrast['first']} and {contrast['second']} ({contrast['of']})"
        for contrast in contrasts
        if contrast["p_holm"] is not None and contrast["p_holm"] > 1 - LEVEL
    ]
    told = f"These are not told apart at the level {1 - LEVEL:.2f}: {'; '.join(pairs)}."
    return [told] if pairs else []


def _opening(found: Mapping[str, Any]) -> str:
    seeds = ", ".join(map(str, found["seeds"])) or "none"
    bootstrap = found["interval"]
    drawn = (
        "each resample draws seeds, and questions once for all seeds and rows, so the interval is "
        "about other seeds and other questions; that of one seed is about other questions only"
    )
    if bootstrap["method"] == TOO_NARROW:
        drawn = "over seeds and over the questions within each"
    text = (
        f"Written by `agent-r1 table`. {_capital(found)} on held-out questions; in brackets a "
        f"{bootstrap['level'] * 100:.0f} % interval (percentile bootstrap, "
        f"{bootstrap['resamples']:,} resamples: {drawn}). "
        f"Seeds: {seeds}; baselines do not depend on the seed and have one run. {found['budget']}"
    )
    return " ".join([text, *_too_narrow(found)])


def _nums_seeds(found: Mapping[str, Any]) -> set[int]:
    """Return the numbers of seeds that trained rows have."""
    seeds = {(row["method"], row["seed"]) for row in found["rows"] if row["seed"] is not None}
    return {*Counter(method for method, _ in seeds).values()}


def _least_p(nums_seeds: set[int]) -> list[str]:
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


def _too_narrow(found: Mapping[str, Any]) -> list[str]:
    """Warn of the intervals of an older version, which kept no answers to mend them with."""
    most = max(_nums_seeds(found), default=1)
    if found["interval"]["method"] != TOO_NARROW or most == 1:
        return []
    return [
        "**These intervals are too narrow.** An older version of the command drew questions anew "
        "for each seed, although all seeds answered the same ones. The right intervals need the "
        f"answers, which this page does not have; with {most} seeds they are up to "
        f"{most**0.5:.1f} times as wide."
    ]


def _chosen(found: Mapping[str, Any]) -> str:
    return "**What was chosen on these questions.** " + (found["chosen_on"] or NOT_KNOWN)


def _table(members: Sequence[Mapping[str, Any]], found: Mapping[str, Any], *, masks: bool) -> str:
    titles = [
        f"{name}{'' if name in found['in_domain'] else ' (untrained kind)'}"
        for name in found["sets"]
    ]
    columns = ["method", *(["loss mask", "advantage mask"] if masks else []), *titles, "average"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for member in members:
        on = ["no" if member["set"].get(mask) is False else "yes" for mask in reversed(MASKS)]
        cells = [member["title"], *(on if masks else []), *_cells(member, found["sets"])]
        lines.append(_row(cells))
    return "\n".join(lines)


def _spending(members: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> list[str]:
    """Return the table of what answers cost, and how fast they were learned."""
    if not any(member.get("progress") for member in members):  # an older version wrote none
        return []
    threshold = found["threshold"]
    has_f1 = any(member["f1"] is not None for member in members)
    columns = ["method", "seeds", *(["F1"] if has_f1 else [])]
    columns += ["calls a question", "area under the curve"]
    columns += [] if threshold is None else ["reached", f"sampled tokens to {share(threshold)}"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for member in members:
        cells = ["-" if (value := member["f1"]) is None else share(value)] if has_f1 else []
        cells += ["-" if (value := member["calls"]) is None else f"{value:.1f}"]
        cells += _progress_cells(member["progress"], threshold)
        lines.append(_row([member["title"], str(len(member["wall_s"])), *cells]))
    text = (
        f"{'F1 and calls' if has_f1 else 'Calls'} are means over the sets of the average. The "
        f"curve shows {measure_title(_measure(found))} in the training rollouts over the steps; "
        "the area under it is divided by their number."
    )
    if threshold is not None:
        text += (
            f" The threshold ({share(threshold)}) was fixed before the first run. It is reached "
            f"when {found['window']} steps in a row have a mean at least as high. The tokens are "
            "the median over the seeds; a run that never got there is censored, and took longer "
            "than any that did."
        )
    return [text, "\n".join(lines)]


def _progress_cells(progress: Mapping[str, Any] | None, threshold: float | None) -> list[str]:
    if progress is None:
        return ["-"] * (1 if threshold is None else 3)
    if threshold is None:
        return [share(progress["area"])]
    middle = progress["median_tokens"]
    reached = f"{progress['reached']} of {progress['runs']}"
    tokens = "censored" if middle is None else f"{middle:,.0f}"
    return [share(progress["area"]), reached, tokens]


def _failed(rows: Sequence[Mapping[str, Any]], members: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of which rows questions failed; their means are of the others."""
    titles = {member["method"]: member["title"] for member in members}
    parts: list[str] = []
    for row in rows:
        seed = "" if row["seed"] is None else f" seed {row['seed']}"
        if row["failed"]:
            which = "" if row.get("failed_known", True) else " (the cell does not say which)"
            parts.append(f"{titles[row['method']]}{seed}: {row['failed']} of {row['set']}{which}")
    if not parts:
        return []
    text = f"Questions that failed, and count in no mean: {'; '.join(parts)}."
    if not all(row.get("failed_known", True) for row in rows):
        text += (
            " Where a cell does not say which, its later answers are paired with other questions, "
            "and intervals may be too narrow."
        )
    return [text]


def _cells(member: Mapping[str, Any], sets: Sequence[str]) -> list[str]:
    if member["sets"] is None:
        return [NOT_RUN] * (len(sets) + 1)
    estimates = [*(member["sets"][name] for name in sets), member["average"]]
    return [interval(Estimate(**estimate)) for estimate in estimates]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _making(found: Mapping[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [_row(["method", "table", "settings", "wall time a run (s)"]), _row(["---"] * 4)]
    for row in found["estimates"]:
        shown = [f"{key} = {json.dumps(value)}" for key, value in row["set"].items()]
        walls = ", ".join(f"{wall:.0f}" for wall in row["wall_s"])
        settings = f"`{', '.join(shown)}`" if shown else ""
        lines.append(_row([row["title"], row["table"], settings, walls or NOT_RUN]))
    return [
        f"```sh\n{found['command']}\n```",
        f"{versions}. All runs together took {found['wall_s'] / 60:.0f} minutes.",
        "\n".join(lines),
    ]
