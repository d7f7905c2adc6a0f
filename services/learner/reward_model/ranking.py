"""A ranking loss among the candidates of one state, as weights of their verdicts.

With s = log p(yes) - log p(no) of each candidate and y its label, a state adds

    sum over y_a > y_b of (y_a - y_b) softplus(s_b - s_a), divided by the sum of y_a - y_b.

Once s is known, so is the gradient of this with respect to s. It is taken by adding it, with
opposite signs, to the weights of the two verdicts in the log-likelihood.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from agent_r1.learner.engine.interface import FloatArray, PolicyEngine, TrainSample


class Candidate(NamedTuple):
    """One of the turns that may follow a state."""

    good: int
    """Index of the sample with the good verdict."""
    bad: int
    label: float
    """Mean reward behind it."""


def ranking_gradient(scores: FloatArray, labels: FloatArray) -> FloatArray:
    """Return [C] the gradient of a state's ranking loss with respect to the scores.

    Args:
        scores: [C] log-odds of the good verdict.
        labels: [C] what the candidates are worth.
    """
    ahead = np.maximum(labels[:, None] - labels[None, :], 0.0)  # of each pair, once
    if not ahead.any():
        return np.zeros_like(scores)
    pull = ahead / (1.0 + np.exp(scores[:, None] - scores[None, :]))
    return (pull.sum(axis=0) - pull.sum(axis=1)) / ahead.sum()


def weighed(
    engine: PolicyEngine,
    samples: Sequence[TrainSample],
    states: Sequence[Sequence[Candidate]],
    weight: float,
) -> dict[int, TrainSample]:
    """Return the samples of some states with the ranking loss in the weights of their verdicts.

    Args:
        engine: says how the model now judges them.
        samples: all of them; each learns its last token.
        states: candidates whose samples are in the batch.
        weight: of the ranking loss beside the log-likelihood.
    """
    indices = [i for state in states for candidate in state for i in candidate[:2]]
    logprobs = dict(zip(indices, engine.token_logprobs([samples[i] for i in indices]), strict=True))
    found: dict[int, TrainSample] = {}
    for state in states:
        scores = np.array([logprobs[c.good][-1] - logprobs[c.bad][-1] for c in state])
        gradient = weight * ranking_gradient(scores, np.array([c.label for c in state]))
        for candidate, slope in zip(state, gradient, strict=True):
            for i, sign in ((candidate.good, -1.0), (candidate.bad, 1.0)):
                advantages = samples[i].advantages.copy()
                advantages[-1] += sign * slope
                found[i] = replace(samples[i], advantages=advantages)
    return found
