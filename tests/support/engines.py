"""Real training engines of one rank on the CPU, and what tests compare of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
from agent_r1.runtime.config import ModelConfig
from tests.support import two_ranks
from tests.support.tiny_models import VOCABULARY, make_samples

sequence_logprobs = two_ranks.sequence_logprobs
SAMPLES = make_samples(two_ranks.COUNT, seed=two_ranks.SEED)
LAYOUTS: dict[str, dict[str, bool]] = {
    "padded": {"share_prefixes": False},
    "packed": {"packing": True},
    "shared": {},
}


def related(samples: list[TrainSample]) -> list[TrainSample]:
    """The samples, and variants of each that begin like it, up to whole copies, out of order."""
    rng = np.random.default_rng(5)
    made = list(samples)
    for sample in samples:
        for kept in (sample.num_tokens, *rng.integers(1, sample.num_tokens, 3)):
            ids = sample.token_ids.copy()
            ids[kept:] = rng.integers(0, VOCABULARY, len(ids) - kept)
            advantages = np.where(sample.loss_mask, rng.normal(), 0.0).astype(np.float32)
            made.append(dataclasses.replace(sample, token_ids=ids, advantages=advantages))
    return [made[i] for i in rng.permutation(len(made))]


def make_engine(
    model_dir: Path, reference: bool = False, critic: bool = False, **settings: Any
) -> DeepSpeedPolicyEngine:
    """An engine of one rank on the CPU."""
    model = ModelConfig(
        path=str(model_dir),
        max_context=512,
        dtype=settings.pop("dtype", "float32"),
        attention=settings.pop("attention", "sdpa"),
        lora=settings.pop("lora", None),
    )
    total_steps, warmup = settings.pop("total_steps", None), settings.pop("critic_warmup_steps", 0)
    group = settings.pop("group", None)
    table = EngineConfig.model_validate({**two_ranks.SETTINGS, **settings})
    setup = CriticSetup(model, two_ranks.CRITIC_LR, warmup) if critic else None
    return DeepSpeedPolicyEngine(
        EngineSetup.of(model, table, with_reference=reference, critic=setup),
        total_steps=total_steps,
        group=group,
    )


def gradient(
    model_dir: Path, samples: list[TrainSample], spec: LossSpec, **settings: Any
) -> np.ndarray:
    """The gradient of one optimizer batch, unclipped."""
    reference = spec.kl_coef > 0
    engine = make_engine(model_dir, reference, **{**two_ranks.SHOWS_GRADIENT, **settings})
    return two_ranks.gradient(engine, samples, spec)


def relative_distance(ours: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))


def plain_loss(model: Any, samples: list[TrainSample]) -> torch.Tensor:
    """PPO's loss by its formula, trajectory by trajectory, over all loss-mask tokens."""
    total = torch.zeros(())
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        log_p = torch.log_softmax(model(ids[None]).logits[0] / sample.temperature, -1)
        chosen = log_p[:-1].gather(1, ids[1:, None])[:, 0]
        ratio = torch.exp(chosen - torch.tensor(sample.rollout_logprobs[1:]))
        advantage = torch.tensor(sample.advantages[1:])
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        total = total + (loss * torch.tensor(sample.loss_mask[1:])).sum()
    return total / sum(int(sample.loss_mask.sum()) for sample in samples)
