"""`agent-r1 train CONFIG --dry-run`: how long a run takes and how large it grows, from two steps.

Runs the first two steps of a configuration with every service, in a folder that is deleted
afterwards unless they fail, and multiplies what they took.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.runs.store import stored_files
from agent_r1.runtime.durations import format_duration
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from agent_r1.runtime.files.disk_space import free_bytes, readable_size
from agent_r1.runtime.files.own_folder import OwnFolder
from agent_r1.runtime.files.run_folder import CHECKPOINTS_DIR, METRICS_FILE
from agent_r1.runtime.files.state import split_lines
from agent_r1.runtime.memory import GIB

STEPS = 2
UNHURRIED_S = 0.001


@dataclass(frozen=True)
class Measured:
    """Measurements of two steps."""

    step_s: float
    """The second step, in seconds; the first one also warms up."""
    rollout_s: float
    """Part of the step in which the servers sampled."""
    checkpoint_bytes: int
    weights_bytes: int
    """Bytes of all versions that are kept."""
    trajectory_bytes: int
    """Bytes of the trajectories that a step writes down."""


@dataclass(frozen=True)
class Plan:
    """Work of the whole run."""

    steps: int
    evaluations: int
    questions: int
    """Questions of one evaluation."""
    samples_per_step: int
    checkpoints: int
    """Checkpoints kept at a time, the one that is written included."""
    trajectories_bytes: float = math.inf
    """Largest size of the stored trajectories."""


def dry_run(config: Config) -> int:
    """Take two steps, and print what the whole run would take."""
    from agent_r1.launch import local
    from agent_r1.launch.local_services import cache_folder

    plan = plan_of(config)
    place = OwnFolder(cache_folder(), "dry-run-")
    folder = place.path / "run"
    kept = False
    try:
        status = local.run_training(shortened(config, folder), resume=False, temporary=True)
        kept = status == EXIT_FAILED  # the message has named a log in it
        if status in (EXIT_FAILED, EXIT_INTERRUPTED):
            return status
        measured = measure(folder)
    finally:
        if kept:
            place.keep()
        else:
            place.remove()
    for line in prediction(config, plan, measured):
        print(line)
    return status


def shortened(config: Config, folder: Path) -> Config:
    """Return the configuration of the first two steps, without evaluations."""
    learner = {"steps": STEPS, "checkpoint_every": 0, "checkpoint_url": None, "weights_dir": None}
    evaluation = {"before": False, "after": False, "every": 0}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": folder}),
            "learner": config.learner.model_copy(update=learner),
            "evaluation": config.evaluation.model_copy(update=evaluation),
        }
    )


def plan_of(config: Config) -> Plan:
    """Return what the whole run does."""
    learner, evaluation = config.learner, config.evaluation
    steps = learner.steps
    if steps is None:
        steps = learner.num_steps(len(config.prompt_order()))
    during = steps // evaluation.every if evaluation.every else 0
    ends = evaluation.before + evaluation.after
    return Plan(
        steps=steps,
        evaluations=(during + ends) if evaluation.sets else 0,
        questions=_questions(config),
        samples_per_step=learner.groups_per_batch * learner.slots_per_group,
        checkpoints=learner.keep_last + learner.keep_best + 1,
        trajectories_bytes=learner.trajectories_max_gib * GIB,
    )


def _questions(config: Config) -> int:
    from agent_r1.runtime.files.tasks import read_sets

    sets = read_sets(config.evaluation.sets, config.evaluation.max_questions)
    return sum(len(tasks) for tasks in sets.values())


def measure(folder: Path) -> Measured:
    """Return what the two steps in a run folder took.

    Raises:
        ConfigError: it has fewer.
    """
    lines = split_lines((folder / METRICS_FILE).read_text(encoding="utf-8"))
    if len(lines) < STEPS:
        raise ConfigError(f"the run ended after {len(lines)} of {STEPS} steps; see above")
    last = json.loads(lines[-1])
    steps = [file.path for file in stored_files(folder) if file.step is not None]
    return Measured(
        step_s=max(last["time/step_s"], UNHURRIED_S),
        rollout_s=last["time/rollout_s"],
        checkpoint_bytes=_size(next((folder / CHECKPOINTS_DIR).glob("step_*"))),
        weights_bytes=_size(folder / "weights"),
        trajectory_bytes=sum(path.stat().st_size for path in steps) // max(1, len(steps)),
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def hours(plan: Plan, measured: Measured) -> tuple[float, float]:
    """Return the seconds of all steps, and of all evaluations, whose questions are asked alike."""
    question_s = measured.rollout_s / plan.samples_per_step
    evaluations_s = plan.evaluations * plan.questions * question_s
    return plan.steps * measured.step_s, evaluations_s


def disk(plan: Plan, measured: Measured) -> int:
    """Return the largest size of the run folder, in bytes."""
    kept = plan.checkpoints * measured.checkpoint_bytes + measured.weights_bytes
    return kept + int(min(plan.steps * measured.trajectory_bytes, plan.trajectories_bytes))


def prediction(config: Config, plan: Plan, measured: Measured) -> Iterator[str]:
    """Yield the lines that tell the user."""
    steps_s, evaluations_s = hours(plan, measured)
    checkpoint = readable_size(measured.checkpoint_bytes)
    yield f"a step takes {measured.step_s:.2f} s, a checkpoint {checkpoint}"
    yield f"{plan.steps} steps will take about {format_duration(steps_s)}"
    if plan.evaluations:
        asked = f"{plan.evaluations} evaluations of {plan.questions} questions"
        yield f"{asked} will take about {format_duration(evaluations_s)} more"
    need, free = disk(plan, measured), free_bytes(config.run.folder().absolute())
    yield f"the run folder will grow to about {readable_size(need)}; {readable_size(free)} are free"
    if need > free:
        yield "!! that does not fit: lower learner.keep_last and learner.keep_best, or move run.dir"
