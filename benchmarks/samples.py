"""Random training samples, for what runs the training engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from agent_r1.learner.engine.interface import TrainSample


def random_samples(
    lengths: Sequence[int], vocabulary: int, *, prompt_tokens: int = 1, seed: int = 0
) -> list[TrainSample]:
    """Return sequences that have a prompt in common and nothing else.

    Args:
        lengths: Tokens of each, the prompt included.
        vocabulary: Number of tokens to draw from.
        prompt_tokens: Tokens of the prompt; those after it were sampled.
        seed: Of all that is random.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(3, vocabulary, prompt_tokens)
    rows = [
        np.append(prompt, rng.integers(3, vocabulary, length - prompt_tokens)).astype(np.int32)
        for length in lengths
    ]
    return [sample_of(row, np.arange(len(row)) >= prompt_tokens, rng) for row in rows]


def sample_of(token_ids: Any, mask: Any, rng: np.random.Generator) -> TrainSample:
    """Return a sample with a random advantage, so that no side may leave it out.

    Args:
        token_ids: [T] its tokens.
        mask: [T] True for those that were sampled.
        rng: Draws the advantage.
    """
    return TrainSample(
        token_ids=token_ids,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -9.0, 0.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0.0).astype(np.float32),
    )


def as_sampled(
    samples: Sequence[TrainSample], engine: Any, noise: float = 0.0
) -> list[TrainSample]:
    """Return samples with the log-probabilities of an engine's policy, a little off."""
    rng = np.random.default_rng(2)
    return [
        dataclasses.replace(
            sample, rollout_logprobs=(own + rng.normal(0, noise, len(own))).astype(np.float32)
        )
        for sample, own in zip(samples, engine.token_logprobs(samples), strict=True)
    ]
