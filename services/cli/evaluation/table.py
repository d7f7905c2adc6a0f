"""`agent-r1 table`: methods over seeds on one start of the services, and a report of the results.

Reads the plan (table_plan.py), finds which runs are finished, lets the local launcher do the
rest (launch/local_table.py), and writes the report (evaluation/experiments/table_report.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, cast

from agent_r1.cli.declare import add_set
from agent_r1.cli.evaluation.asking import (
    Meter,
    ask_left,
    command_again,
    open_evaluation,
    questioning,
    run_kept,
)
from agent_r1.cli.evaluation.experiment import package_versions, print_results
from agent_r1.cli.evaluation.settings import (
    component_differences,
    differences_since,
    flat_values,
)
from agent_r1.cli.evaluation.table_plan import (
    PlannedRun,
    TablePlan,
    check_runs,
    chosen,
    read_plan,
)
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.answer_file import Facts, components_of, key_of, write_json
from agent_r1.evaluation.experiments.cell import TableCell
from agent_r1.evaluation.experiments.config import BASELINE_TITLES, EXACT_MATCH, Baseline
from agent_r1.evaluation.experiments.estimates import Row
from agent_r1.evaluation.experiments.table_report import TableResults
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.evaluation.summary import summary_lines
from agent_r1.launch.local_result import read_json, summary_of
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.outcome import FINISHED, FINISHED_WITH_LOSSES
from agent_r1.runtime.exit_status import EXIT_LOSSES
from agent_r1.runtime.files.run_folder import ANSWERS_FILE, CONFIG_FILE, METRICS_FILE
from agent_r1.runtime.files.state import split_lines

if TYPE_CHECKING:
    from agent_r1.launch.local_table import Client


def table_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `table`."""
    parser.add_argument("table", type=Path, metavar="TABLE", help="table file (.toml)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results, runs and cells (default: those of the file, and runs/table)",
    )
    only_help = "only these methods or baselines, by name"
    parser.add_argument("--only", metavar="METHOD[,METHOD]", help=only_help)
    parser.add_argument("--seeds", metavar="SEED[,SEED]", help="only the runs with these seeds")
    overwrite_help = "start the rows again and discard their results"
    parser.add_argument("--overwrite", action="store_true", help=overwrite_help)
    add_set(parser)


def table(arguments: argparse.Namespace) -> int:
    """Train every method of TABLE with every seed, and compare their scores.

    Tools, reward and rollout start once; the baselines are evaluated first. The scores, with 95 %
    intervals, are written as Markdown and JSON. If you run the command again, it keeps finished
    rows and continues with the rest.
    """
    plan = read_plan(arguments.table, arguments.options, arguments.out)
    rows = [*plan.asked.baselines, *(method.name for method in plan.methods)]
    only = chosen("--only", arguments.only, rows)
    seeds = chosen("--seeds", arguments.seeds, sorted({run.seed for run in plan.runs()}))
    again = _again(arguments, arguments.only, arguments.seeds)
    overwrite: bool = arguments.overwrite
    selected = plan.runs(only, seeds)
    baselines: list[Baseline] = [n for n in plan.asked.baselines if only is None or n in only]
    left = [run for run in selected if overwrite or not _is_kept(plan, run)]
    unasked: list[Baseline] = [
        name for name in baselines if overwrite or not plan.read_cell(plan.baseline(name))
    ]
    if left or unasked:
        check_runs(plan, left)
    if overwrite:
        _discard(plan, [*selected, *map(plan.baseline, baselines)])
    for run in selected:
        _check_settings(plan, run, f"{_again(arguments, run.method)} --overwrite")
    evaluations: dict[Baseline, EvaluationRun] = {
        name: _evaluation(plan, name, overwrite=overwrite) for name in unasked
    }
    to_ask: dict[Baseline, EvaluationRun] = {
        name: found for name, found in evaluations.items() if found.left
    }
    if kept := len(selected) - len(left):
        print(f"{kept} of {len(selected)} rows are finished and kept")
    if left or to_ask:
        code = _run(plan, to_ask, selected, left, again)
        if code:
            return code
    print_results(results_of(plan, _again(arguments)).write(plan.results))
    lossy = [run for run in selected if _status(run) == FINISHED_WITH_LOSSES]
    for run in lossy:
        print(f"!! {run.label} lost more than learner.max_lost_share allows; see {run.folder}")
    return EXIT_LOSSES if lossy else 0


def _discard(plan: TablePlan, runs: Sequence[PlannedRun]) -> None:
    from agent_r1.launch.local_table import check_idle

    check_idle(plan.folder)
    for run in runs:
        shutil.rmtree(run.folder, ignore_errors=True)
        if (cell := plan.cell_file(run)) is not None:
            cell.unlink(missing_ok=True)


def _run(
    plan: TablePlan,
    evaluations: Mapping[Baseline, EvaluationRun],
    selected: Sequence[PlannedRun],
    left: Sequence[PlannedRun],
    again: str,
) -> int:
    """Run the services and all that is left; say how to continue if that does not end."""
    from agent_r1.launch import local_table
    from agent_r1.launch.supervisor import ServiceError

    runs = [local_table.TableRun(run.label, run.folder, run.config) for run in left]
    view = local_table.TableView(len(selected) - len(left), runs)
    client = _asker(plan, evaluations) if evaluations else None

    def work() -> None:
        try:
            stopped = local_table.run_table(
                plan.base, plan.folder, baselines=client, runs=runs, view=view
            )
        except ServiceError as exc:
            raise ValueError(str(exc)) from exc
        if stopped:
            raise KeyboardInterrupt

    def kept() -> str:
        results_of(plan, again)  # writes the cells of what has finished
        finished = sum(_is_kept(plan, run) for run in selected)
        return f"{finished} of {len(selected)} rows are finished and kept; continue with: {again}"

    return run_kept(work, kept)


def _asker(plan: TablePlan, evaluations: Mapping[Baseline, EvaluationRun]) -> Client:
    """Return what asks the baselines, one after the other."""

    async def ask(served: Config) -> None:
        for name, evaluation in evaluations.items():
            print(f"baseline {BASELINE_TITLES[name]}: {len(evaluation.left)} questions")
            started = time.monotonic()
            meter = Meter()
            try:
                await ask_left(evaluation, served, meter)
            finally:
                meter.end()
                file = _wall_file(plan, name)
                before = read_json(file).get("wall_s", 0.0)
                write_json(file, {"wall_s": before + time.monotonic() - started})
            for line in summary_lines(evaluation.summarise(), served.score_names()):
                if not line.startswith(" "):  # the sets, without their types
                    print(line)

    return ask


def _evaluation(plan: TablePlan, name: Baseline, *, overwrite: bool) -> EvaluationRun:
    if overwrite:
        _wall_file(plan, name).unlink(missing_ok=True)
    out, base = plan.answers(name), plan.base
    there = components_of(out)
    asked = questioning(base, name)
    try:
        if not overwrite and not component_differences(there, base.reward, plan.asked.measure):
            components: Facts = {"reward.components": dict(there)}
            earlier = open_evaluation(base, asked, out, facts=components)
            if not earlier.left:  # what is finished is kept
                return earlier
        return open_evaluation(base, asked, out, overwrite=overwrite)
    except ValueError as exc:
        raise ConfigError(f"baseline {name}: {exc}") from exc


def _wall_file(plan: TablePlan, name: Baseline) -> Path:
    return plan.answers(name).with_suffix(".wall.json")


def _differences(plan: TablePlan, run: PlannedRun) -> list[str]:
    """Say in what the run in the folder differs from the planned one; nothing without a run."""
    there = read_json(run.folder / CONFIG_FILE)
    if not there:
        return []
    return differences_since(flat_values(there), run.settings, run.config, plan.asked.measure)


def _check_settings(plan: TablePlan, run: PlannedRun, remedy: str) -> None:
    found = _differences(plan, run)
    if found:
        raise ConfigError(
            f"{run.folder} holds a run with other settings: {'; '.join(found)}; restore the "
            f"settings, choose another --out, or discard that run with: {remedy}"
        )


def _status(run: PlannedRun) -> str | None:
    return summary_of(run.folder).get("status")


def _is_finished(run: PlannedRun) -> bool:
    return _status(run) in (FINISHED, FINISHED_WITH_LOSSES)


def _is_kept(plan: TablePlan, run: PlannedRun) -> bool:
    return _is_finished(run) or bool(plan.read_cell(run))


def _again(arguments: argparse.Namespace, only: str | None = None, seeds: str | None = None) -> str:
    """Return the command that continues a table, or some of its rows."""
    return command_again(
        ("table", arguments.table),
        arguments.options,
        {"--out": arguments.out, "--only": only, "--seeds": seeds},
    )


# --- What the report is made of ----------------------------------------------------------------


def results_of(plan: TablePlan, command: str) -> TableResults:
    """Gather what the runs of a plan left in their folders; write the cells of what is finished."""
    sets = list(plan.base.evaluation.sets)
    rows: list[Row[TableCell]] = [
        Row(name, BASELINE_TITLES[name], "methods", _baseline_cells(plan, name), baseline=True)
        for name in plan.asked.baselines
    ]
    in_domain = _in_domain(plan, sets)
    cells: dict[Path, TableCell] = {}
    for run in plan.runs():
        if _is_finished(run) and not _differences(plan, run):
            cells[run.folder] = _run_cell(plan, run, in_domain)
        elif cell := plan.read_cell(run):
            cells[run.folder] = cell
    for method in plan.methods:
        runs = [cells[run.folder] for run in method.runs if run.folder in cells]
        rows.append(replace(cast(Row[Any], method), runs=runs))
    return TableResults(
        name=plan.name,
        table=plan.asked,
        rows=rows,
        sets=sets,
        in_domain=in_domain,
        budget=_budget(plan),
        command=command,
        versions=package_versions(),
        settings={
            method.name: method.runs[0].config.learner.model_dump(mode="json")
            for method in plan.methods
        },
    )


def _budget(plan: TablePlan) -> str:
    """Say what trained rows spend, and which spend something else."""
    usual = _spends(plan.base.learner)
    spent = {method.title: _spends(method.runs[0].config.learner) for method in plan.methods}
    others = [f"{title} spends {budget}" for title, budget in spent.items() if budget != usual]
    rows = "Every other trained row" if others else "Every trained row"
    return "; ".join([f"{rows} spends {usual}", *others]) + "."


def _spends(learner: LearnerConfig) -> str:
    if learner.steps == 0:
        return "no step of the learner"
    steps = (
        "as many steps as its prompts make," if learner.steps is None else f"{learner.steps} steps"
    )
    return f"{steps} of {learner.groups_per_batch} questions x {learner.group_size} trajectories"


def _run_cell(plan: TablePlan, run: PlannedRun, in_domain: list[str]) -> TableCell:
    file = run.folder / ANSWERS_FILE
    try:
        lines = [json.loads(line) for line in split_lines(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{file} cannot be read ({exc}); discard that run with --only {run.method} --overwrite"
        ) from exc
    file = run.folder / METRICS_FILE
    # A run of no steps has no metrics, and a step of which no sample was scored no mean.
    metrics = split_lines(file.read_text(encoding="utf-8")) if file.exists() else []
    curve = f"reward/{plan.asked.measure}"
    steps = [step for line in metrics if curve in (step := json.loads(line))]
    others = [name for name in run.config.reward.measured() if name != plan.asked.measure]
    return _cell(
        plan,
        run,
        lines,
        in_domain=in_domain,
        wall_s=summary_of(run.folder).get("wall_s"),
        curve=[step[curve] for step in steps],
        tokens=[round(step["mask/share"] * step["batch/tokens"]) for step in steps],
        components={
            name: [step[key] for step in steps if (key := f"reward/{name}") in step]
            for name in others
        },
    )


def _cell(
    plan: TablePlan, run: PlannedRun, lines: Sequence[Mapping[str, Any]], **more: Any
) -> TableCell:
    """Return the cell of what is finished, and write it if the table keeps cells."""
    measure = plan.asked.measure
    of_set = {n: [line for line in lines if line["set"] == n] for n in plan.base.evaluation.sets}
    scored = {
        n: [one for one in of if _score(one, measure) is not None] for n, of in of_set.items()
    }
    f1 = {n: [one["f1"] for one in of if one["f1"] is not None] for n, of in scored.items()}
    cell = TableCell(
        settings=run.cell_settings(),
        measure=measure,
        scores={n: [_score(one, measure) for one in of] for n, of in of_set.items()},
        f1={n: fmean(values) for n, values in f1.items() if values},
        calls={
            n: fmean(sum(one["calls"].values()) for one in of) for n, of in scored.items() if of
        },
        # A line of an older run says so by its missing score alone.
        failed={n: sum(o.get("failed", o["em"] is None) for o in of) for n, of in of_set.items()},
        **more,
    )
    if (file := plan.cell_file(run)) is not None:
        cell.write(file)
    return cell


def _score(line: Mapping[str, Any], measure: str) -> float | None:
    """Return the score of one question; None where it has none."""
    # Lines of older runs have no components.
    return line["em"] if measure == EXACT_MATCH else line["components"].get(measure)


def _baseline_cells(plan: TablePlan, name: Baseline) -> list[TableCell]:
    """Return the one cell of a baseline; none unless every question has its answer."""
    baseline = plan.baseline(name)
    evaluation = None
    if plan.answers(name).exists():
        evaluation = _evaluation(plan, name, overwrite=False)
    if evaluation is None or evaluation.left:
        cell = plan.read_cell(baseline)
        return [] if cell is None else [cell]
    # In the order of the questions, as runs have them, so that both are compared by question.
    answers = [evaluation.file.answers[key_of(task)] for task in evaluation.questions]
    lines = [{**vars(answer), "calls": answer.calls} for answer in answers]
    return [_cell(plan, baseline, lines, wall_s=read_json(_wall_file(plan, name)).get("wall_s"))]


def _in_domain(plan: TablePlan, sets: Sequence[str]) -> list[str]:
    """Return the sets that a finished run says it was trained on; all before there is one."""
    for run in plan.runs():
        of_run = summary_of(run.folder).get("sets") or {}
        if of_run:
            return [name for name in sets if of_run.get(name, {}).get("in_domain")]
        if cell := plan.read_cell(run):
            return [name for name in sets if name in cell.in_domain]
    return list(sets)
