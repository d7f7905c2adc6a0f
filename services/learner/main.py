"""Starts the learner: `agent_r1.cli.run` calls `train` with the spec of one run.

Builds the engine over its ranks, and drives train.py to the end of the run or until SIGTERM or
SIGINT.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from agent_r1.learner.algorithms import find_advantage, find_policy_loss
from agent_r1.learner.engine.interface import PolicyEngine
from agent_r1.learner.outcome import INTERRUPTED
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.train import Learner
from agent_r1_service.announcements import write_announcement

logger = logging.getLogger(__name__)

NAME = "learner"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def train(spec: RunSpec, announce_dir: Path | None, *, resolved_config: Mapping[str, Any]) -> str:
    """Train until the last step; return after a clean stop too, with a checkpoint written.

    Returns:
        the run's status, as in outcome.py.

    Raises:
        ValueError: a checkpoint or a setting is wrong; the text says what to do.
        RunFailedError: a stop rule was met; the text gives the most frequent reasons.
        CanaryError: a rollout server samples with other weights than were published.
        EngineError: the engine or the disk gave up; the last checkpoint is kept.
    """
    find_advantage(spec.learner.advantage)
    find_policy_loss(spec.learner.policy_loss)
    spec.folder.write_config(resolved_config)
    try:
        with _interruptible(), closing(build_engine(spec)) as engine:
            return asyncio.run(run_until_stopped(spec, engine, announce_dir))
    except KeyboardInterrupt:
        logger.info("stopped while the model was being loaded; nothing was trained")
        return INTERRUPTED


def build_engine(spec: RunSpec) -> PolicyEngine:
    """Load the model over all ranks."""
    if spec.run.deterministic:
        # Read when CUDA starts, also by the other ranks.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Imports torch and DeepSpeed, which a wrong configuration should not have to wait for.
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
    from agent_r1.learner.engine.rank_messages import CriticSetup

    config = spec.learner
    critic_model = spec.model.model_copy(update={"path": config.critic_path or spec.model.path})
    return DeepSpeedPolicyEngine(
        spec.model,
        config,
        seed=spec.run.seed,
        total_steps=spec.total_steps * config.optimizer_steps_per_batch,
        with_reference=config.kl != "none",
        critic=CriticSetup(
            critic_model,
            config.critic_lr,
            config.critic_warmup_steps * config.optimizer_steps_per_batch,
        )
        if config.has_critic
        else None,
        deterministic=spec.run.deterministic,
    )


async def run_until_stopped(spec: RunSpec, engine: PolicyEngine, announce_dir: Path | None) -> str:
    """Run the learner; SIGTERM and SIGINT end it in order. Return the run's status."""
    learner = Learner(spec, engine)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, learner.request_stop, signal.Signals(number).name)
    if announce_dir is not None:
        write_announcement(announce_dir, NAME, url="")  # it has no port
    try:
        return await learner.run()
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM, like SIGINT, raise KeyboardInterrupt where no event loop handles it."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
