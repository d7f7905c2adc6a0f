"""Supervised training on dialogues, with the engine of reinforcement learning.

train.py, reward_model/train.py --samples--> train --train_batch--> the engine --> `output`

Everything it writes on the way is in `work_dir`: `log.jsonl` (one line a step), `state/` (to resume
from), `summary.json` (at the end). Interrupted, the same command continues where it stopped.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from pydantic import BaseModel, NonNegativeFloat, NonNegativeInt

from agent_r1.learner.config import SupervisedConfig
from agent_r1.learner.engine.interface import LossSpec, PolicyEngine, TrainSample
from agent_r1.learner.engine.ranks.messages import EngineSetup, differences
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.sft.data import SftData, plan_batches
from agent_r1.runtime.config import ModelConfig, RunConfig
from agent_r1.runtime.exit_status import STOP_SIGNALS
from agent_r1.runtime.files.state import check_object, read_object, split_lines
from agent_r1.runtime.files.writing import replace_directory, write_atomically
from agent_r1.runtime.imports import quick_imports

logger = logging.getLogger(__name__)

LOG_FILE, SUMMARY_FILE, PROGRESS_FILE = "log.jsonl", "summary.json", "progress.json"
_NOT_OF_THE_TASK = {
    "work_dir",
    "output",
    "checkpoint_every",
    "log_every",
    "share_prefixes",
    "torch_threads",
    "ranks",
    "rank_interface",
    "rank_join_timeout_s",
}
"""Keys that may change between an interruption and its resume."""


@dataclass(frozen=True)
class Job:
    """Training job: one table of the configuration, and what was read for it."""

    table: str
    """Name of the table: "sft" or "train_reward"."""
    config: SupervisedConfig
    data: SftData
    weigh: Callable[[PolicyEngine, Sequence[int]], Sequence[TrainSample]] | None = None
    """Returns the samples of a batch, whose weights may depend on the model as it is; None: as they
    were read."""
    report: Callable[[PolicyEngine], dict[str, Any]] = lambda engine: {}
    """Report on the trained model; what it returns goes into the summary."""


class _Progress(BaseModel):
    """Progress of a training."""

    identity: dict[str, Any]
    step: NonNegativeInt = 0
    tokens: NonNegativeInt = 0
    spent_s: NonNegativeFloat = 0.0


class _Training:
    """A job: its plan, and how far it has come."""

    def __init__(self, model: ModelConfig, job: Job, seed: int) -> None:
        self.job, self.config, self.data = job, job.config, job.data
        config = job.config
        named = config.output.with_name(f"{config.output.name}.{job.table}")
        self.work_dir = config.work_dir or named
        self.state_dir = self.work_dir / "state"
        lengths = [sample.num_tokens for sample in self.data.samples]
        self.batches = plan_batches(lengths, config, seed, self.data.states)
        logger.info(
            "dialogues read dialogues=%d num_tokens=%d steps=%d",
            len(lengths),
            self.data.num_tokens,
            len(self.batches),
        )
        settings = config.model_dump(mode="json")
        settings |= settings.pop("engine")
        self.identity = {
            "data": self.data.digest,
            "model": model.model_dump(mode="json"),
            "seed": seed,
            job.table: {k: v for k, v in settings.items() if k not in _NOT_OF_THE_TASK},
        }
        self.progress = _Progress(identity=self.identity)
        self.last_loss: float | None = None

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.progress.step

    def resume(self, engine: PolicyEngine) -> None:
        """Go on from the state of an interrupted training, where there is one.

        Raises:
            ValueError: the state is of another training, or corrupted.
        """
        progress_file = self.state_dir / PROGRESS_FILE
        if not self.state_dir.exists():
            return
        remedy = f"remove {self.state_dir} to start over, or set {self.job.table}.work_dir"
        try:
            progress = check_object(_Progress, read_object(progress_file))
        except (OSError, ValueError) as exc:
            raise ValueError(f"{progress_file} cannot be read ({exc}); {remedy}") from exc
        if progress.identity != self.identity:
            changed = ", ".join(key for key, *_ in differences(self.identity, progress.identity))
            raise ValueError(
                f"{self.state_dir} is the state of another training (different: {changed}); "
                f"{remedy}"
            )
        try:
            engine.load_state(self.state_dir)
        except ValueError as exc:
            raise ValueError(f"{exc}; {remedy}") from exc
        self.progress = progress
        logger.info("training resumed step=%d of=%d", self.step, len(self.batches))

    def save(self, engine: PolicyEngine) -> None:
        """Write the state to resume from, in place of the one before."""
        with replace_directory(self.state_dir) as staging:
            (staging / PROGRESS_FILE).write_text(self.progress.model_dump_json(), encoding="utf-8")
            engine.save_state(staging)

    def train_step(self, engine: PolicyEngine) -> dict[str, Any]:
        """Train on the next batch; return its log line."""
        batch = self.batches[self.step]
        started = time.monotonic()
        if self.job.weigh is None:
            samples: Sequence[TrainSample] = [self.data.samples[i] for i in batch]
        else:
            samples = self.job.weigh(engine, batch)
        spec = LossSpec(kind="nll", drop_zero_advantages=False)
        metrics = engine.train_batch(samples, spec)
        progress = self.progress
        progress.spent_s += time.monotonic() - started
        progress.step += 1
        progress.tokens += int(metrics["batch/tokens"])
        self.last_loss = metrics["loss/total"]
        return {
            "step": progress.step,
            "loss": metrics["loss/total"],
            "lr": metrics["lr"],
            "grad_norm": metrics["grad_norm"],
            "tokens": progress.tokens,
            "tokens_per_s": metrics["tokens_per_s"],
            "elapsed_s": progress.spent_s,
        }

    def log(self, line: dict[str, Any]) -> None:
        """Show one line of progress, with the time left."""
        spent_s = line["elapsed_s"]
        left_s = spent_s / self.step * (len(self.batches) - self.step)
        logger.info(
            "training step=%d/%d loss=%.4f lr=%.2e tokens=%d tokens_per_s=%.0f left=%s",
            self.step,
            len(self.batches),
            line["loss"],
            line["lr"],
            line["tokens"],
            line["tokens"] / spent_s,
            time.strftime("%H:%M:%S", time.gmtime(left_s)),
        )

    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` holds."""
        tokens, spent_s = self.progress.tokens, self.progress.spent_s
        return {
            "steps": self.step,
            "dialogues": len(self.data.samples),
            "tokens": tokens,
            "tokens_per_s": tokens / spent_s if spent_s else 0.0,
            "train_s": spent_s,
            "last_loss": self.last_loss,
            **self.identity,
        }


def train(
    *,
    run: RunConfig,
    model: ModelConfig,
    job: Job,
    place: RankPlace | None = None,
    stop: threading.Event | None = None,
) -> bool:
    """Train to the end, or until SIGINT or SIGTERM.

    Args:
        run: gives the seed, unless the table does.
        model: the model to start from.
        job: data, output and settings.
        place: rank 0's among its ranks; None starts the others on this machine.
        stop: set it to stop after the optimizer step in progress, as a signal does.

    Returns:
        True when the output was written; False when it was interrupted and its state saved.

    Raises:
        ValueError: the state to resume from is of another training.
        EngineError: a rank failed, or memory or disk ran out.
    """
    config = job.config
    training = _Training(model, job, run.seed if config.seed is None else config.seed)
    with quick_imports():
        from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
        from agent_r1.learner.engine.ranks.group import RankGroup

    setup = _engine_setup(run, model, config, job.table)
    group = RankGroup(setup, place)
    with (
        DeepSpeedPolicyEngine(setup, total_steps=len(training.batches), group=group) as engine,
        _stop_on_signal(stop or threading.Event()) as stopping,
    ):
        finished = _train(training, engine, stopping)
        if not finished:
            engine.stop()
        return finished


def check_output(table: str, config: SupervisedConfig) -> None:
    """Refuse to write over something.

    Raises:
        ValueError: the output exists already.
    """
    if config.output.exists() and (not config.output.is_dir() or any(config.output.iterdir())):
        raise ValueError(
            f"{table}.output ({config.output}) exists already; remove it or name another directory"
        )


def follow(
    run: RunConfig, model: ModelConfig, config: SupervisedConfig, table: str, place: RankPlace
) -> NoReturn:
    """Be a rank other than 0 until the ranks end."""
    with quick_imports():
        from agent_r1.learner.engine.ranks.worker import follow

    follow(place, [_engine_setup(run, model, config, table)])


def _engine_setup(
    run: RunConfig, model: ModelConfig, config: SupervisedConfig, table: str
) -> EngineSetup:
    return EngineSetup.of(model, config.engine, seed=run.seed, table_name=f"{table}.engine")


def _train(training: _Training, engine: PolicyEngine, stopping: threading.Event) -> bool:
    """Take the steps that are left; write output and summary after the last."""
    config, last = training.config, len(training.batches)
    training.work_dir.mkdir(parents=True, exist_ok=True)
    training.resume(engine)
    _keep_log_lines(training.work_dir / LOG_FILE, training.step)
    with (training.work_dir / LOG_FILE).open("a", encoding="utf-8", buffering=1) as log:
        while training.step < last:
            if stopping.is_set():
                training.save(engine)
                logger.warning(
                    "training interrupted step=%d of=%d; the same command continues from %s",
                    training.step,
                    last,
                    training.state_dir,
                )
                return False
            line = training.train_step(engine)
            log.write(json.dumps(line) + "\n")
            if training.step % config.log_every == 0 or training.step in (1, last):
                training.log(line)
            if config.checkpoint_every and training.step % config.checkpoint_every == 0:
                training.save(engine)
    found = training.job.report(engine)
    engine.export_model(config.output)
    summary = json.dumps(training.summary() | found, indent=1)
    write_atomically(training.work_dir / SUMMARY_FILE, summary)
    shutil.rmtree(training.state_dir, ignore_errors=True)
    logger.info("model written output=%s", config.output)
    return True


def _keep_log_lines(path: Path, steps: int) -> None:
    """Drop log lines of steps that will be taken (again)."""
    if path.exists():
        lines = split_lines(path.read_text(encoding="utf-8"))
        write_atomically(path, "".join(f"{line}\n" for line in lines[:steps]))


@contextmanager
def _stop_on_signal(stopping: threading.Event) -> Iterator[threading.Event]:
    """Set the event on SIGINT and SIGTERM inside the block, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield stopping
        return

    def handle(signum: int, frame: FrameType | None) -> None:
        stopping.set()

    previous = {name: signal.signal(name, handle) for name in STOP_SIGNALS}
    try:
        yield stopping
    finally:
        for name, handler in previous.items():
            signal.signal(name, handler)
