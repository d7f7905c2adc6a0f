"""The model that scores is swapped while a reward worker works: real Redis, worker and command."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from agent_r1.cli.main import main
from agent_r1.reward import versions
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.versions import GroupVersions
from agent_r1.reward.worker import RewardWorker
from agent_r1.text.verdicts import BAD, GOOD
from agent_r1_proto.rewards import Reward, ScoredTrajectory
from agent_r1_proto.scoring_models import ScoringModel, ScoringModels
from agent_r1_proto.streams import Broker
from tests.support.builders import rollout_task, trajectory
from tests.support.scripted_server import ScriptedServer

pytestmark = pytest.mark.redis

WAIT_S = 30.0
POLL_S = 0.02
OLD, NEW = 0.25, 0.75
NAME = "reward_model"


def verdict(good: float) -> dict[str, Any]:
    tokens = [{"token": GOOD, "logprob": math.log(good)}]
    tokens += [{"token": BAD, "logprob": math.log(1 - good)}]
    return {"choices": [{"logprobs": {"content": [{"top_logprobs": tokens}]}}]}


@pytest.fixture
def server_of() -> Iterator[Callable[..., ScriptedServer]]:
    """Make servers that give one probability and have one model."""
    made: list[ScriptedServer] = []

    def make(good: float, *models: str) -> ScriptedServer:
        made.append(ScriptedServer((200, verdict(good))))
        made[-1].models = list(models)
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id) as connected:
        yield connected


def scorer_of(server: ScriptedServer, version: str = "verifier-1") -> Scorer:
    servers = {NAME: {"url": server.url, "model": version}}
    table = {"components": {NAME: 1.0}, "servers": servers}
    return Scorer(RewardConfig.model_validate(table))


@contextlib.asynccontextmanager
async def working(broker: Broker, scorer: Scorer) -> AsyncIterator[None]:
    worker = RewardWorker(broker, scorer, consumer_name="w")
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)
        await scorer.close()


async def score(broker: Broker, group_id: int, sample_index: int) -> Reward:
    """Return the reward of a sample that the worker gets now."""
    task = rollout_task(broker.keys.run_id, group_id=group_id, sample_index=sample_index)
    await broker.publish(broker.keys.trajectories, trajectory(task))
    consumer = broker.consumer(
        broker.keys.scored, ScoredTrajectory, group="learner", consumer="test"
    )
    async with consumer, asyncio.timeout(WAIT_S):
        while not (entries := await consumer.read(1, 0.5)):
            pass
        await consumer.finish(entries[0])
    reward = entries[0].message.reward
    assert entries[0].message.stream_key() == str(task.key)
    assert reward is not None
    return reward


async def until_followed(scorer: Scorer, version: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while scorer.asking[NAME].newest != version:  # noqa: ASYNC110 - Redis has no event for it
            await asyncio.sleep(POLL_S)


async def test_a_swapped_model_scores_new_groups_and_begun_ones_keep_theirs(
    broker: Broker,
    redis_url: str,
    server_of: Callable[..., ScriptedServer],
    capsys: pytest.CaptureFixture[str],
):
    old, new = server_of(OLD, "verifier-1"), server_of(NEW, "verifier-2")
    scorer = scorer_of(old)
    where = ["--redis", redis_url, "--id", broker.keys.run_id]

    async def swap(*words: str) -> None:
        command = ["reward", "swap", NAME, *words, *where]
        assert await asyncio.to_thread(main, command) == 0
        await until_followed(scorer, words[1])

    async with working(broker, scorer):
        before = await score(broker, 0, 0)
        assert (before.total, before.versions) == (pytest.approx(OLD), {NAME: "verifier-1"})
        await swap("--model", "verifier-2", "--url", new.url)
        begun = await score(broker, 0, 1)
        assert (begun.total, begun.versions) == (pytest.approx(OLD), {NAME: "verifier-1"})
        for sample in range(2):
            after = await score(broker, 1, sample)
            assert (after.total, after.versions) == (pytest.approx(NEW), {NAME: "verifier-2"})
        await swap("--model", "verifier-1")  # back: its address is known
        assert (await score(broker, 2, 0)).versions == {NAME: "verifier-1"}
        assert (await score(broker, 3, 0)).versions == {NAME: "verifier-1"}
        capsys.readouterr()
        assert await asyncio.to_thread(main, ["status", *where]) == 0
    listed = [line for line in capsys.readouterr().out.splitlines() if "verifier" in line]
    assert [("verifier-2" in one, "what comes" in one) for one in listed] == [
        (True, False),
        (False, True),
    ]
    assert new.url in listed[0]
    assert old.url in listed[1]
    assert {body["model"] for body in old.bodies} == {"verifier-1"}
    assert {body["model"] for body in new.bodies} == {"verifier-2"}


async def test_a_service_that_has_not_seen_a_swap_scores_a_group_as_another_began_it(
    broker: Broker, server_of: Callable[..., ScriptedServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(versions, "LOOK_S", math.inf)
    models, server = ScoringModels(broker), server_of(OLD, "verifier-1")
    first, second = (scorer_of(server) for _ in range(2))
    late, early = (GroupVersions(models, scorer.asking) for scorer in (first, second))
    await late.start()
    await models.swap(NAME, ScoringModel(version="verifier-2", url=server.url))
    await early.start()
    group = rollout_task(group_id=7)
    other_group = rollout_task(group_id=8)
    question = rollout_task(group_id=7, purpose="eval", reply_stream="replies")
    assert await late.of(other_group) == {NAME: "verifier-1"}
    assert await early.of(group) == {NAME: "verifier-2"}
    assert await late.of(group) == {NAME: "verifier-2"}
    assert first.asking[NAME].of("verifier-2").server.model == "verifier-2"
    # A group of an evaluation is another one, and a sample on its own has no group to fit.
    await models.swap(NAME, ScoringModel(version="verifier-3", url=server.url))
    third = GroupVersions(models, scorer_of(server).asking)
    await third.start()
    assert await third.of(group) == {NAME: "verifier-2"}
    assert await third.of(question) == {NAME: "verifier-3"}
    assert await third.of(rollout_task(group_id=7, group_size=1)) == {NAME: "verifier-3"}
    with pytest.raises(ValueError, match=r"'verifier-9' of a scoring model is not known"):
        first.asking[NAME].of("verifier-9")


async def test_what_a_service_is_configured_with_is_the_newest_only_if_it_is_new(broker: Broker):
    models = ScoringModels(broker)

    async def known() -> list[tuple[str, str]]:
        return [(one.version, one.url) for one in await models.read(NAME)]

    await models.configure(NAME, ScoringModel(version="a", url="http://old"))
    await models.swap(NAME, ScoringModel(version="b", url="http://b"))
    await models.configure(NAME, ScoringModel(version="a", url="http://moved"))
    assert await known() == [("a", "http://moved"), ("b", "http://b")]
    await models.configure(NAME, ScoringModel(version="c", url="http://c"))
    await models.swap(NAME, ScoringModel(version="a", url="http://a"))
    assert await known() == [("b", "http://b"), ("c", "http://c"), ("a", "http://a")]
    assert await models.read("judge") == []
    now = time.time()
    await models.note_uses({(NAME, "b"), ("judge", "a")})
    used = await models.last_used(NAME)
    assert used.keys() == {"b"}
    assert abs(used["b"] - now) < WAIT_S


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exact_match", "--model", "m"], "'exact_match') asks no model; those that do are judge"),
        (["judge", "--model", "m"], "no reward service of this run asks a model for judge"),
        ([NAME, "--model", "m"], "new to this run, which knows verifier-1; say where it is"),
        ([NAME, "--model", "m", "--url", "http://127.0.0.1:9"], "does not say which models"),
        ([NAME, "--model", "m", "--url", "URL"], "'m' is not served at URL, which has verifier-2"),
    ],
)
async def test_a_swap_that_cannot_work_is_refused(
    broker: Broker,
    redis_url: str,
    server_of: Callable[..., ScriptedServer],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
):
    server = server_of(NEW, "verifier-2")
    first = ScoringModel(version="verifier-1", url="http://first")
    await ScoringModels(broker).configure(NAME, first)
    command = ["reward", "swap", *(word.replace("URL", server.url) for word in words)]
    command += ["--redis", redis_url, "--id", broker.keys.run_id]
    assert await asyncio.to_thread(main, command) != 0
    assert message.replace("URL", server.url) in " ".join(capsys.readouterr().err.split())
    assert await ScoringModels(broker).read(NAME) == [first]
