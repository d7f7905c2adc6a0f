"""How a command is declared: its name, its help, and the function that runs it."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

CONFIG_HELP = "configuration: a .toml file, or the config.json of a run folder"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What commands are added to."""
LARGEST = 10**9
"""No option counts or measures more."""


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


def integer(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number within limits."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text} must be a whole number {_limits(least, most)}"
            )
        return value

    return parse


def number(least: float, most: float = LARGEST, *, or_0: bool = False) -> Callable[[str], float]:
    """Return the type of an option that takes a number within limits, or 0 as well."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (least <= value <= most or (or_0 and value == 0)):
            what = "0 or a number" if or_0 else "a number"
            raise argparse.ArgumentTypeError(f"{text} must be {what} {_limits(least, most)}")
        return value

    return parse


def _limits(least: float, most: float) -> str:
    return f"of {least:g} or more" if most == LARGEST else f"from {least:g} to {most:g}"


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
