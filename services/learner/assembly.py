"""What one start of a training run works with, put together: RunSpec, checkpoint --> `TrainingRun`.

train.py goes through the steps with it, run_end.py writes down how the run ended.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_r1.learner.checkpoint import Checkpoints, LearnerState, Ledger
from agent_r1.learner.collector import RolloutCollector
from agent_r1.learner.engine.thread import EngineThread
from agent_r1.learner.evaluation import TrainingEvaluation
from agent_r1.learner.evaluation_schedule import Evaluations
from agent_r1.learner.groups import GroupBuffer, GroupBufferConfig
from agent_r1.learner.reporting.step_report import StepReporter
from agent_r1.learner.reporting.summary import RunSummary
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.shutdown import StopSignal
from agent_r1.learner.stop_rules import FailureMonitor
from agent_r1.learner.weights.publisher import WeightPublisher
from agent_r1_proto.failures import Failure, FailureBoard
from agent_r1_proto.registry import Registry
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker, StreamConsumer
from agent_r1_proto.tasks import SamplingParameters

GROUP = "learner"
CONSUMER = "learner"


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
    engine: EngineThread
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
    canary_checked: bool = False
    """The canary was compared once since this start."""

    @property
    def policy_version(self) -> int:
        """Newest published version."""
        return self.publisher.newest.policy_version


async def open_folder(spec: RunSpec, engine: EngineThread) -> OpenedFolder:
    """Take the run folder over, and load the newest checkpoint of a resumed run into the engine.

    Raises:
        ValueError: the checkpoint is damaged or of other prompts, or the disk is too small.
    """
    ledger = Ledger(spec.folder.path)
    if spec.resume:  # before the checkpoint is read: whoever wrote it writes no more
        ledger.next_incarnation()
    checkpoints = Checkpoints(
        spec.folder.path,
        keep_last=spec.learner.keep_last,
        keep_best=spec.learner.keep_best,
        require_owner=ledger.require_newest,
    )
    state = await _restore(spec, engine, checkpoints)
    if not spec.resume:
        ledger.next_incarnation()
    spec.folder.open_at(state.step, ledger.require_newest)
    return OpenedFolder(ledger, checkpoints, state)


async def _restore(spec: RunSpec, engine: EngineThread, checkpoints: Checkpoints) -> LearnerState:
    """Load the newest checkpoint of a resumed run into the engine; an empty state else."""
    fingerprint = spec.prompts.fingerprint()
    state = await engine.call(checkpoints.load) if spec.resume else None
    if state is not None and state.prompt_fingerprint != fingerprint:
        raise ValueError(
            "data.train, data.shuffle or run.seed changed since the checkpoint of step "
            f"{state.step}: the prompt order would skip and repeat prompts; restore them, or "
            "start a new run"
        )
    checkpoints.check_disk(await engine.call(lambda e: e.checkpoint_bytes()))
    return state or LearnerState(prompt_fingerprint=fingerprint)


async def connect(spec: RunSpec) -> Broker:
    """Connect to the run's Redis."""
    assert spec.redis.url is not None  # make_run_spec has checked it
    return await Broker.connect(
        spec.redis.url,
        spec.run.id,
        lease_s=spec.redis.lease_s,
        max_processing_failures=spec.redis.max_processing_failures,
    )


def assemble(
    spec: RunSpec,
    opened: OpenedFolder,
    *,
    engine: EngineThread,
    broker: Broker,
    stop_signal: StopSignal,
) -> TrainingRun:
    """Build the parts of one start from where the run stands; nothing is sent or written yet."""
    config, ledger, state = spec.learner, opened.ledger, opened.state
    registry = Registry(broker)
    summary = RunSummary(state)
    monitor = _monitor(spec, state)
    collector = _collector(spec, opened, broker, registry, monitor)
    publisher = WeightPublisher(
        engine=engine,
        registry=registry,
        ledger=ledger,
        weights_dir=spec.weights_dir,
        run_id=spec.run.id,
        dtype=spec.model.dtype,
        config=config,
    )
    publisher.canary_floor = state.canary_floor
    evaluations = Evaluations(
        runner=TrainingEvaluation(
            sets=spec.eval_sets,
            trained_sets=spec.prompts.set_names(),
            config=spec.evaluation,
            learner=config,
            broker=broker,
            run_id=spec.run.id,
            incarnation=ledger.last_incarnation,
            monitor=monitor,
            read_board=collector.read_board,
        ),
        folder=spec.folder,
        summary=summary,
        checkpoints=opened.checkpoints,
        shown_per_set=config.trajectories_per_step,
    )
    reporter = StepReporter(
        folder=spec.folder,
        summary=summary,
        collector=collector,
        monitor=monitor,
        total_steps=spec.total_steps,
        trajectories_per_step=config.trajectories_per_step,
        max_staleness=config.max_staleness,
    )
    run = TrainingRun(
        spec=spec,
        step=state.step,
        prompt_fingerprint=state.prompt_fingerprint,
        stop_signal=stop_signal,
        engine=engine,
        broker=broker,
        registry=registry,
        ledger=ledger,
        checkpoints=opened.checkpoints,
        monitor=monitor,
        consumer=broker.consumer(
            broker.keys.scored, ScoredTrajectory, group=GROUP, consumer=CONSUMER
        ),
        collector=collector,
        publisher=publisher,
        evaluations=evaluations,
        reporter=reporter,
        summary=summary,
    )

    def show_failure(failure: Failure) -> None:
        spec.folder.write_failure(run.step, failure)

    monitor.show = show_failure
    return run


def _monitor(spec: RunSpec, state: LearnerState) -> FailureMonitor:
    monitor = FailureMonitor(
        max_failed_share=spec.learner.max_failed_share,
        samples_per_batch=spec.samples_per_batch,
        stall_timeout_s=spec.learner.stall_timeout_s,
        log_dir=spec.folder.logs,
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
    buffer_config = GroupBufferConfig(
        run_id=spec.run.id,
        incarnation=opened.ledger.last_incarnation,
        group_size=config.group_size,
        groups_per_batch=config.groups_per_batch,
        max_staleness=config.max_staleness,
        sample_timeout_s=config.sample_timeout_s,
        max_attempts=config.max_attempts,
        greedy_baseline=config.has_greedy_baseline,
        drop_equal_groups=config.drop_equal_groups,
    )
    group_buffer = GroupBuffer(buffer_config, SamplingParameters(temperature=config.temperature))
    group_buffer.counts.update(state.counts)
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
