"""`agent-r1 show RUN`: stored trajectories in the terminal.

Reads `trajectories/*.jsonl` of a run folder, which the learner writes; writes to the terminal.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.cli.live_run import run_config
from agent_r1.cli.results.stored import eval_files, read_records, step_files
from agent_r1.cli.results.transcript import (
    SAMPLED_STYLE,
    TOOL_STYLE,
    escaped,
    heading,
    print_transcript,
)
from agent_r1.config.sources import ConfigError
from agent_r1_service.control_tokens import control_pattern


def _chosen_files(arguments: argparse.Namespace) -> list[Path]:
    """Return the files to read, the newest first."""
    folder: Path = arguments.run_folder
    if arguments.eval is not None:
        evaluations = eval_files(folder)
        wanted = arguments.eval
        name = f"{int(wanted):06d}" if wanted.isdigit() else wanted
        if name not in evaluations:
            raise ConfigError(
                f"no stored evaluation {wanted!r} in {folder}; the stored ones are "
                f"{sorted(evaluations)}"
            )
        return [evaluations[name]]
    steps = step_files(folder)
    if arguments.step is not None:
        if arguments.step not in steps:
            known = f"{min(steps)} to {max(steps)}" if steps else "none yet"
            raise ConfigError(
                f"no stored trajectories of step {arguments.step} in {folder}; the stored steps "
                f"are {known}"
            )
        return [steps[arguments.step]]
    return [steps[number] for number in sorted(steps, reverse=True)]


def _control_tokens(run_folder: Path) -> re.Pattern[str] | None:
    """Return what matches the control tokens of the model; None where its tokenizer is not here."""
    try:
        file = Path(run_config(run_folder).model.path) / "tokenizer.json"
        tokens = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
        return control_pattern(token["content"] for token in tokens if token["special"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def show(arguments: argparse.Namespace) -> int:
    """Print the chosen trajectories."""
    console = Console(highlight=False, markup=False, emoji=False)
    control = _control_tokens(arguments.run_folder)
    shown = left = 0
    for path in _chosen_files(arguments):
        for record in read_records(path):
            if arguments.group is not None and record["group_id"] != arguments.group:
                continue
            if arguments.failed and record["status"] != "FAILED":
                continue
            if shown >= arguments.limit:
                left += 1
                continue
            if shown == 0:
                legend = Text("text the model sampled", style=SAMPLED_STYLE)
                console.print(legend.append("  text a tool returned", style=TOOL_STYLE))
            shown += 1
            console.rule(Text(escaped(heading(record))), align="left")
            print_transcript(record, console, control)
    if shown == 0:
        console.print(f"no stored trajectory of {arguments.run_folder} matches")
    elif left:
        console.print(f"{left} more match; --limit {shown + left} shows them all")
    return 0
