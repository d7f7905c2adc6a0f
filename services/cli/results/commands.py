"""Commands for what a run left behind: status, show, export, rescore, dead-letters."""

from __future__ import annotations

from pathlib import Path

from agent_r1.cli.declare import (
    CONFIG_HELP,
    Commands,
    add_command,
    add_group,
    add_set,
    integer,
)


def add_to(commands: Commands) -> None:
    """Add all of them."""
    _add_run_folders(commands)
    _add_dead_letters(commands)


def _add_run_folders(commands: Commands) -> None:
    status = add_command(
        commands,
        "status",
        "results.status:status",
        "show what a run and its services are doing",
        "Print the last step of a run, what waits in its streams, and every rollout server and "
        "tool with its version; of a run that has ended, how it ended.",
    )
    status.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")

    show = add_command(
        commands,
        "show",
        "results.show:show",
        "read stored trajectories of a run",
        "Print stored trajectories: the model's text and the tools' text in different colours, "
        "with calls, rewards and policy versions.",
    )
    show.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    show.add_argument("--step", type=integer(0), metavar="N", help="only this learner step")
    show.add_argument("--group", type=integer(0), metavar="ID", help="only this group")
    show.add_argument("--failed", action="store_true", help="only FAILED trajectories")
    show.add_argument("--eval", metavar="NAME", help="only this evaluation: before, after, …")
    limit_help = "show at most N (default: 8)"
    show.add_argument("--limit", type=integer(1), default=8, metavar="N", help=limit_help)

    export = add_command(
        commands,
        "export",
        "results.export:export",
        "write a trained policy as a model directory",
        "Write the policy of a checkpoint as a Hugging Face model directory, with tokenizer and "
        "chat template, a model card, and agent.json: the system prompt, the tools, the sampling "
        "and the limits of the run (docs/serving.md). `agent-r1 train CONFIG --from OUT` trains it "
        "further. With --critic, write the critic of a PPO run instead, as a model that the reward "
        "component `critic` asks.",
    )
    export.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    export.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist yet")
    step_help = "learner step of the checkpoint, `last` (the default), or `best` by evaluation"
    export.add_argument("--step", default="last", metavar="N", help=step_help)
    adapter_help = "of a run with [model.lora]: write the adapter alone, in PEFT's format; without "
    export.add_argument(
        "--adapter", action="store_true", help=f"{adapter_help}this it is merged into the model"
    )
    critic_help = "write the critic, which says what a state is worth"
    export.add_argument("--critic", action="store_true", help=critic_help)

    rescore = add_command(
        commands,
        "rescore",
        "results.rescore:rescore",
        "score stored trajectories again with other rewards",
        "Score the stored trajectories of a run with the [reward] of another configuration, and "
        "compare: mean rewards, components, and the share of groups whose trajectories all have "
        "the same reward, from which nothing is learned. Nothing is changed in the run folder.",
    )
    rescore.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    config_help = f"{CONFIG_HELP}; without it, the run's own with --set"
    rescore.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    add_set(rescore)
    out_help = "write both rewards of each trajectory there, as JSON lines"
    rescore.add_argument("--out", type=Path, metavar="FILE", help=out_help)


def _add_dead_letters(commands: Commands) -> None:
    letters = add_group(
        commands,
        "dead-letters",
        "messages that could not be processed",
        "List, show and retry messages that could not be processed. The run may be running, or it "
        "may have ended.",
    )
    listing = add_command(
        letters,
        "list",
        "results.dead_letters:list_letters",
        "list them: id, time, stream, key, reason",
    )
    one = add_command(letters, "show", "results.dead_letters:show_letters", "print one in full")
    retry = add_command(
        letters,
        "retry",
        "results.dead_letters:retry_letters",
        "put one, or all, back on the stream they came from",
    )
    for parser in (listing, one, retry):
        parser.add_argument("run_folder", type=Path, metavar="RUN", help="run folder")
    one.add_argument("id", metavar="ID", help="its id, as `list` prints it")
    retry.add_argument("id", metavar="ID", help="its id, as `list` prints it, or `all`")
