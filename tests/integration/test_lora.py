"""LoRA, for real: the learner trains adapters, a CPU engine serves each version of them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.lora import export_merged
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.runtime.config import LoraConfig, ModelConfig
from agent_r1.text.tokens import Generation
from agent_r1.weights.adapters import ADAPTER_FILE, adapter_shapes, read_adapter
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.weights import WeightManifest
from tests.support.engines import (
    SAMPLES,
    gradient,
    make_engine,
    plain_loss,
    relative_distance,
    sequence_logprobs,
)
from tests.support.live_engine import LiveEngine
from tests.support.sent_weights import sent
from tests.support.snapshot_files import VOCAB_SIZE, build_model, model_logprobs, write_version
from tests.support.tiny_models import save_model

PARITY = 1e-4
LORA = LoraConfig(rank=4)
SPEC = LossSpec(kl_coef=0.1)
STEP: dict[str, Any] = {"lr": 3e-3}
"""Versions then differ by far more than PARITY."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("lora") / "model", tied=True)


def scores(engine: DeepSpeedPolicyEngine) -> np.ndarray:
    return np.concatenate(engine.token_logprobs(SAMPLES))


def train(engine: DeepSpeedPolicyEngine, samples: Sequence[TrainSample] = SAMPLES) -> list[float]:
    return [engine.train_batch(samples, SPEC)["loss/total"] for _ in range(2)]


@pytest.mark.parametrize("settings", [{}, {"zero_stage": 3}])
def test_only_adapters_are_trained_written_and_restored(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any]
):
    base = make_engine(model_dir)
    engine = make_engine(model_dir, reference=True, lora=LORA, **STEP, **settings)
    # The second matrix of a new adapter is 0.
    np.testing.assert_allclose(scores(engine), scores(base), atol=1e-6)
    train(engine)
    engine.save_state(tmp_path / "state")
    went_on = train(engine)

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    shapes = adapter_shapes({n: tuple(p.shape) for n, p in model.named_parameters()}, LORA)
    manifest = write_version(engine, tmp_path / "v1", "run", 1)
    assert {entry.name: tuple(entry.shape) for entry in manifest.tensors} == shapes
    assert engine.snapshot_bytes() == 4 * sum(a * b for a, b in shapes.values())
    with safe_open(tmp_path / "state" / "policy.safetensors", "pt") as state:
        names = set(state.keys())
    # A weight and two moments of each matrix, and nothing of the model.
    assert len(names) == 3 * len(shapes)
    assert all(".lora_A." in name or ".lora_B." in name for name in names)

    # The reference is the model without its adapter: it has not moved, and the policy has.
    reference = np.concatenate(engine.token_logprobs(SAMPLES, "reference"))
    np.testing.assert_allclose(reference, scores(base), atol=1e-6)
    assert np.abs(scores(engine) - reference).max() > 100 * PARITY

    resumed = make_engine(model_dir, reference=True, lora=LORA, **STEP, **settings)
    resumed.load_state(tmp_path / "state")
    assert train(resumed) == went_on


def test_activations_that_are_computed_again_have_the_same_gradient(model_dir: Path):
    settings: dict[str, Any] = {"zero_stage": 3, "activation_checkpointing": True}
    kept, again = (
        train(make_engine(model_dir, reference=True, lora=LORA, **STEP, **more))
        for more in ({}, settings)
    )
    # The second loss is that of weights which the first gradient has changed.
    assert again == pytest.approx(kept, rel=1e-5)
    assert kept[0] != pytest.approx(kept[1], rel=1e-3)


def test_a_merged_adapter_equals_a_separate_one_and_starts_another_run(
    model_dir: Path, tmp_path: Path
):
    engine = make_engine(model_dir, reference=True, lora=LORA, **STEP)
    train(engine)
    engine.export_model(tmp_path / "adapter")
    adapter = read_adapter(tmp_path / "adapter")
    assert adapter.base == str(model_dir)
    table = ModelConfig(path=str(model_dir), max_context=512)
    export_merged(tmp_path / "merged", table, tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = SAMPLES[0].token_ids
    np.testing.assert_allclose(
        sequence_logprobs(engine, [ids])[0], model_logprobs(merged, ids.tolist()), atol=1e-5
    )
    # Tied weights are stored once, as the base has them.
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert names == load_file(model_dir / "model.safetensors").keys()

    written = load_file(tmp_path / "adapter" / ADAPTER_FILE)
    started = make_engine(model_dir, reference=True, lora=adapter.lora)
    np.testing.assert_array_equal(scores(started), scores(engine))

    found = gradient(model_dir, SAMPLES, LossSpec(), lora=adapter.lora)
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model_dir), tmp_path / "adapter", is_trainable=True
    )
    plain_loss(plain, SAMPLES).backward()
    grads: dict[str, Any] = {
        n.replace(".default.", "."): p.grad for n, p in plain.named_parameters()
    }
    expected = [grads[name].double().flatten().numpy() for name in sorted(written)]
    assert relative_distance(found, np.concatenate(expected)) <= 1e-5


def test_adapters_and_a_whole_critic_are_trained_together(model_dir: Path):
    engine = make_engine(model_dir, critic=True, lora=LORA)
    sampled = [
        dataclasses.replace(
            sample,
            value_mask=sample.loss_mask,
            returns=np.ones(sample.num_tokens, np.float32),
            old_values=np.zeros(sample.num_tokens, np.float32),
        )
        for sample in SAMPLES
    ]
    losses = [
        engine.train_batch(sampled, LossSpec(value_clip=None))["loss/value"] for _ in range(3)
    ]
    assert losses[2] < losses[0]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveEngine]:
    engine = LiveEngine(tmp_path_factory.mktemp("served"), lora=LORA)
    yield engine
    engine.close()


@pytest.mark.vllm
def test_every_pushed_adapter_is_served_also_after_a_prefix_cached_before(
    live: LiveEngine, tmp_path: Path
):
    learner = make_engine(live.folder / "model", reference=True, lora=LORA, **STEP)
    # 90 tokens: two whole blocks of 32 that the engine caches, and a rest.
    prompt = [int(token) for token in np.random.default_rng(3).integers(2, 290, 90)]

    def distance() -> float:
        held = live.run(live.policy.score(prompt))
        return float(
            np.abs(np.array(held) - sequence_logprobs(learner, [np.array(prompt)])[0]).max()
        )

    async def sample(name: str, max_tokens: int) -> Generation:
        return await live.policy.generate(
            prompt, max_tokens=max_tokens, temperature=1.0, seed=0, request_id=name
        )

    async def push_under_load(manifest: WeightManifest) -> Generation:
        running = asyncio.ensure_future(sample(f"running-{manifest.policy_version}", 300))
        await sample(f"pace-{manifest.policy_version}", 20)
        await live.policy.load_weights(manifest)
        return await running

    assert distance() <= PARITY  # version 0: an adapter of zeros
    # The model of the engine knows fewer tokens than that of the samples.
    known = [dataclasses.replace(one, token_ids=one.token_ids % VOCAB_SIZE) for one in SAMPLES]
    for version in (1, 2):
        live.run(sample(f"before-{version}", 2))  # caches the prompt under the older version
        train(learner, known)
        manifest = write_version(learner, tmp_path / f"v{version}", "test", version)
        assert distance() > 100 * PARITY
        crossing = live.run(push_under_load(manifest))
        assert live.policy.policy_version == version
        assert distance() <= PARITY
        # Its later tokens are the new adapter's, over a prefix computed under it.
        older, newer = crossing.version_spans
        assert (older.policy_version, newer.policy_version) == (version - 1, version)
        ids = np.array(prompt + crossing.token_ids)
        expected = sequence_logprobs(learner, [ids])[0][len(prompt) - 1 :][newer.start :]
        np.testing.assert_allclose(crossing.logprobs[newer.start :], expected, atol=PARITY)

    async def send() -> None:
        async with sent(learner.weights(), 3, tmp_path, learner.adapter) as manifest:
            await live.policy.load_weights(manifest)

    train(learner, known)
    assert distance() > 100 * PARITY
    live.run(send())
    assert distance() <= PARITY


@pytest.mark.vllm
def test_weights_of_another_form_are_refused(live: LiveEngine, tmp_path: Path):
    with pytest.raises(WeightsRefusedError, match=r"whole model, and .* adapter of rank 4 and alp"):
        live.push(build_model(seed=5))
    learner = make_engine(live.folder / "model", lora=LoraConfig(rank=2))
    manifest = write_version(learner, tmp_path / "v", "test", 9)
    with pytest.raises(WeightsRefusedError, match=r"adapter of rank 2 .* adapter of rank 4"):
        live.run(live.policy.load_weights(manifest))
