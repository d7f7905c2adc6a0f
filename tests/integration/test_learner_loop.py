"""The learner's loop with a real Redis, real HTTP and real files; engine and services are fakes."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learner.checkpoints.ledger import Ledger
from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints
from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.stop_rules import RunFailedError
from agent_r1.learner.train import Learner
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1.runs.store import stored_files
from agent_r1.runtime.files.dead_letters import load_letters
from agent_r1.runtime.files.writing import DiskFullError
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.rewards import Reward, ScoredTrajectory, ScoreRequest
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory
from tests.support.fakes import running
from tests.support.learner_fakes import (
    FakeEngine,
    FakeServices,
    answered,
    eventually,
    samples_of,
    training_spec,
    write_tasks,
)
from tests.support.runs import json_lines, metrics_lines, summary

pytestmark = pytest.mark.redis


async def test_a_run_trains_every_step_and_leaves_a_complete_folder(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    sets = {name: write_tasks(tmp_path / f"{name}.jsonl", 6, name=name) for name in ("near", "far")}
    write_tasks(tmp_path / "run-data" / "train.jsonl", 6, name="near")
    spec = training_spec(
        folder,
        redis_url,
        run_id,
        evaluation={"sets": sets, "every": 2},
        checkpoint_every=2,
        keep_last=1,
        system_prompt="Use the tools.",
    )
    engine = FakeEngine()

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        scored = answered(rollout, version)
        if rollout.purpose == "eval" and version == 2:  # step 2 answers best, the last one worse
            right = Reward(total=1.0, components={"exact_match": 1.0, "f1": 1.0})
            return scored.replace(reward=right)
        return scored

    async with await Broker.connect(redis_url, run_id) as broker:
        async with FakeServices(broker, answer=answer).running() as services:
            await asyncio.wait_for(Learner(spec, engine).run(), 30)
        assert services.loads == [1, 2, 3]
        assert await broker.depth(broker.keys.tasks) == 0
        assert await broker.depth(broker.keys.scored) == 0
        leftover = [key async for key in broker.redis.scan_iter(f"{broker.keys.prefix}replies*")]
        assert leftover == []
    assert engine.trained == samples_of(range(6))
    lines = metrics_lines(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    # Rewards of a group are 0 and 1: mean 1/2, population std 1/2, advantages of opposite sign.
    assert lines[0]["reward/mean"] == 0.5
    assert lines[0]["reward/std"] == 0.5
    assert lines[0]["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    assert lines[0]["advantage/max"] == pytest.approx(0.70711, abs=1e-4)
    assert lines[0]["mask/share"] == 6 / 8
    assert [line["policy/version"] for line in lines] == [1, 2, 3]
    assert {line["staleness/max"] for line in lines} == {0.0}
    assert all(line["canary/dlogp_max"] <= 1e-4 for line in lines)
    assert lines[0]["eval/near/n"] == 6
    result = summary(folder)
    assert result["status"] == "finished"
    assert result["algorithm"] == "grpo"
    assert (result["steps"], result["seed"]) == (3, 1)
    assert result["trajectories_trained"] == 12
    assert result["sampled_tokens"] == 12 * 6
    assert result["reward_s"] == pytest.approx(0.25)
    assert set(result["sets"]) == {"near", "far"}
    assert result["sets"]["far"]["in_domain"] is False
    assert result["sets"]["near"]["after"]["types"]["a"]["n"] == 3
    assert result["em_before"] == 0.0  # one sample a question, sample 0 is wrong
    assert result["reward_before"] == result["components_before"]["exact_match"] == 0.0
    assert result["calls_before"] == {}
    assert result["canary_max_dlogp"] <= 1e-4
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == [
        "step_000002",
        "step_000003",
    ]
    assert sorted(path.name for path in (folder / "weights").iterdir()) == ["v2", "v3"]
    assert [(file.step, file.evaluation) for file in stored_files(folder)] == [
        *((step, None) for step in (1, 2, 3)),
        *((None, name) for name in ("after", "before", "step_000002")),
    ]
    told = {one["system_prompt"] for file in stored_files(folder) for one in file.records()}
    assert told == {"Use the tools."}


async def test_training_and_evaluation_have_the_turns_of_the_run(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {"near": write_tasks(tmp_path / "near.jsonl", 2, name="near")}
    spec = training_spec(
        tmp_path / "run", redis_url, run_id, evaluation={"sets": sets}, max_turns=2, steps=1
    )
    asked: set[tuple[str, int | None]] = set()

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        asked.add((rollout.purpose, rollout.sampling.max_turns))
        return answered(rollout, version)

    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, answer=answer).running(),
    ):
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
    assert asked == {("train", 2), ("eval", 2)}


async def test_a_run_of_no_steps_evaluates_the_model_it_begins_with(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {"near": write_tasks(tmp_path / "near.jsonl", 2, name="near")}
    asked = {"sets": sets, "before": False}
    spec = training_spec(tmp_path / "run", redis_url, run_id, evaluation=asked, steps=0)
    engine = FakeEngine()
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running(),
    ):
        await asyncio.wait_for(Learner(spec, engine).run(), 60)
        assert await broker.depth(broker.keys.tasks) == 0
    assert engine.trained == []
    result = summary(tmp_path / "run")
    assert (result["status"], result["steps"]) == ("finished", 0)
    assert result["sets"]["near"]["after"]["n"] == 2


async def test_a_finished_run_leaves_nothing_in_redis_but_the_services_that_stay(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id)
    async with await Broker.connect(redis_url, run_id) as broker:
        keys = broker.keys
        await broker.redis.xadd(keys.scored, {b"nonsense": b"1"})  # is dead-lettered
        async with FakeServices(broker).running():
            await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
            left = {key.decode() async for key in broker.redis.scan_iter(f"{keys.prefix}*")}
            # A server that waits for tasks creates their stream, and takes it along when it leaves.
            assert left - {keys.tasks} == {keys.rollout_server("fake")}
        left = {key.decode() async for key in broker.redis.scan_iter(f"{keys.prefix}*")}
        assert left <= {keys.rollout_server("fake")}
    assert [letter.stream for letter in load_letters(tmp_path / "run")] == [keys.scored]


async def test_a_second_run_on_the_same_services_begins_by_pushing_its_own_weights(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {"held": write_tasks(tmp_path / "held.jsonl", 2, name="held")}
    evaluation = {"sets": sets, "before": False}
    first, second = FakeEngine(), FakeEngine()
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        spec = training_spec(tmp_path / "first", redis_url, run_id, evaluation=evaluation)
        await asyncio.wait_for(Learner(spec, first).run(), 30)
        assert services.weights == 3
        left = Ledger(tmp_path / "first")
        (tmp_path / "second").mkdir()
        Ledger(tmp_path / "second").go_on_after(
            incarnation=left.last_incarnation, policy_version=left.last_policy_version
        )
        spec = training_spec(tmp_path / "second", redis_url, run_id, evaluation=evaluation)
        await asyncio.wait_for(Learner(spec, second).run(), 30)
        # The servers held version 3; 4 is the second run's start, 5 to 7 are its three steps.
        assert services.loads == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(second.trained) == samples_of(range(6))
    sampled = {
        s.trajectory.policy_versions()[0]
        for s in services.published
        if s.trajectory.rollout.key.incarnation == 2
    }
    assert sampled == {4, 5, 6}
    result = summary(tmp_path / "second")
    assert (result["status"], result["starts"], result["policy_version"]) == ("finished", 1, 7)


async def test_the_last_evaluation_leaves_its_scores_question_by_question(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {name: write_tasks(tmp_path / f"{name}.jsonl", 2, name=name) for name in ("near", "far")}
    spec = training_spec(
        tmp_path / "run", redis_url, run_id, evaluation={"sets": sets}, trajectories_per_step=0
    )

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        if rollout.task.id == "far1":
            return answered(rollout, version, status="FAILED", reason="outage")
        calls = [
            ToolCallRecord(end_token_index=3, tool="search", status="ok"),
            ToolCallRecord(end_token_index=3, tool="search", status="malformed"),
        ]
        return answered(rollout, version, calls=calls)

    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, answer=answer).running(),
    ):
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    text = (tmp_path / "run" / "evaluation_after.jsonl").read_text()
    wrong = {"exact_match": 0.0, "f1": 0.0}  # sample 0 of a question is wrong
    scored = {"failed": False, "reward": 0.0, "components": wrong, "calls": {"search": 1}}
    scored |= {"em": 0.0, "f1": 0.0}
    lost = {"failed": True, "reward": None, "components": {}, "calls": {}, "em": None, "f1": None}
    assert [json.loads(line) for line in text.splitlines()] == [
        {"id": "near0", "set": "near", "type": "a", **scored},
        {"id": "near1", "set": "near", "type": "b", **scored},
        {"id": "far0", "set": "far", "type": "a", **scored},
        {"id": "far1", "set": "far", "type": "b", **lost},
    ]


async def test_a_finished_run_that_is_given_more_steps_forgets_its_last_evaluation(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    last = [folder / "evaluation_after.jsonl", folder / "trajectories" / "eval_after.parquet"]
    sets = {"held": write_tasks(tmp_path / "held.jsonl", 2, name="held")}
    spec = training_spec(folder, redis_url, run_id, evaluation={"sets": sets})
    async with await Broker.connect(redis_url, run_id) as broker, FakeServices(broker).running():
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
        assert summary(folder)["sets"]["held"]["after"]["n"] == 2
        assert all(file.exists() for file in last)
        evaluation = {"sets": sets, "after": False}
        spec = training_spec(folder, redis_url, run_id, resume=True, steps=4, evaluation=evaluation)
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
    result = summary(folder)
    assert (result["status"], result["steps"]) == ("finished", 4)
    assert result["sets"]["held"]["before"]["n"] == 2
    assert result["sets"]["held"]["after"] is None
    assert result["reward_after"] is None
    assert not any(file.exists() for file in last)


async def test_staleness_one_trains_on_mixed_versions(tmp_path: Path, redis_url: str, run_id: str):
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=4, max_staleness=1)
    engine = FakeEngine(train_s=0.05)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        await asyncio.wait_for(Learner(spec, engine).run(), 30)
    assert sorted(engine.trained) == samples_of(range(8))
    ages = [line["staleness/max"] for line in metrics_lines(tmp_path / "run")]
    # Two batches are asked for at version 0; every later one while the batch before is trained.
    assert ages == [0.0, 1.0, 1.0, 1.0]
    versions = {s.trajectory.policy_versions()[0] for s in services.published}
    assert versions == {0, 1, 2}
    assert summary(tmp_path / "run")["max_staleness_seen"] == 1


async def test_rollouts_and_evaluation_go_on_while_the_engine_trains(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {"held": write_tasks(tmp_path / "held.jsonl", 8, name="held")}
    spec = training_spec(
        tmp_path / "run",
        redis_url,
        run_id,
        evaluation={"sets": sets, "every": 1, "before": False, "after": False},
        max_staleness=1,
        steps=3,
    )
    engine = FakeEngine()
    file = tmp_path / "run" / "evaluations.jsonl"
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        # Batch 1 trains until batch 2 is gathered, batch 2 until step 1 is evaluated.
        conditions = [lambda: len(services.published) >= 8, file.exists]
        engine.until = lambda: engine.steps >= 2 or conditions[engine.steps]()
        await asyncio.wait_for(Learner(spec, engine).run(), 150)
    assert metrics_lines(tmp_path / "run")[1]["eval/step"] == 1
    evaluations = file.read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [1, 2]


async def test_a_stop_writes_a_checkpoint_and_resume_goes_on(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    engine = FakeEngine(train_s=0.1)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        learner = Learner(training_spec(folder, redis_url, run_id, steps=6), engine)
        running = asyncio.create_task(learner.run())
        await eventually(lambda: engine.steps >= 2, running)
        learner.request_stop("SIGTERM")
        await asyncio.wait_for(running, 10)
        stopped = summary(folder)
        assert stopped["status"] == "interrupted"
        assert 2 <= stopped["steps"] < 6
        assert [line["step"] for line in metrics_lines(folder)] == list(
            range(1, stopped["steps"] + 1)
        )
        again = FakeEngine()
        spec = training_spec(folder, redis_url, run_id, steps=6, resume=True)
        await asyncio.wait_for(Learner(spec, again).run(), 30)
    assert sorted(again.trained) == samples_of(range(12))
    assert [line["step"] for line in metrics_lines(folder)] == [1, 2, 3, 4, 5, 6]
    assert summary(folder)["starts"] == 2
    assert services.loads == sorted(set(services.loads))  # no version twice


async def test_a_run_that_cannot_learn_says_so_while_it_trains(
    tmp_path: Path, redis_url: str, run_id: str
):
    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        call = {"end_token_index": 3, "tool": "search", "status": "error"}
        calls = [ToolCallRecord(**call, error="AB"[rollout.key.group_id % 2])]
        scored = answered(rollout, version, calls=calls)
        return scored.replace(reward=Reward(total=0.0, components={"em": 0.0}))

    # 8 groups are 4 steps of 2; 8 calls have been made after two.
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=5)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, answer=answer).running(),
    ):
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    assert summary(tmp_path / "run")["status"] == "finished"
    told = {one["what"].partition(" (most")[0] for one in summary(tmp_path / "run")["conditions"]}
    assert told == {
        "each of the last 8 calls of tool 'search' failed",
        "the run cannot learn: in 8 of the last 8 groups every trajectory has the same reward",
    }


async def test_a_resumed_learner_says_how_to_join_before_any_server_has_its_weights(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    async with await Broker.connect(redis_url, run_id) as broker:
        registry = Registry(broker)
        async with FakeServices(broker).running():
            engine = FakeEngine(train_s=0.1)
            spec = training_spec(folder, redis_url, run_id, steps=6, transport="http")
            learner = Learner(spec, engine)
            running = asyncio.create_task(learner.run())
            await eventually(lambda: engine.steps >= 2, running)
            learner.request_stop("SIGTERM")
            await asyncio.wait_for(running, 60)
        before = await registry.join_offer()
        # Servers that have come with the first learner have gone with it: others can only join.
        spec = training_spec(folder, redis_url, run_id, steps=6, transport="http", resume=True)
        running = asyncio.create_task(Learner(spec, FakeEngine()).run())
        async with asyncio.timeout(60):
            while await registry.join_offer() == before:
                assert not running.done()
                await asyncio.sleep(0.05)
        async with FakeServices(broker).running():
            await asyncio.wait_for(running, 60)
    assert summary(folder)["status"] == "finished"


async def test_without_any_rollout_server_the_run_stops_with_that_reason(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, first_server_timeout_s=0.5)
    with pytest.raises(RunFailedError, match=r"first_server_timeout_s allows 0\.5 s"):
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)


async def test_a_full_disk_keeps_the_last_checkpoint_and_says_so(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    engine = FakeEngine(full_disk_at=2)
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running(),
    ):
        spec = training_spec(folder, redis_url, run_id, checkpoint_every=1)
        with pytest.raises(DiskFullError, match="the disk is full: a checkpoint "):
            await asyncio.wait_for(Learner(spec, engine).run(), 30)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000001"]
        again = FakeEngine()
        spec = training_spec(folder, redis_url, run_id, checkpoint_every=1, resume=True)
        await asyncio.wait_for(Learner(spec, again).run(), 30)
    assert sorted(again.trained) == samples_of(range(6))


async def test_a_disk_too_small_for_the_weights_is_refused_at_start(
    tmp_path: Path, redis_url: str, run_id: str
):
    spec = training_spec(tmp_path / "run", redis_url, run_id, keep_versions=2)
    unfinished = tmp_path / "run" / "weights" / ".v7.of.one.that.was.killed"
    unfinished.mkdir(parents=True)
    engine = FakeEngine()
    engine.bytes_of_a_snapshot = 10**18
    # The two that are kept, and the one that is written before the older is deleted.
    expected = r"weights has .* free, and 3 weight versions of .*lower learner\.keep_versions \(2\)"
    with pytest.raises(ValueError, match=expected):
        await asyncio.wait_for(Learner(spec, engine).run(), 60)
    assert engine.trained == []
    assert not unfinished.exists()
    spec = training_spec(tmp_path / "sent", redis_url, run_id, steps=1, transport="collective")
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, run_id=run_id).running(),
    ):
        await asyncio.wait_for(Learner(spec, engine).run(), 60)  # what is sent needs no disk
    assert not list((tmp_path / "sent").glob("weights/v*"))


async def test_a_rank_that_is_lost_between_two_batches_ends_the_run(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder, engine = tmp_path / "run", FakeEngine()
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, answer=lambda rollout, version: None).running(),
    ):
        learner = Learner(training_spec(folder, redis_url, run_id), engine)
        run = asyncio.create_task(learner.run())
        await eventually(lambda: folder.exists())
        engine.lost = "the training engine ended: rank 1 ended"
        with pytest.raises(EngineError, match="rank 1 ended"):
            await asyncio.wait_for(run, 30)
    assert summary(folder)["reason"] == engine.lost


async def test_a_redis_that_is_too_small_is_refused_at_start(
    tmp_path: Path, redis_server: Any, run_id: str
):
    redis_server.stop()
    redis_server.start(maxmemory="10mb")
    spec = training_spec(tmp_path / "run", redis_server.url, run_id, groups_per_batch=500)
    with pytest.raises(ValueError, match=r"the Redis at redis\.url \(10 MiB\)"):
        await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)


def broken(request: ScoreRequest) -> float:
    raise KeyError("a column of mine")


async def test_a_broken_reward_stops_the_run_within_seconds_and_shows_its_traceback(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    spec = training_spec(folder, redis_url, run_id, groups_per_batch=4, group_size=4)
    table = RewardConfig(components={f"{__name__}:broken": 1.0})
    async with await Broker.connect(redis_url, run_id, lease_s=2.0) as broker:
        reward = RewardWorker(broker, Scorer(table), consumer_name="reward")
        stop = asyncio.Event()
        async with (
            running(reward.run(stop)),
            FakeServices(broker, scores=False).running(),
        ):
            with pytest.raises(RunFailedError, match=r"test_learner_loop:broken' raised KeyError"):
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 10)
    (shown,) = json_lines(folder / "failures.jsonl")
    assert (shown["where"], shown["step"]) == ("reward", 0)
    first, *rest = shown["reason"].splitlines()
    assert first.endswith("raised KeyError: 'a column of mine'")
    assert 'raise KeyError("a column of mine")' in "".join(rest)
    result = summary(folder)
    # Nothing after a batch of 16 results would have been better.
    assert (result["status"], result["failed_samples"], result["lost_share"]) == ("failed", 16, 1.0)
    assert result["dead_letters"] >= 16


async def test_training_ends_when_evaluations_no_longer_improve(
    tmp_path: Path, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    threads: dict[str, set[int]] = {"save": set(), "record_score": set()}
    for name, seen in threads.items():
        method = getattr(Checkpoints, name)

        def noted(*args: Any, _method: Any = method, _seen: set[int] = seen) -> Any:
            _seen.add(threading.get_ident())
            return _method(*args)

        monkeypatch.setattr(Checkpoints, name, noted)
    folder, sets = tmp_path / "run", {"held": write_tasks(tmp_path / "held.jsonl", 2, name="held")}
    evaluation = {"sets": sets, "every": 1, "before": False, "patience": 2, "score": "exact_match"}
    asked: list[RolloutTask] = []

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        scored = answered(rollout, version)
        if rollout.purpose != "eval":
            return scored
        # What it is rewarded for rises, and what is wanted falls, with every evaluation of 2
        # questions; the next version may be there before the second one is asked.
        asked.append(rollout)
        evaluations = (len(asked) + 1) // 2
        components = {"exact_match": 1 / (1 + evaluations)}
        return scored.replace(reward=Reward(total=float(evaluations), components=components))

    for resume in (False, True):
        spec = training_spec(
            *(folder, redis_url, run_id),
            resume=resume,
            steps=500,
            checkpoint_every=100,
            keep_last=1,
            evaluation=evaluation,
        )
        async with (
            await Broker.connect(redis_url, run_id) as broker,
            FakeServices(broker, answer=answer).running(),
        ):
            status = await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 60)
        result = summary(folder)
        assert (status, result["best_score"]) == ("finished", 1 / (1 + 1))
        assert result["steps"] == len(metrics_lines(folder)) < 500
        assert "of 500 steps: 2 evaluations in a row were no better" in result["reason"]
        assert "evaluation.score is 'exact_match'" in result["reason"]
        # A checkpoint and a score may make the same folder surplus: one thread deletes for both.
        assert threads["save"] == threads["record_score"]
        assert len(threads["save"]) == 1
        for seen in threads.values():
            seen.clear()
    best, last = sorted(path.name for path in (folder / "checkpoints").glob("step_*"))
    assert (best, last) == ("step_000001", f"step_{result['steps']:06d}")


async def test_an_evaluation_whose_answers_cannot_be_scored_ends_at_once(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {"held": write_tasks(tmp_path / "held.jsonl", 40, name="held")}
    spec = training_spec(tmp_path / "run", redis_url, run_id, evaluation={"sets": sets})

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory | None:
        # Every other question is never answered: those that are tell enough.
        silent = rollout.purpose == "train" or rollout.key.group_id % 2
        return None if silent else answered(rollout, version)

    table = RewardConfig(components={f"{__name__}:broken": 1.0})
    async with await Broker.connect(redis_url, run_id, lease_s=2.0) as broker:
        reward = RewardWorker(broker, Scorer(table), consumer_name="reward")
        async with (
            running(reward.run(asyncio.Event())),
            FakeServices(broker, answer=answer, scores=False).running(),
        ):
            with pytest.raises(RunFailedError, match=r"^8 of the 40 questions .*'before' failed"):
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 15)
    (shown,) = json_lines(tmp_path / "run" / "failures.jsonl")
    assert 'raise KeyError("a column of mine")' in shown["reason"]


async def test_entries_that_no_service_can_read_stop_the_run_too(
    tmp_path: Path, redis_url: str, run_id: str
):
    """As when a rollout server of another release reads the tasks."""
    spec = training_spec(tmp_path / "run", redis_url, run_id)

    async def misread(broker: Broker) -> None:
        consumer = broker.consumer(broker.keys.tasks, Trajectory, group="rollout", consumer="old")
        async with consumer:
            while True:
                await consumer.read(8, 0.1)

    async with await Broker.connect(redis_url, run_id, lease_s=2.0) as broker:
        server = RolloutServer(
            server_id="old", url="", policy_version=0, pid=1, host="localhost", started_at=0.0
        )
        await Registry(broker).announce_rollout_server(server, 60.0)
        async with running(misread(broker)):
            with pytest.raises(RunFailedError, match=r"unreadable_entry: tasks: .*rollout_task"):
                await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 15)
    assert summary(tmp_path / "run")["failed_samples"] == 8


async def test_a_step_counts_its_own_failures_and_the_run_says_what_it_lost(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    spec = training_spec(folder, redis_url, run_id, group_size=4, groups_per_batch=2)
    async with await Broker.connect(redis_url, run_id) as broker:
        board = FailureBoard(broker)
        told: list[asyncio.Task[None]] = []

        def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
            # One sample of the second batch fails for good; in the first, two attempts did.
            reason = "tool_http_5xx: search"
            if rollout.key.group_id == 0 and rollout.key.sample_index < 2:
                told.append(asyncio.ensure_future(board.note("rollout", reason, "r")))
            if (rollout.key.group_id, rollout.key.sample_index) != (2, 0):
                return answered(rollout, version)
            return answered(rollout, version, status="FAILED", reason=reason)

        async with FakeServices(broker, answer=answer).running():
            status = await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    for name, count in (("failed", 1.0), ("attempts", 2.0), ("dead_letters", 0.0)):
        assert sum(line[f"failures/{name}"] for line in metrics_lines(folder)) == count
    result = summary(folder)
    # 1 of 24 samples is 4 %, within the 5 % that are allowed.
    assert (status, result["status"], result["reason"]) == ("finished", "finished", "")
    assert (result["failed_samples"], result["lost_share"]) == (1, pytest.approx(1 / 24))
    (shown,) = json_lines(folder / "failures.jsonl")
    assert shown["kind"] == "tool_http_#xx: search"


async def test_a_run_that_lost_more_than_it_may_says_so_in_its_status(
    tmp_path: Path, redis_url: str, run_id: str
):
    folder = tmp_path / "run"
    sets = {"held": write_tasks(tmp_path / "held.jsonl", 4, name="held")}
    spec = training_spec(folder, redis_url, run_id, evaluation={"sets": sets, "before": False})

    def answer(rollout: RolloutTask, version: int) -> ScoredTrajectory:
        if rollout.purpose == "eval" and rollout.task.id == "held3":
            return answered(rollout, version, status="FAILED", reason="tool_timeout: search")
        calls = [ToolCallRecord(end_token_index=3, tool="lookup", status="error", error="broken")]
        return answered(rollout, version, calls=calls if rollout.purpose == "eval" else None)

    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker, answer=answer).running(),
    ):
        status = await asyncio.wait_for(Learner(spec, FakeEngine()).run(), 30)
    result = summary(folder)
    assert (status, result["status"]) == ("finished_with_losses", "finished_with_losses")
    assert result["reason"].startswith(
        "1 of the 4 questions of the evaluation after/held failed for good (25%); "
        "learner.max_lost_share allows 5%."
    )
    assert result["lost_share"] == 0.0  # of training
    kinds = {line["kind"] for line in json_lines(folder / "failures.jsonl")}
    assert kinds == {"tool lookup answered an error: broken", "tool_timeout: search"}
