"""The real engine as a sampler: tokens, log-probabilities, limits, errors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.rollout.vllm.policy import VllmPolicy
from agent_r1.text.tokens import Generation, PromptError, PromptTooLongError
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.trajectory import VersionSpan
from tests.support.live_engine import (
    MAX_CONTEXT,
    LiveEngine,
    engine_settings,
    shared_engine,
    start_error,
)
from tests.support.snapshot_files import (
    EOS,
    VOCAB_SIZE,
    all_logprobs,
    build_model,
    model_logprobs,
    own_tensors,
    random_prompts,
    write_snapshot,
)

pytestmark = pytest.mark.vllm

PARITY = 1e-4
BLOCK = 32
"""Tokens of a prefix that the engine finds again at a time."""
LENGTHS = [2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, 100, 200]


@pytest.fixture
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LiveEngine:
    return shared_engine(request.config, tmp_path_factory)


def sample(
    engine: LiveEngine,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    request_id: str = "sample",
) -> Generation:
    return engine.run(
        engine.policy.generate(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            request_id=request_id,
        )
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_those_of_a_transformers_forward(
    engine: LiveEngine, temperature: float
):
    prompt = [5, 17, 200, 3, 42]
    version = engine.policy.policy_version
    result = sample(engine, prompt, max_tokens=40, temperature=temperature, seed=3)
    expected = model_logprobs(
        engine.models[version], prompt + result.token_ids, temperature=temperature
    )[len(prompt) - 1 :]
    assert result.logprobs == pytest.approx(expected, abs=PARITY)
    assert result.version_spans == [VersionSpan(policy_version=version, start=0, end=40)]
    assert result.finish_reason == "length"


@pytest.mark.parametrize("length", LENGTHS)
def test_scores_are_those_of_a_transformers_forward(engine: LiveEngine, length: int):
    [tokens] = random_prompts([length], seed=length)
    expected = model_logprobs(engine.models[engine.policy.policy_version], tokens)
    for _ in range(2):  # the second time, every whole block but that of the last token is cached
        scores = engine.run(engine.policy.score(tokens))
        assert len(scores) == length - 1
        assert scores == pytest.approx(expected, abs=PARITY)
    # The values of different tokens differ by far more than the bound.
    assert length == 2 or np.ptp(expected) > 1000 * PARITY
    later = [*tokens[:-1], (tokens[-1] + 1) % VOCAB_SIZE, 5]  # begins like what is cached
    expected = model_logprobs(engine.models[engine.policy.policy_version], later)
    assert engine.run(engine.policy.score(later)) == pytest.approx(expected, abs=PARITY)


def test_scores_from_a_token_on_are_those_of_the_whole_prompt(engine: LiveEngine):
    [tokens] = random_prompts([50], seed=3)
    expected = model_logprobs(engine.models[engine.policy.policy_version], tokens)
    # Blocks have 16 tokens: from the second time on, 48 are cached, fewer than 49 but over 40.
    for first in (20, 49, 40, 1):
        scores = engine.run(engine.policy.score(tokens, first))
        assert scores == pytest.approx(expected[first - 1 :], abs=PARITY)


def test_a_cached_prefix_is_not_scored_with_the_weights_before(engine: LiveEngine):
    [tokens] = random_prompts([100], seed=2)
    before = engine.run(engine.policy.score(tokens))
    engine.push(build_model(seed=77))
    scores = engine.run(engine.policy.score(tokens))
    model = engine.models[engine.policy.policy_version]
    assert scores == pytest.approx(model_logprobs(model, tokens), abs=PARITY)
    assert np.abs(np.subtract(scores, before)).max() > 1000 * PARITY


def test_greedy_sampling_takes_the_likeliest_token(engine: LiveEngine):
    prompt = [9, 8, 7]
    result = sample(engine, prompt, max_tokens=6, temperature=0.0)
    logprobs = all_logprobs(engine.models[engine.policy.policy_version], prompt + result.token_ids)[
        len(prompt) - 1 : -1
    ]
    for token, row in zip(result.token_ids, logprobs, strict=True):
        assert row[token] == pytest.approx(max(row), abs=PARITY)


def test_a_seed_fixes_the_sample_and_another_one_changes_it(engine: LiveEngine):
    first = sample(engine, [11, 12], max_tokens=30, seed=7)
    again = sample(engine, [11, 12], max_tokens=30, seed=7)
    other = sample(engine, [11, 12], max_tokens=30, seed=8)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def test_the_end_of_turn_token_is_sampled_kept_and_ends_the_generation(engine: LiveEngine):
    assert list(engine.policy.eos_token_ids) == [EOS]
    engine.push(build_model(seed=0, eos_weight=20.0))
    result = sample(engine, [5, 6], max_tokens=30)
    engine.push(build_model(seed=0))
    assert result.token_ids == [EOS]
    assert result.finish_reason == "stop"
    assert result.logprobs == pytest.approx([0.0], abs=1e-2)


def test_a_generation_ends_where_the_context_does(engine: LiveEngine):
    prompt = [4] * (MAX_CONTEXT - 3)
    result = sample(engine, prompt, max_tokens=50)
    assert len(result.token_ids) == 3
    assert result.finish_reason == "length"


def test_prompts_that_cannot_be_sampled_from_are_refused(engine: LiveEngine):
    with pytest.raises(
        PromptTooLongError, match=f"{MAX_CONTEXT} tokens.* at most {MAX_CONTEXT - 1}"
    ):
        sample(engine, [4] * MAX_CONTEXT, max_tokens=1)
    with pytest.raises(PromptError, match="0 tokens; at least 1"):
        sample(engine, [], max_tokens=1)
    with pytest.raises(PromptError, match=f"outside the model's vocabulary of {VOCAB_SIZE}"):
        sample(engine, [VOCAB_SIZE], max_tokens=1)
    with pytest.raises(ValueError, match=r"max_tokens \(0\)"):
        sample(engine, [4], max_tokens=0)
    with pytest.raises(PromptError, match="1 tokens; at least 2"):
        engine.run(engine.policy.score([4]))
    assert engine.policy.num_in_flight == 0


def test_a_cancelled_generation_leaves_the_engine(engine: LiveEngine):
    async def cancel_one() -> None:
        policy = engine.policy
        long = asyncio.ensure_future(
            policy.generate([3], max_tokens=500, temperature=1.0, seed=0, request_id="long")
        )
        await policy.generate([3], max_tokens=3, temperature=1.0, seed=0, request_id="short")
        assert policy.num_in_flight == 1
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert policy.num_in_flight == 0

    engine.run(cancel_one())
    assert len(sample(engine, [3], max_tokens=4, request_id="long").token_ids) == 4


def test_more_requests_than_fit_one_step_all_finish(engine: LiveEngine):
    async def many() -> list[Generation]:
        return await asyncio.gather(
            *(
                engine.policy.generate(
                    [number + 2] * 400,
                    max_tokens=3,
                    temperature=1.0,
                    seed=number,
                    request_id=f"many-{number}",
                )
                for number in range(40)
            )
        )

    # 40 prompts of 400 tokens: several steps of 2,048 tokens, and more than max_num_seqs.
    assert [len(result.token_ids) for result in engine.run(many())] == [3] * 40


async def test_a_model_or_a_setting_that_cannot_work_is_refused_before_the_engine_starts(
    tmp_path: Path,
):
    build_model(seed=0).save_pretrained(tmp_path / "model")
    missing = engine_settings(tmp_path / "none", max_context=512)
    assert "is not a directory" in await start_error(missing)
    (tmp_path / "empty").mkdir()
    empty = engine_settings(tmp_path / "empty", max_context=512)
    assert "no usable config.json" in await start_error(empty)
    longer = await start_error(engine_settings(tmp_path / "model", max_context=2048))
    assert "model.max_context (2048) exceeds the 1024 positions" in longer


async def test_a_bfloat16_engine_serves_a_float32_model_and_loads_bfloat16_weights(
    tmp_path: Path,
):
    import torch

    build_model(seed=0).save_pretrained(tmp_path / "model")
    policy = VllmPolicy(
        engine_settings(tmp_path / "model", dtype="bfloat16", max_context=128, kv_cache_gib=0.1)
    )
    await policy.start()
    try:
        tokens = list(range(2, 90))
        await assert_bfloat16_close(policy, tokens, build_model(seed=0))
        model = build_model(seed=1).to(torch.bfloat16)
        with pytest.raises(WeightsRefusedError, match=r"is float32; model\.dtype is bfloat16"):
            await policy.load_weights(write_snapshot(tmp_path, own_tensors(model.float()), 1))
        model = model.to(torch.bfloat16)
        await policy.load_weights(write_snapshot(tmp_path, own_tensors(model), 1))
        await assert_bfloat16_close(policy, tokens, model.float())
    finally:
        await policy.stop()


async def assert_bfloat16_close(policy: VllmPolicy, tokens: list[int], model: Any) -> None:
    scores = await policy.score(tokens)
    expected = model_logprobs(model, tokens)
    distances = [abs(a - b) for a, b in zip(scores, expected, strict=True)]
    # bfloat16 keeps 8 bits: about 0.01 here; a wrong tensor gives 0.5 and more.
    assert sum(distances) / len(distances) < 0.05
