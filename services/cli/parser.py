"""The command line of `agent-r1`: its commands, their arguments and their help.

This module imports no service, so that `agent-r1 --help` answers at once. A command names the
function that runs it, and `agent_r1.cli.main` imports that function's module only then.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from pathlib import Path
from typing import TypeAlias

METHODS = ("agent", "base_tool_call", "naive_rag")
"""`agent_r1.evaluation.config.Method`, whose module takes too long to import for `--help`."""
CONFIG_HELP = "configuration: a .toml file, or the config.json of a run folder"


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def _add(
    commands: _Commands, name: str, run: str, summary: str, description: str = ""
) -> argparse.ArgumentParser:
    """Add a command that calls the function `run` of a module in `agent_r1.cli`."""
    description = description or f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=f"agent_r1.cli.{run}")
    return parser


def _add_group(commands: _Commands, name: str, summary: str, description: str = "") -> _Commands:
    """Add a command that has commands of its own."""
    group = _add(commands, name, "", summary, description)
    group.set_defaults(run=None, parser=group)
    return group.add_subparsers(dest="action", metavar="ACTION")


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
        help="set one key, overriding the file and the environment, for example "
        "--set learner.steps=10; repeat it for more keys",
    )


def _add_beginning(commands: _Commands) -> None:
    init = _add(
        commands,
        "init",
        "init:init",
        "write a task that runs as it is into a new folder",
        "Write a task that trains on this machine as it is: data, a tool, an environment, a "
        "reward, a configuration, a test and a README that says what to change. Nothing is "
        "overwritten.",
    )
    init.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that is new or empty")
    init.add_argument(
        "--example",
        choices=("starter", "tiny_world"),
        default="starter",
        help="starter (the default): 20 tasks and your own code to change. tiny_world: the search "
        "agent of the documentation, with its generator",
    )

    setup = _add(
        commands,
        "setup",
        "setup:setup",
        "install the packages that training needs",
        "Install exactly the packages of the lock that comes with agent-r1 into the virtual "
        "environment of this command. If you run it again, it continues where it stopped.",
    )
    setup.add_argument("variant", choices=("cpu", "gpu"), help="for CPUs alone, or for NVIDIA GPUs")

    validate = _add(
        commands,
        "validate",
        "validate:validate",
        "check a task without its model",
        "Check the configuration, every line of the data, the tools (which are started), the "
        "environment and the reward; look for questions that repeat or leak into the evaluation "
        "and for prompts that do not fit; and play the passing and the failing episode that the "
        "table [episodes] names. The exit status is 1 if a check fails.",
    )
    _add_config(validate)

    tried = _add(
        commands,
        "try",
        "tryout:try_out",
        "watch the first tasks of a run without training",
        "Start the services without a learner, let a policy attempt the first tasks as training "
        "would, and print every turn, call and reward. Warns when training could not learn.",
    )
    _add_config(tried)
    tried.add_argument(
        "-n", dest="tasks", type=int, default=4, metavar="N", help="tasks (default: 4)"
    )
    samples_help = "attempts at each task, whose rewards are compared (default: 4)"
    tried.add_argument("--samples", type=int, default=4, metavar="K", help=samples_help)
    tried.add_argument(
        "--policy",
        metavar="POLICY",
        help="model directory, run folder, or openai:URL for a server with the OpenAI chat API "
        "(default: model.path)",
    )
    model_help = "with openai:URL: name of the model (default: the first that the server lists)"
    tried.add_argument("--model", metavar="NAME", help=model_help)


def _add_running(commands: _Commands) -> None:
    train = _add(
        commands,
        "train",
        "run:train",
        "start every service on this machine and train",
        "Start every service in its own process on this machine, and train. Ctrl-C stops the run "
        "cleanly; --resume continues it.",
    )
    _add_config(train, required=False)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (run.dir)")
    from_help = "start from this model, or from the last checkpoint of a run (model.path)"
    train.add_argument("--from", dest="policy", metavar="MODEL_OR_RUN", help=from_help)
    dry_help = "take two steps in a folder of its own, and say how long the run and how large "
    train.add_argument("--dry-run", action="store_true", help=f"{dry_help}its folder will be")
    train.add_argument(
        "--resume",
        metavar="DIR_OR_URL",
        help="continue the run in this folder, or the one at this URL of an object store, in the "
        "folder --run-dir",
    )

    serve = _add(
        commands,
        "serve",
        "run:serve",
        "run one service in the foreground",
        "Run one service in the foreground. SERVICE is rollout, reward, learner, or the name of a "
        "tool in the configuration. `serve tool --name NAME` is the same; if there is only one "
        "tool, you may leave out --name. `serve tool my_module:MyTool` serves a class from the "
        "current folder without a configuration. With --join, everything comes from the learner of "
        "a run, which may be on another machine. Set redis.url or AGENT_R1__REDIS__URL to the "
        "Redis to use. Services find tools through it, or by tools.<name>.url. If CONFIG is the "
        "config.json of a run that is running, the service uses the Redis of that run.",
    )
    serve.add_argument("service", metavar="SERVICE", help="rollout, reward, learner, or a tool")
    _add_config(serve, required=False)
    serve.add_argument(
        "--join",
        metavar="RUN_ID",
        help="instead of CONFIG: take configuration, model, plugins and corpus from the learner of "
        "this run, which may be on another host (docs/scale-out.md)",
    )
    serve.add_argument("--redis", metavar="URL", help="with --join: Redis of the run")
    serve.add_argument("--name", metavar="TOOL", help="which tool, with `serve tool`")
    serve.add_argument("--resume", action="store_true", help="learner: continue the run")
    serve.add_argument("--announce-dir", type=Path, help=argparse.SUPPRESS)
    serve.add_argument("--resume-if-begun", action="store_true", help=argparse.SUPPRESS)

    sft = _add(
        commands,
        "sft",
        "run:sft",
        "supervised warm start",
        "Train a model on demonstrations, as the table [sft] of the configuration says.",
    )
    _add_config(sft)

    train_reward = _add(
        commands,
        "train-reward",
        "run:train_reward",
        "train a reward model on stored trajectories",
        "Train a reward model on the stored trajectories of runs, as the table [train_reward] of "
        "the configuration says. The component reward_model asks it.",
    )
    _add_config(train_reward)


def _add_config_commands(commands: _Commands) -> None:
    actions = _add_group(commands, "config", "check or show a configuration")
    check = _add(
        actions,
        "check",
        "config:check",
        "validate everything without starting anything",
        "Validate everything without starting anything, and list every problem: keys and values, "
        "files, the model and its chat template, your own tools, environment, rewards and "
        "functions (they are imported and constructed in a separate process), and what the run "
        "needs from this machine. `agent-r1 train` makes the same checks.",
    )
    show = _add(actions, "show", "config:show", "print every value and where it came from")
    for parser in (check, show):
        _add_config(parser)
    check.add_argument(
        "--elsewhere",
        action="store_true",
        help="skip what depends on this machine: GPUs, the run folder, ports, servers",
    )


def _add_doctor(commands: _Commands) -> None:
    doctor = _add(
        commands,
        "doctor",
        "doctor:doctor",
        "say what this machine has and lacks",
        "Look at software, GPUs, disk, shared memory, Redis and the sandbox. With CONFIG, make the "
        "checks of `agent-r1 config check` and `agent-r1 train` as well: the model and its chat "
        "template, tools and their index, ports, the memory of Redis. Each line says ok, note or "
        "problem; below a problem is its remedy. The exit status is 2 if there is one.",
    )
    doctor.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help=f"{CONFIG_HELP} (optional)"
    )
    _add_set(doctor)


def _add_estimate(commands: _Commands) -> None:
    estimate = _add(
        commands,
        "estimate",
        "estimate:estimate",
        "say how much memory and disk a run takes",
        "Work out the memory of learner and rollout, and the disk for checkpoints and weights, "
        "from the configuration and the size of the model. Nothing is loaded or started. Where it "
        "does not fit, say which keys make it fit; the exit status is then 1.",
    )
    _add_config(estimate)
    gpu_help = "judge for GPUs of this size (default: those of this machine, or its CPU)"
    estimate.add_argument("--gpu-gb", type=float, metavar="GB", help=gpu_help)


def _add_search(commands: _Commands) -> None:
    actions = _add_group(commands, "search", "build the index of the search tool")
    index = _add(
        actions,
        "index",
        "search:index",
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
    add("--bulk-mb", type=int, default=8, metavar="N", help="size of a request in MiB (default: 8)")
    add("--shards", type=int, default=1, metavar="N", help="parts of the index (default: 1)")
    replicas_help = "copies of the index (default: 1 if the cluster has a second node)"
    add("--replicas", type=int, metavar="N", help=replicas_help)
    add(
        "--delete-old",
        action="store_true",
        help="delete every other version; by default the previous one is kept",
    )
    add(
        "--request-timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="longest one request may take, in seconds (default: 120)",
    )


def _add_evaluation(commands: _Commands) -> None:
    evaluate = _add(
        commands,
        "evaluate",
        "evaluate:evaluate",
        "score a policy on the evaluation sets",
        "Start tools, reward and rollout on this machine with a given policy, ask every question "
        "of evaluation.sets, and write one JSON line per answer to FILE. The scores, with 95 % "
        "intervals, go into a file beside it, with the suffix .summary.json. If you run the "
        "command again after an interruption, it asks only the questions that have no answer yet. "
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
        "--attempts",
        type=int,
        default=1,
        metavar="K",
        help="sample K answers to each question, and report pass@k and pass^k as well; needs "
        "evaluation.temperature > 0 (default: 1)",
    )
    out_help = "JSON-lines file to write"
    evaluate.add_argument("--out", type=Path, required=True, metavar="FILE", help=out_help)
    overwrite_help = "start again and discard the answers in FILE"
    evaluate.add_argument("--overwrite", action="store_true", help=overwrite_help)


def _add_diagnose(commands: _Commands) -> None:
    diagnose = _add(
        commands,
        "diagnose",
        "diagnose:diagnose",
        "say whether a task and a model can tell methods apart",
        "Play the scripted policies of [diagnose], ask a model the evaluation questions and "
        "groups of training questions on services of its own, and compare every figure to its "
        "bound: the scores of the scripted policies, greedy and sampled scores of the model, the "
        "share of groups with different rewards, and how alike the gradients of trajectories and "
        "of two estimators are. The exit status is 1 if a bound is missed. `--set "
        "evaluation.max_questions=N` asks fewer questions of each set.",
    )
    _add_config(diagnose)
    diagnose.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); by default the "
        "configuration's model.path",
    )
    diagnose.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write the figures to"
    )


def _add_comparisons(commands: _Commands) -> None:
    compare = _add(
        commands,
        "compare",
        "evaluate:compare",
        "paired test between two evaluations",
        "Compare two files of `agent-r1 evaluate` on the questions that both have, for each set "
        "and for all sets: the difference of the means with its 95 % interval (paired bootstrap), "
        "and an exact McNemar test for exact match.",
    )
    compare.add_argument("a", type=Path, metavar="A", help="JSON-lines file of an evaluation")
    b_help = "file of the other; differences are B - A"
    compare.add_argument("b", type=Path, metavar="B", help=b_help)
    compare.add_argument("--out", type=Path, metavar="FILE", help="write the numbers as JSON")

    table = _add(
        commands,
        "table",
        "table:table",
        "compare methods over several seeds",
        "Start tools, reward and rollout once, evaluate the baselines, train every method of TABLE "
        "with every seed, and write the scores with 95 % intervals as Markdown and JSON. If you "
        "run the command again, it keeps finished rows and continues with the rest.",
    )
    table.add_argument("table", type=Path, metavar="TABLE", help="table file (.toml)")
    table.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for results and runs (default: the file's `results`, and runs/table)",
    )
    only_help = "only these methods or baselines, by name"
    table.add_argument("--only", metavar="METHOD[,METHOD]", help=only_help)
    overwrite_help = "start the rows again and discard their results"
    table.add_argument("--overwrite", action="store_true", help=overwrite_help)
    _add_set(table)


def _add_chat(commands: _Commands) -> None:
    chat = _add(
        commands,
        "chat",
        "chat:chat",
        "ask the agent a question and watch its turns",
        "Start tools and rollout on this machine, then ask the agent questions: your own, or "
        "held-out ones (`:pick`). Text from the model and text from tools have different colours.",
    )
    policy_help = "model directory, or run folder (its last checkpoint)"
    chat.add_argument("policy", metavar="MODEL_OR_RUN", help=policy_help)
    config_help = f"{CONFIG_HELP}; a run folder has its own"
    chat.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    _add_set(chat)
    chat.add_argument("--question", metavar="TEXT", help="ask this one question and exit")
    chat.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")


def _add_run_folders(commands: _Commands) -> None:
    status = _add(
        commands,
        "status",
        "status:status",
        "say what a run and its services do now",
        "Print the last step of a run, what waits in its streams, and every rollout server and "
        "tool with its version; of a run that has ended, how it ended.",
    )
    status.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")

    show = _add(
        commands,
        "show",
        "show:show",
        "read stored trajectories of a run",
        "Print stored trajectories: the model's text and the tools' text in different colours, "
        "with calls, rewards and policy versions.",
    )
    show.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    show.add_argument("--step", type=int, metavar="N", help="only this learner step")
    show.add_argument("--group", type=int, metavar="ID", help="only this group")
    show.add_argument("--failed", action="store_true", help="only FAILED trajectories")
    show.add_argument("--eval", metavar="NAME", help="only this evaluation: before, after, …")
    limit_help = "show at most N (default: 8)"
    show.add_argument("--limit", type=int, default=8, metavar="N", help=limit_help)

    export = _add(
        commands,
        "export",
        "export:export",
        "write a trained policy as a model directory",
        "Write the policy of a checkpoint as a Hugging Face model directory, with tokenizer and "
        "chat template, a model card, and agent.json: the system prompt, the tools, the sampling "
        "and the limits of the run (docs/serving.md). `agent-r1 train CONFIG --from OUT` trains it "
        "further.",
    )
    export.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist yet")
    step_help = "learner step of the checkpoint, `last` (the default), or `best` by evaluation"
    export.add_argument("--step", default="last", metavar="N", help=step_help)

    rescore = _add(
        commands,
        "rescore",
        "rescore:rescore",
        "score stored trajectories again with other rewards",
        "Score the stored trajectories of a run with the [reward] of another configuration, and "
        "compare: mean rewards, components, and the share of groups whose trajectories all have "
        "the same reward, from which nothing is learned. Nothing is changed in the run folder.",
    )
    rescore.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    config_help = f"{CONFIG_HELP}; without it, the run's own with --set"
    rescore.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    _add_set(rescore)
    out_help = "write both rewards of each trajectory there, as JSON lines"
    rescore.add_argument("--out", type=Path, metavar="FILE", help=out_help)


def _add_dead_letters(commands: _Commands) -> None:
    letters = _add_group(
        commands,
        "dead-letters",
        "messages that could not be processed",
        "List, show and retry messages that could not be processed. The run may be running, or it "
        "may have ended.",
    )
    listing = _add(
        letters, "list", "dead_letters:list_letters", "list them: id, time, stream, key, reason"
    )
    one = _add(letters, "show", "dead_letters:show_letters", "print one in full")
    retry = _add(
        letters,
        "retry",
        "dead_letters:retry_letters",
        "put one, or all, back on the stream they came from",
    )
    for parser in (listing, one, retry):
        parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    one.add_argument("id", metavar="ID", help="its id, as `list` prints it")
    retry.add_argument("id", metavar="ID", help="its id, as `list` prints it, or `all`")


def _add_tools(commands: _Commands) -> None:
    actions = _add_group(
        commands,
        "tools",
        "manage tool instances and versions",
        "List tool instances, drain them, and divide new trajectories among versions while "
        "training runs. Rollout servers follow within a second.",
    )

    def action(name: str, function: str, summary: str) -> argparse.ArgumentParser:
        parser = _add(actions, name, f"tools:{function}", summary)
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
        type=float,
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
    mcp = _add(
        actions,
        "mcp",
        "tools_mcp:serve_mcp",
        "serve one tool to an MCP agent over stdio",
        "Serve one tool of a configuration to an MCP agent over standard input and output. The "
        "agent starts this command itself; logs go to standard error. A tool service that already "
        "runs offers the same at its URL + /mcp.",
    )
    _add_config(mcp)
    mcp.add_argument("tool", metavar="TOOL", help="name of its table, [tools.TOOL]")


def _add_rollout(commands: _Commands) -> None:
    actions = _add_group(
        commands,
        "rollout",
        "list and drain rollout servers",
        "List the rollout servers of a run, and take one out while training continues. To add one, "
        "start `agent-r1 serve rollout`.",
    )
    listing = _add(actions, "list", "rollout:list_servers", "print every server that takes samples")
    drain = _add(
        actions,
        "drain",
        "rollout:drain_server",
        "take a server out of service",
        "Take a server out of service. It takes no more samples, finishes those it has, gives back "
        "to the other servers what takes longer than --timeout-s, and ends. Nothing is lost.",
    )
    for parser in (listing, drain):
        parser.add_argument("--run", dest="run_folder", type=Path, metavar="RUN", help="run folder")
        parser.add_argument("--redis", metavar="URL", help="Redis of the run (default: of --run)")
        parser.add_argument("--id", metavar="RUN_ID", help="run.id (default: of --run)")
    drain.add_argument("server", metavar="NAME", help="the server, as `list` names it")
    drain.add_argument(
        "--timeout-s",
        type=float,
        default=120.0,
        metavar="S",
        help="time to finish the samples in flight, in seconds (default: 120)",
    )


def _add_ray(commands: _Commands) -> None:
    actions = _add_group(
        commands,
        "ray",
        "train on a Ray cluster",
        "Train on the Ray cluster that RAY_ADDRESS names: the learner as a job, the other services "
        "as Serve applications (docs/deploy/ray.md). Needs the extra agent-r1[ray].",
    )
    up = _add(
        actions,
        "up",
        "ray:up",
        "train a run on a cluster, or continue or follow it there",
        "Submit the learner's job, deploy the services, and print the job's log until it ends. "
        "Without RAY_ADDRESS, a cluster is started on this machine for as long as the command "
        "runs. Ctrl-C stops the run cleanly. The same command continues a run that was stopped, "
        "and follows one that runs; services whose configuration has changed are replaced.",
    )
    down = _add(actions, "down", "ray:down", "stop a run on a cluster cleanly")
    train = _add(
        actions,
        "train",
        "ray:train",
        "the learner's job, for `ray job submit -- agent-r1 ray train CONFIG`",
    )
    apps = _add(actions, "apps", "ray:apps", "print the Serve configuration, for `serve deploy`")
    for parser in (up, down, train, apps):
        _add_config(parser)
    up.add_argument("--detach", action="store_true", help="return when everything is submitted")


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
    _add_beginning(commands)
    _add_running(commands)
    _add_config_commands(commands)
    _add_doctor(commands)
    _add_estimate(commands)
    _add_search(commands)
    _add_tools(commands)
    _add_rollout(commands)
    _add_ray(commands)
    _add_evaluation(commands)
    _add_diagnose(commands)
    _add_comparisons(commands)
    _add_chat(commands)
    _add_run_folders(commands)
    _add_dead_letters(commands)
    return parser
