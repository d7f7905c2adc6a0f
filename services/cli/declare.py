"""Options that several commands share, and numbers within limits."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path

CONFIG_HELP = "configuration: a .toml file, or the config.json of a run folder"

LARGEST = 10**9
"""No option counts or measures more."""


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


def refuse_beside(option: str, others: Mapping[str, object]) -> None:
    """Refuse options that another one leaves without effect.

    Args:
        option: the other one, as users write it.
        others: values of the options without effect; None or False where one was not given.

    Raises:
        ValueError: one was given.
    """
    given = [name for name, value in others.items() if value is not None and value is not False]
    if given:
        does, them = ("does", "it") if len(given) == 1 else ("do", "them")
        raise ValueError(f"{' and '.join(given)} {does} nothing with {option}; leave {them} out")


def add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Let a command take a configuration, and single keys of it."""
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", nargs=None if required else "?", help=CONFIG_HELP
    )
    add_set(parser)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    """Let a command take a run folder."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")


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
