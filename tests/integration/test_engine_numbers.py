"""The training engine in both number formats: layouts, FlexAttention, offload, published bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agent_r1.learner.engine import attention
from agent_r1.learner.engine.flex import plan_flex
from agent_r1.learner.engine.interface import LossSpec
from agent_r1.learner.engine.model_files import POLICY_FILE, WEIGHT
from agent_r1.weights.delta import apply_delta, write_delta
from tests.support.engines import (
    LAYOUTS,
    SAMPLES,
    gradient,
    make_engine,
    related,
    relative_distance,
)
from tests.support.flex import use_flex_on_cpu
from tests.support.snapshot_files import write_version
from tests.support.tiny_models import save_model, with_values

SPEC = LossSpec(policy_loss="gspo", aggregation="sequence_mean", kl_coef=0.1, entropy_coef=0.01)
ROOM = {"max_tokens_per_microbatch": 300}
"""Enough for more rows than FlexAttention needs, and too little for all samples."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A model with heads of 16, the least that FlexAttention takes."""
    return save_model(tmp_path_factory.mktemp("numbers") / "model", hidden=64)


@pytest.fixture(scope="module")
def exact(model_dir: Path) -> np.ndarray:
    """The gradient in float32, without a layout of ours."""
    return gradient(model_dir, related(SAMPLES), SPEC, **ROOM, **LAYOUTS["padded"])


@pytest.fixture(scope="module")
def rounding(model_dir: Path, exact: np.ndarray) -> float:
    """How far the gradient in bfloat16 is from it, without a layout of ours: 0.04 of its norm."""
    settings = {**ROOM, **LAYOUTS["padded"], "dtype": "bfloat16"}
    return relative_distance(gradient(model_dir, related(SAMPLES), SPEC, **settings), exact)


@pytest.fixture
def flex_plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the engine take FlexAttention, as on a GPU; the masks that it made."""
    use_flex_on_cpu(monkeypatch)
    plans: list[Any] = []

    def plan(*rows: Any) -> Any:
        plans.append(plan_flex(*rows))
        return plans[-1]

    monkeypatch.setattr(attention, "plan_flex", plan)
    return plans


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_a_layout_adds_nothing_to_the_rounding_of_bfloat16(
    model_dir: Path, exact: np.ndarray, rounding: float, layout: str
):
    settings = {**ROOM, **LAYOUTS[layout], "dtype": "bfloat16"}
    found = gradient(model_dir, related(SAMPLES), SPEC, **settings)
    assert relative_distance(found, exact) <= 1.1 * rounding


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_flex_attention_adds_nothing_to_the_rounding_of_bfloat16(
    model_dir: Path, exact: np.ndarray, rounding: float, layout: str, flex_plans: list[Any]
):
    settings = {**ROOM, **LAYOUTS[layout], "dtype": "bfloat16"}
    found = gradient(model_dir, related(SAMPLES), SPEC, **settings)
    assert relative_distance(found, exact) <= 1.1 * rounding
    assert flex_plans


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("packed", {}),
        ("shared", {"activation_checkpointing": True}),
        ("shared", {"activation_checkpointing": True, "zero_stage": 3}),
    ],
)
def test_flex_attention_has_the_gradient_of_padding(
    model_dir: Path, exact: np.ndarray, layout: str, more: dict[str, Any], flex_plans: list[Any]
):
    found = gradient(model_dir, related(SAMPLES), SPEC, **ROOM, **LAYOUTS[layout], **more)
    assert relative_distance(found, exact) <= 1e-5
    assert len(flex_plans) > 1


def test_flex_attention_has_the_values_and_scores_of_padding(
    model_dir: Path, flex_plans: list[Any]
):
    samples = with_values(related(SAMPLES))
    spec = LossSpec(trains_policy=False)
    found: list[list[np.ndarray]] = []
    for layout in ("padded", "shared"):
        engine = make_engine(model_dir, critic=True, **ROOM, **LAYOUTS[layout])
        engine.train_batch(samples, spec)  # the critic's head starts at 0
        found.append([*engine.token_values(samples), *engine.token_logprobs(samples)])
    for padded, shared in zip(*found, strict=True):
        np.testing.assert_allclose(shared, padded, atol=2e-5)
    assert flex_plans


def test_a_model_whose_heads_are_too_small_for_flex_attention_is_refused(
    tmp_path: Path, flex_plans: list[Any]
):
    with pytest.raises(ValueError, match=r"share_prefixes = true needs FlexAttention.* size 8, "):
        make_engine(save_model(tmp_path / "model"), **LAYOUTS["shared"])
    assert not flex_plans


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("stage", "offload"), [(1, "optimizer"), (3, "all")])
def test_offloading_changes_no_step(
    model_dir: Path, tmp_path: Path, stage: int, offload: str, dtype: str
):
    spec = LossSpec(kl_coef=0.1)
    metrics: list[list[float]] = []
    weights: list[dict[str, torch.Tensor]] = []
    for place in ("none", offload):
        engine = make_engine(
            model_dir, reference=True, dtype=dtype, zero_stage=stage, offload=place
        )
        steps = [engine.train_batch(SAMPLES, spec) for _ in range(2)]
        metrics.append([m[n] for m in steps for n in ("loss/total", "loss/kl_ref", "grad_norm")])
        write_version(engine, tmp_path / place, "run", 1)
        weights.append(load_file(tmp_path / place / "model.safetensors"))
    np.testing.assert_allclose(metrics[1], metrics[0], rtol=1e-4, atol=1e-7)
    # The norm is summed in another order, which may round a weight to its neighbour: 2^-7 of it.
    rtol = 1e-5 if dtype == "float32" else 2**-7
    # Adam divides by the gradient's own size: where that is no more than rounding, a part of the
    # step (0.001) is rounding too.
    for name, expected in weights[0].items():
        found = weights[1][name]
        rounded = ~torch.isclose(found, expected, rtol=rtol, atol=1e-6)
        assert rounded.float().mean() < 1e-3, name
        assert float((found - expected).abs().max()) < (1e-4 if dtype == "float32" else 2**-6), name


@pytest.mark.parametrize("stage", [1, 3])
def test_bfloat16_is_published_from_float32_and_its_delta_gives_the_same_bits(
    model_dir: Path, tmp_path: Path, stage: int
):
    engine = make_engine(model_dir, dtype="bfloat16", lr=1e-6, zero_stage=stage)
    write_version(engine, tmp_path / "v0", "run", 0)
    for _ in range(3):
        engine.train_batch(SAMPLES, LossSpec())
    manifest = write_version(engine, tmp_path / "v3", "run", 3)
    base, new = (tmp_path / version / "model.safetensors" for version in ("v0", "v3"))
    published, before = load_file(new), load_file(base)

    engine.save_state(tmp_path / "state")
    state = load_file(tmp_path / "state" / POLICY_FILE)
    rounded = finer = changed = 0
    for name, weight in published.items():
        own = name.replace("lm_head", "head").replace("model.", "decoder.", 1)
        master = state[f"{own}.{WEIGHT}"]
        assert torch.equal(master.bfloat16(), weight)
        rounded += weight.numel()
        finer += int((master != weight).sum())
        changed += int((weight != before[name]).sum())
    # Three steps of 1e-6 move most weights (not the embeddings of tokens that no sample has), and
    # few of them to the next bfloat16.
    assert finer > 0.7 * rounded
    assert 0 < changed < 0.05 * rounded

    frames, _ = write_delta(base, new, manifest.tensors, tmp_path / "delta")
    apply_delta(base, tmp_path / "delta", frames, manifest, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == new.read_bytes()
    assert sum(frames) < 0.1 * new.stat().st_size
