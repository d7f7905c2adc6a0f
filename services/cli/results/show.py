"""`agent-r1 show RUN`: stored trajectories and dead letters in the terminal.

Reads a run folder, as `agent-r1 rescore` does; writes to the terminal.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.cli.declare import add_run_folder, integer, refuse_beside
from agent_r1.cli.results.dead_letters import counted, letter_lines, read_letters
from agent_r1.config.live_run import run_config
from agent_r1.config.sources import ConfigError
from agent_r1.evaluation.transcript import (
    SAMPLED_STYLE,
    TOOL_STYLE,
    heading,
    print_transcript,
)
from agent_r1.runs.store import StoredFile, stored_files
from agent_r1.runtime.files.run_folder import TRAJECTORIES_DIR
from agent_r1.runtime.unicode import escaped_line
from agent_r1.text.control_tokens import control_pattern, is_control
from agent_r1.text.reading import MARKUP
from agent_r1.text.tool_formats import NO_CALLS, load_tool_format

SHOWN = 8


def stored(run_folder: Path) -> list[StoredFile]:
    """Return the files of a run's trajectories: steps in their order, then evaluations.

    Raises:
        ConfigError: the folder has no trajectories.
    """
    if not (run_folder / TRAJECTORIES_DIR).is_dir():
        raise ConfigError(
            f"{run_folder} has no folder {TRAJECTORIES_DIR}; name a run folder, such as runs/demo"
        )
    return stored_files(run_folder)


def show_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `show`."""
    add_run_folder(parser)
    parser.add_argument("--step", type=integer(0), metavar="N", help="only this learner step")
    parser.add_argument("--group", type=integer(0), metavar="ID", help="only this group")
    parser.add_argument("--failed", action="store_true", help="only FAILED trajectories")
    parser.add_argument("--eval", metavar="NAME", help="only this evaluation: before, after, …")
    limit_help = f"show at most N (default: {SHOWN})"
    parser.add_argument("--limit", type=integer(1), metavar="N", help=limit_help)
    letter_help = "print this dead letter in full, or `all`, instead of trajectories"
    parser.add_argument("--dead-letter", metavar="ID", help=letter_help)


def _chosen_files(arguments: argparse.Namespace) -> list[StoredFile]:
    """Return the files to read, the newest first."""
    folder: Path = arguments.run_folder
    files = stored(folder)
    if arguments.eval is not None:
        evaluations = {file.evaluation: file for file in files if file.evaluation is not None}
        wanted = arguments.eval
        name = f"step_{int(wanted):06d}" if wanted.isdigit() else wanted
        if name not in evaluations:
            raise ConfigError(
                f"no stored evaluation {wanted!r} in {folder}; the stored ones are "
                f"{sorted(evaluations)}"
            )
        return [evaluations[name]]
    steps = {file.step: file for file in files if file.step is not None}
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
    """Print stored trajectories of a run, or its dead letters.

    The model's text and the tools' text have different colours; calls, rewards and policy versions
    are beside them.
    """
    if arguments.dead_letter is not None:
        of_trajectories = ("step", "group", "failed", "eval", "limit")
        given = {f"--{name}": getattr(arguments, name) for name in of_trajectories}
        refuse_beside("--dead-letter", given)
        letters = read_letters(arguments.run_folder, arguments.dead_letter)
        for letter in letters:
            print("\n".join(letter_lines(letter)))
        if not letters:
            print(counted(0))
        return 0
    console = Console(highlight=False, markup=False, emoji=False)
    control = _control_tokens(arguments.run_folder)
    shown = left = 0
    for file in _chosen_files(arguments):
        for record in file.records():
            if arguments.group is not None and record["group_id"] != arguments.group:
                continue
            if arguments.failed and record["status"] != "FAILED":
                continue
            if shown >= (arguments.limit or SHOWN):
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
