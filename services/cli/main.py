"""The `agent-r1` command: parses the command line and hands over to the command's module.

Every command's module is imported only when the command runs, so that `agent-r1 --help` answers at
once. A `ValueError` (a configuration, a file, a port) is printed as one message with exit status 2;
a run that stopped for a reason of its own likewise. Anything else is a defect and keeps its
traceback.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from agent_r1_service.exit_status import ERROR_PREFIX, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REASON
from agent_r1_service.files import DiskFullError

logger = logging.getLogger(__name__)

METHODS = ("agent", "base_tool_call", "naive_rag")
"""`agent_r1.evaluation.config.Method`, whose module takes too long to import for `--help`."""
CONFIG_HELP = "configuration: a .toml file, or the config.json of a run folder"


def _add_config(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "config", type=Path, metavar="CONFIG", nargs=None if required else "?", help=CONFIG_HELP
    )
    _add_set(parser)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="options",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set one key and override file and environment: --set learner.steps=10 (repeatable)",
    )


def _train_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "train",
        help="start every service on this machine and train",
        description="Start every service in its own process on this machine, and train. Ctrl-C "
        "stops cleanly; --resume continues the run.",
    )
    _add_config(parser, required=False)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (run.dir)")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="continue the run in this folder"
    )
    parser.set_defaults(run="agent_r1.cli.run:train")


def _serve_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="run one service in the foreground",
        description="Run one service in the foreground. SERVICE is rollout, reward, learner, or "
        "the name of a tool in the configuration. `serve tool --name NAME` is the same; if there "
        "is only one tool, you may leave out --name. `serve tool my_module:MyTool` serves a class "
        "from the current folder without a configuration. Set redis.url or AGENT_R1__REDIS__URL to "
        "the Redis to use. Tools are found through it, or have a tools.<name>.url. With the "
        "config.json of a running run, the service uses the Redis of that run.",
    )
    parser.add_argument("service", metavar="SERVICE", help="rollout, reward, learner, tool")
    _add_config(parser)
    parser.add_argument("--name", metavar="TOOL", help="which tool, with `serve tool`")
    parser.add_argument("--resume", action="store_true", help="learner: continue the run")
    parser.add_argument("--announce-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume-if-begun", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run="agent_r1.cli.run:serve")


def _config_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "config",
        help="check or show a configuration",
        description="Check a configuration, or show every value with its source.",
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    for name, text, description in (
        (
            "check",
            "validate everything without starting anything",
            "Validate everything without starting anything, and list every problem: keys and "
            "values, files, the model and its chat template, your own tools, environment, rewards "
            "and functions (imported and constructed in a separate process), and what the run "
            "needs from this machine. `agent-r1 train` makes the same check.",
        ),
        ("show", "print every value and where it came from", "Print every value and its source."),
    ):
        action = actions.add_parser(name, help=text, description=description)
        _add_config(action)
        if name == "check":
            action.add_argument(
                "--elsewhere",
                action="store_true",
                help="skip what depends on this machine: GPUs, the run folder, ports, servers",
            )
        action.set_defaults(run=f"agent_r1.cli.config:{name}")


def _search_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "search",
        help="build the index of the search tool",
        description="Build the index of the search tool.",
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    index = actions.add_parser(
        "index",
        help="build the index of a corpus",
        description="Build the index of a corpus. Running the command again does nothing; "
        "after an interruption it continues. A changed corpus becomes a new version, which "
        "replaces the old one when it is complete. Set the credentials of Elasticsearch in the "
        "environment: AGENT_R1_ELASTICSEARCH_API_KEY, or _USER and _PASSWORD.",
    )
    index.add_argument(
        "--backend",
        choices=("elasticsearch", "embedded"),
        required=True,
        help="elasticsearch: an index on a server; embedded: a folder on this machine",
    )
    index.add_argument(
        "--corpus", type=Path, required=True, metavar="FILE", help="lines of {id, title, text}"
    )
    index.add_argument(
        "--index", required=True, metavar="NAME", help="name of the index; embedded: its folder"
    )
    index.add_argument("--url", metavar="URL", help="the server (http://localhost:9200)")
    index.add_argument(
        "--ca-certs", type=Path, metavar="FILE", help="PEM file to verify the server with"
    )
    index.add_argument("--no-verify-certs", action="store_true", help="accept any certificate")
    index.add_argument("--bulk-mb", type=int, default=8, metavar="N", help="size of a request (8)")
    index.add_argument("--shards", type=int, default=1, metavar="N", help="parts of the index (1)")
    index.add_argument(
        "--replicas", type=int, metavar="N", help="copies (1 if there is a second node)"
    )
    index.add_argument(
        "--delete-old",
        action="store_true",
        help="delete every other version; by default the previous one is kept",
    )
    index.add_argument(
        "--request-timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="longest one request may take, in seconds (120)",
    )
    index.set_defaults(run="agent_r1.cli.search:index")


def _evaluation_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    evaluate = commands.add_parser(
        "evaluate",
        help="score a policy on the evaluation sets",
        description="Start tools, reward and rollout on this machine with a given policy, ask "
        "every question of evaluation.sets, and write one JSON line per answer to FILE. The "
        "scores, with 95 % intervals, go beside it, with the suffix .summary.json. Run again "
        "after an interruption, it asks only the questions that have no answer yet. "
        "`--set run.seed=S` seeds the sampling, `--set evaluation.temperature=T` sets its "
        "temperature.",
    )
    _add_config(evaluate)
    evaluate.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); base_tool_call uses the "
        "configuration's model.path by default",
    )
    evaluate.add_argument(
        "--method",
        choices=METHODS,
        default=METHODS[0],
        help="agent (the default): the policy with its tools. base_tool_call: the same with the "
        "untrained model that CONFIG names. naive_rag: one retrieval with the question, then one "
        "turn to answer",
    )
    evaluate.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON-lines file to write"
    )
    evaluate.add_argument(
        "--overwrite", action="store_true", help="start again and discard the answers in FILE"
    )
    evaluate.set_defaults(run="agent_r1.cli.evaluate:evaluate")

    compare = commands.add_parser(
        "compare",
        help="paired test between two evaluations",
        description="Compare two files of `agent-r1 evaluate` on the questions that both have, for "
        "each set and for all sets: the difference of the means with its 95 % interval (paired "
        "bootstrap), and an exact McNemar test for exact match.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="JSON-lines file of an evaluation")
    compare.add_argument(
        "b", type=Path, metavar="B", help="file of the other; differences are B - A"
    )
    compare.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON")
    compare.set_defaults(run="agent_r1.cli.evaluate:compare")

    table = commands.add_parser(
        "table",
        help="compare methods over several seeds",
        description="Start tools, reward and rollout once, evaluate the baselines, train every "
        "method of TABLE with every seed, and write scores with 95 % intervals as Markdown and "
        "JSON. Run again, it keeps finished rows and continues with the rest.",
    )
    table.add_argument("table", type=Path, metavar="TABLE", help="table file (.toml)")
    table.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results and runs; by default the file's `results`, and runs/table",
    )
    table.add_argument(
        "--only", metavar="METHOD[,METHOD]", help="only these methods or baselines, by name"
    )
    table.add_argument(
        "--overwrite", action="store_true", help="start the rows again and discard what they have"
    )
    _add_set(table)
    table.set_defaults(run="agent_r1.cli.table:table")


def _model_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sft = commands.add_parser(
        "sft",
        help="supervised warm start",
        description="Train a model on demonstrations (table [sft]).",
    )
    _add_config(sft)
    sft.set_defaults(run="agent_r1.cli.run:sft")

    chat = commands.add_parser(
        "chat",
        help="ask the agent a question and watch its turns",
        description="Start tools and rollout on this machine, then ask the agent questions: your "
        "own, or held-out ones (`:pick`). Text from the model and text from tools have different "
        "colours.",
    )
    chat.add_argument(
        "policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or run folder (its last checkpoint)",
    )
    chat.add_argument(
        "--config", type=Path, metavar="CONFIG", help=f"{CONFIG_HELP}; a run folder has its own"
    )
    _add_set(chat)
    chat.add_argument("--question", metavar="TEXT", help="ask this one question and exit")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    chat.set_defaults(run="agent_r1.cli.chat:chat")


def _reading_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show",
        help="read stored trajectories of a run",
        description="Print stored trajectories: sampled text and tool text in different colours, "
        "calls, rewards, policy versions.",
    )
    show.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    show.add_argument("--step", type=int, metavar="N", help="only this learner step")
    show.add_argument("--group", type=int, metavar="ID", help="only this group")
    show.add_argument("--failed", action="store_true", help="only FAILED trajectories")
    show.add_argument(
        "--eval", metavar="NAME", help="only this evaluation, such as before or after"
    )
    show.add_argument("--limit", type=int, default=8, metavar="N", help="show at most N (8)")
    show.set_defaults(run="agent_r1.cli.show:show")

    letters = commands.add_parser(
        "dead-letters",
        help="messages that could not be processed",
        description="List, show and retry messages that could not be processed, of a run that is "
        "running or has ended.",
    )
    letters.set_defaults(parser=letters)
    actions = letters.add_subparsers(dest="action", metavar="ACTION")
    for name, text in (
        ("list", "one line each: id, stream, key, reason"),
        ("show", "print one in full"),
        ("retry", "put one, or all, back on the stream they came from"),
    ):
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        action.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
        if name != "list":
            action.add_argument(
                "id", metavar="ID", help="as listed" + (", or `all`" if name == "retry" else "")
            )
        action.set_defaults(run=f"agent_r1.cli.dead_letters:{name}_letters")


def _tools_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tools = commands.add_parser(
        "tools",
        help="manage tool instances and versions",
        description="List tool instances, drain them, and divide new trajectories among versions "
        "while training runs. Rollout servers follow within a second.",
    )
    tools.set_defaults(parser=tools)
    actions = tools.add_subparsers(dest="action", metavar="ACTION")

    def action(name: str, function: str, text: str) -> argparse.ArgumentParser:
        parser = actions.add_parser(name, help=text, description=text.capitalize() + ".")
        parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
        parser.add_argument("--redis", metavar="URL", help="Redis of the pool, without --run")
        parser.add_argument("--pool", metavar="NAME", help="tool pool (run.tool_pool)")
        if name != "list":
            parser.add_argument("tool", metavar="TOOL", help="name of the tool")
        parser.set_defaults(run=f"agent_r1.cli.tools:{function}")
        return parser

    action("list", "list_tools", "print every instance and the share of its version")
    drain = action("drain", "drain_tools", "take an instance, or a version, out of service")
    undrain = action("undrain", "undrain_tools", "put drained instances back into service")
    for parser in (drain, undrain):
        parser.add_argument("--instance", metavar="NAME", help="this instance, as `list` names it")
        parser.add_argument("--version", metavar="VERSION", help="every instance of this version")
    drain.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="longest wait for trajectories that still need it, in seconds (120)",
    )
    weight = action("weight", "weight_tools", "divide new trajectories among versions")
    weight.add_argument(
        "weights",
        nargs="*",
        metavar="VERSION=WEIGHT",
        help="such as 1.0=9 2.0=1; a version that is not announced yet gets its share once it is",
    )
    weight.add_argument(
        "--newest", action="store_true", help="give everything to the newest version again"
    )
    rollback = action("rollback", "rollback_tool", "give everything to the previous version")
    rollback.add_argument("--version", metavar="VERSION", help="give it to this version instead")
    mcp = actions.add_parser(
        "mcp",
        help="serve one tool to an MCP agent over stdio",
        description="Serve one tool of a configuration to an MCP agent over standard input and "
        "output. The agent starts this command itself; logs go to standard error. A tool service "
        "that already runs offers the same at its URL + /mcp.",
    )
    _add_config(mcp)
    mcp.add_argument("tool", metavar="TOOL", help="name of its table, [tools.TOOL]")
    mcp.set_defaults(run="agent_r1.cli.tools_mcp:serve_mcp")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="agent-r1",
        description="Train LLM agents end to end with reinforcement learning.",
        epilog="`agent-r1 COMMAND --help` explains a command.",
    )
    version = importlib.metadata.version("agent-r1")
    parser.add_argument(
        "--version",
        action="version",
        version=f"agent-r1 {version}",
        help="print the version and exit",
    )
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _train_parser(commands)
    _serve_parser(commands)
    _config_parser(commands)
    _search_parser(commands)
    _tools_parser(commands)
    _evaluation_parsers(commands)
    _model_parsers(commands)
    _reading_parsers(commands)
    return parser


def _load(target: str) -> Callable[[argparse.Namespace], int]:
    import importlib

    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    arguments = build_parser().parse_args(argv)
    if arguments.run is None:  # no command, or one that has commands of its own
        arguments.parser.print_help()
        return EXIT_REASON
    try:
        return _load(arguments.run)(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone (`agent-r1 show RUN | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except (ValueError, DiskFullError) as exc:
        # The launcher keeps a log, where a trace helps; a person reads the message.
        logged = getattr(arguments, "announce_dir", None) is not None
        logger.log(logging.ERROR if logged else logging.DEBUG, "stopped", exc_info=True)
        print(f"{ERROR_PREFIX}{exc}", file=sys.stderr)
        return EXIT_REASON


if __name__ == "__main__":
    sys.exit(main())
