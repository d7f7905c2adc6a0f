"""Commands that prepare a run and train: from `setup` and `estimate` to `train` and `serve`."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent_r1.cli.declare import (
    CONFIG_HELP,
    Commands,
    add_command,
    add_config,
    add_group,
    add_set,
    integer,
    number,
)

MOST_GPUS, MOST_BOXES = 1000, 1000
"""That `estimate` adds up."""


def add_to(commands: Commands) -> None:
    """Add all of them."""
    _add_setup(commands)
    _add_train(commands)
    _add_serve(commands)
    _add_supervised(commands)
    _add_config_commands(commands)
    _add_doctor(commands)
    _add_estimate(commands)


def _add_setup(commands: Commands) -> None:
    setup = add_command(
        commands,
        "setup",
        "training.setup:setup",
        "install the packages that training needs",
        "Install exactly the packages of the lock that comes with agent-r1 into the virtual "
        "environment of this command. If you run it again, it continues where it stopped.",
    )
    setup.add_argument("variant", choices=("cpu", "gpu"), help="for CPUs alone, or for NVIDIA GPUs")


def _add_train(commands: Commands) -> None:
    train = add_command(
        commands,
        "train",
        "training.run:train",
        "start every service on this machine and train",
        "Start every service in its own process on this machine, and train. Ctrl-C stops the run "
        "cleanly; --resume continues it.",
    )
    add_config(train, required=False)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (run.dir)")
    from_help = "start from this model, or from the last checkpoint of a run (model.path)"
    train.add_argument("--from", dest="policy", metavar="MODEL_OR_RUN", help=from_help)
    dry_help = "take two steps in a separate folder, then say how long the run will take and how "
    train.add_argument("--dry-run", action="store_true", help=f"{dry_help}large its folder will be")
    train.add_argument(
        "--resume",
        metavar="DIR_OR_URL",
        help="continue the run in this folder, or the one at this URL of an object store, in the "
        "folder --run-dir",
    )


def _add_serve(commands: Commands) -> None:
    serve = add_command(
        commands,
        "serve",
        "training.run:serve",
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
    add_config(serve, required=False)
    serve.add_argument(
        "--join",
        metavar="RUN_ID",
        help="instead of CONFIG: take configuration, model, plugins and corpus from the learner of "
        "this run, which may be on another host (docs/scale-out.md)",
    )
    serve.add_argument("--redis", metavar="URL", help="with --join: Redis of the run")
    serve.add_argument("--name", metavar="TOOL", help="which tool, with `serve tool`")
    serve.add_argument("--resume", action="store_true", help="learner: continue the run")
    serve.add_argument(
        "--take-over",
        action="store_true",
        help="learner: end another learner that trains this run, and go on in its place",
    )
    serve.add_argument("--announce-dir", type=Path, help=argparse.SUPPRESS)
    serve.add_argument("--resume-if-begun", action="store_true", help=argparse.SUPPRESS)


def _add_supervised(commands: Commands) -> None:
    sft = add_command(
        commands,
        "sft",
        "training.run:sft",
        "supervised warm start",
        "Train a model on demonstrations, as the table [sft] of the configuration says.",
    )
    add_config(sft)

    train_reward = add_command(
        commands,
        "train-reward",
        "training.run:train_reward",
        "train a reward model on stored trajectories",
        "Train a reward model on the stored trajectories of runs, as the table [train_reward] of "
        "the configuration says. The component reward_model asks it.",
    )
    add_config(train_reward)


def _add_config_commands(commands: Commands) -> None:
    actions = add_group(commands, "config", "check or show a configuration")
    check = add_command(
        actions,
        "check",
        "training.config:check",
        "validate everything without starting anything",
        "Validate everything without starting anything, and list every problem: keys and values, "
        "files, the model and its chat template, your own tools, environment, rewards and "
        "functions (they are imported and constructed in a separate process), and what the run "
        "needs from this machine. `agent-r1 train` makes the same checks.",
    )
    show = add_command(
        actions, "show", "training.config:show", "print every value and where it came from"
    )
    for parser in (check, show):
        add_config(parser)
    check.add_argument(
        "--elsewhere",
        action="store_true",
        help="skip what depends on this machine: GPUs, the run folder, ports, servers",
    )


def _add_doctor(commands: Commands) -> None:
    doctor = add_command(
        commands,
        "doctor",
        "training.doctor:doctor",
        "say what this machine has and lacks",
        "Look at software, GPUs, disk, shared memory, Redis and the sandbox. With CONFIG, make the "
        "checks of `agent-r1 config check` and `agent-r1 train` as well: the model and its chat "
        "template, tools and their index, ports, the memory of Redis. Each line says ok, note or "
        "problem; below a problem is its remedy. The exit status is 2 if there is one.",
    )
    doctor.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help=f"{CONFIG_HELP} (optional)"
    )
    add_set(doctor)


def _add_estimate(commands: Commands) -> None:
    estimate = add_command(
        commands,
        "estimate",
        "training.estimate:estimate",
        "say how much memory and disk a run takes",
        "Work out the memory of learner and rollout, what is placed on each GPU and in memory, and "
        "the disk for checkpoints and weights, from the configuration and the size of the model. "
        "Nothing is loaded or started. Where it does not fit, say which keys make it fit; the exit "
        "status is then 1.",
    )
    add_config(estimate)
    gpu_help = "judge for GPUs of this size (default: those of this machine, or its CPU)"
    estimate.add_argument("--gpu-gb", type=number(1), metavar="GB", help=gpu_help)
    gpus_help = "GPUs of a machine (default: those of this one; 1 with --gpu-gb)"
    estimate.add_argument("--gpus", type=integer(1, MOST_GPUS), metavar="N", help=gpus_help)
    memory_help = "memory of a machine (default: what is free on this one; any with --gpu-gb)"
    estimate.add_argument("--memory-gb", type=number(1), metavar="GB", help=memory_help)
    boxes_help = "machines of this kind, whose GPUs are counted in a row (default: 1)"
    estimate.add_argument(
        "--boxes", type=integer(1, MOST_BOXES), default=1, metavar="N", help=boxes_help
    )
