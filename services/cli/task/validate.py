"""`agent-r1 try CONFIG --policy none`: checks of a task without its model.

They cover data, tools, environment and reward. Starts the tools as a run would, and plays scripted
turns against them in this process (episodes.py). Each check is a line; below one that failed stands
what is wrong, and the remedy.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from agent_r1.cli.task.episodes import Episode, EpisodeRunner, open_runner, read_episode, scripted
from agent_r1.config import checks as config_checks
from agent_r1.config.findings import Check
from agent_r1.config.packages import TOOLS, missing_packages_problem
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError, at_hand
from agent_r1.learner.groups import total_reward
from agent_r1.reward.components import COMPARES_WORDS
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.math_forms import is_number
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1.rollout.envs import load_env_class
from agent_r1.runtime.exit_status import EXIT_FAILED
from agent_r1.runtime.files.tasks import numbered_tasks
from agent_r1.runtime.user_code import describe
from agent_r1_proto.rewards import ScoredTrajectory, ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import Task
from agent_r1_proto.trajectory import ANSWERED, ToolCallRecord, Trajectory

EMPTY_ANSWER = "<think></think><answer></answer>"
"""Leads a component to what it compares answers with."""
SHOWN = 5
"""Most problems of one kind that are printed."""
_PLACE = re.compile(r"(?::|, row )\d+$")


@dataclass(frozen=True)
class Line:
    """A task and where it stands."""

    task: Task
    where: str
    """File and line."""
    trains: bool

    def __str__(self) -> str:
        """Name file, line and task."""
        return f"{self.where} (task {self.task.id!r})"


def validate(config: Config) -> int:
    """Check a task without its model; 1 if a check failed."""
    from agent_r1.launch import local_client

    missing = missing_packages_problem(TOOLS)
    if missing is not None:
        raise ConfigError(missing)
    problems = 0

    def show(one: Check) -> None:
        nonlocal problems
        problems += len(one.problems)
        for line in one.lines():
            print(line, flush=True)

    for one in config_checks.find(config, "train", machine=False).checks:
        show(one)
    if not problems:
        tasks = read_lines(config)
        for one in data_checks(config, tasks):
            show(one)

        async def check(served: Config) -> None:
            async for one in served_checks(served, tasks):
                show(one)

        try:
            local_client.run_client(config, check, print, only_tools=True)
        except ValueError as exc:
            show(Check("tools", "", [str(exc)]))
    print(f"{problems} problem{'' if problems == 1 else 's'}" if problems else "no problems")
    return EXIT_FAILED if problems else 0


# --- The data ------------------------------------------------------------------------------------


def read_lines(config: Config) -> list[Line]:
    """Read every task of the configuration, in the order of its files.

    Raises:
        TaskFileError: a line is wrong; file and line are named.
    """
    train = [] if config.data is None else config.data.train
    sources = [(source, True) for source in train]
    sources += [(source, False) for source in config.evaluation.sets.values()]
    return [
        Line(task, where.replace(str(source), str(at_hand(source.source)), 1), trains)
        for source, trains in sources
        for where, task in numbered_tasks(source)
    ]


def data_checks(config: Config, tasks: Sequence[Line]) -> Iterator[Check]:
    """Yield what is found by reading: repeated questions, and what environment and reward need."""
    trained = sum(line.trains for line in tasks)
    found = f"{trained} to train on, {len(tasks) - trained} to evaluate with"
    notes = list(number_notes(config.reward, tasks))
    yield Check("tasks", found, _limited(repeated(tasks)), notes)
    yield Check("environment", config.env.type, _limited(_env_problems(config, tasks)))


def repeated(tasks: Iterable[Line]) -> Iterator[str]:
    """Yield the tasks that were there before: the same prompt, payload and tool context.

    Prompts alone may be equal: a game asks every player the same.
    """
    first: dict[str, Line] = {}
    for line in tasks:
        question = json.dumps(
            [
                [[m.role, " ".join(m.shown().casefold().split())] for m in line.task.messages()],
                line.task.payload,
                line.task.tool_context,
            ],
            sort_keys=True,
        )
        earlier = first.setdefault(question, line)
        if earlier is line:
            continue
        if earlier.trains and not line.trains:
            yield f"{line} leaks: {earlier} trains on the same question; remove one of them"
        else:
            yield f"{line} repeats {earlier}; remove one of them"


def number_notes(reward: RewardConfig, tasks: Iterable[Line]) -> Iterator[str]:
    """Yield the files whose answers are mostly numbers, where the reward compares words."""
    weights = {"exact_match": 1.0} if reward.rule == "paper" else reward.components
    comparing = [name for name, weight in weights.items() if weight and name in COMPARES_WORDS]
    files: dict[str, list[Line]] = defaultdict(list)
    for line in tasks if comparing else ():
        files[_PLACE.sub("", line.where)].append(line)
    for file, lines_of_file in files.items():
        numeric = [line for line in lines_of_file if _has_number(line.task)]
        if 2 * len(numeric) >= len(lines_of_file):
            yield (
                f"{file}: the answers of {len(numeric)} of {len(lines_of_file)} tasks are numbers, "
                f"which {' and '.join(comparing)} compares without points and signs: 35 equals "
                '3.5, and 5 equals -5; use the component math_equal, with rule = "weighted"'
            )


def _has_number(task: Task) -> bool:
    answers = task.payload.get("answers")
    return isinstance(answers, list) and any(isinstance(a, str) and is_number(a) for a in answers)


def _env_problems(config: Config, tasks: Iterable[Line]) -> Iterator[str]:
    """Yield the tasks for which the environment cannot be made."""
    made = load_env_class(config.env.type, set(config.env.options))
    for line in tasks:
        try:
            made(line.task, **config.env.options)
        except Exception as exc:  # noqa: BLE001 - user code may raise anything
            yield (
                f"{line}: {made.__name__}(...) raised {describe(exc)}; correct the task's payload "
                "or the class"
            )


async def _reward_problems(
    scorer: Scorer, tasks: Iterable[Line], empty: ScoreTurn
) -> AsyncIterator[str]:
    """Yield the tasks whose empty answer the reward cannot score."""
    for line in tasks:
        request = ScoreRequest(payload=line.task.payload, turns=[empty])
        try:
            await scorer.score(request)
        except (ComponentError, ValueError) as exc:
            text = str(exc)
            remedy = "" if "; " in text else "; correct the task's payload or the component"
            yield f"{line}: an empty answer cannot be scored: {text}{remedy}"


def _limited(problems: Iterable[str]) -> list[str]:
    """Return the first problems, and how many more there are."""
    found = list(problems)
    left = len(found) - SHOWN
    return found[:SHOWN] + ([f"{left} more like these"] if left > 0 else [])


# --- With the tools ------------------------------------------------------------------------------


async def served_checks(served: Config, tasks: Sequence[Line]) -> AsyncIterator[Check]:
    """Yield what is found with the tools running: their schemas, prompts, rewards, the episodes."""
    async with open_runner(served) as runner:
        for name, spec in runner.specs.items():
            parameters = ", ".join(spec.parameters.get("properties", {}))
            yield Check(f"tools.{name}", f"version {spec.version}: {name}({parameters})")
        yield _prompt_check(served, runner, tasks)
        # Not of language models, which would be asked about every line.
        scorer = Scorer(
            served.reward.without_asking(),
            served.turn_reader(),
        )
        empty = ScoreTurn(text=EMPTY_ANSWER, token_ids=runner.chat.encode(EMPTY_ANSWER))
        problems = [problem async for problem in _reward_problems(scorer, tasks, empty)]
        yield Check("reward", ", ".join(served.reward.components), _limited(problems))
        async for one in episode_checks(served, runner, tasks):
            yield one


def _prompt_check(config: Config, runner: EpisodeRunner, tasks: Sequence[Line]) -> Check:
    """Compare the prompts, as the model gets them, with the context."""
    limit, turn = config.model.max_context, config.env.max_tokens_per_turn
    problems: list[str] = []
    lengths: list[int] = []
    crowded = 0
    for line in tasks:
        try:
            length = len(runner.prompt_tokens(line.task))
        except ValueError as exc:
            problems.append(f"{line}: {exc}")
            continue
        lengths.append(length)
        crowded += limit - turn < length < limit
        if length >= limit:
            problems.append(
                f"{line}: the prompt has {length} tokens, and model.max_context is {limit}; "
                "shorten it or raise model.max_context"
            )
    if not lengths:
        return Check("prompts", "", _limited(problems))
    found = (
        f"{min(lengths)} to {max(lengths)} tokens (median {statistics.median(lengths):.0f}) of "
        f"{limit}"
    )
    notes = []
    if crowded:
        notes.append(
            f"{crowded} prompts leave less than env.max_tokens_per_turn ({turn}) for the first "
            "turn; raise model.max_context"
        )
    return Check("prompts", found, _limited(problems), notes)


async def episode_checks(
    config: Config, runner: EpisodeRunner, tasks: Sequence[Line]
) -> AsyncIterator[Check]:
    """Play the two episodes that the configuration names, and compare what they are worth."""
    files = {"passing": config.episodes.passing, "failing": config.episodes.failing}
    missing = [name for name, file in files.items() if file is None]
    by_id = {line.task.id: line.task for line in reversed(tasks)}
    worth: dict[str, float] = {}
    called: set[str] = set()
    for name, file in files.items():
        if file is None:
            continue
        try:
            one, reward = await _play(name, read_episode(file), runner, by_id, called)
        except (ConfigError, ComponentError) as exc:
            one, reward = Check(f"{name} episode", str(at_hand(file)), [str(exc)]), None
        yield one
        if reward is not None:
            worth[name] = reward
    if missing:
        text = (
            f"there is no {' and no '.join(missing)} episode, so nothing shows that the reward "
            "tells good from bad; name one in [episodes]"
        )
        yield Check("episodes", "", notes=[text])
    elif len(worth) == 2:
        yield _compared(worth["passing"], worth["failing"])
    silent = sorted(runner.specs.keys() - called)
    if silent:
        text = f"no episode calls {', '.join(silent)}, so nothing shows that it answers; add a call"
        yield Check("tools", "", notes=[text])


def _compared(passing: float, failing: float) -> Check:
    if passing > failing:
        return Check("rewards", f"passing {passing:g} > failing {failing:g}")
    problem = (
        f"the passing episode earns {passing:g} and the failing one {failing:g}, so the reward "
        "does not tell them apart; correct the reward, the environment or the episodes"
    )
    return Check("rewards", "", [problem])


async def _play(
    name: str,
    episode: Episode,
    runner: EpisodeRunner,
    tasks: Mapping[str, Task],
    called: set[str],
) -> tuple[Check, float | None]:
    """Play one episode; return what is said of it, and its reward. `called` gets its tools."""
    if episode.task not in tasks:
        raise ConfigError(
            f"the {name} episode names the task {episode.task!r}, which no file of the "
            "configuration has; name one of data.train or evaluation.sets"
        )
    scored = await runner.run(tasks[episode.task], scripted(episode.turns))
    trajectory = scored.trajectory
    called.update(call.tool for call in trajectory.calls() if call.status in ANSWERED)
    problems = []
    if trajectory.status == "FAILED":
        problems.append(f"it FAILED: {trajectory.reason}; correct the tool, the ToolEnv or a turn")
    problems += list(_unanswered(trajectory)) if name == "passing" else []
    if trajectory.status == "TRUNCATED" and name == "passing":
        problems.append(f"it was cut off: {trajectory.reason}; raise the limit or shorten a turn")
    unused = len(episode.turns) - len(trajectory.turns)
    if unused and not problems:
        problems.append(
            f"it ended ({trajectory.reason}) after {len(trajectory.turns)} turns, and the script "
            f"has {unused} more; remove them or correct the ToolEnv"
        )
    reward = None if scored.reward is None else total_reward(scored)
    return Check(f"{name} episode", _worth(scored), problems), reward


def _unanswered(trajectory: Trajectory) -> Iterator[str]:
    """Yield the tools of a passing episode all of whose calls ended in an error."""
    calls: dict[str, list[ToolCallRecord]] = defaultdict(list)
    for call in trajectory.calls():
        if call.status in ANSWERED:
            calls[call.tool].append(call)
    for tool, found in calls.items():
        if all(call.status == "error" for call in found):
            yield (
                f"every call of tools.{tool} ended in an error ({found[0].text()!r:.200}); correct "
                "the tool, or the calls of the episode"
            )


def _worth(scored: ScoredTrajectory) -> str:
    """Describe how an episode ended and what it is worth."""
    trajectory = scored.trajectory
    calls = ", ".join(f"{call.tool or '(not parsed)'} {call.status}" for call in trajectory.calls())
    how = f"{trajectory.status}: {trajectory.reason}, {len(trajectory.turns)} turns"
    if scored.reward is None:
        return f"{how} ({calls or 'no calls'})"
    components = ", ".join(f"{k} {v:g}" for k, v in scored.reward.components.items())
    return f"reward {total_reward(scored):g} ({components}); {how} ({calls or 'no calls'})"
