"""`agent-r1 chat MODEL_OR_RUN`: ask the agent, and watch its turns.

Starts tools, reward and rollout on this machine, sends each question as a task of its own
(`purpose` eval) and prints the trajectory that comes back: sampled text and tool text in different
colours.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from agent_r1.cli.declare import CONFIG_HELP, add_set, number
from agent_r1.cli.evaluation.decoding import (
    add_decoding,
    check_tools,
    decoding_of,
    fitted_setting,
)
from agent_r1.cli.policy import config_file_of, describe_policy, with_policy
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.evaluation.transcript import SAMPLED_STYLE, TOOL_STYLE, print_transcript
from agent_r1.reward.components import ASKING
from agent_r1.runs.record import readable
from agent_r1.runtime.evaluation_client import EvalClient, EvalResult
from agent_r1.runtime.exit_status import EXIT_FAILED
from agent_r1.runtime.files.tasks import read_task_file
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import (
    LEAST_TEMPERATURE,
    MOST_TEMPERATURE,
    Decoding,
    SamplingParameters,
    Task,
)

HELP = (
    "Type a question. :pick [SET] asks a held-out question, :task FILE:ID a task of a file, :sets "
    "lists the sets, :help prints this text, :quit leaves."
)
NEEDS_PAYLOAD = (
    "this environment may need the payload of a task: --task FILE:ID asks one with its payload"
)
ANSWER_TIMEOUT_S = 300.0
READ_BYTES = 65536


def chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `chat`."""
    policy_help = "model directory, or run folder (its last checkpoint)"
    parser.add_argument("policy", metavar="MODEL_OR_RUN", help=policy_help)
    config_help = f"{CONFIG_HELP}; a run folder has its own"
    parser.add_argument("--config", type=Path, metavar="CONFIG", help=config_help)
    add_set(parser)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--question", metavar="TEXT", help="ask this one question and exit")
    task_help = "ask the task of this id in a file of tasks, with its payload, and exit"
    one.add_argument("--task", metavar="FILE:ID", help=task_help)
    add_decoding(parser)
    parser.add_argument(
        "--temperature",
        type=number(LEAST_TEMPERATURE, MOST_TEMPERATURE, or_0=True),
        default=0.0,
        metavar="T",
        help="0 (the default) is greedy",
    )


def chat(arguments: argparse.Namespace) -> int:
    """Start tools and rollout on this machine, then ask the agent questions.

    They are your own, or held-out ones (`:pick`). Text from the model and text from tools have
    different colours.
    """
    from agent_r1.launch import local_client

    config = chat_config(arguments.policy, arguments.config, arguments.options)
    temperature = arguments.temperature
    if (fitted := fitted_setting(arguments, config.model.policy)) is None:
        decoding = decoding_of(arguments, config, temperature)
    else:
        print(fitted.instead_of("--temperature", temperature))
        config, decoding = fitted.applied(config), fitted.decoding
        temperature = fitted.temperature
    asked = arguments.question if arguments.task is None else named_task(config, arguments.task)
    config = uncompared(config, None if decoding is None else decoding.scorer)
    check_tools(decoding, config_checks.check(config, "serve").specs)
    console = Console(highlight=False, markup=False, emoji=False)

    async def talk(served: Config) -> int:
        sampling = SamplingParameters(temperature=temperature)
        return await converse(served, console, asked, sampling, decoding)

    def report(line: str) -> None:
        loud = line.startswith("!!")
        console.print(Text(line, style="bold red" if loud else "dim"), soft_wrap=True)

    policy = describe_policy(config.model.policy)
    report(policy if policy == config.model.policy else f"{policy} ({config.model.policy})")
    return local_client.run_client(config, talk, report)


def chat_config(policy: str, file: Path | None, options: list[str]) -> Config:
    """Find the configuration: the one named, else that of the run which made the policy."""
    file = file or config_file_of(policy)
    if file is None:
        raise ConfigError(
            f"{policy} is not in a run folder, so its tools and prompts are unknown; name a "
            "configuration with --config"
        )
    return with_policy(load_config(file, options).config, policy)


def uncompared(config: Config, scorer: str | None = None) -> Config:
    """Return a configuration whose rewards need no right answer, since nobody knows one.

    Args:
        config: of the services.
        scorer: component that is kept.
    """
    changes = {
        "rule": "weighted",
        "components": {"answered": 1.0} | ({} if scorer is None else {scorer: 0.0}),
        "ranges": {},
        "servers": config.reward.servers.model_copy(
            update={name: None for name in ASKING if name != scorer}
        ),
    }
    return config.model_copy(update={"reward": config.reward.model_copy(update=changes)})


def named_task(config: Config, named: str) -> Task:
    """Return the task that `FILE:ID` names; FILE is read as the configuration reads it.

    Raises:
        ConfigError: there is no such file, or no such task in it.
    """
    cuts = [place for place, sign in enumerate(named) if sign == ":"]
    splits = [(Path(named[:cut]), named[cut + 1 :]) for cut in cuts]
    found = next(((file, task_id) for file, task_id in splits if file.exists()), None)
    if found is None:
        raise ConfigError(
            f"--task ({named}) must be FILE:ID, an existing file of tasks and the id of one in it"
        )
    file, task_id = found
    train = [] if config.data is None else config.data.train
    sources = [*train, *config.evaluation.sets.values()]
    same = [one for one in sources if one.source.absolute() == file.absolute()]
    tasks = {task.id: task for task in read_task_file(same[0] if same else file)}
    if task_id not in tasks:
        near = difflib.get_close_matches(task_id, tasks, n=1) or list(tasks)[:1]
        raise ConfigError(f"--task: {file} has no task {task_id!r}; did you mean {near[0]!r}?")
    return tasks[task_id]


def _pick(config: Config, wanted: str, rng: random.Random) -> Task:
    """Choose a held-out question at random.

    Raises:
        ValueError: there is no such set.
    """
    sets = config.evaluation.sets
    if not sets:
        raise ConfigError("the configuration names no held-out questions; set evaluation.sets")
    if wanted and wanted not in sets:
        raise ConfigError(f"there is no set {wanted!r}; the sets are {', '.join(sorted(sets))}")
    return rng.choice(read_task_file(sets[wanted or rng.choice(sorted(sets))]))


class LineReader:
    """Reads lines of standard input while services are watched.

    Without a thread, since one that waits for input would keep the process from ending, and without
    Python's buffer, since what waits in it does not wake the event loop.
    """

    def __init__(self) -> None:
        self._descriptor = sys.stdin.fileno()
        self._data = b""
        self._ended = False

    async def read(self) -> str | None:
        """Ask for a line; None at the end of input."""
        print("question> ", end="", flush=True)
        while b"\n" not in self._data and not self._ended:
            await self._wait()
            chunk = os.read(self._descriptor, READ_BYTES)
            self._data += chunk
            self._ended = not chunk
        line, _, self._data = self._data.partition(b"\n")
        if not line and self._ended and not self._data:
            return None
        return line.decode(errors="replace").strip()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        try:
            loop.add_reader(self._descriptor, ready.set)
        except PermissionError:  # a file, which is always ready
            return
        try:
            await ready.wait()
        finally:
            loop.remove_reader(self._descriptor)


async def converse(
    config: Config,
    console: Console,
    asked: str | Task | None,
    sampling: SamplingParameters,
    decoding: Decoding | None = None,
) -> int:
    async with await Broker.connect(config.redis.connection_url(), config.run.id) as broker:
        client = EvalClient(
            broker,
            run_id=config.run.id,
            client_id="chat",
            sampling=sampling,
            decoding=decoding,
            timeout_s=ANSWER_TIMEOUT_S,
        )
        policy = describe_policy(config.model.policy)
        if isinstance(asked, str):
            asked = Task(id="chat", prompt=asked)
        if asked is not None:
            return _show(await client.run([asked]), config, policy, console)
        legend = Text("text the model samples", style=SAMPLED_STYLE)
        console.print(legend.append("  text a tool returns", style=TOOL_STYLE))
        console.print(HELP)
        rng = random.Random()
        count = 0
        reader = LineReader()
        while (line := await reader.read()) is not None:
            command, _, argument = line.partition(" ")
            if command in (":quit", ":q", ":exit"):
                break
            if not line or command == ":help":
                console.print(HELP)
                continue
            if command == ":sets":
                console.print(", ".join(sorted(config.evaluation.sets)) or "none")
                continue
            try:
                if command == ":pick":
                    task = _pick(config, argument.strip(), rng)
                elif command == ":task":
                    task = named_task(config, argument.strip())
                else:
                    task = Task(id=f"chat-{count}", prompt=line)
            except ValueError as exc:
                console.print(Text(str(exc), style="bold red"))
                continue
            count += 1
            _show(await client.run([task]), config, policy, console)
    return 0


def _show(results: Sequence[EvalResult], config: Config, policy: str, console: Console) -> int:
    (result,) = results
    if result.scored is None:
        console.print(Text(f"no answer: {result.reason}; see the logs", style="bold red"))
        return EXIT_FAILED
    if "env_error" in result.reason and not result.scored.trajectory.rollout.task.payload:
        console.print(Text(NEEDS_PAYLOAD, style="bold red"), soft_wrap=True)
    record = readable(
        result.scored, step=0, advantage=None, trained=False, system_prompt=config.system_prompt
    )
    # The servers are fresh and number weights from 0, and `answered` is no reward.
    record["policy"] = policy
    if record["reward"] is not None:
        record["reward"]["total"] = None
    print_transcript(record, console)
    sys.stdout.flush()
    return EXIT_FAILED if result.failed else 0
