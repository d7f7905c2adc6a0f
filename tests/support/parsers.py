"""Every parser of the command line, with its arguments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from agent_r1.cli.parser import CommandParser


def parsers(parser: argparse.ArgumentParser) -> Iterator[CommandParser]:
    """Yield a parser and those of its commands, all the way down."""
    assert isinstance(parser, CommandParser)
    parser.load()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)
