"""Commands for services that run: search, tools, rollout, reward, ray."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_r1.cli.declare import (
    Commands,
    add_command,
    add_config,
    add_group,
    integer,
    number,
)


def add_to(commands: Commands) -> None:
    """Add all of them."""
    _add_search(commands)
    _add_tools(commands)
    _add_rollout(commands)
    _add_reward(commands)
    _add_ray(commands)


def _add_search(commands: Commands) -> None:
    actions = add_group(commands, "search", "build the index of the search tool")
    index = add_command(
        actions,
        "index",
        "services.search:index",
        "build the index of a corpus",
        "Build the index of a corpus. Running the command again does nothing; after an "
        "interruption it continues. A corpus that has changed becomes a new version, which "
        "replaces the old one when it is complete. Credentials for Elasticsearch come from the "
        "environment: set AGENT_R1_ELASTICSEARCH_API_KEY, or AGENT_R1_ELASTICSEARCH_USER and "
        "AGENT_R1_ELASTICSEARCH_PASSWORD; with _FILE at its end, a variable names a file instead.",
    )
    add = index.add_argument
    add(
        "--backend",
        choices=("elasticsearch", "embedded"),
        required=True,
        help="elasticsearch: an index on a server; embedded: a folder on this machine",
    )
    corpus_help = "JSON lines of {id, title, text}"
    add("--corpus", type=Path, required=True, metavar="FILE", help=corpus_help)
    add("--index", required=True, metavar="NAME", help="name of the index; embedded: its folder")
    add("--url", metavar="URL", help="the server (default: http://localhost:9200)")
    add("--ca-certs", type=Path, metavar="FILE", help="PEM file to verify the server with")
    add("--no-verify-certs", action="store_true", help="accept any certificate")
    add(
        "--bulk-mb",
        type=integer(1, 1024),
        default=8,
        metavar="N",
        help="size of a request in MiB (default: 8)",
    )
    add(
        "--shards",
        type=integer(1, 1024),
        default=1,
        metavar="N",
        help="parts of the index (default: 1)",
    )
    replicas_help = "copies of the index (default: 1 if the cluster has a second node)"
    add("--replicas", type=integer(0, 1024), metavar="N", help=replicas_help)
    add(
        "--delete-old",
        action="store_true",
        help="delete every other version; by default the previous one is kept",
    )
    add(
        "--request-timeout-s",
        type=number(1),
        default=120.0,
        metavar="S",
        help="longest one request may take, in seconds (default: 120)",
    )


def _add_tools(commands: Commands) -> None:
    actions = add_group(
        commands,
        "tools",
        "manage tool instances and versions",
        "List tool instances, drain them, and divide new trajectories among versions while "
        "training runs. Rollout servers follow within a second.",
    )

    def action(name: str, function: str, summary: str) -> argparse.ArgumentParser:
        parser = add_command(actions, name, f"services.tools:{function}", summary)
        parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
        parser.add_argument("--redis", metavar="URL", help="Redis of the pool, without --run")
        parser.add_argument("--pool", metavar="NAME", help="tool pool (run.tool_pool)")
        if name != "list":
            parser.add_argument("tool", metavar="TOOL", help="name of the tool")
        return parser

    action("list", "list_tools", "print every instance and the share of its version")
    drain = action("drain", "drain_tools", "take an instance, or a version, out of service")
    undrain = action("undrain", "undrain_tools", "put drained instances back into service")
    for parser in (drain, undrain):
        parser.add_argument("--instance", metavar="NAME", help="this instance, as `list` names it")
        parser.add_argument("--version", metavar="VERSION", help="every instance of this version")
    drain.add_argument(
        "--timeout-s",
        type=number(0),
        default=120.0,
        metavar="S",
        help="longest wait for trajectories that still need it, in seconds (default: 120)",
    )
    weight = action("weight", "weight_tools", "divide new trajectories among versions")
    weight.add_argument(
        "weights",
        nargs="*",
        metavar="VERSION=WEIGHT",
        help="such as 1.0=9 2.0=1; a version without an instance gets its share once it has one",
    )
    newest_help = "give everything to the newest version again"
    weight.add_argument("--newest", action="store_true", help=newest_help)
    rollback = action("rollback", "rollback_tool", "give everything to the previous version")
    rollback.add_argument("--version", metavar="VERSION", help="give it to this version instead")
    mcp = add_command(
        actions,
        "mcp",
        "services.tools_mcp:serve_mcp",
        "serve one tool to an MCP agent over stdio",
        "Serve one tool of a configuration to an MCP agent over standard input and output. The "
        "agent starts this command itself; logs go to standard error. A tool service that already "
        "runs offers the same at its URL + /mcp.",
    )
    add_config(mcp)
    mcp.add_argument("tool", metavar="TOOL", help="name of its table, [tools.TOOL]")


def _add_rollout(commands: Commands) -> None:
    actions = add_group(
        commands,
        "rollout",
        "list and drain rollout servers",
        "List the rollout servers of a run, and take one out while training continues. To add one, "
        "start `agent-r1 serve rollout`.",
    )
    listing = add_command(
        actions, "list", "services.rollout:list_servers", "print every server that takes samples"
    )
    drain = add_command(
        actions,
        "drain",
        "services.rollout:drain_server",
        "take a server out of service",
        "Take a server out of service. It takes no more samples, finishes those it has, gives back "
        "to the other servers what takes longer than --timeout-s, and ends. Nothing is lost.",
    )
    for parser in (listing, drain):
        _add_run(parser)
    drain.add_argument("server", metavar="NAME", help="the server, as `list` names it")
    drain.add_argument(
        "--timeout-s",
        type=number(0),
        default=120.0,
        metavar="S",
        help="time to finish the samples in flight, in seconds (default: 120)",
    )


def _add_reward(commands: Commands) -> None:
    actions = add_group(
        commands,
        "reward",
        "list and swap the models that reward components ask",
        "List the versions of the models that the components judge, reward_model and critic ask, "
        "and swap one while training continues. Reward services follow within a second.",
    )
    listing = add_command(
        actions, "list", "services.reward:list_models", "print every version and when it was used"
    )
    swap = add_command(
        actions,
        "swap",
        "services.reward:swap_model",
        "let another model score new groups",
        "Let another model score new groups. Groups that the old one has begun to score keep it: "
        "stop its server once `list` shows that it is no longer used. A version that was used "
        "before needs no --url.",
    )
    for parser in (listing, swap):
        _add_run(parser)
    swap.add_argument("component", metavar="COMPONENT", help="judge, reward_model or critic")
    swap.add_argument("--model", required=True, metavar="NAME", help="what its server calls it")
    swap.add_argument("--url", metavar="URL", help="URL of its server, as in reward.*.url")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--redis", metavar="URL", help="Redis of the run (default: of --run)")
    parser.add_argument("--id", metavar="RUN_ID", help="run.id (default: of --run)")


def _add_ray(commands: Commands) -> None:
    actions = add_group(
        commands,
        "ray",
        "train on a Ray cluster",
        "Train on the Ray cluster that RAY_ADDRESS names: the learner as a job, the other services "
        "as Serve applications (docs/deploy/ray.md). Needs the extra agent-r1[ray].",
    )
    up = add_command(
        actions,
        "up",
        "services.ray:up",
        "train a run on a cluster, or continue or follow it there",
        "Submit the learner's job, deploy the services, and print the job's log until it ends. "
        "Without RAY_ADDRESS, a cluster is started on this machine for as long as the command "
        "runs. Ctrl-C stops the run cleanly. The same command continues a run that was stopped, "
        "and follows one that runs; services whose configuration has changed are replaced.",
    )
    down = add_command(actions, "down", "services.ray:down", "stop a run on a cluster cleanly")
    train = add_command(
        actions,
        "train",
        "services.ray:train",
        "the learner's job, for `ray job submit -- agent-r1 ray train CONFIG`",
    )
    apps = add_command(
        actions, "apps", "services.ray:apps", "print the Serve configuration, for `serve deploy`"
    )
    for parser in (up, down, train, apps):
        add_config(parser)
    up.add_argument("--detach", action="store_true", help="return when everything is submitted")
