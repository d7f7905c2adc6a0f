"""The end of a training run in the terminal: what it achieved, what it lost, how to continue.

local.py --run folder--> here. Reads `summary.json` and the stored evaluations, which the
learner writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_r1.config.sources import at_hand, quoted
from agent_r1.evaluation.score_names import ScoreNames
from agent_r1.evaluation.transcript import print_transcript
from agent_r1.launch.local_view import program, set_scores
from agent_r1.learner.outcome import FAILED, FINISHED, FINISHED_WITH_LOSSES, INTERRUPTED
from agent_r1.runs.store import stored_files
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_LOSSES
from agent_r1.runtime.files.conditions import read_conditions, summarize
from agent_r1.runtime.files.run_folder import (
    CONDITIONS_FILE,
    LEDGER_FILE,
    LOGS_DIR,
    SUMMARY_FILE,
)
from agent_r1.runtime.files.state import read_object
from agent_r1.runtime.files.writing import write_atomically

EXIT_OF_STATUS = {FINISHED: 0, FINISHED_WITH_LOSSES: EXIT_LOSSES}
"""Exit status of `agent-r1 train` by the status of a run that reached its last step."""


def read_json(file: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing where it is missing or broken."""
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}


def summary_of(folder: Path) -> dict[str, Any]:
    """Return a run folder's `summary.json`; empty without one."""
    return read_json(folder / SUMMARY_FILE)


def _changed_answer(folder: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Find one held-out question with its answer before and after, best one that was wrong."""
    stored = {file.evaluation: file for file in stored_files(folder)}
    if not {"before", "after"} <= stored.keys():
        return None
    before = {record["task_id"]: record for record in stored["before"].records()}
    pairs = [
        (before[record["task_id"]], record)
        for record in stored["after"].records()
        if record["task_id"] in before
    ]
    if not pairs:
        return None

    def gain(pair: tuple[dict[str, Any], dict[str, Any]]) -> tuple[float, int]:
        rewards = [(record.get("reward") or {}).get("total", 0.0) for record in pair]
        num_turns = [len(record["turns"]) for record in pair]
        return rewards[1] - rewards[0], num_turns[1] - num_turns[0]

    return max(pairs, key=gain)


def _result_table(summary: dict[str, Any], names: ScoreNames) -> Table:
    table = Table("set", "score", "before", "after")
    sets = summary.get("sets") or {}
    for name, of_set in sets.items():
        kind = "" if of_set.get("in_domain", True) else " (untrained kind)"
        before, after = of_set.get("before") or {}, of_set.get("after") or {}
        _add_scores(table, f"{name}{kind}", before, after, names)
        table.add_row("", "questions", _questions(before), _questions(after))
        table.add_section()
    if sum(of_set.get("in_domain", True) for of_set in sets.values()) > 1:
        before, after = (
            {key: summary.get(f"{key}_{when}") for key in ("reward", "components", "calls")}
            for when in ("before", "after")
        )
        _add_scores(table, "mean of the trained sets", before, after, names)
    return table


def _add_scores(
    table: Table, title: str, before: dict[str, Any], after: dict[str, Any], names: ScoreNames
) -> None:
    columns = [dict(set_scores(scores, names)) if scores else {} for scores in (before, after)]
    for score in columns[0] or columns[1]:
        table.add_row(title, score, *(column.get(score, "-") for column in columns))
        title = ""


def _questions(scores: dict[str, Any]) -> str:
    if not scores:
        return "-"
    failed = f" ({scores['failed']} failed)" if scores.get("failed") else ""
    return f"{scores.get('n')}{failed}"


def losses_text(summary: dict[str, Any], folder: Path) -> str:
    """Say what a run lost and why."""
    command, run = program("agent-r1"), quoted(folder)
    lines = [
        f"!! {summary.get('reason')}",
        "The policy was trained on what was left, which may differ from what was lost.",
        f"to see them: {command} show {run} --failed",
    ]
    if summary.get("dead_letters"):
        lines.append(f"{summary['dead_letters']} dead letters: {command} status {run}")
    return "\n   ".join(lines)


def print_result(folder: Path, names: ScoreNames, output: TextIO | None = None) -> None:
    """Print what a finished run achieved and where to look next."""
    console = Console(file=output or sys.stdout, highlight=False, markup=False, emoji=False)
    summary = summary_of(folder)
    if not summary:
        console.print(
            f"{folder / SUMMARY_FILE} is missing; see {folder / LOGS_DIR}", soft_wrap=True
        )
        return
    pair = _changed_answer(folder)
    if pair is not None:
        for title, record in zip(("before", "after"), pair, strict=True):
            console.rule(f"one held-out question, {title} training", align="left")
            print_transcript(record, console)
    if summary.get("sets"):
        console.print(_result_table(summary, names))
    wall = summary.get("wall_s")
    console.print(
        f"{summary.get('steps')} steps, {summary.get('trajectories_trained')} trajectories, "
        f"{summary.get('sampled_tokens')} sampled tokens"
        + (f" in {format_duration(wall)}" if wall is not None else "")
    )
    if summary.get("status") == FINISHED_WITH_LOSSES:
        console.print(Text(losses_text(summary, folder), style="bold red"), soft_wrap=True)
    elif summary.get("reason"):
        console.print(summary["reason"], soft_wrap=True)
    for line in hindrances(folder):
        console.print(line, soft_wrap=True)
    _print_next(console, folder)


def hindrances(folder: Path) -> Iterator[str]:
    """Yield what has hindered a run for a while, each kind once."""
    for one in summarize(read_conditions(folder / CONDITIONS_FILE)):
        times = "" if one["times"] == 1 else f", {one['times']} times"
        lasts = " (to its end)" if one["lasts"] else ""
        took = format_duration(float(str(one["seconds"])))
        yield f"hindered for {took}{times}{lasts}: {one['what']}"


def _print_next(console: Console, folder: Path) -> None:
    agent_r1, tensorboard = program("agent-r1"), program("tensorboard")
    console.print("Next:", style="bold")
    run, logs = quoted(folder), quoted(folder / "tensorboard")
    console.print(f"  {agent_r1} show {run}            stored trajectories", soft_wrap=True)
    console.print(f"  {agent_r1} chat {run}            ask the agent yourself", soft_wrap=True)
    console.print(f"  {tensorboard} --logdir {logs}", soft_wrap=True)
    console.print(f"  {at_hand(folder)}/summary.json, {at_hand(folder)}/logs/", soft_wrap=True)
    console.print(f"  {agent_r1} ui {run}              see the run in a browser", soft_wrap=True)


def print_nothing_to_do(folder: Path, status: str, output: TextIO | None = None) -> None:
    """Say that a run which is to be resumed has finished."""
    print(
        f"nothing to do: the run has {status.replace('_', ' ')} (see "
        f"{at_hand(folder / SUMMARY_FILE)}); to train on, raise learner.steps or learner.epochs "
        "with --set",
        file=output or sys.stdout,
    )


def note_failure(folder: Path, error: str) -> None:
    """Say in the summary why the launcher stopped a run: its learner knows only that it did."""
    summary = summary_of(folder)
    if summary.get("status") == INTERRUPTED:
        text = json.dumps(
            summary | {"status": FAILED, "reason": error}, indent=2, ensure_ascii=False
        )
        write_atomically(folder / SUMMARY_FILE, text + "\n")


def print_stopped(folder: Path, error: str | None, *, temporary: bool = False) -> None:
    """Say why a run stopped (None: the user stopped it), and how to continue if it can.

    A run in a temporary folder cannot.
    """
    stream = sys.stdout if error is None else sys.stderr
    if error is not None:
        print(f"{ERROR_PREFIX}{error}", file=stream)
    for line in hindrances(folder):
        print(line, file=stream)
    way_on = _way_on(folder, failed=error is not None, temporary=temporary)
    print(way_on, file=stream, flush=True)


def _way_on(folder: Path, *, failed: bool, temporary: bool) -> str:
    cause = "correct the problem above, and " if failed else ""
    again = f"{cause}start again with the same command."
    if temporary:
        return f"Stopped: {again}"
    if not (folder / LEDGER_FILE).exists():
        return f"Stopped before training began: {again}"
    resume = f"{program('agent-r1')} train --resume {quoted(folder)}"
    if failed:
        return (
            "Stopped. Remove the cause before you continue; --set KEY=VALUE changes a key of the "
            f"configuration. To continue: {resume}"
        )
    return f"Stopped. To continue: {resume}"
