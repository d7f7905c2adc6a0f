"""Commands for a task before it trains: init, validate, try."""

from __future__ import annotations

from pathlib import Path

from agent_r1.cli.declare import (
    Commands,
    add_command,
    add_config,
    integer,
)


def add_to(commands: Commands) -> None:
    """Add all of them."""
    _add_task(commands)


def _add_task(commands: Commands) -> None:
    init = add_command(
        commands,
        "init",
        "task.init:init",
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

    validate = add_command(
        commands,
        "validate",
        "task.validate:validate",
        "check a task without its model",
        "Check the configuration, every line of the data, the tools (which are started), the "
        "environment and the reward; look for questions that repeat or leak into the evaluation "
        "and for prompts that do not fit; and play the passing and the failing episode that the "
        "table [episodes] names. The exit status is 1 if a check fails.",
    )
    add_config(validate)

    tried = add_command(
        commands,
        "try",
        "task.tryout:try_out",
        "watch the first tasks of a run without training",
        "Start the services without a learner, let a policy attempt the first tasks as training "
        "would, and print every turn, call and reward. Warns when training could not learn.",
    )
    add_config(tried)
    tried.add_argument(
        "-n", dest="tasks", type=integer(1), default=4, metavar="N", help="tasks (default: 4)"
    )
    samples_help = "attempts at each task, whose rewards are compared (default: 4)"
    tried.add_argument("--samples", type=integer(1), default=4, metavar="K", help=samples_help)
    tried.add_argument(
        "--policy",
        metavar="POLICY",
        help="model directory, run folder, or openai:URL for a server with the OpenAI chat API "
        "(default: model.path)",
    )
    model_help = "with openai:URL: name of the model (default: the first that the server lists)"
    tried.add_argument("--model", metavar="NAME", help=model_help)
