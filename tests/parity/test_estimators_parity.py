"""Estimators and losses against verl's, on batches with tool text between sampled tokens.

verl pads to [B, T] tensors with a response mask; here trajectories have their own length, with tool
text inside and a prompt before. Values, rewards and log-probabilities on tokens outside the mask
differ from 0 where an implementation must not look at them.

`make test` puts verl into `.venv/parity`, beside the environment: its requirements exclude the
transformers release used here.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.learner.algorithms import find_policy_loss, make_advantage
from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.aggregation import Aggregation, aggregation_weights
from agent_r1.learner.algorithms.kl import KlEstimator, kl_per_token
from agent_r1.learner.algorithms.losses import LossInputs, LossOptions
from agent_r1.learner.algorithms.losses.value import clipped_value_loss

PARITY = Path(sys.prefix) / "parity"
TOLERANCE = 1e-6
SEEDS = range(5)
AGGREGATIONS: list[tuple[Aggregation, str]] = [
    ("token_mean", "token-mean"),
    ("sequence_mean", "seq-mean-token-mean"),
    ("sequence_sum", "seq-mean-token-sum"),
    ("fixed_length", "seq-mean-token-sum-norm"),
]


@pytest.fixture(scope="module")
def verl() -> Iterator[Any]:
    """verl's `core_algos`."""
    if not PARITY.is_dir():
        pytest.skip(f"{PARITY} is missing: `make setup` installs verl there")
    sys.path.append(str(PARITY))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stands_in = importlib.util.find_spec("ray") is None
    if stands_in:
        # verl imports ray for workers, which nothing here starts; it is 240 MB.
        stub: Any = ModuleType("ray")
        stub.ObjectRef = object
        sys.modules["ray"] = stub
    try:
        yield importlib.import_module("verl.trainer.ppo.core_algos")
    finally:
        if stands_in:
            del sys.modules["ray"]
        sys.path.remove(str(PARITY))
        root.handlers[:] = handlers
        root.setLevel(level)


class Scene:
    """A random batch: 3 groups, 8 trajectories, tool text between sampled tokens, padding."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.group_ids = [0, 1, 0, 2, 1, 0, 1, 0]
        self.num_rows, self.width = len(self.group_ids), 24
        shape = (self.num_rows, self.width)
        self.mask = np.zeros(shape, dtype=bool)
        for row in range(self.num_rows):
            start = 0
            for _ in range(int(rng.integers(1, 4))):
                sampled = int(rng.integers(1, 5))
                self.mask[row, start : start + sampled] = True
                start += sampled + int(rng.integers(1, 4))
        self.rewards = np.where(self.mask & (rng.random(shape) < 0.3), rng.normal(size=shape), 0.0)
        for row in range(self.num_rows):
            self.rewards[row, np.flatnonzero(self.mask[row])[-1]] += rng.normal()
        self.values = rng.normal(size=shape)
        self.greedy = rng.normal(size=self.num_rows)
        self.logprobs = -rng.exponential(size=shape) - 0.01
        self.old_logprobs = self.logprobs + rng.normal(scale=0.3, size=shape)
        self.row_advantages = rng.normal(size=self.num_rows)
        self.advantages = rng.normal(size=shape)

    def batch(self) -> AdvantageBatch:
        """The batch as this project has it: a prompt of 2 tokens before, no padding after."""
        lengths = [int(np.flatnonzero(mask)[-1]) + 2 for mask in self.mask]

        def rows(array: np.ndarray) -> list[np.ndarray]:
            return [
                np.concatenate([np.zeros(2, array.dtype), row[:length]])
                for row, length in zip(array, lengths, strict=True)
            ]

        return AdvantageBatch(
            group_ids=self.group_ids,
            token_rewards=rows(self.rewards),
            credit_masks=rows(self.mask),
            values=rows(self.values),
            # verl takes one number off every token: a greedy answer of a single token
            greedy_rewards=[np.array([reward]) for reward in self.greedy],
        )

    def tensor(self, name: str) -> torch.Tensor:
        """One of the arrays as verl takes it: [B, T] of float64."""
        return torch.tensor(getattr(self, name), dtype=torch.float64)

    def inputs(self, advantages: np.ndarray) -> LossInputs:
        """The masked tokens as losses take them here; log-probabilities take gradient."""
        rows, _ = np.nonzero(self.mask)
        return LossInputs(
            torch.tensor(self.logprobs[self.mask], requires_grad=True),
            torch.tensor(self.old_logprobs[self.mask]),
            torch.tensor(advantages[self.mask]),
            torch.tensor(rows),
            self.num_rows,
        )

    def weights(self, aggregation: Aggregation) -> torch.Tensor:
        """[N] what each masked token weighs."""
        counts = self.mask.sum(axis=1).tolist()
        by_row = aggregation_weights(counts, aggregation, fixed_length=self.width)
        return torch.tensor(by_row, dtype=torch.float64)[np.nonzero(self.mask)[0]]


def masked(arrays: list[np.ndarray], scene: Scene) -> np.ndarray:
    """Ours, packed in verl's order of tokens."""
    masks = scene.batch().credit_masks
    return np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)])


def verl_advantages(verl: Any, name: str, scene: Scene, options: dict[str, Any]) -> Any:
    """verl's advantages and returns, [B, T]."""
    config = importlib.import_module("verl.trainer.config").AlgoConfig(
        gamma=options.get("gamma", 1.0)
    )
    rewards, mask = scene.tensor("rewards"), scene.tensor("mask")
    index = np.array(scene.group_ids)
    calls: dict[str, Callable[[], Any]] = {
        "gae": lambda: verl.compute_gae_advantage_return(
            rewards,
            scene.tensor("values"),
            mask,
            options.get("gamma", 1.0),
            options.get("lam", 1.0),
        ),
        "grpo": lambda: verl.compute_grpo_outcome_advantage(
            rewards, mask, index, norm_adv_by_std_in_grpo=options.get("normalize_std", True)
        ),
        "rloo": lambda: verl.compute_rloo_outcome_advantage(rewards, mask, index),
        "reinforce_pp": lambda: verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config
        ),
        "reinforce_pp_baseline": (
            lambda: verl.compute_reinforce_plus_plus_baseline_outcome_advantage(
                rewards, mask, index
            )
        ),
        "remax": lambda: verl.compute_remax_outcome_advantage(
            rewards, scene.tensor("greedy"), mask
        ),
    }
    return calls[name]()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gae", {}),
        ("gae", {"gamma": 0.9, "lam": 0.8}),
        ("grpo", {}),
        ("grpo", {"normalize_std": False}),
        ("rloo", {}),
        ("reinforce_pp", {}),
        ("reinforce_pp", {"gamma": 0.9}),
        ("reinforce_pp_baseline", {}),
        ("remax", {}),  # verl's has no discount
    ],
)
def test_advantages_agree(verl: Any, name: str, options: dict[str, Any], seed: int):
    scene = Scene(seed)
    ours, our_returns, *_ = make_advantage(name, options)(scene.batch())
    theirs, their_returns = verl_advantages(verl, name, scene, options)
    expected = theirs.numpy()[scene.mask]
    np.testing.assert_allclose(masked(ours, scene), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.ptp(expected) > 0.5
    if our_returns is not None:
        expected = their_returns.numpy()[scene.mask]
        np.testing.assert_allclose(
            masked(our_returns, scene), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


@pytest.mark.parametrize(
    ("ours", "theirs"), [("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl")]
)
def test_kl_agrees(verl: Any, ours: KlEstimator, theirs: str):
    # up to 30 nats apart, beyond k3's bounds
    logprobs = torch.linspace(-30, 0, 61, dtype=torch.float64)
    for reference in (torch.full_like(logprobs, -15), torch.zeros_like(logprobs)):
        torch.testing.assert_close(
            kl_per_token(logprobs, reference, ours),
            verl.kl_penalty(logprobs, reference, theirs),
            atol=TOLERANCE,
            rtol=TOLERANCE,
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("ours", "theirs"), AGGREGATIONS)
def test_aggregation_agrees(verl: Any, ours: Aggregation, theirs: str, seed: int):
    scene = Scene(seed)
    scene.mask[3] = False  # a trajectory that is filtered out
    losses, mask = scene.tensor("advantages"), scene.tensor("mask")
    expected = verl.agg_loss(losses, mask, theirs, loss_scale_factor=scene.width)
    found = (losses[mask.bool()] * scene.weights(ours)).sum()
    assert found.item() == pytest.approx(expected.item(), abs=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "theirs", "aggregation", "mode"),
    [
        *(("ppo", "vanilla", *pair) for pair in AGGREGATIONS),
        *(("cispo", "cispo", *pair) for pair in AGGREGATIONS),
        *(("reinforce", "gpg", *pair) for pair in AGGREGATIONS),  # -A log p
        ("gspo", "gspo", *AGGREGATIONS[1]),  # verl aggregates GSPO in this way only
    ],
)
def test_losses_and_gradients_agree(
    verl: Any, name: str, theirs: str, aggregation: Aggregation, mode: str, seed: int
):
    scene = Scene(seed)
    advantages = scene.advantages
    if name == "gspo":
        advantages = np.repeat(scene.row_advantages[:, None], scene.width, axis=1)
    # verl's GSPO has no dual clip
    options = LossOptions(clip_low=0.2, clip_high=0.3, dual_clip=None if name == "gspo" else 1.5)
    inputs = scene.inputs(advantages)
    result = find_policy_loss(name)(inputs, options)
    loss = (result.loss * scene.weights(aggregation)).sum()
    loss.backward()

    config = importlib.import_module("verl.workers.config").ActorConfig(
        strategy="fsdp",
        rollout_n=8,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=1.5,
    )
    logprobs = scene.tensor("logprobs").requires_grad_()
    expected, metrics = verl.get_policy_loss_fn(theirs)(
        old_log_prob=scene.tensor("old_logprobs"),
        log_prob=logprobs,
        advantages=torch.tensor(advantages),
        response_mask=scene.tensor("mask"),
        loss_agg_mode=mode,
        config=config,
    )
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    assert inputs.logprobs.grad is not None
    assert logprobs.grad is not None
    torch.testing.assert_close(
        inputs.logprobs.grad,
        logprobs.grad[torch.tensor(scene.mask)],
        atol=TOLERANCE,
        rtol=TOLERANCE,
    )
    clipped = metrics.get("actor/pg_clipfrac", 0.0) + metrics.get("actor/pg_clipfrac_lower", 0.0)
    assert result.clipped.double().mean().item() == pytest.approx(clipped, abs=TOLERANCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_loss_agrees(verl: Any, seed: int):
    scene = Scene(seed)
    ours = scene.tensor("values")[torch.tensor(scene.mask)].requires_grad_()
    old, target = scene.tensor("logprobs"), scene.tensor("advantages")
    selected = torch.tensor(scene.mask)
    result = clipped_value_loss(ours, old[selected], target[selected], clip=0.5)
    loss = (result.loss * scene.weights("token_mean")).sum()
    loss.backward()
    values = scene.tensor("values").requires_grad_()
    expected, clipped = verl.compute_value_loss(values, target, old, scene.tensor("mask"), 0.5)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=TOLERANCE)
    assert ours.grad is not None
    assert values.grad is not None
    torch.testing.assert_close(ours.grad, values.grad[selected], atol=TOLERANCE, rtol=TOLERANCE)
    assert result.clipped.double().mean().item() == pytest.approx(clipped.item(), abs=TOLERANCE)
