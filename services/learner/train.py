"""The training loop: rank 0 of the learner.

- consumes: batches of complete groups (collector.py);
- waits for: a batch; the engine; at least one rollout server that has the new weights;
- unblocked by: the last slot of a group becoming final; `/weights/load` answered;
- produces: weight versions (weights/publisher.py), checkpoints, metrics, evaluations, the summary.

The engine blocks, so its calls run in a thread of their own, one at a time; collecting, issuing
overdue samples again and evaluations continue meanwhile. assembly.py builds the parts, run_end.py
writes what a run leaves behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

from agent_r1.learner.assembly import TrainingRun, assemble, connect, open_folder
from agent_r1.learner.checkpoints.ownership import TakenOverError
from agent_r1.learner.engine.interface import PolicyEngine, TrainSample
from agent_r1.learner.groups import Group
from agent_r1.learner.heartbeat import Heartbeat, refuse_a_second
from agent_r1.learner.outcome import FAILED, INTERRUPTED
from agent_r1.learner.reporting.prometheus import learner_page, scrape_targets
from agent_r1.learner.reporting.step_report import StepReport
from agent_r1.learner.run_end import finish, save_checkpoint, write_summary
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.server import LearnerServer, serve_learner
from agent_r1.learner.shutdown import StopRequested, StopSignal, cancel_and_wait
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.learner.train_samples import build_samples, loss_spec
from agent_r1.learner.weights.canary import CanaryError, canary_samples
from agent_r1.learner.weights.delivery import PushReport
from agent_r1.learner.weights.run_bundle import RunOffer
from agent_r1.runs.remote import add_store_routes
from agent_r1.runtime.http.token import find_token
from agent_r1.runtime.tracing import record_span
from agent_r1_proto.registry import Registry

logger = logging.getLogger(__name__)

ENGINE_WATCH_S = 0.5


async def train(run: TrainingRun) -> str:
    """Train to the last step and evaluate; return the run's status."""
    unless_stopped = run.stop_signal.unless_stopped
    offering = await _start_collecting(run)
    await unless_stopped(run.publisher.wait_for_server())
    await _evaluate_before(run)
    if run.step < run.spec.total_steps:
        run.evaluations.forget_after()
    try:
        while run.step < run.spec.total_steps and not run.evaluations.no_longer_improve():
            await train_step(run)
            await _checkpoint_and_evaluate(run)
        await unless_stopped(_delivered(run))
    finally:
        if run.delivery is not None:
            await cancel_and_wait({run.delivery})
    await unless_stopped(run.evaluations.wait())
    if run.spec.evaluation.after:
        await unless_stopped(run.evaluations.run("after", run.step, run.policy_version))
    await cancel_and_wait({offering})
    return await finish(run)


async def train_step(run: TrainingRun) -> None:
    """Take a batch, train on it, publish the new weights, report.

    Where older weights may be trained on (max_staleness > 0), the new ones are written and loaded
    while the next batch is trained; only their copy in memory is waited for.
    """
    config, unless_stopped = run.spec.learner, run.stop_signal.unless_stopped
    started = time.monotonic()
    groups = await unless_stopped(run.collector.next_batch())
    rollout_s = time.monotonic() - started
    learn_started = time.monotonic()
    newest_version = run.collector.groups.newest_version
    loop = asyncio.get_running_loop()
    batch = await loop.run_in_executor(run.engine_thread, build_samples, groups, config, run.engine)
    canary = _canary_samples(run, groups)
    if canary and not run.canary_checked:
        # Before the first step of a start: in bf16, version 0 is the noise floor.
        run.canary_checked = True
        await unless_stopped(run.publisher.check_canary(canary))
    loss = loss_spec(config, run.step)
    metrics = await loop.run_in_executor(
        run.engine_thread, run.engine.train_batch, batch.samples, loss
    )
    _trace_learning(run.step + 1, groups, time.monotonic() - learn_started)
    # Nothing awaits from here to the push: a stop finds the whole step done, or not begun.
    run.step += 1
    run.collector.mark_trained(groups)
    report = StepReport(
        step=run.step,
        groups=groups,
        samples=batch.samples,
        advantages=batch.advantages,
        entropies=batch.entropies,
        newest_version=newest_version,
        policy_version=newest_version,
        engine=metrics | batch.metrics,
        rollout_s=rollout_s,
        learn_s=time.monotonic() - learn_started,
        evaluation=run.evaluations.take_metrics(),
    )
    run.summary.add_batch(len(batch.samples), report.sampled_tokens, report.max_staleness)
    trained = time.monotonic()
    delivery: asyncio.Task[PushReport] | None = None
    try:
        await unless_stopped(run.collector.require_newest())
        await unless_stopped(_delivered(run))
        push = await unless_stopped(run.publisher.take(canary))
        report.policy_version = push.policy_version
        bringing = _push(run, push, run.collector.groups.advance(push.policy_version))
        if config.max_staleness > 0:
            delivery = run.stop_signal.spawn(bringing, "deliver")
            run.delivery = delivery
        else:
            report.push = await unless_stopped(bringing)
        push.wait_s = time.monotonic() - trained
    finally:
        report.step_s = time.monotonic() - started
        _write_down(run, report, delivery)


async def _push(run: TrainingRun, push: PushReport, credits: int) -> PushReport:
    """Bring weights that were taken to the servers, and ask for more samples.

    With `max_staleness`, samples are asked for as soon as servers can know of the weights, and no
    sooner: what is begun before is of the version before.
    """
    await run.publisher.publish(push)
    if run.spec.learner.max_staleness > 0:
        await run.collector.ask_for_more(credits)
        return await run.publisher.deliver(push)
    await run.publisher.deliver(push)
    await run.collector.ask_for_more(credits)
    return push


def _canary_samples(run: TrainingRun, groups: Sequence[Group]) -> list[TrainSample]:
    """Return what the canary looks at of this batch; nothing without a canary."""
    config = run.spec.learner
    if config.canary_tokens == 0:
        return []
    trajectories = [scored.trajectory for group in groups for scored in group.survivors]
    return canary_samples(trajectories, config.canary_trajectories, run.spec.model.max_context)


def _trace_learning(step: int, groups: Sequence[Group], learn_s: float) -> None:
    """Add the step to the trace of each trajectory that was trained in it."""
    ended_at = time.time()
    for scored in (scored for group in groups for scored in group.survivors):
        parent = scored.trajectory.rollout.traceparent
        record_span("learn", parent, ended_at - learn_s, ended_at, step=step)


async def _delivered(run: TrainingRun) -> None:
    """Wait until a server has the weights of the step before."""
    if run.delivery is not None:
        await run.delivery


def _write_down(
    run: TrainingRun, report: StepReport, delivery: asyncio.Task[PushReport] | None
) -> None:
    """Write a step down once its weights are delivered, and after the step before."""

    def write(_: object = None) -> None:
        if delivery is not None and not delivery.cancelled() and delivery.exception() is None:
            report.push = delivery.result()
        run.reporter.write(report)

    if run.delivery is None:
        write()
    else:  # its own, or that of the step before
        run.delivery.add_done_callback(write)


async def _start_collecting(run: TrainingRun) -> asyncio.Task[None]:
    """Announce this start and its weights, and ask for the first groups.

    Returns:
        The task that says how other hosts join, once it has read the files they need.
    """
    stop_signal, collector, publisher = run.stop_signal, run.collector, run.publisher
    await stop_signal.unless_stopped(run.registry.set_incarnation(run.ledger.last_incarnation))
    await stop_signal.unless_stopped(collector.start())
    # First, because a push waits for servers, and those may be on other hosts and have to join.
    offer = RunOffer(run.spec, run.registry, publisher.transport)
    offering = stop_signal.spawn(offer.prepare(), "offer")
    if run.spec.resume or run.ledger.last_policy_version > 0:
        # Servers may hold the weights of a step that is no longer part of this run, or of
        # another run on the same services.
        report = await stop_signal.unless_stopped(publisher.push())
        collector.groups.advance(report.policy_version)
    else:  # version 0: the configured model
        await stop_signal.unless_stopped(publisher.announce())
    stop_signal.spawn(collector.collect_forever(run.consumer), "collect")

    async def announce() -> None:
        await publisher.announce()
        await offer.announce()

    watch = collector.watch_forever(lambda: publisher.newest, announce)
    stop_signal.spawn(watch, "watch")
    stop_signal.spawn(_watch_engine(run.engine), "engine")
    await stop_signal.unless_stopped(collector.fill())
    return offering


async def _watch_engine(engine: PolicyEngine) -> None:
    """Let the end of a rank end the run, also while it waits for rollouts."""
    while True:
        engine.check()
        await asyncio.sleep(ENGINE_WATCH_S)


async def _evaluate_before(run: TrainingRun) -> None:
    wanted = run.spec.evaluation.before and "before" not in run.summary.evaluations
    if wanted and run.step == 0:
        evaluation = run.evaluations.run("before", 0, run.policy_version)
        await run.stop_signal.unless_stopped(evaluation)


async def _checkpoint_and_evaluate(run: TrainingRun) -> None:
    """Write a checkpoint and start an evaluation where this step is due for them."""
    config, step = run.spec.learner, run.step
    last = step >= run.spec.total_steps
    every, eval_every = config.checkpoint_every, run.spec.evaluation.every
    evaluates = eval_every > 0 and step % eval_every == 0 and not last
    # keep_best chooses among evaluated steps, so those are checkpointed too.
    due = every > 0 and (step % every == 0 or (evaluates and config.keep_best > 0))
    if due or last or evaluates:  # then metrics have what the checkpoint has, and servers too
        await run.stop_signal.unless_stopped(_delivered(run))
    if due or last:
        await save_checkpoint(run)
    if evaluates:
        run.evaluations.start(run.stop_signal, step, run.policy_version)


class Learner:
    """One start of a training run: opens what it needs, trains, and ends in order."""

    def __init__(self, spec: RunSpec, engine: PolicyEngine) -> None:
        self._spec = spec
        self._engine = engine
        self._stop_signal: StopSignal | None = None

    def request_stop(self, why: str) -> None:
        """End the run in order: checkpoint, summary, return."""
        if self._stop_signal is not None:
            self._stop_signal.request_stop(why)

    async def run(self, on_up: Callable[[str], None] = lambda url: None) -> str:
        """Train to the last step, or until a stop is requested.

        Args:
            on_up: called with the base URL of the learner's HTTP server once it answers.

        Returns:
            the run's status, as in outcome.py.

        Raises:
            RunFailedError: a stop rule was met; a checkpoint was written.
            CanaryError: a rollout server samples with other weights; a checkpoint was written.
            DiskFullError: the disk is full; the last checkpoint is kept.
            ValueError: the checkpoint is damaged, Redis or the disk is too small, or the address
                of the HTTP server cannot be used.
        """
        spec = self._spec
        self._stop_signal = stop_signal = StopSignal()
        try:
            async with serve_learner(spec.learner.server, find_token(spec.run)) as server:
                followers = add_store_routes(server.app, spec.folder.path)
                on_up(server.url)
                try:
                    return await self._train(stop_signal, server)
                finally:
                    await followers.have_all()
        except StopRequested:
            logger.info("stopped before training began")
            return INTERRUPTED
        finally:
            await stop_signal.close()
            spec.folder.close()

    async def _train(self, stop_signal: StopSignal, server: LearnerServer) -> str:
        spec, unless_stopped = self._spec, stop_signal.unless_stopped
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as thread:
            async with await unless_stopped(connect(spec)) as broker, AsyncExitStack() as stack:
                registry = Registry(broker)
                if not spec.take_over:
                    await unless_stopped(refuse_a_second(registry, spec.run.id, spec.folder.path))
                heartbeat = Heartbeat(registry, spec.folder.path, spec.redis.lease_s)
                await unless_stopped(heartbeat.beat())
                stack.push_async_callback(heartbeat.withdraw)
                stop_signal.spawn(heartbeat.beat_forever(), "heartbeat")
                known = await unless_stopped(registry.known_numbers())
                opened = await open_folder(spec, self._engine, thread, known)
                spec.check_memory((await unless_stopped(broker.memory())).limit)
                run = assemble(
                    spec,
                    opened,
                    engine=self._engine,
                    engine_thread=thread,
                    broker=broker,
                    server=server,
                    stop_signal=stop_signal,
                )
                learner_page(run).add_route(server.app)
                server.serve_targets(partial(scrape_targets, run, server.url))
                return await _train_to_an_end(run)


async def _train_to_an_end(run: TrainingRun) -> str:
    """Train; whatever ends the run early is written down before it is raised."""
    async with run.consumer, run.publisher:
        try:
            return await train(run)
        except StopRequested as exc:
            await save_checkpoint(run)
            await write_summary(run, INTERRUPTED, str(exc))
            return INTERRUPTED
        except TakenOverError:
            raise
        except (RunFailedError, CanaryError) as exc:
            await save_checkpoint(run)
            await write_summary(run, FAILED, str(exc))
            raise
        except Exception as exc:
            run.ledger.require_newest()  # then that is the reason, whatever went wrong
            with contextlib.suppress(Exception):  # the first error is the one to report
                await write_summary(run, FAILED, str(exc))
            raise
        finally:
            await run.stop_signal.close()
