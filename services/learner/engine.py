"""What training needs of an engine: the protocol `train.py` and `sft.py` are written against.

train.py --TrainSample, LossSpec--> PolicyEngine (policy_engine.py) --metrics--> train.py

Dimension key: T = tokens in one trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_r1_proto.weights import WeightManifest

KlEstimator = Literal["k1", "k2", "k3"]
LossKind = Literal["ppo", "nll"]


class EngineError(RuntimeError):
    """The engine cannot go on: a rank ended, a collective failed, a gradient is not finite."""


@dataclass(frozen=True)
class TrainSample:
    """One trajectory as the loss sees it.

    Position t is about token t, the token being predicted; position 0 is never trained on, since
    nothing predicts the first token.
    """

    token_ids: npt.NDArray[np.int32]
    """[T] prompt, sampled and tool tokens."""
    loss_mask: npt.NDArray[np.bool_]
    """[T] True where token t counts in the loss."""
    rollout_logprobs: npt.NDArray[np.float32]
    """[T] natural-log probability at sampling; read where loss_mask is True."""
    advantages: npt.NDArray[np.float32]
    """[T] advantage of each token; for the loss "nll", its weight."""
    temperature: float = 1.0
    """Temperature the tokens were sampled at; must be > 0."""

    def __post_init__(self) -> None:
        num_tokens = len(self.token_ids)
        if num_tokens < 2:
            raise ValueError(f"a train sample has {num_tokens} tokens; it needs at least 2")
        for name in ("loss_mask", "rollout_logprobs", "advantages"):
            length = len(getattr(self, name))
            if length != num_tokens:
                raise ValueError(f"{name} has {length} entries; token_ids has {num_tokens}")
        if self.loss_mask[0]:
            raise ValueError("loss_mask[0] is True, but nothing predicts the first token")
        if not self.temperature > 0:
            raise ValueError(
                f"temperature ({self.temperature}) must be > 0: greedy samples are not trained on"
            )

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True)
class LossSpec:
    """Which loss, with its settings; one for a whole batch."""

    kind: LossKind = "ppo"
    """"ppo": clipped policy loss; "nll": weighted negative log-likelihood (SFT)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    """Weight of the KL to the reference; > 0 needs an engine made with a reference."""
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    aggregation: Literal["token_mean"] = "token_mean"
    optimizer_steps: int = 1
    """Split the samples, in order, into this many optimizer batches."""
    drop_zero_advantages: bool = True
    """Skip the computation (not the count) of samples whose advantages are all 0."""


class PolicyEngine(Protocol):
    """The policy and its optimizer, over one or more ranks; every call is blocking.

    Not thread-safe: one call at a time. After an EngineError every further call raises it again.
    """

    def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec) -> dict[str, float]:
        """Take `spec.optimizer_steps` optimizer steps on `samples`.

        The loss is the sum of token losses over the number of loss-mask tokens of each optimizer
        batch over all ranks and micro-batches. The ratio's denominator is `rollout_logprobs`, or,
        with more than one optimizer step, the learner's own before the first.

        Returns:
            Metrics of the batch: loss/total, loss/policy, loss/clip_fraction, loss/kl_ref (with a
            reference), policy/entropy (nats), policy/ratio_max, logprob/abs_diff_mean and
            logprob/abs_diff_max (learner against rollout, before the first step), grad_norm
            (before clipping; last optimizer step), lr, batch/tokens, batch/action_tokens,
            batch/computed_tokens (without padding and dropped samples), batch/padding_share,
            batch/microbatches, time/learn_s, tokens_per_s. A metric that nothing was computed for
            is left out.

        Raises:
            ValueError: `samples` is empty or has no loss-mask token.
            EngineError: see there; out-of-memory messages name the keys to lower, in order.
        """
        ...

    def logprobs(
        self, token_ids: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[npt.NDArray[np.float32]]:
        """Return [T-1] natural-log probability of token t+1 given tokens 0..t, per sequence."""
        ...

    def write_snapshot(self, directory: Path, run_id: str, policy_version: int) -> WeightManifest:
        """Write `model.safetensors` and `manifest.json` under `directory`, atomically."""
        ...

    def save_state(self, directory: Path) -> None:
        """Write weights, optimizer state and step count, with checksums, into `directory`."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote.

        Raises:
            ValueError: a file is missing, differs from its checksum, or was written with other
                ranks, stage or dtype.
        """
        ...

    def export_model(self, directory: Path) -> None:
        """Write a Hugging Face model directory: weights, config, tokenizer, chat template."""
        ...

    def checkpoint_bytes(self) -> int:
        """Return about how many bytes `save_state` and `export_model` write together."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far, those before a resume included."""
        ...

    def close(self) -> None:
        """End the other ranks; further calls are errors. May be called twice."""
        ...
