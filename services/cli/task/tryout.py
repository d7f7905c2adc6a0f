"""`agent-r1 try CONFIG`: watch a policy at the first tasks of a run, before anything is trained.

Starts the services without a learner and prints every turn, call and reward component; with
`openai:URL` only the tools are started, and without a policy validate.py plays scripted turns. In
the end it says what would keep training from learning.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from rich.console import Console
from rich.text import Text

from agent_r1.cli.declare import add_config, integer, refuse_beside
from agent_r1.cli.policy import describe_policy, with_policy
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.evaluation.transcript import BAD_STYLE, SAMPLED_STYLE, TOOL_STYLE, print_transcript
from agent_r1.learner.groups import total_reward
from agent_r1.runs.record import readable
from agent_r1.runtime.evaluation_client import ATTEMPT, EvalClient, EvalResult
from agent_r1.runtime.exit_status import EXIT_FAILED
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import SamplingParameters, Task

OPENAI = "openai:"
NO_POLICY = "none"
TASKS = SAMPLES = 4

Group = list[EvalResult]
"""The attempts at one task."""
Ask = Callable[[int, Task], Awaitable[Group]]
"""Makes the attempts at the task of this number."""


def try_out_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `try`."""
    add_config(parser)
    tasks_help = f"tasks (default: {TASKS})"
    parser.add_argument("-n", dest="tasks", type=integer(1), metavar="N", help=tasks_help)
    samples_help = f"attempts at each task, whose rewards are compared (default: {SAMPLES})"
    parser.add_argument("--samples", type=integer(1), metavar="K", help=samples_help)
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="model directory, run folder, openai:URL for a server with the OpenAI chat API, or "
        "none (default: model.path)",
    )
    model_help = "with openai:URL: name of the model (default: the first that the server lists)"
    parser.add_argument("--model", metavar="NAME", help=model_help)


def try_out(arguments: argparse.Namespace) -> int:
    """Let a policy attempt the first tasks as training would, without a learner.

    Every turn, call and reward is printed, and a warning when training could not learn. The exit
    status is 1 if an attempt failed. With --policy none, check the task without its model: the
    configuration, every line of the data, the tools (which are started), the environment and the
    reward; look for questions that repeat or leak into the evaluation and for prompts that do not
    fit; and play the passing and the failing episode that the table [episodes] names. The exit
    status is then 1 if a check fails.
    """
    from agent_r1.launch import local_client

    policy: str | None = arguments.policy
    if policy == NO_POLICY:
        from agent_r1.cli.task.validate import validate

        attempts = {"-n": arguments.tasks, "--samples": arguments.samples}
        refuse_beside("--policy none", {**attempts, "--model": arguments.model})
        return validate(load_config(arguments.config, arguments.options).config)
    asks_server = policy is not None and policy.startswith(OPENAI)
    if arguments.model is not None and not asks_server:
        raise ConfigError("--model goes with --policy openai:URL; it names a model of that server")
    config = load_config(arguments.config, arguments.options).config
    if policy is not None and not asks_server:
        config = with_policy(config, policy)
    config_checks.check(config, "serve", machine=not asks_server)
    samples: int = arguments.samples or SAMPLES
    tasks = first_tasks(config, arguments.tasks or TASKS)
    console = Console(highlight=False, markup=False, emoji=False)
    shown = policy if policy is not None and asks_server else describe_policy(config.model.policy)
    groups: list[Group] = []

    def report(line: str) -> None:
        loud = line.startswith("!!")
        console.print(Text(line, style=BAD_STYLE if loud else "dim"), soft_wrap=True)

    async def watch(ask: Ask) -> None:
        for number, task in enumerate(tasks):
            groups.append(await ask(number, task))
            print_group(groups[-1], shown, console, config.system_prompt)

    async def client(served: Config) -> None:
        if policy is not None and asks_server:
            await _ask_server(served, policy, arguments.model, samples, watch)
        else:
            await _ask_rollout(served, samples, watch)

    report(f"policy: {shown}")
    legend = Text("text the model samples", style=SAMPLED_STYLE)
    console.print(legend.append("  text a tool returns", style=TOOL_STYLE))
    local_client.run_client(config, client, report, only_tools=asks_server)
    for warning in warnings(groups, calls_tools=bool(config.tools)):
        report(f"!! {warning}")
    return EXIT_FAILED if any(one.failed for group in groups for one in group) else 0


def first_tasks(config: Config, count: int) -> list[Task]:
    """Return the tasks that training would begin with, or the first of the evaluation sets.

    Raises:
        ConfigError: the configuration names no data.
    """
    if config.data is not None:
        order = config.prompt_order()
        return [order.task(i) for i in range(min(count, len(order)))]
    files = list(config.evaluation.sets.values())
    if not files:
        raise ConfigError("the configuration names no tasks; set data.train or evaluation.sets")
    return [task for file in files for task in read_task_file(file)][:count]


# --- Asking --------------------------------------------------------------------------------------


def _attempts(task: Task, samples: int) -> list[Task]:
    """Return a task as it is asked each time, so that each attempt has a seed of its own."""
    return [
        task.model_copy(update={"metadata": {**task.metadata, ATTEMPT: number}})
        for number in range(samples)
    ]


async def _ask_rollout(
    served: Config, samples: int, watch: Callable[[Ask], Awaitable[None]]
) -> None:
    """Let the rollout service make the attempts, sampled as in training."""
    async with await Broker.connect(served.redis.connection_url(), served.run.id) as broker:
        client = EvalClient(
            broker,
            run_id=served.run.id,
            client_id="try",
            sampling=SamplingParameters(temperature=served.learner.temperature),
            seed=served.run.seed,
            sample_timeout_s=served.learner.sample_timeout_s,
            max_attempts=served.learner.max_attempts,
        )
        await watch(lambda _, task: client.run(_attempts(task, samples)))


async def _ask_server(
    served: Config,
    policy: str,
    model: str | None,
    samples: int,
    watch: Callable[[Ask], Awaitable[None]],
) -> None:
    """Let a server with the OpenAI API write the turns; tools, environment and reward are real."""
    from agent_r1.cli.task.episodes import open_runner
    from agent_r1.cli.task.openai_policy import Dialogue, DialogueChat, find_model, open_client
    from agent_r1.reward.scorer import ComponentError

    async with open_client(policy.removeprefix(OPENAI)) as http, open_runner(served) as runner:
        server = await find_model(http, model)

        async def attempt(group: int, task: Task, sample: int) -> EvalResult:
            dialogue = Dialogue(server, served.learner.temperature, served.env.max_tokens_per_turn)
            chat = DialogueChat(runner.chat, dialogue)
            try:
                return EvalResult(
                    task,
                    await runner.run(
                        task, dialogue.next_text, chat=chat, group=group, sample=sample
                    ),
                )
            except (ComponentError, ValueError) as exc:
                return EvalResult(task, None, str(exc))

        async def ask(group: int, task: Task) -> Group:
            return await asyncio.gather(
                *(attempt(group, task, sample) for sample in range(samples))
            )

        await watch(ask)


# --- Showing -------------------------------------------------------------------------------------


def print_group(
    group: Group, policy: str, console: Console, system_prompt: str | None = None
) -> None:
    """Print every attempt at a task, and their rewards side by side."""
    for number, one in enumerate(group):
        if one.scored is None:
            console.rule(Text(f"{one.task.id}  sample {number}"), align="left")
            console.print(Text(f"no result: {one.reason}", style=BAD_STYLE), soft_wrap=True)
            continue
        record = readable(
            one.scored, step=0, advantage=None, trained=False, system_prompt=system_prompt
        )
        record["policy"] = policy
        title = f"{one.task.id}  sample {number}  {record['status']}"
        console.rule(Text(title), align="left")
        print_transcript(record, console)
    rewards = "  ".join(f"{reward:g}" for reward in rewards_of(group))
    console.print(Text(f"rewards of {group[0].task.id}: {rewards or 'none'}", style="bold"))


def rewards_of(group: Group) -> list[float]:
    """Return the rewards that the group's attempts would be trained with."""
    return [total_reward(one.scored) for one in group if one.scored and not one.failed]


def warnings(groups: Sequence[Group], *, calls_tools: bool) -> Iterator[str]:
    """Yield what would keep training from learning, each with a remedy.

    Args:
        groups: what came of each task.
        calls_tools: the model is offered tools.
    """
    results = [one for group in groups for one in group]
    if failed := [one for one in results if one.failed]:
        yield (
            f"{len(failed)} of {len(results)} attempts failed; the first: {failed[0].reason}; "
            "correct the tool, the environment or the reward"
        )
    compared = {group[0].task.id: rewards_of(group) for group in groups}
    equal = {name: r[0] for name, r in compared.items() if len(r) > 1 and len(set(r)) == 1}
    if equal:
        names = ", ".join(f"{name} ({reward:g})" for name, reward in equal.items())
        some = "" if len(equal) < len(groups) else "nothing can be learned: "
        yield (
            f"{some}all rewards are equal in {len(equal)} of {len(groups)} groups: {names}; a "
            "group teaches only by its differences: take easier or harder tasks, a reward with "
            "more values, a better model, or more --samples"
        )
    calls = [c for one in results if one.scored for c in one.scored.trajectory.calls()]
    if calls_tools and not calls:
        yield (
            "the model made no tool call; say in env.system_prompt, or in the prompt of your "
            "agent, when to call and how, or warm the model up with `agent-r1 sft`"
        )
    elif calls and all(call.status == "malformed" for call in calls):
        yield (
            f"none of the {len(calls)} tool calls could be read; the first: {calls[0].error}; see "
            "that the chat template tells the model the format that is read"
        )
    cut = [one for one in results if one.scored and one.scored.trajectory.status == "TRUNCATED"]
    if cut and cut[0].scored is not None:
        yield (
            f"{len(cut)} of {len(results)} attempts were cut off; the first: "
            f"{cut[0].scored.trajectory.reason}; raise that limit, or teach the model to be brief"
        )
