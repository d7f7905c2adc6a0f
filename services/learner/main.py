"""Starts the learner: `agent_r1.cli.services.serve` calls `train` with the spec of one run.

Builds the engine over its ranks, and drives train.py to the end of the run or until SIGTERM or
SIGINT. In the process of a rank other than 0 it calls `follow`, with the same tables.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from agent_r1.learner.algorithms import check_equal_groups, find_policy_loss, make_advantage
from agent_r1.learner.assembly import connect
from agent_r1.learner.config import EngineConfig, LearnerConfig
from agent_r1.learner.engine.interface import PolicyEngine
from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from agent_r1.learner.heartbeat import refuse_a_second
from agent_r1.learner.outcome import INTERRUPTED
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.train import Learner
from agent_r1.runtime.announcements import write_announcement
from agent_r1.runtime.config import ModelConfig, RunConfig
from agent_r1.runtime.exit_status import STOP_SIGNALS
from agent_r1.runtime.imports import quick_imports
from agent_r1_proto.registry import Registry

if TYPE_CHECKING:
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine

logger = logging.getLogger(__name__)

NAME = "learner"


def train(
    spec: RunSpec,
    announce_dir: Path | None,
    *,
    place: RankPlace | None = None,
) -> str:
    """Train until the last step; return after a clean stop too, with a checkpoint written.

    Returns:
        the run's status, as in outcome.py.

    Raises:
        ValueError: a checkpoint or a setting is wrong; the text says what to do.
        RunFailedError: a stop rule was met; the text gives the most frequent reasons.
        CanaryError: a rollout server samples with other weights than were published.
        EngineError: the engine or the disk gave up; the last checkpoint is kept.
    """
    make_advantage(spec.learner.advantage, spec.learner.advantage_parameters)
    spec.learner.check_group_size(spec.learner.estimator)
    find_policy_loss(spec.learner.policy_loss)
    if spec.learner.drop_equal_groups:
        check_equal_groups(spec.learner.policy_loss)
    spec.folder.write_config(spec.resolved_config)
    try:
        with _interruptible():
            if not spec.take_over:
                asyncio.run(_refuse_a_second(spec))
        with _interruptible(), build_engine(spec, place) as engine:
            status = asyncio.run(run_until_stopped(spec, engine, announce_dir))
            if status == INTERRUPTED:
                engine.stop()
            return status
    except KeyboardInterrupt:
        logger.info("stopped while the model was being loaded; nothing was trained")
        return INTERRUPTED


def follow(
    run: RunConfig,
    model: ModelConfig,
    learner: LearnerConfig,
    engine: EngineConfig,
    place: RankPlace,
) -> NoReturn:
    """Be a rank other than 0 until the ranks end."""
    setup = engine_setup(run, model, learner, engine)
    with quick_imports():
        from agent_r1.learner.engine.ranks.worker import follow

    follow(place, [setup])


def build_engine(spec: RunSpec, place: RankPlace | None = None) -> DeepSpeedPolicyEngine:
    """Join the ranks, or start them on this machine, and load the model over all of them."""
    setup = engine_setup(spec.run, spec.model, spec.learner, spec.engine)
    # Imports torch and DeepSpeed, which a wrong configuration should not have to wait for.
    with quick_imports():
        from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
        from agent_r1.learner.engine.ranks.group import RankGroup

    return DeepSpeedPolicyEngine(
        setup,
        total_steps=spec.total_steps * spec.learner.optimizer_steps_per_batch,
        group=RankGroup(setup, place),
    )


def engine_setup(
    run: RunConfig, model: ModelConfig, config: LearnerConfig, engine: EngineConfig
) -> EngineSetup:
    """Return the engine's setup, as every rank reads it in the configuration."""
    if run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    critic_model = model.model_copy(update={"path": config.critic_path or model.path})
    return EngineSetup.of(
        model,
        engine,
        seed=run.seed,
        with_reference=config.kl != "none",
        critic=CriticSetup(
            critic_model,
            config.critic_lr,
            config.critic_warmup_steps * config.optimizer_steps_per_batch,
        )
        if config.has_critic
        else None,
        deterministic=run.deterministic,
    )


async def _refuse_a_second(spec: RunSpec) -> None:
    """Refuse a second learner of the run before the model is loaded beside the first one's."""
    async with await connect(spec) as broker:
        await refuse_a_second(Registry(broker), spec.run.id, spec.folder.path)


async def run_until_stopped(spec: RunSpec, engine: PolicyEngine, announce_dir: Path | None) -> str:
    """Run the learner; SIGTERM and SIGINT end it in order. Return the run's status."""
    learner = Learner(spec, engine)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, learner.request_stop, signal.Signals(number).name)

    def announce(url: str) -> None:
        if announce_dir is not None:
            write_announcement(announce_dir, NAME, url)

    try:
        return await learner.run(announce)
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)  # a second one does not cut the end short


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM, like SIGINT, raise KeyboardInterrupt where no event loop handles it."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        for one in STOP_SIGNALS:  # launchers and ranks may each send one
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in STOP_SIGNALS:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
