"""`agent-r1 matrix`: real models on public data sets, asked and decoded in several ways.

Reads the plan (matrix_plan.py), lets the local launcher start the services once for all cells that
can share them, asks what is left, and writes the report (evaluation/matrix/report.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_r1.cli.evaluation.decoding import check_tools
from agent_r1.cli.evaluation.evaluate import Meter, command_again, evaluation_facts
from agent_r1.cli.evaluation.matrix_plan import Choice, MatrixPlan, PlannedCell, read_plan
from agent_r1.cli.evaluation.table import package_versions
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.answers import Answer
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.evaluation.matrix.cells import load_cell, measure, read_cell, write_cell
from agent_r1.evaluation.matrix.pool import calls_of, choose, enough, tokens_of
from agent_r1.evaluation.matrix.report import NOT_RUN, Results, write_report
from agent_r1.launch.threads import in_thread
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED, EXIT_LOSSES


def matrix(arguments: argparse.Namespace) -> int:
    """Ask every model of MATRIX its questions, by every method and way of decoding.

    The questions are those of MATH-500, GSM8K, HumanEval, MBPP, HotpotQA, 2WikiMultihopQA and
    MuSiQue, or those of task files. Scores with 95 % intervals, tokens, calls and seconds are
    written as Markdown, JSON and pictures, with the comparisons that MATRIX names. If you run the
    command again, it keeps finished cells and continues with the rest.
    """
    plan = read_plan(arguments.matrix, arguments.options, arguments.out)
    if arguments.overwrite:
        for cell in plan.runnable():
            cell.file.unlink(missing_ok=True)
    left = [cell for cell in plan.runnable() if read_cell(cell.file, cell.settings) is None]
    for reason in dict.fromkeys(cell for cell in plan.cells.values() if isinstance(cell, str)):
        print(f"left out, {reason}")
    print(f"{len(plan.runnable()) - len(left)} of {len(plan.runnable())} cells are finished")
    groups: dict[tuple[str, ...], list[PlannedCell]] = {}
    for cell in left:
        groups.setdefault(cell.services, []).append(cell)
    for group in groups.values():
        _check(group)
    for group in groups.values():
        try:
            _run(group, overwrite=arguments.overwrite)
        except KeyboardInterrupt:
            print(f"stopped; {_kept(plan, arguments)}", file=sys.stderr)
            return EXIT_INTERRUPTED
        except ValueError as exc:
            raise ValueError(f"{exc}\n{_kept(plan, arguments)}") from exc
    results = Results(
        name=plan.name,
        cells={
            place: cell if isinstance(cell, str) else read_cell(cell.file, cell.settings) or NOT_RUN
            for place, cell in plan.cells.items()
        },
        models=plan.models,
        series=plan.series,
        comparisons=plan.comparisons,
        command=_again(arguments),
        versions=package_versions(),
    )
    for file in write_report(results, plan.results):
        print(f"results: {file}")
    if NOT_RUN not in results.cells.values():
        return 0
    print(f"!! questions failed: cells without results are asked again with: {_again(arguments)}")
    return EXIT_LOSSES


def _check(group: Sequence[PlannedCell]) -> None:
    """Refuse what would fail once services run."""
    named = " / ".join(group[0].services)
    try:
        specs = config_checks.check(group[0].config, "evaluate").specs
        for cell in group:
            check_tools(cell.questioning.decoding, specs)
    except ConfigError as exc:
        raise ConfigError(f"{named}: {exc}") from exc


def _run(group: Sequence[PlannedCell], *, overwrite: bool) -> None:
    """Ask the cells of a group, one after the other, on one start of the services."""
    from agent_r1.launch import local_client

    # Opened before anything starts: answers of other settings are refused here.
    evaluations: dict[Path, EvaluationRun] = {}
    for cell in group:
        if cell.answers not in evaluations:
            evaluations[cell.answers] = _evaluation(cell, overwrite=overwrite)
    # What chooses as many answers as another cell costs comes after that one.
    ordered = sorted(group, key=lambda cell: cell.choice is not None)
    meter = Meter()

    async def ask(served: Config) -> None:
        for cell in ordered:
            evaluation = evaluations[cell.answers]
            if evaluation.left and evaluation not in asked:
                asked.append(evaluation)
                meter.event(f"{cell.answers.stem}: {len(evaluation.left)} answers")
                await in_thread(
                    lambda evaluation=evaluation: evaluation.ask(
                        run=served.run, redis=served.redis, on_progress=meter.show
                    )
                )
            meter.event(_finish(cell, evaluation))

    asked: list[EvaluationRun] = []
    try:
        if any(evaluation.left for evaluation in evaluations.values()):
            local_client.run_client(group[0].config, ask, meter.event)
        else:  # interrupted after the last answer
            for cell in ordered:
                meter.event(_finish(cell, evaluations[cell.answers]))
    finally:
        meter.end()


def _evaluation(cell: PlannedCell, *, overwrite: bool) -> EvaluationRun:
    try:
        return EvaluationRun(
            sets={cell.place.set: cell.source},
            questioning=cell.questioning,
            out=cell.answers,
            facts=evaluation_facts(cell.config),
            overwrite=overwrite,
        )
    except ValueError as exc:
        raise ConfigError(f"{cell.place.name}: {exc}") from exc


def _finish(cell: PlannedCell, evaluation: EvaluationRun) -> str:
    """Write a cell's numbers, unless too many questions failed; return a line about it."""
    answers, candidates = list(evaluation.file.answers.values()), None
    if cell.choice is not None:
        candidates = _candidates(cell.choice, answers)
        if candidates is None:
            return (
                f"!! {cell.place.name}: not measured, since its cost is that of a cell which is "
                "not finished"
            )
        answers = choose(answers, candidates, cell.choice.scorer)
    failed = sum(answer.failed for answer in answers)
    if failed > cell.config.learner.max_lost_share * len(answers):
        return f"!! {cell.place.name}: {failed} of {len(answers)} questions failed: " + "; ".join(
            evaluation.failures()
        )
    found = measure(answers, cell.family, cell.settings, candidates=candidates)
    write_cell(cell.file, found)
    return (
        f"{cell.place.name}: {cell.family.measure} {found.score[0]:.3f} "
        f"[{found.score[1]:.3f}, {found.score[2]:.3f}]  "
        f"tokens {found.sampled_tokens[0]:.0f}  n {found.n}"
    )


def _candidates(choice: Choice, answers: Sequence[Answer]) -> int | None:
    """Return how many answers of the pool are chosen from.

    None where they are to cost as much as a cell that is not finished.
    """
    if choice.costs_as is None:
        return choice.candidates
    costing = load_cell(choice.costs_as)
    if costing is None:
        return None
    if choice.counts == "calls":
        return enough(answers, calls_of, costing.calls[0], choice.candidates)
    return enough(answers, tokens_of, costing.sampled_tokens[0], choice.candidates)


def _kept(plan: MatrixPlan, arguments: argparse.Namespace) -> str:
    cells = plan.runnable()
    done = sum(cell.file.exists() for cell in cells)
    command = _again(arguments)
    return f"{done} of {len(cells)} cells and all answers are kept; continue with: {command}"


def _again(arguments: argparse.Namespace) -> str:
    return command_again(("matrix", arguments.matrix), arguments.options, {"--out": arguments.out})
