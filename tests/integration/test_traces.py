"""One sample is one trace, from the learner's request to the step it is trained in.

Learner, rollout server, tool and reward service are real, but for engine and sampler; so is what
receives the spans.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_r1.learner.train import Learner
from agent_r1.reward.config import RewardConfig
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1.runtime import tracing
from agent_r1.runtime.config import ListenConfig, RunConfig
from agent_r1.runtime.http.serving import bind, serving
from agent_r1.runtime.tracing import begin_trace, span, start_tracing, trace_headers
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1_proto.streams import Broker
from tests.support.learner_fakes import FakeEngine, training_spec, write_tasks
from tests.support.otlp_receiver import receiving
from tests.support.rollout_bench import ANSWER, SEARCH, Bench

WAIT_S = 120.0


class Search(Tool):
    """Answers every query alike."""

    name = "search"
    description = "Finds."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        return "Ada was born in 1815."


@pytest.fixture(autouse=True)
def _no_tracer_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_tracer", None)  # as it is after each test, too


def test_nothing_is_traced_without_an_endpoint() -> None:
    assert start_tracing(RunConfig(), "test") is None
    with span("turn"):
        assert trace_headers() == {}
    assert begin_trace("sample") is None


def test_a_collector_that_is_away_holds_nothing_up() -> None:
    provider = start_tracing(RunConfig(otlp_endpoint="http://127.0.0.1:1"), "test")
    with span("turn", number=3):
        assert trace_headers().keys() == {"traceparent"}
    assert provider is not None
    provider.shutdown()


@pytest.mark.redis
async def test_one_trajectory_is_one_trace(tmp_path: Path, redis_url: str, run_id: str) -> None:
    write_tasks(tmp_path / "run-data" / "train.jsonl", 2)
    options = {"groups_per_batch": 1, "canary_tokens": 0, "weights_dir": tmp_path}
    spec = training_spec(tmp_path / "run", redis_url, run_id, steps=1, **options)
    listen = ListenConfig()
    with receiving() as receiver:
        provider = start_tracing(RunConfig(otlp_endpoint=receiver.url), "test")
        async with await Broker.connect(redis_url, run_id) as broker:
            bench = Bench.of(broker, redis_url, tmp_path)
            listener = bind("search", listen, None)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            tool: Any = SimpleNamespace(name="search", url=url)
            stop = asyncio.Event()
            scorer = Scorer(RewardConfig(components={"format": 1.0}))
            reward = RewardWorker(broker, scorer, consumer_name="test")
            async with (
                serving(create_app(ToolService(Search(), instance="one")), listener, listen, None),
                bench.server(bench.policy(SEARCH, ANSWER), tool),
                asyncio.timeout(WAIT_S),
            ):
                scoring = asyncio.create_task(reward.run(stop))
                assert await Learner(spec, FakeEngine()).run() == "finished"
                stop.set()
                await scoring
            listener.close()
        assert provider is not None
        provider.shutdown()
    roots = [one for one in receiver.spans if one.name == "sample"]
    # One batch of one group of two samples, and no more groups than the run trains.
    assert len(roots) == 2
    assert len({root.trace_id for root in roots}) == 2
    for root in roots:
        trace = {one.span_id: one for one in receiver.spans if one.trace_id == root.trace_id}

        def path(span_id: str, trace: dict[str, Any] = trace) -> str:
            one = trace[span_id]
            return one.name if not one.parent_id else f"{path(one.parent_id)} > {one.name}"

        assert sorted(map(path, trace)) == sorted(
            [
                "sample",
                "sample > rollout",
                *["sample > rollout > turn", "sample > rollout > turn > generate"] * 2,
                "sample > rollout > turn > tool call",
                "sample > rollout > turn > tool call > tool",
                "sample > reward",
                "sample > learn",
            ]
        )
        (called,) = [one for one in trace.values() if one.name == "tool"]
        assert called.attributes["agent_r1.tool"] == "search"
        (asked,) = [one for one in trace.values() if one.name == "tool call"]
        assert asked.attributes["gen_ai.operation.name"] == "execute_tool"
        assert asked.attributes["gen_ai.tool.name"] == "search"
        (attempt,) = [one for one in trace.values() if one.name == "rollout"]
        assert attempt.attributes["gen_ai.operation.name"] == "invoke_agent"
        assert attempt.attributes["gen_ai.conversation.id"].startswith(f"{run_id}/")
        for made in (one for one in trace.values() if one.name == "generate"):
            assert made.attributes["gen_ai.operation.name"] == "chat"
            assert made.attributes["gen_ai.usage.input_tokens"] > 0
            assert made.attributes["gen_ai.usage.output_tokens"] > 0
        (learned,) = [one for one in trace.values() if one.name == "learn"]
        assert learned.attributes["agent_r1.step"] == 1
    assert {one.trace_id for one in receiver.spans} == {root.trace_id for root in roots}
