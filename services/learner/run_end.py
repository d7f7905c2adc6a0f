"""End of a run: train.py --TrainingRun--> checkpoint, `summary.json`, a tidy Redis.

A checkpoint is also written whenever one is due; the summary says how the run ended, and what it
lost on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from agent_r1.learner.assembly import TrainingRun
from agent_r1.learner.checkpoints.run_checkpoint import LearnerState
from agent_r1.learner.outcome import FINISHED, FINISHED_WITH_LOSSES, Losses
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.runtime.files.dead_letters import save_letters

logger = logging.getLogger(__name__)

LAST_LOOK_TIMEOUT_S = 2.0
"""Longest wait for Redis before the summary is written, and after it."""


async def finish(run: TrainingRun) -> str:
    """End a run that has taken its last step; return its status."""
    await save_checkpoint(run)
    problems = _losses(run).problems(run.spec.learner.max_lost_share)
    status = FINISHED_WITH_LOSSES if problems else FINISHED
    why = [_explain_losses(run, problems), _explain_early_end(run)]
    await write_summary(run, status, " ".join(filter(None, why)))
    await run.stop_signal.close()  # the watch would restore what is deleted now
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_leave_redis(run), LAST_LOOK_TIMEOUT_S)
    return status


async def save_checkpoint(run: TrainingRun) -> None:
    """Write a checkpoint of this step, or its newest bookkeeping; a stop does not cut it."""
    run.spec.folder.finish_trajectories()
    run.summary.note_canary(run.publisher.canary_max_dlogp)
    state = run.summary.save_into(
        LearnerState(
            step=run.step,
            policy_version=run.policy_version,
            next_group_id=run.collector.next_group_id,
            outstanding_groups=run.collector.outstanding_ids(),
            prompt_fingerprint=run.prompt_fingerprint,
            canary_floor=run.publisher.canary_floor,
            counts=dict(run.collector.groups.counts),
            failures=dict(run.monitor.counts),
            failed_tasks=list(run.collector.failed_tasks),
        )
    )
    started = time.monotonic()
    save = asyncio.get_running_loop().run_in_executor(
        run.engine_thread, run.checkpoints.save, run.engine, state
    )
    path = await asyncio.shield(save)
    logger.info(
        "state saved step=%d path=%s duration_s=%.2f", run.step, path, time.monotonic() - started
    )


async def write_summary(run: TrainingRun, status: str, reason: str) -> None:
    """Write `summary.json`.

    Args:
        run: as far as it came.
        status: as in outcome.py.
        reason: why it ended so; "" for one that took all its steps without losses.
    """
    # Redis may be what ended the run; that too many failed was said when it happened.
    with contextlib.suppress(TimeoutError, RunFailedError):
        await asyncio.wait_for(run.collector.count_failures(), LAST_LOOK_TIMEOUT_S)
    run.summary.note_canary(run.publisher.canary_max_dlogp)
    spec, losses, counts = run.spec, _losses(run), run.collector.groups.counts
    spec.folder.write_summary(
        {
            "status": status,
            "reason": reason,
            "run_id": spec.run.id,
            "model": spec.model.path,
            "algorithm": spec.learner.algorithm,
            "seed": spec.run.seed,
            "steps": run.step,
            "total_steps": spec.total_steps,
            "starts": run.ledger.starts,
            "policy_version": run.policy_version,
            **run.summary.summary(run.evaluations.in_domain),
            "results": dict(counts),
            "failures": dict(run.monitor.counts.most_common()),
            "failed_samples": losses.failed,
            "lost_share": losses.share,
            "failed_tasks": list(run.collector.failed_tasks),
            "dead_letters": counts["dead_letters"],
            "conditions": spec.folder.conditions(),
        }
    )


def _losses(run: TrainingRun) -> Losses:
    return Losses.of(run.collector.groups.counts, run.summary.evaluations)


def _explain_losses(run: TrainingRun, problems: list[str]) -> str:
    if not problems:
        return ""
    allowed = f"learner.max_lost_share allows {run.spec.learner.max_lost_share:.0%}"
    return f"{'; '.join(problems)}; {allowed}. {run.monitor.explain()}"


def _explain_early_end(run: TrainingRun) -> str:
    if run.step >= run.spec.total_steps:
        return ""
    config = run.spec.evaluation
    return (
        f"training ended after {run.step} of {run.spec.total_steps} steps: {config.patience} "
        "evaluations in a row were no better than the best before them (evaluation.patience; "
        f"evaluation.score is {config.score!r})."
    )


async def _leave_redis(run: TrainingRun) -> None:
    """Leave nothing of a finished run but the announcements of services that stay.

    Dead letters move to the run folder. Without a rollout server the run is over for everyone.
    """
    save_letters(run.spec.folder.path, await run.broker.dead_letters())
    await run.broker.forget_training()
    if not await run.registry.rollout_servers():
        await run.broker.forget_run()
