"""`EvaluationRun` against a real Redis, with stand-ins for rollout and reward."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agent_r1.evaluation.config import QuestioningConfig
from agent_r1.evaluation.main import EvaluationRun
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import Decoding
from tests.support.learner_fakes import FakeServices, write_tasks

pytestmark = pytest.mark.redis


@pytest.mark.parametrize(("continuations", "purpose"), [(None, "eval"), (2, "value")])
async def test_only_what_says_what_turns_are_worth_has_its_purpose(
    tmp_path: Path, redis_url: str, run_id: str, continuations: int | None, purpose: str
):
    decoding = Decoding(method="value_guided", beta=0.0, continuations=continuations)
    questioning = QuestioningConfig(
        max_questions=2, timeout_s=20.0, temperature=1.0, decoding=decoding
    )
    sets = {"a": write_tasks(tmp_path / "a.jsonl", 2, name="a")}
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        evaluation = EvaluationRun(sets=sets, questioning=questioning, out=tmp_path / "out.jsonl")
        await asyncio.to_thread(
            evaluation.ask, run=RunConfig(id=run_id), redis=RedisConfig(url=redis_url)
        )
    assert [rollout.purpose for rollout in services.seen] == [purpose] * 2
    assert len(evaluation.file.answers) == 2


async def test_every_question_becomes_one_line_and_counts_in_the_summary(
    tmp_path: Path, redis_url: str, run_id: str
):
    sets = {name: write_tasks(tmp_path / f"{name}.jsonl", 5, name=name) for name in ("a", "b")}
    out = tmp_path / "out" / "answers.jsonl"
    async with (
        await Broker.connect(redis_url, run_id) as broker,
        FakeServices(broker).running() as services,
    ):
        questioning = QuestioningConfig(max_questions=4, max_turns=2, timeout_s=20.0)
        evaluation = EvaluationRun(sets=sets, questioning=questioning, out=out)
        await asyncio.to_thread(
            evaluation.ask, run=RunConfig(id=run_id), redis=RedisConfig(url=redis_url)
        )
        summary = await asyncio.to_thread(evaluation.summarise)
    assert {name: scores.n for name, scores in summary.items()} == {"a": 4, "b": 4}
    text = await asyncio.to_thread(out.read_text)
    lines = [json.loads(line) for line in text.splitlines()]
    assert sorted(line["id"] for line in lines) == [f"{n}{i}" for n in "ab" for i in range(4)]
    assert {rollout.sampling.max_turns for rollout in services.seen} == {2}
    assert {rollout.purpose for rollout in services.seen} == {"eval"}
    written = json.loads(await asyncio.to_thread(out.with_suffix(".summary.json").read_text))
    assert written["sets"]["a"]["n"] == 4
    assert written["sets"]["b"]["types"]["b"]["n"] == 2
