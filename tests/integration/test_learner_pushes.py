"""Pushes of the learner's loop to rollout servers: on time, late, refused, from files and memory.

Redis, HTTP, files and process groups are real; engine and services are fakes.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.learner.train import Learner
from agent_r1.learner.weights.canary import CanaryError
from agent_r1.weights.collective import CollectiveTransport
from agent_r1.weights.download import TransferError
from agent_r1.weights.snapshot import Weights, write_snapshot
from agent_r1_proto.registry import RolloutServer
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.support.learner_fakes import (
    FakeEngine,
    FakeServices,
    answered,
    eventually,
    training_spec,
)
from tests.support.runs import metrics_lines, summary
from tests.support.sent_weights import slow_servers

pytestmark = pytest.mark.redis


async def test_the_next_batch_is_trained_while_servers_load_and_published_when_they_have(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=3, max_staleness=1)
    engine = FakeEngine(train_s=0.1)
    async with await Broker.connect(redis_url, run_id) as broker:
        async with FakeServices(broker).running() as services:
            services.may_load.clear()
            running = asyncio.create_task(Learner(spec, engine).run())
            # The second batch was asked for at version 0 too.
            await eventually(lambda: engine.steps == 2, running)
            assert services.asked_to_load == [1]
            assert services.loads == []
            assert not (tmp_path / "run" / "metrics.jsonl").exists()
            assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == ["v1"]
            services.may_load.set()
            await asyncio.wait_for(running, 60)
        assert services.loads == [1, 2, 3]
    lines = metrics_lines(tmp_path / "run")
    assert [line["policy/version"] for line in lines] == [1.0, 2.0, 3.0]
    assert max(line["staleness/max"] for line in lines) == 1.0


async def test_without_staleness_nothing_goes_on_before_a_server_has_the_weights(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=2)
    async with await Broker.connect(redis_url, run_id) as broker:
        async with FakeServices(broker).running() as services:
            services.may_load.clear()
            running = asyncio.create_task(Learner(spec, FakeEngine()).run())
            await eventually(lambda: services.asked_to_load == [1], running)
            # The samples of the next batch are asked for once a server has the weights.
            assert {rollout.key.group_id for rollout in services.seen} == {0, 1}
            assert await broker.depth(broker.keys.tasks) == 0
            services.may_load.set()
            await asyncio.wait_for(running, 60)
        assert services.loads == [1, 2]


async def test_the_next_batch_is_trained_while_weights_are_written(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    class Engine(FakeEngine):
        def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec):
            metrics = super().train_batch(samples, spec)
            trained[self.steps].set()
            return metrics

    def write(directory: Path, run_id: str, policy_version: int, *args: Any, **options: Any):
        assert trained[min(policy_version + 1, 3)].wait(20)
        return write_snapshot(directory, run_id, policy_version, *args, **options)

    trained = {step: threading.Event() for step in (1, 2, 3)}
    monkeypatch.setattr("agent_r1.learner.weights.publisher.write_snapshot", write)
    spec = training_spec(tmp_path / "run", redis_url, run_id, max_staleness=1)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        async with services.running():
            await asyncio.wait_for(Learner(spec, Engine()).run(), 60)
    # What was sent is of its version, although the engine had gone on.
    assert (services.loads, services.weights) == ([1, 2, 3], 3)
    steps = metrics_lines(tmp_path / "run")
    assert max(step["canary/dlogp_max"] for step in steps) < 1e-6


async def test_a_stop_while_servers_load_writes_the_step_down(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, max_staleness=1)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        services.may_load.clear()
        learner = Learner(spec, FakeEngine())
        running = asyncio.create_task(learner.run())
        await eventually(lambda: services.asked_to_load == [1], running)
        learner.request_stop("the test")
        assert await asyncio.wait_for(running, 60) == "interrupted"
        services.may_load.set()
    steps = summary(tmp_path / "run")["steps"]
    lines = metrics_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    # Version 1 was published; no server had it, so step 2, if it was trained, published nothing.
    assert {line["policy/version"] for line in lines} == {1}


async def test_a_step_that_is_stopped_before_its_push_names_the_version_before(
    tmp_path: Path, redis_url: str, run_id: str
):
    engine = FakeEngine()
    async with await Broker.connect(redis_url, run_id) as broker, FakeServices(broker).running():
        learner = Learner(training_spec(tmp_path / "run", redis_url, run_id), engine)
        loop = asyncio.get_running_loop()

        def stop_in_step_2() -> bool:
            if engine.steps == 1:
                loop.call_soon_threadsafe(learner.request_stop, "the test")
            return True

        engine.until = stop_in_step_2
        assert await asyncio.wait_for(learner.run(), 60) == "interrupted"
    lines = metrics_lines(tmp_path / "run")
    assert [(line["step"], line["policy/version"]) for line in lines] == [(1, 1), (2, 1)]


async def test_weights_that_a_server_acknowledged_but_does_not_use_end_the_run(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.stale_weights = True
        async with services.running():
            with pytest.raises(RuntimeError, match="does not sample with the learner's weights"):
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    assert summary(tmp_path / "run")["status"] == "failed"


async def test_a_wrong_canary_is_a_warning_when_so_configured(
    tmp_path: Path, redis_url: str, run_id: str, caplog: pytest.LogCaptureFixture
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, canary_action="warn")
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.stale_weights = True
        async with services.running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    assert "does not sample with the learner's weights of policy version 1" in caplog.text
    # Weights 0 against 3 steps: |-0.53 - -0.50|.
    assert summary(tmp_path / "run")["canary_max_dlogp"] == pytest.approx(0.03, abs=1e-6)


@pytest.mark.parametrize("fault", ["short_canary", "refuse_canary"])
async def test_a_canary_without_an_answer_obeys_the_configured_action(
    tmp_path: Path, redis_url: str, run_id: str, caplog: pytest.LogCaptureFixture, fault: str
):
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        setattr(services, fault, True)
        async with services.running():
            for action in ("fail", "warn"):
                spec = training_spec(
                    tmp_path / action, redis_url, run_id, steps=2, canary_action=action
                )
                running = asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
                if action == "fail":
                    with pytest.raises(RuntimeError, match=r'log-prob.*canary_action = "warn"'):
                        await running
                else:
                    await running
    assert summary(tmp_path / "fail")["status"] == "failed"
    assert summary(tmp_path / "warn")["steps"] == 2
    assert "does not sample with the learner's weights" in caplog.text


async def test_a_canary_of_later_weights_than_were_pushed_is_not_compared(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.moved_on = True
        async with services.running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    found = summary(tmp_path / "run")
    assert (found["status"], found["canary_max_dlogp"]) == ("finished", None)


async def test_a_server_that_refuses_the_weights_ends_the_run_with_its_reason(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.refuse_loads = True
        async with services.running():
            with pytest.raises(RunFailedError, match="checksum of lm_head differs"):
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)


async def test_a_server_that_stays_at_the_version_before_has_not_taken_the_weights(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.stays_behind = True
        async with services.running():
            with pytest.raises(RunFailedError, match="fake stayed at policy version 0"):
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_weights_that_a_server_finds_damaged_are_written_again(
    tmp_path: Path,
    redis_url: str,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    max_staleness: int,
):
    def write(directory: Path, run_id: str, policy_version: int, *args: Any, **options: Any):
        written.append(policy_version)
        services.refuse_loads = written.count(policy_version) == 1
        return write_snapshot(directory, run_id, policy_version, *args, **options)

    written: list[int] = []
    monkeypatch.setattr("agent_r1.learner.weights.publisher.write_snapshot", write)
    spec = training_spec(tmp_path / "run", redis_url, run_id, max_staleness=max_staleness)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        async with services.running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    assert summary(tmp_path / "run")["status"] == "finished"
    assert written == [1, 1, 2, 2, 3, 3]
    assert services.loads == [1, 2, 3]


async def test_a_server_that_is_being_replaced_is_waited_for(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    # Three refusals end a run; an engine that has died answers 503 as often until it is replaced.
    monkeypatch.setattr("agent_r1.learner.weights.publisher.POLL_S", 0.02)
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker)
        services.outages = 10
        async with services.running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    assert services.outages == 0
    assert summary(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("transport", ["file", "collective"])
async def test_a_dead_server_does_not_hold_up_a_push(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch, transport: str
):
    monkeypatch.setattr("agent_r1.weights.collective.MEET_S", 60.0)
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport=transport)
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker, run_id=run_id)
        async with services.running():
            dead = RolloutServer(
                server_id="dead",
                url="http://127.0.0.1:9",
                policy_version=0,
                pid=1,
                host="localhost",
                started_at=0.0,
            )
            await services.registry.announce_rollout_server(dead, 60.0)
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    assert summary(tmp_path / "run")["status"] == "finished"


async def test_a_server_that_never_ends_to_load_holds_up_neither_the_learner_nor_the_others(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        slow, fast = FakeServices(broker, server_id="slow"), FakeServices(broker, server_id="fast")
        async with slow.running(), fast.running():
            slow.may_load.clear()
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
            slow.may_load.set()
    assert (fast.loads, slow.asked_to_load[:1]) == ([1, 2, 3], [1])
    assert summary(tmp_path / "run")["status"] == "finished"


async def test_large_weights_have_more_time(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.weights.manifest.SLOWEST_BYTES_PER_S", 10.0)
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=1, push_timeout_s=0.05)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        services.may_swap.clear()
        running = asyncio.create_task(Learner(spec, FakeEngine()).run())
        await eventually(lambda: bool(services.asked_to_load), running)
        await asyncio.sleep(0.5)  # ten times the limit for weights of no size
        services.may_swap.set()
        await asyncio.wait_for(running, 60)
    assert services.asked_to_load == [1]


async def test_weights_are_let_go_of_once_they_are_delivered(
    tmp_path: Path, redis_url: str, run_id: str
):
    held: list[weakref.ref[Any]] = []

    class Engine(FakeEngine):
        def weights(self) -> Weights:
            weights = super().weights()
            held.append(weakref.ref(weights))
            return weights

        def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec):
            gc.collect()
            assert [ref() for ref in held] == [None] * len(held)
            return super().train_batch(samples, spec)

    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, run_id=run_id).running(),
    ):
        await asyncio.wait_for(Learner(spec, Engine()).run(), 40)
    assert len(held) >= 3


async def test_weights_travel_over_http_where_nothing_is_shared(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="http")
    async with await Broker.connect(redis_url, run_id) as broker:
        async with FakeServices(broker).running() as services:
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
        assert services.loads == [1, 2, 3]
        assert services.weights == 3
    assert all(location.startswith("http://127.0.0.1:") for location in services.locations)
    snapshot = (tmp_path / "run" / "weights" / "v3" / "model.safetensors").stat().st_size
    steps = metrics_lines(tmp_path / "run")
    assert [step["push/size_bytes"] for step in steps] == [snapshot] * 3
    assert all(step["push/bytes_sent"] > snapshot for step in steps)  # and a manifest
    assert summary(tmp_path / "run")["status"] == "finished"


# -- learner.transport = "collective": from memory to memory --------------------------------------


async def test_weights_go_from_memory_to_memory_also_to_servers_that_come_later(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.learner.weights.publisher.POLL_S", 0.5)
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="collective")
    async with await Broker.connect(redis_url, run_id) as broker:
        services = FakeServices(broker, run_id=run_id)
        restarted = False

        def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
            nonlocal restarted
            if version == 1 and not restarted:  # the only server starts again
                restarted = True
                services.version = services.weights = 0
                return None
            return answered(rollout, version)

        services.answer = answer
        async with services.running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
        assert services.loads == [1, 1, 2, 3]
        assert services.weights == 3
    assert all(location.startswith("collective://127.0.0.1:") for location in services.locations)
    assert not list((tmp_path / "run" / "weights").glob("v*"))
    steps = metrics_lines(tmp_path / "run")
    size = steps[0]["push/size_bytes"]
    assert [step["push/bytes_sent"] / size for step in steps] == [1, 2, 1]  # the second time to one
    assert summary(tmp_path / "run")["status"] == "finished"


async def test_a_frozen_server_is_left_out_of_a_broadcast(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.weights.collective.MEET_S", 3.0)
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="collective")
    async with await Broker.connect(redis_url, run_id) as broker:
        frozen = FakeServices(broker, server_id="frozen", run_id=run_id)
        fast = FakeServices(broker, server_id="fast", run_id=run_id)
        async with frozen.running(), fast.running():
            frozen.may_load.clear()
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
            frozen.may_load.set()
    assert fast.loads == [1, 2, 3]
    assert frozen.asked_to_load == [1]  # it is not invited again while it has not answered
    assert summary(tmp_path / "run")["status"] == "finished"


async def test_a_server_that_receives_slowly_is_left_out_of_later_groups(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.weights.collective.BUCKET_BYTES", 1)  # over 100 of them
    monkeypatch.setattr("agent_r1.learner.weights.publisher.POLL_S", 0.1)
    slow_servers(monkeypatch).add("slow")
    spec = training_spec(
        tmp_path / "run", redis_url, run_id, transport="collective", push_timeout_s=2.0
    )
    async with await Broker.connect(redis_url, run_id) as broker:
        good, slow = (FakeServices(broker, server_id=n, run_id=run_id) for n in ("good", "slow"))
        async with good.running(), slow.running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
    assert (good.loads, slow.loads) == ([1, 2, 3], [])
    first, *later = [line["push/wait_s"] for line in metrics_lines(tmp_path / "run")]
    assert first > 2.0  # the limit, which one group has cost
    assert max(later) < 1.5
    assert summary(tmp_path / "run")["status"] == "finished"


async def test_a_server_that_came_too_late_is_invited_again(
    tmp_path: Path,
    redis_url: str,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("agent_r1.weights.collective.MEET_S", 3.0)
    monkeypatch.setattr("agent_r1.learner.weights.publisher.LOUD_S", 0.1)
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="collective")
    async with await Broker.connect(redis_url, run_id) as broker:
        async with FakeServices(broker, run_id=run_id).running() as services:
            services.may_load.clear()
            running = asyncio.create_task(Learner(spec, FakeEngine()).run())
            # Its request goes on while the learner waits for another server.
            await eventually(lambda: "that takes the weights" in caplog.text, running)
            assert "none of 1 invited servers came" in caplog.text
            services.may_load.set()
            await asyncio.wait_for(running, 60)
        assert services.loads == [1, 2, 3]
    assert summary(tmp_path / "run")["status"] == "finished"


class EngineThatWaits(FakeEngine):
    """An engine that trains the batch after `steps` when it may."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._waits_after = steps
        self.may_go_on = threading.Event()

    def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec):
        assert self.steps != self._waits_after or self.may_go_on.wait(30)
        return super().train_batch(samples, spec)


async def test_a_late_server_that_takes_long_to_load_holds_up_nobody(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    engine = EngineThatWaits(1)
    monkeypatch.setattr("agent_r1.learner.weights.publisher.POLL_S", 0.2)
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="collective")
    async with await Broker.connect(redis_url, run_id) as broker:
        fast, late = (FakeServices(broker, server_id=n, run_id=run_id) for n in ("fast", "late"))
        late.may_swap.clear()
        async with fast.running():
            running = asyncio.create_task(Learner(spec, engine).run())
            await eventually(lambda: fast.loads == [1], running)
            async with late.running():
                await eventually(lambda: late.asked_to_load == [1], running)
                engine.may_go_on.set()
                await asyncio.wait_for(running, 40)
                late.may_swap.set()
    assert fast.loads == [1, 2, 3]
    assert summary(tmp_path / "run")["status"] == "finished"


async def test_a_late_server_is_compared_with_the_learner_too(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    engine = EngineThatWaits(2)
    monkeypatch.setattr("agent_r1.learner.weights.publisher.POLL_S", 0.2)
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="collective")
    async with await Broker.connect(redis_url, run_id) as broker:
        fast, late = (FakeServices(broker, server_id=n, run_id=run_id) for n in ("fast", "late"))
        late.stale_weights = True  # acknowledges, and samples with version 0
        async with fast.running():
            running = asyncio.create_task(Learner(spec, engine).run())
            await eventually(lambda: fast.loads == [1, 2], running)
            async with late.running():
                await eventually(lambda: late.loads == [2], running)
                await eventually(lambda: late.canaries > 0, running)
                engine.may_go_on.set()
                with pytest.raises(CanaryError, match="server late does not sample with"):
                    await asyncio.wait_for(running, 40)


async def test_a_late_server_that_is_being_sent_a_version_holds_up_no_push(
    tmp_path: Path,
    redis_url: str,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    given_up, send = threading.Event(), CollectiveTransport._send

    def sends(*arguments: Any) -> None:
        try:
            send(*arguments)
        except TransferError:
            given_up.set()
            raise

    class Engine(EngineThatWaits):
        def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec):
            assert self.steps < 2 or given_up.wait(10)  # it takes above 20 s
            return super().train_batch(samples, spec)

    engine = Engine(1)
    monkeypatch.setattr(CollectiveTransport, "_send", sends)
    monkeypatch.setattr("agent_r1.weights.collective.BUCKET_BYTES", 1)  # over 100 of them
    monkeypatch.setattr("agent_r1.learner.weights.publisher.POLL_S", 0.1)
    slow = slow_servers(monkeypatch)
    slow.add("late")
    spec = training_spec(tmp_path / "run", redis_url, run_id, transport="collective")
    async with await Broker.connect(redis_url, run_id) as broker:
        fast, late = (FakeServices(broker, server_id=n, run_id=run_id) for n in ("fast", "late"))
        async with fast.running():
            running = asyncio.create_task(Learner(spec, engine).run())
            await eventually(lambda: fast.loads == [1], running)
            async with late.running():
                await eventually(lambda: late.asked_to_load == [1], running)
                slow.clear()  # what is being sent stays slow
                engine.may_go_on.set()  # the next push begins in the middle of it
                await asyncio.wait_for(running, 60)
    gc.collect()
    assert max(one["push/wait_s"] for one in metrics_lines(tmp_path / "run")) < 10
    assert fast.loads == [1, 2, 3]
    assert 1 not in late.loads  # what was given up is not used
    assert "never retrieved" not in caplog.text
