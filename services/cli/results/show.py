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
from agent_r1.config.sources import ConfigError
from agent_r1.evaluation.transcript import (
    SAMPLED_STYLE,
    TOOL_STYLE,
    heading,
    print_transcript,
)
from agent_r1.runtime.unicode import escaped_line
from agent_r1.text.control_tokens import control_pattern, is_control
from agent_r1.text.reading import MARKUP
from agent_r1.text.tool_formats import NO_CALLS, load_tool_format


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
        config = run_config(run_folder)
        folder = Path(config.model.path)
        tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        named = config.tool_format()
        tool_format = NO_CALLS if named is None else load_tool_format(named)
        markup, template = (*MARKUP, *tool_format.markup), _chat_template(folder)
        return control_pattern(
            token["content"]
            for token in tokens
            if is_control(
                token["content"],
                special=token["special"],
                in_glue=token["content"] in template,
                markup=markup,
            )
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _chat_template(folder: Path) -> str:
    """Return the text of a model's chat template, which loads faster than what renders it."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return json.dumps(settings.get("chat_template", ""), ensure_ascii=False)


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
            console.rule(Text(escaped_line(heading(record))), align="left")
            print_transcript(record, console, control)
    if shown == 0:
        console.print(f"no stored trajectory of {arguments.run_folder} matches")
    elif left:
        console.print(f"{left} more match; --limit {shown + left} shows them all")
    return 0
