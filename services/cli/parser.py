"""The command line of `agent-r1`: its commands, their arguments and their help.

Nothing here or in a `commands.py` imports a service, so that `agent-r1 --help` answers at once. A
command names the function that runs it, and `agent_r1.cli.main` imports its module only then.
"""

from __future__ import annotations

import argparse
import importlib.metadata

from agent_r1.cli.evaluation import commands as evaluation
from agent_r1.cli.results import commands as results
from agent_r1.cli.services import commands as services
from agent_r1.cli.task import commands as task
from agent_r1.cli.training import commands as training


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="agent-r1",
        description="Train LLM agents end to end with reinforcement learning.",
        epilog="`agent-r1 COMMAND --help` explains a command.",
    )
    version = f"agent-r1 {importlib.metadata.version('agent-r1')}"
    version_help = "print the version and exit"
    parser.add_argument("--version", action="version", version=version, help=version_help)
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for room in (task, training, services, evaluation, results):
        room.add_to(commands)
    return parser
