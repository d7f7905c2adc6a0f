"""The training loop: rank 0 of the learner.

- consumes: batches of complete groups (collector.py);
- waits for: a batch; the engine; at least one rollout server that has the new weights;
- unblocked by: the last slot of a group becoming final; `/weights/load` answered;
- produces: weight versions (weights/publisher.py), checkpoints, metrics, evaluations, the summary.

Engine calls run in a thread of their own; collecting, issuing overdue samples again and
evaluations during training continue meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from agent_r1.learner.checkpoint import Checkpoints, LearnerState, Ledger
from agent_r1.learner.collector import RolloutCollector
from agent_r1.learner.engine.interface import PolicyEngine
from agent_r1.learner.engine.thread import EngineThread
from agent_r1.learner.evaluation import TrainingEvaluation
from agent_r1.learner.evaluation_schedule import Evaluations
from agent_r1.learner.groups import GroupBuffer, GroupBufferConfig
from agent_r1.learner.outcome import (
    FAILED,
    FINISHED,
    FINISHED_WITH_LOSSES,
    INTERRUPTED,
    Losses,
)
from agent_r1.learner.ownership import TakenOverError
from agent_r1.learner.reporting.step_report import StepLog, StepReport
from agent_r1.learner.reporting.summary import RunSummary
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.shutdown import StopRequested, StopSignal
from agent_r1.learner.stop_rules import FailureMonitor, RunFailedError
from agent_r1.learner.train_samples import build_samples, loss_spec
from agent_r1.learner.weights.canary import CanaryError, CanaryTokens
from agent_r1.learner.weights.publisher import WeightSync
from agent_r1_proto.dead_letters import save_letters
from agent_r1_proto.failures import Failure, FailureBoard
from agent_r1_proto.registry import Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import SamplingParameters

logger = logging.getLogger(__name__)

GROUP = "learner"
CONSUMER = "learner"
LAST_LOOK_TIMEOUT_S = 2.0
"""Longest wait for Redis before the summary is written, and after it."""


class Learner:
    """One start of a training run: restores, then drives `Training` to its end."""

    def __init__(self, plan: RunSpec, engine: PolicyEngine) -> None:
        self._plan = plan
        self._engine = engine
        self._halt: StopSignal | None = None

    def request_stop(self, why: str) -> None:
        """End the run in order: checkpoint, summary, return."""
        if self._halt is not None:
            self._halt.request_stop(why)

    async def run(self) -> str:
        """Train to the last step, or until a stop is requested.

        Returns:
            the run's status, as in outcome.py.

        Raises:
            RunFailedError: a stop rule was met; a checkpoint was written.
            CanaryError: a rollout server samples with other weights; a checkpoint was written.
            DiskFullError: the disk is full; the last checkpoint is kept.
            ValueError: the checkpoint is damaged, or Redis or the disk is too small.
        """
        plan = self._plan
        self._halt = halt = StopSignal()
        with EngineThread(self._engine) as engine:
            try:
                ledger = Ledger(plan.folder.path)
                if plan.resume:  # before the checkpoint is read: whoever wrote it writes no more
                    ledger.next_incarnation()
                checkpoints = Checkpoints(
                    plan.folder.path,
                    keep_last=plan.learner.keep_last,
                    keep_best=plan.learner.keep_best,
                    require_owner=ledger.require_newest,
                )
                state = await _restore(plan, engine, checkpoints)
                if not plan.resume:
                    ledger.next_incarnation()
                plan.folder.open_at(state.step, ledger.require_newest)
                async with await halt.unless_stopped(_connect(plan)) as broker:
                    plan.check_memory(await halt.unless_stopped(broker.memory_limit()))
                    training = Training(plan, engine, broker, halt, checkpoints, ledger, state)
                    return await training.run()
            except StopRequested:
                logger.info("stopped before training began")
                return INTERRUPTED
            finally:
                await halt.close()
                plan.folder.close()


async def _connect(plan: RunSpec) -> Broker:
    assert plan.redis.url is not None  # make_run_spec has checked it
    return await Broker.connect(
        plan.redis.url,
        plan.run.id,
        lease_s=plan.redis.lease_s,
        max_processing_failures=plan.redis.max_processing_failures,
    )


async def _restore(plan: RunSpec, engine: EngineThread, checkpoints: Checkpoints) -> LearnerState:
    """Load the newest checkpoint of a resumed run into the engine; an empty state else."""
    fingerprint = plan.prompts.fingerprint()
    state = await engine.call(checkpoints.load) if plan.resume else None
    if state is not None and state.prompt_fingerprint != fingerprint:
        raise ValueError(
            "data.train, data.shuffle or run.seed changed since the checkpoint of step "
            f"{state.step}: the prompt order would skip and repeat prompts; restore them, or "
            "start a new run"
        )
    checkpoints.check_disk(await engine.call(lambda e: e.checkpoint_bytes()))
    return state or LearnerState(prompt_fingerprint=fingerprint)


class Training:
    """The loop itself, with everything it needs connected."""

    def __init__(
        self,
        plan: RunSpec,
        engine: EngineThread,
        broker: Broker,
        halt: StopSignal,
        checkpoints: Checkpoints,
        ledger: Ledger,
        state: LearnerState,
    ) -> None:
        config = plan.learner
        self.plan = plan
        self.step = state.step
        self._config = config
        self._engine = engine
        self._broker = broker
        self._halt = halt
        self._checkpoints = checkpoints
        self._fingerprint = state.prompt_fingerprint
        self._incarnation = ledger.last_incarnation
        self._ledger = ledger
        self._registry = Registry(broker)
        self._records = RunSummary(state)
        self._canary_checked = False
        self._monitor = FailureMonitor(
            max_failed_share=config.max_failed_share,
            samples_per_batch=plan.samples_per_batch,
            stall_timeout_s=config.stall_timeout_s,
            log_dir=plan.folder.logs,
            show=self._show_failure,
        )
        self._monitor.counts.update(state.failures)
        self._work = self._make_work(state)
        self._sync = WeightSync(
            engine=engine,
            registry=self._registry,
            ledger=ledger,
            weights_dir=plan.weights_dir,
            run_id=plan.run.id,
            dtype=plan.model.dtype,
            config=config,
        )
        self._sync.canary_floor = state.canary_floor
        self._log = StepLog(
            folder=plan.folder,
            records=self._records,
            work=self._work,
            monitor=self._monitor,
            total_steps=plan.total_steps,
            trajectories_per_step=config.trajectories_per_step,
            max_staleness=config.max_staleness,
        )
        self._evaluations = Evaluations(
            runner=TrainingEvaluation(
                sets=plan.eval_sets,
                trained_sets=plan.prompts.set_names(),
                config=plan.evaluation,
                learner=config,
                broker=broker,
                run_id=plan.run.id,
                incarnation=self._incarnation,
                monitor=self._monitor,
                read_board=self._work.read_board,
            ),
            folder=plan.folder,
            records=self._records,
            checkpoints=checkpoints,
            shown_per_set=config.trajectories_per_step,
        )

    def _make_work(self, state: LearnerState) -> RolloutCollector:
        config = self._config
        rules = GroupBufferConfig(
            run_id=self.plan.run.id,
            incarnation=self._incarnation,
            group_size=config.group_size,
            groups_per_batch=config.groups_per_batch,
            max_staleness=config.max_staleness,
            sample_timeout_s=config.sample_timeout_s,
            max_attempts=config.max_attempts,
            greedy_baseline=config.has_greedy_baseline,
            drop_equal_groups=config.drop_equal_groups,
        )
        book = GroupBuffer(rules, SamplingParameters(temperature=config.temperature))
        book.counts.update(state.counts)
        return RolloutCollector(
            broker=self._broker,
            registry=self._registry,
            book=book,
            prompts=self.plan.prompts,
            monitor=self._monitor,
            board=FailureBoard(self._broker),
            next_group_id=state.next_group_id,
            reopen=state.outstanding_groups,
            failed_tasks=state.failed_tasks,
            groups_to_train=max(0, self.plan.total_steps - state.step) * config.groups_per_batch,
        )

    def _show_failure(self, failure: Failure) -> None:
        self.plan.folder.write_failure(self.step, failure)

    async def run(self) -> str:
        """Train to the last step, or until a stop; see `Learner.run`."""
        consumer = self._broker.consumer(
            self._broker.keys.scored, ScoredTrajectory, group=GROUP, consumer=CONSUMER
        )
        halt = self._halt
        async with consumer, self._sync:
            try:
                await halt.unless_stopped(self._registry.set_incarnation(self._incarnation))
                await halt.unless_stopped(self._work.start())
                await self._publish_first_weights()
                halt.spawn(self._work.collect_forever(consumer), "collect")
                watch = self._work.watch_forever(lambda: self._sync.newest, self._sync.announce)
                halt.spawn(watch, "watch")
                await self._train()
                return await self._end()
            except StopRequested as exc:
                await self._save()
                await self._write_summary(INTERRUPTED, str(exc))
                return INTERRUPTED
            except TakenOverError:
                raise
            except (RunFailedError, CanaryError) as exc:
                await self._save()
                await self._write_summary(FAILED, str(exc))
                raise
            except Exception as exc:
                self._ledger.require_newest()  # then that is the reason, whatever went wrong
                with contextlib.suppress(Exception):  # the first error is the one to report
                    await self._write_summary(FAILED, str(exc))
                raise
            finally:
                await halt.close()

    async def _publish_first_weights(self) -> None:
        if self.plan.resume or self._ledger.last_policy_version > 0:
            # Servers may hold the weights of a step that is no longer part of this run, or of
            # another run on the same services.
            report = await self._halt.unless_stopped(self._sync.push())
            self._work.book.advance(report.policy_version)
        else:
            await self._halt.unless_stopped(
                self._sync.announce()
            )  # version 0: the configured model

    async def _train(self) -> None:
        await self._halt.unless_stopped(self._work.fill())
        await self._halt.unless_stopped(self._sync.wait_for_server())
        config = self.plan.evaluation
        if config.before and self.step == 0 and not self._records.has_evaluation("before"):
            await self._halt.unless_stopped(self._evaluations.run("before", 0, self._version))
        while self.step < self.plan.total_steps:
            await self._one_step()
            await self._after_step()

    @property
    def _version(self) -> int:
        return self._sync.newest.policy_version

    async def _one_step(self) -> None:
        started = time.monotonic()
        groups = await self._halt.unless_stopped(self._work.next_batch())
        rollout_s = time.monotonic() - started
        learn_started = time.monotonic()
        newest = self._version
        prepared = await self._engine.call(
            lambda engine: build_samples(groups, self._config, engine)
        )
        canary_tokens = CanaryTokens.of(
            groups[0].survivors[0].trajectory, self._config.canary_tokens
        )
        await self._check_first_canary(canary_tokens)
        spec = loss_spec(self._config, self.step)
        learned = await self._engine.call(lambda engine: engine.train_batch(prepared.samples, spec))
        # Nothing awaits from here to the push: a stop finds the whole step done, or not begun.
        self.step += 1
        self._work.mark_trained(groups)
        report = StepReport(
            step=self.step,
            groups=groups,
            advantages=prepared.advantages,
            newest_version=newest,
            engine=learned | prepared.metrics,
            rollout_s=rollout_s,
            learn_s=time.monotonic() - learn_started,
            evaluation=self._evaluations.take_metrics(),
        )
        self._records.add_batch(len(prepared.samples), report.sampled_tokens, report.max_staleness)
        try:
            await self._halt.unless_stopped(self._work.require_newest())
            report.push = await self._halt.unless_stopped(self._sync.push(canary_tokens))
            await self._halt.unless_stopped(self._work.advance(self._version))
        finally:
            report.step_s = time.monotonic() - started
            self._log.write(report)

    async def _check_first_canary(self, tokens: CanaryTokens | None) -> None:
        """Compare once before the first step of a start: in bf16, version 0 is the noise floor."""
        if not self._canary_checked and tokens is not None:
            self._canary_checked = True
            await self._halt.unless_stopped(self._sync.check_canary(tokens))

    async def _after_step(self) -> None:
        step, every = self.step, self._config.checkpoint_every
        last = step >= self.plan.total_steps
        eval_every = self.plan.evaluation.every
        evaluates = eval_every > 0 and step % eval_every == 0 and not last
        # keep_best chooses among evaluated steps, so those are checkpointed too.
        due = every > 0 and (step % every == 0 or (evaluates and self._config.keep_best > 0))
        if due or last:
            await self._save()
        if evaluates:
            self._evaluations.start(self._halt, step, self._version)

    async def _end(self) -> str:
        await self._halt.unless_stopped(self._evaluations.wait())
        if self.plan.evaluation.after:
            await self._halt.unless_stopped(
                self._evaluations.run("after", self.step, self._version)
            )
        await self._save()
        problems = self._losses().problems(self._config.max_lost_share)
        status = FINISHED_WITH_LOSSES if problems else FINISHED
        await self._write_summary(status, self._explain_losses(problems))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._leave_redis(), LAST_LOOK_TIMEOUT_S)
        return status

    async def _leave_redis(self) -> None:
        """Leave nothing of a finished run but what services that stay still read.

        Dead letters move to the run folder. Without a rollout server the run is over for everyone.
        """
        save_letters(self.plan.folder.path, await self._broker.dead_letters())
        await self._broker.forget_results()
        if not await self._registry.rollout_servers():
            await self._broker.forget_run()

    def _losses(self) -> Losses:
        return Losses.of(self._work.book.counts, self._records.evaluations)

    def _explain_losses(self, problems: list[str]) -> str:
        if not problems:
            return ""
        allowed = f"learner.max_lost_share allows {self._config.max_lost_share:.0%}"
        return f"{'; '.join(problems)}; {allowed}. {self._monitor.explain()}"

    async def _save(self) -> None:
        """Write a checkpoint of this step, or its newest bookkeeping; a stop does not cut it."""
        self._records.note_canary(self._sync.canary_max_dlogp)
        state = self._records.save_into(
            LearnerState(
                step=self.step,
                policy_version=self._version,
                next_group_id=self._work.next_group_id,
                outstanding_groups=self._work.outstanding_ids(),
                prompt_fingerprint=self._fingerprint,
                canary_floor=self._sync.canary_floor,
                counts=dict(self._work.book.counts),
                failures=dict(self._monitor.counts),
                failed_tasks=list(self._work.failed_tasks),
            )
        )
        started = time.monotonic()
        path = await asyncio.shield(
            self._engine.call(lambda engine: self._checkpoints.save(engine, state))
        )
        logger.info(
            "state saved step=%d path=%s duration_s=%.2f",
            self.step,
            path,
            time.monotonic() - started,
        )

    async def _write_summary(self, status: str, reason: str) -> None:
        # Redis may be what ended the run; that too many failed was said when it happened.
        with contextlib.suppress(TimeoutError, RunFailedError):
            await asyncio.wait_for(self._work.count_failures(), LAST_LOOK_TIMEOUT_S)
        self._records.note_canary(self._sync.canary_max_dlogp)
        losses = self._losses()
        summary = {
            "status": status,
            "reason": reason,
            "run_id": self.plan.run.id,
            "model": self.plan.model.path,
            "algorithm": self._config.algorithm,
            "seed": self.plan.run.seed,
            "steps": self.step,
            "total_steps": self.plan.total_steps,
            "starts": self._ledger.starts,
            "policy_version": self._version,
            **self._records.summary(self._evaluations.in_domain),
            "results": dict(self._work.book.counts),
            "failures": dict(self._monitor.counts.most_common()),
            "failed_samples": losses.failed,
            "lost_share": losses.share,
            "failed_tasks": list(self._work.failed_tasks),
            "dead_letters": self._work.book.counts["dead_letters"],
        }
        self.plan.folder.write_summary(summary)
