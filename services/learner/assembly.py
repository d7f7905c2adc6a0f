"""Parts of one start of a training run, put together: RunSpec, checkpoint --> `TrainingRun`.

train.py goes through the steps with it, run_end.py writes down how the run ended.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints, LearnerState, check_prompts
from agent_r1.learner.collector import RolloutCollector
from agent_r1.learner.engine.interface import PolicyEngine
from agent_r1.learner.evaluation import Evaluations
from agent_r1.learner.groups import GroupBuffer
from agent_r1.learner.learning_watch import LearningWatch
from agent_r1.learner.reporting.loggers import open_loggers
from agent_r1.learner.reporting.loggers.base import RunFacts
from agent_r1.learner.reporting.step_report import StepReporter
from agent_r1.learner.reporting.summary import RunSummary
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.server import LearnerServer
from agent_r1.learner.shutdown import StopSignal
from agent_r1.learner.stop_rules import FailureMonitor
from agent_r1.learner.weights.delivery import PushReport
from agent_r1.learner.weights.publisher import WeightPublisher, prepare_weights_dir
from agent_r1.runtime.files.conditions import Condition
from agent_r1_proto.connection import LEARNER_GROUP
from agent_r1_proto.failures import Failure, FailureBoard
from agent_r1_proto.registry import KnownNumbers, Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.stream_consumer import StreamConsumer
from agent_r1_proto.streams import Broker

logger = logging.getLogger(__name__)

NAME = "learner"
"""Name of the one consumer of LEARNER_GROUP."""


@dataclass(frozen=True)
class OpenedFolder:
    """A run folder that this start writes to, and where the run stands in it."""

    ledger: Ledger
    checkpoints: Checkpoints
    state: LearnerState


@dataclass
class TrainingRun:
    """One start of a run: its step, and the parts that the loop works with, connected."""

    spec: RunSpec
    step: int
    """Batches trained."""
    prompt_fingerprint: str
    stop_signal: StopSignal
    engine: PolicyEngine
    engine_thread: Executor
    """One thread, in which every call of the engine runs: it blocks, and is not thread-safe."""
    broker: Broker
    registry: Registry
    ledger: Ledger
    checkpoints: Checkpoints
    monitor: FailureMonitor
    consumer: StreamConsumer[ScoredTrajectory]
    collector: RolloutCollector
    publisher: WeightPublisher
    evaluations: Evaluations
    reporter: StepReporter
    summary: RunSummary
    delivery: asyncio.Task[PushReport] | None = None
    """Brings the newest weights to the servers while the next batch is prepared."""
    canary_checked: bool = False
    """The canary was compared once since this start."""

    @property
    def policy_version(self) -> int:
        """Newest published version."""
        return self.publisher.newest.policy_version

    def note_condition(self, condition: Condition) -> None:
        """Write down what hinders the run, when it begins and when it is over."""
        logger.warning("%s", condition.text())
        self.spec.folder.write_condition(condition)

    def show_failure(self, failure: Failure) -> None:
        """Write the first failure of a kind into the run folder, at once."""
        self.spec.folder.write_failure(self.step, failure)


async def open_folder(
    spec: RunSpec, engine: PolicyEngine, engine_thread: Executor, known: KnownNumbers
) -> OpenedFolder:
    """Take the run folder over, and load the newest checkpoint of a resumed run into the engine.

    Numbers go on from those that the services know, which may be newer than the folder.

    Raises:
        ValueError: the checkpoint is damaged or of other prompts, or the disk is too small.
        StoreError: the run store cannot be used.
    """
    ledger = Ledger(spec.folder.path, spec.store)
    loop = asyncio.get_running_loop()
    if spec.resume:  # before the checkpoint is read: whoever wrote it writes no more
        await loop.run_in_executor(engine_thread, ledger.next_incarnation, known.incarnation)
    checkpoints = Checkpoints(
        spec.folder.path,
        keep_last=spec.learner.keep_last,
        keep_best=spec.learner.keep_best,
        require_owner=ledger.require_newest,
        store=spec.store,
    )
    state = await loop.run_in_executor(engine_thread, _restore, spec, engine, checkpoints)
    if not spec.resume:
        await loop.run_in_executor(engine_thread, ledger.next_incarnation, known.incarnation)
    ledger.go_on_after(incarnation=0, policy_version=known.policy_version)
    facts = RunFacts(spec.run.id, spec.folder.path, spec.resolved_config)
    opening = partial(open_loggers, spec.learner.loggers, facts, state.step)
    spec.folder.open_at(state.step, ledger.require_newest, opening)
    return OpenedFolder(ledger, checkpoints, state)


def _restore(spec: RunSpec, engine: PolicyEngine, checkpoints: Checkpoints) -> LearnerState:
    """Load the newest checkpoint of a resumed run into the engine; an empty state else."""
    fingerprint = spec.prompts.fingerprint()
    state = checkpoints.load(engine) if spec.resume else None
    if state is not None:
        check_prompts(state, fingerprint)
    checkpoints.check_disk(engine.checkpoint_bytes())
    prepare_weights_dir(spec, engine.snapshot_bytes())
    return state or LearnerState(prompt_fingerprint=fingerprint)


async def connect(spec: RunSpec) -> Broker:
    """Connect to the run's Redis."""
    return await Broker.connect(
        spec.redis.connection_url(),
        spec.run.id,
        lease_s=spec.redis.lease_s,
        max_processing_failures=spec.redis.max_processing_failures,
    )


def assemble(
    spec: RunSpec,
    opened: OpenedFolder,
    *,
    engine: PolicyEngine,
    engine_thread: Executor,
    broker: Broker,
    server: LearnerServer,
    stop_signal: StopSignal,
) -> TrainingRun:
    """Build the parts of one start from where the run stands; nothing is sent or written yet."""
    ledger, checkpoints, state = opened.ledger, opened.checkpoints, opened.state
    registry, summary, monitor = Registry(broker), RunSummary.of(state), _monitor(spec, state)
    collector = _collector(spec, opened, broker, registry, monitor)
    run = TrainingRun(
        spec=spec,
        step=state.step,
        prompt_fingerprint=state.prompt_fingerprint,
        stop_signal=stop_signal,
        engine=engine,
        engine_thread=engine_thread,
        broker=broker,
        registry=registry,
        ledger=ledger,
        checkpoints=checkpoints,
        monitor=monitor,
        consumer=broker.consumer(
            broker.keys.scored, ScoredTrajectory, group=LEARNER_GROUP, consumer=NAME
        ),
        collector=collector,
        publisher=WeightPublisher(
            spec,
            engine=engine,
            engine_thread=engine_thread,
            registry=registry,
            ledger=ledger,
            server=server,
            canary_floor=state.canary_floor,
        ),
        evaluations=Evaluations(
            spec,
            broker=broker,
            collector=collector,
            monitor=monitor,
            summary=summary,
            checkpoints=checkpoints,
            engine_thread=engine_thread,
        ),
        reporter=StepReporter(spec, summary=summary, collector=collector, monitor=monitor),
        summary=summary,
    )
    monitor.show = run.show_failure
    monitor.note_condition = run.note_condition
    return run


def _monitor(spec: RunSpec, state: LearnerState) -> FailureMonitor:
    monitor = FailureMonitor(
        max_failed_share=spec.learner.max_failed_share,
        samples_per_batch=spec.samples_per_batch,
        stall_timeout_s=spec.learner.stall_timeout_s,
        log_dir=spec.folder.logs,
        learning=LearningWatch(
            groups_per_batch=spec.learner.groups_per_batch,
            compares_groups=spec.learner.estimator.compares_group,
        ),
    )
    monitor.counts.update(state.failures)
    return monitor


def _collector(
    spec: RunSpec,
    opened: OpenedFolder,
    broker: Broker,
    registry: Registry,
    monitor: FailureMonitor,
) -> RolloutCollector:
    config, state = spec.learner, opened.state
    incarnation = opened.ledger.last_incarnation
    group_buffer = GroupBuffer(config, run_id=spec.run.id, incarnation=incarnation)
    group_buffer.counts.update(state.counts)
    group_buffer.on_complete = monitor.saw_group
    return RolloutCollector(
        broker=broker,
        registry=registry,
        group_buffer=group_buffer,
        prompts=spec.prompts,
        monitor=monitor,
        board=FailureBoard(broker),
        next_group_id=state.next_group_id,
        reopen=state.outstanding_groups,
        failed_tasks=state.failed_tasks,
        groups_to_train=max(0, spec.total_steps - state.step) * config.groups_per_batch,
    )
