"""The learner on agents' sessions: what sequences begin with alike is computed once, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.model_files import CRITIC_FILE, POLICY_FILE, WEIGHT
from benchmarks.samples import as_sampled
from tests.support.engines import LAYOUTS, make_engine, relative_distance
from tests.support.forests import KINDS, SMALL, grow, samples_of
from tests.support.tiny_models import save_model
from tests.support.two_ranks import SHOWS_GRADIENT

MOST_TOKENS = 900
"""Of a micro-batch: a step has several."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def gradients(
    model_dir: Path, folder: Path, samples: list[TrainSample], loss: LossSpec, **layout: Any
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The changes of policy and critic in one step, which are their gradients; its metrics."""
    settings = {**SHOWS_GRADIENT, "max_tokens_per_microbatch": MOST_TOKENS, **layout}
    engine = make_engine(model_dir, critic=True, **settings)
    states: list[dict[str, dict[str, np.ndarray]]] = []
    metrics: dict[str, float] = {}
    for version in ("before", "after"):
        engine.save_state(folder / version)
        files = (POLICY_FILE, CRITIC_FILE)
        states.append({name: load_file(folder / version / name) for name in files})
        metrics = metrics or engine.train_batch(samples, loss)
    before, after = states
    changes = {
        name: np.concatenate(
            [
                (before[name][key].astype(np.float64) - after[name][key]).ravel()
                for key in sorted(before[name])
                if key.endswith(f".{WEIGHT}")
            ]
        )
        for name in before
    }
    return changes, metrics


@pytest.mark.parametrize(
    ("policy_loss", "aggregation"), [("ppo", "token_mean"), ("gspo", "sequence_mean")]
)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_session_is_trained_as_if_each_of_its_sequences_stood_alone(
    kind: str, policy_loss: str, aggregation: Any, model_dir: Path, tmp_path: Path
):
    samples = samples_of(await grow(kind, SMALL, 2))
    samples = as_sampled(samples, make_engine(model_dir), noise=0.02)
    loss = LossSpec(policy_loss=policy_loss, aggregation=aggregation)
    found = {
        layout: gradients(model_dir, tmp_path / layout, samples, loss, **LAYOUTS[layout])
        for layout in ("shared", "padded")
    }
    (ours, metrics), (alone, _) = found.values()
    assert metrics["batch/microbatches"] > 1
    assert metrics["batch/shared_share"] > 0.15
    for name, gradient in alone.items():
        assert np.linalg.norm(gradient) > 0
        assert relative_distance(ours[name], gradient) <= 1e-5
