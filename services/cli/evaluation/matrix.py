"""`agent-r1 matrix`: real models on public data sets, asked and decoded in several ways.

Reads the plan (matrix_plan.py), lets the local launcher start the services once for all cells that
can share them, asks what is left, and writes the report (evaluation/experiments/matrix_report.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from agent_r1.cli.declare import add_set
from agent_r1.cli.evaluation.asking import (
    Meter,
    ask_left,
    command_again,
    on_services,
    open_evaluation,
    run_kept,
)
from agent_r1.cli.evaluation.decoding import check_tools
from agent_r1.cli.evaluation.experiment import named, package_versions, print_results
from agent_r1.cli.evaluation.matrix_plan import MatrixPlan, PlannedCell, read_plan
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError
from agent_r1.evaluation.answer_file import Answer
from agent_r1.evaluation.choosing import calls_of, choose, enough, tokens_of
from agent_r1.evaluation.experiments.cell import MatrixCell, measure
from agent_r1.evaluation.experiments.matrix_report import MatrixResults
from agent_r1.evaluation.experiments.report import NOT_RUN
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.runtime.exit_status import EXIT_LOSSES


def matrix_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `matrix`."""
    parser.add_argument("matrix", type=Path, metavar="MATRIX", help="matrix file (.toml)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results and answers (default: the file's `results`, and runs/matrix)",
    )
    overwrite_help = "start all cells again and discard their answers"
    parser.add_argument("--overwrite", action="store_true", help=overwrite_help)
    add_set(parser)


def matrix(arguments: argparse.Namespace) -> int:
    """Ask every model of MATRIX its questions, by every method and way of decoding.

    The questions are those of MATH-500, GSM8K, HumanEval, MBPP, HotpotQA, 2WikiMultihopQA and
    MuSiQue, or those of task files. Scores with 95 % intervals, tokens, calls and seconds are
    written as Markdown, JSON and pictures, with the comparisons that MATRIX names. If you run the
    command again, it keeps finished cells and continues with the rest.
    """
    plan = read_plan(arguments.matrix, arguments.options, arguments.out)
    again = _again(arguments)
    cells, overwrite = plan.runnable(), arguments.overwrite
    if overwrite:
        if plan.absent:
            raise next(iter(plan.absent.values()))
        for cell in cells:
            cell.file.unlink(missing_ok=True)
    left = [cell for cell in cells if cell.read() is None]
    for name, why in plan.absent.items():
        print(f"the model {name} is not here, and its finished cells are taken as they are: {why}")
    for reason in dict.fromkeys(cell for cell in plan.cells.values() if isinstance(cell, str)):
        print(f"left out, {reason}")
    total = sum(not isinstance(cell, str) for cell in plan.cells.values())
    print(f"{total - len(left)} of {total} cells are finished")
    groups: dict[tuple[str, ...], list[PlannedCell]] = {}
    for cell in left:
        groups.setdefault(cell.services, []).append(cell)
    for group in groups.values():
        _check(group)

    def work() -> None:
        for group in groups.values():
            _run(group, overwrite=overwrite)

    def kept() -> str:
        done = sum(cell.file.exists() for cell in cells)
        return f"{done} of {len(cells)} cells and all answers are kept; continue with: {again}"

    if code := run_kept(work, kept):
        return code
    return _report(plan, again)


def _report(plan: MatrixPlan, again: str) -> int:
    results = MatrixResults(
        name=plan.name,
        matrix=plan.asked,
        cells={
            place: cell.read() or NOT_RUN if isinstance(cell, PlannedCell) else cell
            for place, cell in plan.cells.items()
        },
        command=again,
        versions=package_versions(),
    )
    print_results(results.write(plan.results))
    if NOT_RUN not in results.cells.values():
        return 0
    print(f"!! questions failed: cells without results are asked again with: {again}")
    return EXIT_LOSSES


def _check(group: Sequence[PlannedCell]) -> None:
    """Refuse what would fail once services run."""
    with named(" / ".join(group[0].services)):
        specs = config_checks.check(group[0].config, "evaluate").specs
        for cell in group:
            check_tools(cell.questioning.decoding, specs)


def _run(group: Sequence[PlannedCell], *, overwrite: bool) -> None:
    """Ask the cells of a group, one after the other, on one start of the services."""
    # Opened before anything starts: answers of other settings are refused here.
    evaluations: dict[Path, EvaluationRun] = {}
    for cell in group:
        if cell.answers not in evaluations:
            evaluations[cell.answers] = _evaluation(cell, overwrite=overwrite)
    # What chooses as many answers as another cell costs comes after that one.
    ordered = sorted(group, key=lambda cell: cell.pooled)

    async def ask(served: Config, meter: Meter) -> None:
        asked: list[EvaluationRun] = []
        for cell in ordered:
            evaluation = evaluations[cell.answers]
            if evaluation.left and evaluation not in asked:
                asked.append(evaluation)
                meter.event(f"{cell.answers.stem}: {len(evaluation.left)} answers")
                await ask_left(evaluation, served, meter)
            meter.event(_finish(cell, evaluation))

    if any(evaluation.left for evaluation in evaluations.values()):
        on_services(group[0].config, ask)
    else:  # interrupted after the last answer
        for cell in ordered:
            print(_finish(cell, evaluations[cell.answers]))


def _evaluation(cell: PlannedCell, *, overwrite: bool) -> EvaluationRun:
    try:
        return open_evaluation(cell.config, cell.questioning, cell.answers, overwrite=overwrite)
    except ValueError as exc:
        raise ConfigError(f"{cell.place.name}: {exc}") from exc


def _finish(cell: PlannedCell, evaluation: EvaluationRun) -> str:
    """Write a cell's numbers, unless too many questions failed; return a line about it."""
    answers, candidates = list(evaluation.file.answers.values()), None
    if cell.pooled:
        candidates = _candidates(cell, answers)
        if candidates is None:
            return (
                f"!! {cell.place.name}: not measured, since its cost is that of a cell which is "
                "not finished"
            )
        answers = choose(answers, candidates, cell.scorer)
    failed = sum(answer.failed for answer in answers)
    if failed > cell.config.learner.max_lost_share * len(answers):
        return f"!! {cell.place.name}: {failed} of {len(answers)} questions failed: " + "; ".join(
            evaluation.failures()
        )
    found = measure(answers, cell.family, cell.settings, candidates=candidates)
    found.write(cell.file)
    return (
        f"{cell.place.name}: {cell.family.measure} {found.score[0]:.3f} "
        f"[{found.score[1]:.3f}, {found.score[2]:.3f}]  "
        f"tokens {found.sampled_tokens[0]:.0f}  n {found.n}"
    )


def _candidates(cell: PlannedCell, answers: Sequence[Answer]) -> int | None:
    """Return how many answers of the pool are chosen from.

    None where they are to cost as much as a cell that is not finished.
    """
    fewest = cell.entry.candidates
    if cell.costs_as is None:
        return fewest
    costing = MatrixCell.read(cell.costs_as)
    if costing is None:
        return None
    if cell.entry.calls_of is not None:
        return enough(answers, calls_of, costing.calls[0], fewest)
    return enough(answers, tokens_of, costing.sampled_tokens[0], fewest)


def _again(arguments: argparse.Namespace) -> str:
    return command_again(("matrix", arguments.matrix), arguments.options, {"--out": arguments.out})
