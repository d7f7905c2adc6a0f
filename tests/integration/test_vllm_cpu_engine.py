"""What makes the engine of a CPU fast changes no number: norms, draws, prefixes, whole answers."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agent_r1.rollout.policy import EngineWork
from agent_r1.rollout.vllm import engine_process
from agent_r1.rollout.vllm.settings import read_model
from agent_r1.text.tokens import Generation
from tests.support.live_engine import (
    LiveEngine,
    engine_settings,
    shared_engine,
    start_error,
)
from tests.support.snapshot_files import all_logprobs, build_model

pytestmark = pytest.mark.vllm

BLOCK = 32
"""Tokens of a prefix that the engine finds again at a time."""


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LiveEngine:
    return shared_engine(request.config, tmp_path_factory)


def sample_all(engine: LiveEngine, prompts: list[list[int]], **options: Any) -> list[Generation]:
    """Sample after each prompt at the same time; the seed is the prompt's index."""

    async def all_at_once() -> list[Generation]:
        calls = (
            engine.policy.generate(
                prompt, **{"temperature": 1.0, "seed": i, "request_id": f"all-{i}", **options}
            )
            for i, prompt in enumerate(prompts)
        )
        return await asyncio.gather(*calls)

    return engine.run(all_at_once())


def test_its_model_is_imported_once(
    engine: LiveEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from vllm.model_executor.models.registry import ModelRegistry

    [name] = json.loads((engine.folder / "model" / "config.json").read_text())["architectures"]
    # For a class that it has not imported vLLM starts a process, and keeps here what that found.
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    assert ModelRegistry.models[name].inspect_model_cls().architecture == name
    assert list(tmp_path.iterdir()) == []


def test_tokens_are_drawn_as_the_model_says(engine: LiveEngine):
    count, prompt = 1500, [5, 9, 70]
    answers = sample_all(engine, [prompt] * count, max_tokens=1)
    drawn = Counter(answer.token_ids[0] for answer in answers)

    model = engine.models[engine.policy.policy_version]
    [*_, row] = all_logprobs(model, prompt)
    probabilities = [2.718281828459045**logprob for logprob in row]
    # Of `count` draws, a token of probability p has count * p, give or take 5 standard deviations
    # of sqrt(count * p * (1 - p)); one draw more for those too rare for a deviation to tell.
    for token, p in enumerate(probabilities):
        deviation = (count * p * (1 - p)) ** 0.5
        assert abs(drawn[token] - count * p) <= 5 * deviation + 1
    assert len(drawn) > 20  # the model is not so sure that this shows nothing


def test_an_answer_does_not_depend_on_the_batch(engine: LiveEngine):
    prompts = [[number + 2, 50, 7] for number in range(24)]
    together = sample_all(engine, prompts, max_tokens=40)
    alone = [
        engine.run(
            engine.policy.generate(
                prompts[i], max_tokens=40, temperature=1.0, seed=i, request_id="alone"
            )
        )
        for i in (0, 11, 23)
    ]

    assert [answer.token_ids for answer in alone] == [together[i].token_ids for i in (0, 11, 23)]
    assert len({tuple(answer.token_ids) for answer in together}) == 24


def test_the_prompt_of_a_group_is_computed_once(engine: LiveEngine):
    prompt = [(7 * i) % 290 + 2 for i in range(3 * BLOCK + 5)]
    before = engine.policy.work.prompt_tokens
    sample_all(engine, [prompt] * 8, max_tokens=2)

    # The three whole blocks once, and the 5 tokens behind them for each of the 8.
    assert engine.policy.work.prompt_tokens - before == 3 * BLOCK + 8 * 5


def test_a_turn_computes_what_is_new_since_the_turn_before(engine: LiveEngine):
    first = [(11 * i) % 290 + 2 for i in range(2 * BLOCK)]
    [answer] = sample_all(engine, [first], max_tokens=BLOCK)
    before = engine.policy.work.prompt_tokens
    second = first + answer.token_ids + [3] * 10
    sample_all(engine, [second], max_tokens=2)

    # The last token of the first turn has no keys and values yet: it was sampled, not computed.
    assert engine.policy.work.prompt_tokens - before == BLOCK + 10


def test_norms_are_those_of_pytorch():
    import torch

    from agent_r1.rollout.vllm.cpu.norms import fused_add_rms_norm, rms_norm

    torch.manual_seed(0)
    for rows, width in ((1, 128), (77, 896)):
        x, residual, weight = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width)
        expected = torch.nn.functional.rms_norm(x, (width,), weight, 1e-6)
        torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, atol=2e-6, rtol=2e-6)
        total = x + residual
        expected = torch.nn.functional.rms_norm(total, (width,), weight, 1e-6)
        normed, summed = fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
        torch.testing.assert_close(normed, expected, atol=2e-6, rtol=2e-6)
        torch.testing.assert_close(summed, total, atol=0, rtol=0)


async def test_what_does_not_fit_this_machine_is_refused_before_the_engine_starts(tmp_path: Path):
    build_model(seed=0).save_pretrained(tmp_path / "model")
    # 2 layers x (key + value) x 1 head x 32 x 4 bytes = 512 bytes a token, 0.25 MiB a sequence.
    small = await start_error(
        engine_settings(tmp_path / "model", max_context=512, kv_cache_gib=0.0002)
    )
    assert "rollout.kv_cache_gib (0.0002)" in small
    assert "0.00 GiB one sequence" in small
    huge = await start_error(
        engine_settings(tmp_path / "model", max_context=512, kv_cache_gib=100_000.0)
    )
    assert "exceed the free memory" in huge
    keys = ["rollout.max_concurrent", "rollout.kv_cache_gib (", "model.max_context"]
    places = [huge.index(key, huge.index("lower, in this order")) for key in keys]
    assert places == sorted(places)


async def test_the_model_runner_of_gpus_is_refused(tmp_path: Path):
    build_model(seed=0).save_pretrained(tmp_path / "model")
    settings = engine_settings(tmp_path / "model", max_context=512, model_runner="v2")
    assert 'rollout.model_runner ("v2") runs on GPUs only' in await start_error(settings)


@pytest.mark.parametrize(("wanted", "found"), [(None, 8192), (1024, 1024)])
def test_vllm_chooses_the_tokens_of_a_step_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int | None, found: int
):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    def defaults_of_an_h100(cls: Any, world_size: int) -> tuple[dict[Any, int], dict[Any, int]]:
        context = UsageContext.OPENAI_API_SERVER
        return {context: 8192, UsageContext.LLM_CLASS: 16384}, {context: 1024}

    configs: list[Any] = []
    monkeypatch.setattr(EngineArgs, "get_batch_defaults", classmethod(defaults_of_an_h100))
    monkeypatch.setattr(AsyncLLM, "from_vllm_config", lambda config, **_: configs.append(config))
    build_model(seed=0).save_pretrained(tmp_path / "model")
    settings = engine_settings(tmp_path / "model", max_context=512, max_batched_tokens=wanted)
    args = engine_process._engine_args(settings, read_model(settings), on_cpu=False)
    started = engine_process.launch_engine(args, settings, EngineWork(), "v1", forks=False)
    assert configs[0].scheduler_config.max_num_batched_tokens == found
    assert f"max_batched_tokens={found} " in started.description
