"""The command line of `agent-r1`: one table of commands for each room, and their parser.

A row has a command's name, one line of help, and the function that runs it. Its module is imported
once the command has been chosen, and then adds the arguments, so `agent-r1 --help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from agent_r1.runtime.imports import quick_imports

Table: TypeAlias = "Mapping[str, tuple[str, str | Table]]"
"""Help and `module:function` of each command, or the table of a group.

`function_arguments` of the same module adds the arguments, and the function's docstring is the
description in the help.
"""

TASK: Table = {
    "init": ("write a task that runs as it is into a new folder", "task.init:init"),
    "try": ("watch the first tasks of a run without training", "task.tryout:try_out"),
}
TRAINING: Table = {
    "setup": ("install the packages that training needs", "training.setup:setup"),
    "check": ("say what is wrong with a configuration or a machine", "training.config:check"),
    "config": (
        "show a configuration",
        {"show": ("print every value and where it came from", "training.config:show")},
    ),
    "train": ("start every service on this machine and train", "training.train:train"),
    "sft": ("supervised warm start", "training.supervised:sft"),
    "train-reward": (
        "train a reward model on stored trajectories",
        "training.supervised:train_reward",
    ),
}
SERVICES: Table = {
    "serve": ("run one service in the foreground", "services.serve:serve"),
    "search": (
        "build the index of the search tool",
        {"index": ("build the index of a corpus", "services.search:index")},
    ),
    "tools": (
        "manage tool instances and versions while training runs",
        {
            "drain": ("take an instance, or a version, out of service", "services.tools:drain"),
            "undrain": ("put drained instances back into service", "services.tools:undrain"),
            "weight": ("divide new trajectories among versions", "services.tools:weight"),
            "rollback": ("give everything to the previous version", "services.tools:rollback"),
            "mcp": ("serve one tool to an MCP agent over stdio", "services.tools:mcp"),
        },
    ),
    "agents": (
        "agents that are started elsewhere",
        {"attach": ("let a command work on attempts of a run", "services.attach:attach")},
    ),
    "rollout": (
        "take rollout servers out while training runs",
        {"drain": ("take a server out of service", "services.rollout:drain")},
    ),
    "reward": (
        "swap the models that reward components ask while training runs",
        {"swap": ("let another model score new groups", "services.reward:swap")},
    ),
    "ray": (
        "train on the Ray cluster that RAY_ADDRESS names (docs/deploy/ray.md)",
        {
            "up": ("train a run on a cluster, or continue or follow it there", "services.ray:up"),
            "down": ("stop a run on a cluster cleanly", "services.ray:down"),
            "train": ("the learner's job, for `ray job submit`", "services.ray:train"),
            "apps": ("print the Serve configuration, for `serve deploy`", "services.ray:apps"),
        },
    ),
}
EVALUATION: Table = {
    "evaluate": ("score a policy on the evaluation sets", "evaluation.evaluate:evaluate"),
    "diagnose": (
        "say whether a task and a model can tell methods apart",
        "evaluation.diagnose:diagnose",
    ),
    "compare": ("paired test between two evaluations", "evaluation.evaluate:compare"),
    "table": ("compare methods over several seeds", "evaluation.table:table"),
    "matrix": (
        "evaluate models on public data sets, asked in several ways",
        "evaluation.matrix:matrix",
    ),
    "chat": ("ask the agent a question and watch its turns", "evaluation.chat:chat"),
}
RESULTS: Table = {
    "status": ("show what a run and its services are doing", "results.status:status"),
    "ui": ("show runs, curves, services and evaluations in a browser", "results.ui:ui"),
    "show": ("read stored trajectories and dead letters of a run", "results.show:show"),
    "export": (
        "write a trained policy as a model directory, or trajectories",
        "results.export:export",
    ),
    "rescore": ("score stored trajectories again with other rewards", "results.rescore:rescore"),
    "dead-letters": (
        "messages that could not be processed",
        {"retry": ("put one, or all, back on their streams", "results.dead_letters:retry")},
    ),
}

RENAMED = {
    "validate": "try CONFIG --policy none",
    "doctor": "check",
    "estimate": "check CONFIG",
    "config check": "check CONFIG",
    "tools list": "status RUN",
    "rollout list": "status RUN",
    "reward list": "status RUN",
    "dead-letters list": "status RUN",
    "dead-letters show": "show RUN --dead-letter ID",
}
"""Commands of earlier releases, and those that do their work now."""


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, whose module adds the arguments when they are first needed."""

    target = ""
    """`module:function` in `agent_r1.cli`; "" for a parser that is complete."""

    def load(self) -> None:
        """Import the command's module and add its arguments."""
        if not self.target:
            return
        module_name, _, function = self.target.partition(":")
        self.target = ""
        with quick_imports():
            module = importlib.import_module(f"agent_r1.cli.{module_name}")
        run = getattr(module, function)
        self.description = inspect.getdoc(run)
        self.set_defaults(run=run)
        getattr(module, f"{function}_arguments")(self)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parse the arguments of the command, which has been chosen."""
        self.load()
        return super().parse_known_args(args, namespace)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = CommandParser(
        prog="agent-r1",
        description="Train LLM agents end to end with reinforcement learning.",
        epilog="`agent-r1 COMMAND --help` explains a command.",
    )
    version = f"agent-r1 {importlib.metadata.version('agent-r1')}"
    version_help = "print the version and exit"
    parser.add_argument("--version", action="version", version=version, help=version_help)
    parser.set_defaults(run=None, parser=parser)
    _add_commands(parser, "command", {**TASK, **TRAINING, **SERVICES, **EVALUATION, **RESULTS})
    return parser


def _add_commands(parser: argparse.ArgumentParser, dest: str, table: Table) -> None:
    commands = parser.add_subparsers(dest=dest, metavar=dest.upper(), parser_class=CommandParser)
    for name, (summary, target) in table.items():
        one = commands.add_parser(name, help=summary)
        if isinstance(target, str):
            one.target = target
        else:
            one.description = f"{summary[0].upper()}{summary[1:]}."
            one.set_defaults(run=None, parser=one)
            _add_commands(one, "action", target)


def new_name(words: Sequence[str]) -> str | None:
    """Return the command that does the work of an older one; None for the commands of today."""
    return RENAMED.get(" ".join(words[:1])) or RENAMED.get(" ".join(words[:2]))
