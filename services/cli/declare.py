"""How a command is declared: its name, its help, and the function that runs it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TypeAlias

CONFIG_HELP = "configuration: a .toml file, or the config.json of a run folder"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What commands are added to."""


def add_command(
    commands: Commands, name: str, run: str, summary: str, description: str = ""
) -> argparse.ArgumentParser:
    """Add a command that calls the function `run` of a module in `agent_r1.cli`."""
    description = description or f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=f"agent_r1.cli.{run}")
    return parser


def add_group(commands: Commands, name: str, summary: str, description: str = "") -> Commands:
    """Add a command that has commands of its own."""
    group = add_command(commands, name, "", summary, description)
    group.set_defaults(run=None, parser=group)
    return group.add_subparsers(dest="action", metavar="ACTION")


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Let a command take a configuration, and single keys of it."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", nargs=None if required else "?", help=CONFIG_HELP
    )
    add_set(parser)


def add_set(parser: argparse.ArgumentParser) -> None:
    """Let a command take single keys of the configuration."""
    parser.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key, overriding the file and the environment, for example "
        "--set learner.steps=10; repeat it for more keys",
    )
