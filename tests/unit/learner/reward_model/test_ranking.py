"""The ranking loss among candidates of one state, against torch's own gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.learner.engine.interface import TrainSample
from agent_r1.learner.reward_model.ranking import Candidate, ranking_gradient, weighed
from agent_r1.learner.sft.data import weighted_sample


def loss(scores: torch.Tensor, labels: Sequence[float]) -> torch.Tensor:
    pairs = [
        (a - b, torch.nn.functional.softplus(scores[j] - scores[i]))
        for i, a in enumerate(labels)
        for j, b in enumerate(labels)
        if a > b
    ]
    total: Any = sum(gap * term for gap, term in pairs) / sum(gap for gap, _ in pairs)
    return total


@pytest.mark.parametrize("labels", [[1.0, 0.0], [0.25, 0.75, 0.75], [0.1, 0.5, 0.9, 0.3]])
def test_the_gradient_is_that_of_the_loss(labels: list[float]):
    scores = torch.linspace(-1.0, 2.0, len(labels), dtype=torch.float64, requires_grad=True)
    loss(scores, labels).backward()
    found = ranking_gradient(scores.detach().numpy().astype(np.float32), np.array(labels))
    assert scores.grad is not None
    assert found == pytest.approx(scores.grad.numpy(), abs=1e-6)


def test_equal_candidates_are_not_ranked():
    assert not ranking_gradient(np.array([0.0, 5.0]), np.array([0.5, 0.5])).any()


class Judge:
    """Says how likely each sample's verdict is."""

    def __init__(self, logprobs: Sequence[float]) -> None:
        self.logprobs = logprobs

    def token_logprobs(self, samples: Sequence[TrainSample]) -> list[Any]:
        return [np.array([0.0, 0.0, self.logprobs[int(s.token_ids[0])]]) for s in samples]


def test_the_verdicts_of_a_candidate_are_weighed_against_each_other():
    # Both candidates are 0.5 to 0.5, and the first is right: softplus'(0) = 1/2 each way, so with
    # the weight 2 its yes gains 1 and its no loses 1, and the other way round.
    weights = [(1.0, 0.0), (0.25, 0.75)]
    samples = [
        weighted_sample(np.array([i, 7, 8], np.int32), np.array([0, 0, weight], np.float32))
        for i, weight in enumerate(w for pair in weights for w in pair)
    ]
    engine: Any = Judge([-0.7] * 4)
    state = [Candidate(0, 1, 1.0), Candidate(2, 3, 0.25)]
    found = weighed(engine, samples, [state], 2.0)
    assert [float(found[i].advantages[-1]) for i in range(4)] == [2.0, -1.0, -0.75, 1.75]
    assert [float(sample.advantages[-1]) for sample in samples] == [1.0, 0.0, 0.25, 0.75]
