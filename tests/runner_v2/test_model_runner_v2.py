"""Model Runner V2 where V1 has other code: prompts in chunks, and greedy answers of both."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from agent_r1.rollout.vllm import engine_process
from tests.runner_v2.gpu_engine import BATCHED_TOKENS
from tests.runner_v2.greedy import NUM_TOKENS, answer_all
from tests.support.live_engine import MAX_CONTEXT, LiveEngine, engine_settings, shared_engine
from tests.support.snapshot_files import build_model, model_logprobs, random_prompts

pytestmark = [pytest.mark.vllm, pytest.mark.v2]

PARITY = 1e-5
V1_TIMEOUT_S = 200.0


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LiveEngine:
    return shared_engine(request.config, tmp_path_factory)


def test_scores_of_prompts_that_share_steps_in_chunks(engine: LiveEngine):
    batch = random_prompts([200] * 3, seed=1)
    assert sum(map(len, batch)) > BATCHED_TOKENS  # so that some are computed in two steps
    model = engine.models[engine.policy.policy_version]

    async def score_all() -> list[list[float]]:
        return await asyncio.gather(*(engine.policy.score(tokens) for tokens in batch))

    for _ in range(2):
        for tokens, scores in zip(batch, engine.run(score_all()), strict=True):
            assert scores == pytest.approx(model_logprobs(model, tokens), abs=PARITY)


def test_greedy_answers_are_those_of_the_other_runner(engine: LiveEngine):
    asked = random_prompts([1, 33, 97, 200], seed=3)
    engine.push(build_model(seed=0))  # that of the directory
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "TRITON_INTERPRET", "TORCHDYNAMO_DISABLE")
    }
    command = [sys.executable, "-m", "tests.runner_v2.greedy", str(engine.folder / "model")]
    found = subprocess.run(
        command,
        input=json.dumps(asked),
        env=plain,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=V1_TIMEOUT_S,
    )
    others = json.loads(found.stdout.splitlines()[-1])
    for (ids, logprobs), (other_ids, other_logprobs) in zip(
        engine.run(answer_all(engine.policy, asked)), others, strict=True
    ):
        assert len(ids) == NUM_TOKENS
        assert ids == other_ids
        assert logprobs == pytest.approx(other_logprobs, abs=PARITY)


def test_the_other_runner_can_be_chosen_where_triton_is_there(engine: LiveEngine):
    facts = engine.policy._model()
    settings = engine_settings(engine.folder / "model", max_context=MAX_CONTEXT)
    args = engine_process._engine_args(settings, facts, on_cpu=False)
    for runner in ("v1", "v2"):
        with engine_process._engine_environment(settings, runner, compiled=False):
            assert args.create_engine_config().use_v2_model_runner == (runner == "v2")
