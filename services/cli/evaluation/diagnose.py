"""`agent-r1 diagnose`: whether a task and a model can tell methods apart, before any is trained.

Plays the scripted policies of `[diagnose]` in this process, asks the model on services of its own
(greedy and sampled answers, and groups of training questions), computes the gradients of those
groups, and compares every figure to its bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_r1.cli.declare import add_config
from agent_r1.cli.evaluation.asking import Meter, on_services, write_out
from agent_r1.cli.policy import describe_policy, with_policy
from agent_r1.cli.task.scripted import play_all
from agent_r1.config import checks as config_checks
from agent_r1.config.run import Config, ConfigError, load_config
from agent_r1.evaluation.diagnosis import (
    Figure,
    base_figures,
    scripted_figures,
    training_figures,
)
from agent_r1.evaluation.main import Progress, attempt_of
from agent_r1.runtime.evaluation_client import EvalClient, EvalResult
from agent_r1.runtime.exit_status import EXIT_FAILED
from agent_r1.runtime.files.tasks import read_sets, read_task_file
from agent_r1_proto.registry import Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import SamplingParameters, Task
from agent_r1_proto.weights import NewestVersion

TIMEOUT_S = 7200.0
MAX_IN_FLIGHT = 256


@dataclass
class _Questions:
    """Questions that are asked."""

    sets: dict[str, list[Task]]
    training: list[Task]


@dataclass
class _Answers:
    """Answers to them."""

    greedy: dict[str, list[EvalResult]]
    sampled: dict[str, list[list[EvalResult]]]
    """Sampled answers by set, one list per question."""
    groups: list[list[EvalResult]]


def diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `diagnose`."""
    add_config(parser)
    parser.add_argument(
        "--policy",
        metavar="MODEL_OR_RUN",
        help="model directory, or a run folder (its last checkpoint); by default the "
        "configuration's model.path",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON file to write the figures to"
    )


def diagnose(arguments: argparse.Namespace) -> int:
    """Play the scripted policies of [diagnose], ask a model, and compare every figure to its
    bound.

    The model is asked the evaluation questions and groups of training questions, on services of
    its own. The figures are the scores of the scripted policies, greedy and sampled scores of the
    model, the share of groups with different rewards, and how alike the gradients of trajectories
    and of two estimators are. The exit status is 1 if a bound is missed. `--set
    evaluation.max_questions=N` asks fewer questions of each set.
    """
    config = load_config(arguments.config, arguments.options).config
    if arguments.policy is not None:
        config = with_policy(config, arguments.policy)
    config_checks.check(config, "evaluate")
    questions = _questions(config)
    print(describe_policy(config.model.policy))
    figures = _scripted(config, questions.sets)
    for figure in figures:
        print(figure.line())
    answers = _ask(config, questions)
    for figure in _of_model(config, answers):
        print(figure.line())
        figures.append(figure)
    missed = [figure.name for figure in figures if not figure.passed]
    print(f"missed: {'; '.join(missed)}" if missed else "every bound is kept")
    if arguments.out is not None:
        record = {
            "policy": config.model.policy,
            "passed": not missed,
            "figures": [figure.record() for figure in figures],
        }
        write_out(arguments.out, record)
    return EXIT_FAILED if missed else 0


def _questions(config: Config) -> _Questions:
    wanted = config.diagnose.sets or list(config.evaluation.sets)
    if not wanted or config.data is None:
        raise ConfigError(
            "diagnose asks evaluation questions and training questions; name files under "
            "evaluation.sets and in data.train"
        )
    batch, groups = config.learner.groups_per_batch, config.diagnose.groups
    if groups < batch:
        raise ConfigError(
            f"diagnose.groups ({groups}) must be at least learner.groups_per_batch ({batch}): "
            "gradients are those of whole batches"
        )
    files = {name: config.evaluation.sets[name] for name in wanted}
    training = read_task_file(config.data.train[0])[:groups]
    return _Questions(read_sets(files, config.evaluation.max_questions), training)


def _scripted(config: Config, sets: dict[str, list[Task]]) -> list[Figure]:
    policies = dict(config.diagnose.degenerate)
    if config.diagnose.oracle is not None:
        policies["oracle"] = config.diagnose.oracle
    rewards = play_all(config, policies, sets)
    oracle = rewards.pop("oracle", None)
    return scripted_figures(oracle, rewards)


def _ask(config: Config, questions: _Questions) -> _Answers:
    """Ask everything on services of its own."""

    async def ask(served: Config, meter: Meter) -> _Answers:
        url = served.redis.connection_url()
        async with await Broker.connect(url, served.run.id, lease_s=served.redis.lease_s) as broker:
            await Registry(broker).set_newest_version(NewestVersion(policy_version=0))
            asker = _Asker(served, broker, meter)
            return _Answers(
                greedy={n: await asker.run(tasks, 0.0) for n, tasks in questions.sets.items()},
                sampled={n: await asker.sampled(tasks) for n, tasks in questions.sets.items()},
                groups=await asker.sampled(questions.training),
            )

    return on_services(config, ask)


@dataclass
class _Asker:
    """Asks the services of a run."""

    config: Config
    broker: Broker
    meter: Meter

    async def sampled(self, tasks: Sequence[Task]) -> list[list[EvalResult]]:
        """Return `diagnose.attempts` answers to each question, at temperature 1."""
        attempts = self.config.diagnose.attempts
        asked = [attempt_of(task, attempt) for task in tasks for attempt in range(attempts)]
        results = await self.run(asked, 1.0)
        return [results[i : i + attempts] for i in range(0, len(results), attempts)]

    async def run(self, tasks: Sequence[Task], temperature: float) -> list[EvalResult]:
        """Return an answer to each question."""
        config, done, failed = self.config, 0, 0

        def take(result: EvalResult) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + result.failed
            self.meter.show(Progress("answered", done, len(tasks), failed))

        client = EvalClient(
            self.broker,
            run_id=config.run.id,
            client_id="diagnose",
            sampling=SamplingParameters(temperature=temperature),
            seed=config.run.seed,
            timeout_s=TIMEOUT_S,
            sample_timeout_s=config.learner.sample_timeout_s,
            max_attempts=config.learner.max_attempts,
            max_in_flight=MAX_IN_FLIGHT,
        )
        return await client.run(tasks, take)


def _of_model(config: Config, answers: _Answers) -> list[Figure]:
    from agent_r1.learner.diagnosis import gradient_figures
    from agent_r1.learner.groups import Group, Slot

    greedy = {name: _rewards(results) for name, results in answers.greedy.items()}
    sampled = {name: list(map(_rewards, of)) for name, of in answers.sampled.items()}
    groups = [
        Group(i, _scored(results)[0].trajectory.rollout.task, 0, slots)
        for i, results in enumerate(answers.groups)
        if len(slots := [Slot(0.0, final=True, result=s) for s in _scored(results)]) > 1
    ]
    gradients = gradient_figures(
        groups,
        config.learner,
        config.model,
        config.diagnose.turn_lam,
        config.engine.torch_threads,
    )
    return [
        *base_figures(greedy, sampled, config.diagnose.solved_above),
        *training_figures(
            list(map(_rewards, answers.groups)),
            [figures.top_share for figures in gradients],
            [figures.cosine for figures in gradients],
        ),
    ]


def _scored(results: Sequence[EvalResult]) -> list[ScoredTrajectory]:
    return [r.scored for r in results if not r.failed and r.scored is not None]


def _rewards(results: Sequence[EvalResult]) -> list[float]:
    return [s.reward.total for s in _scored(results) if s.reward is not None]
