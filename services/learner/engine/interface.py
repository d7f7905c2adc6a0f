"""The engine's interface: the protocol that its callers are written against.

train.py, sft/supervised.py --TrainSample, LossSpec--> PolicyEngine (policy_engine.py) --metrics-->
back to them

Dimension key: T = tokens in one trajectory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from agent_r1.learner.objective import Aggregation, KlEstimator
from agent_r1.weights.snapshot import Weights
from agent_r1_proto.weights import AdapterHeader

LossKind = Literal["policy", "nll"]
Model = Literal["policy", "reference"]

FloatArray = npt.NDArray[np.float32]

PER_TOKEN = (
    *("loss_mask", "rollout_logprobs", "advantages", "old_logprobs", "importance_weights"),
    *("value_mask", "returns", "old_values"),
)
"""Fields of a TrainSample with an entry a token; None where one is not given."""


class EngineError(RuntimeError):
    """The engine cannot continue: a rank ended, a collective failed, a gradient is not finite."""


@dataclass(frozen=True)
class TrainSample:
    """One trajectory as the loss sees it.

    Position t is about token t, the token being predicted; position 0 is never trained on, since
    nothing predicts the first token. Segments stand end to end; each is a sequence of its own for
    the model, while the loss counts the trajectory.
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
    name: str = ""
    """Name in messages: the rollout id."""
    old_logprobs: FloatArray | None = None
    """[T] the probability ratio's denominator; None is rollout_logprobs."""
    importance_weights: FloatArray | None = None
    """[T] factor of each token's policy loss; None is 1."""
    value_mask: npt.NDArray[np.bool_] | None = None
    """[T] True where the critic learns token t's return; None where there is no critic."""
    returns: FloatArray | None = None
    """[T] value target of the critic; read where value_mask is True."""
    old_values: FloatArray | None = None
    """[T] value before the update; read where value_mask is True."""
    segment_starts: Sequence[int] = ()
    """Indices at which segments begin, but for the first; see `Trajectory`."""

    def __post_init__(self) -> None:
        arrays = {name: getattr(self, name) for name in PER_TOKEN}
        lengths = {name: len(array) for name, array in arrays.items() if array is not None}
        assert set(lengths.values()) == {self.num_tokens}, lengths
        # Nothing predicts the first token of a segment.
        assert not any(self.loss_mask[start] for start in (0, *self.segment_starts))
        assert self.temperature > 0, "greedy samples are not trained on"

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_segments(self) -> int:
        """At least 1."""
        return len(self.segment_starts) + 1

    def segments(self) -> list[TrainSample]:
        """Return each segment as a sample of its own."""
        if not self.segment_starts:
            return [self]
        bounds = itertools.pairwise([0, *self.segment_starts, self.num_tokens])
        return [self._cut(start, end) for start, end in bounds]

    def _cut(self, start: int, end: int) -> TrainSample:
        arrays = {name: getattr(self, name) for name in ("token_ids", *PER_TOKEN)}
        cut = {name: array[start:end] for name, array in arrays.items() if array is not None}
        return replace(self, segment_starts=(), **cut)


@dataclass(frozen=True)
class LossSpec:
    """Loss and its settings; one for a whole batch."""

    kind: LossKind = "policy"
    """"policy": `policy_loss`, KL and entropy; "nll": weighted negative log-likelihood (SFT)."""
    policy_loss: str = "ppo"
    """A name from `algorithms.POLICY_LOSSES`, or module:function."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_coef: float = 0.0
    """Weight of the KL to the reference; > 0 needs an engine made with a reference."""
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0
    aggregation: Aggregation = "token_mean"
    fixed_length: int = 1024
    """Tokens, for aggregation "fixed_length"."""
    value_clip: float | None = 0.5
    """Distance up to which the critic's loss follows a value from the old one; None is no bound."""
    optimizer_steps: int = 1
    """Split the samples, in order, into this many optimizer batches."""
    drop_zero_advantages: bool = True
    """Run samples whose advantages are all 0 forward only, where their gradient is exactly 0."""
    trains_policy: bool = True
    """False trains the critic only: its warm-up."""
    steps_before: int | None = None
    """Optimizer steps of the run's plan before this batch: its place in the learning-rate schedule.
    None is those taken so far."""


@dataclass(frozen=True)
class Predictions:
    """Predictions of the policy for the trained tokens of one sample, in nats; 0.0 elsewhere."""

    logprobs: FloatArray
    """[T] log-probability of each token, under all before it."""
    entropies: FloatArray
    """[T] entropy of the distribution that each token was drawn from."""


class PolicyEngine(Protocol):
    """The policy and its optimizer, over one or more ranks; every call is blocking.

    Not thread-safe: one call at a time. After an EngineError every further call raises it again.
    """

    def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec) -> dict[str, float]:
        """Take up to `spec.optimizer_steps` optimizer steps on `samples`.

        Each optimizer batch is aggregated as `spec.aggregation` says over all ranks and
        micro-batches, however it was cut. The ratio's denominator is each sample's `old_logprobs`,
        else its `rollout_logprobs`. Samples with a `value_mask` train the critic as well. An
        optimizer step in which no token counts is skipped, and there is no more than one a sample.

        Returns:
            Metrics of the batch. Over all tokens that count in the loss, each as its own optimizer
            step found it: loss/total, loss/policy (means over the steps), loss/clip_fraction (share
            of the tokens whose loss a bound decides), loss/kl_ref (with a reference),
            policy/entropy (nats), policy/ratio_max and, with one optimizer step,
            logprob/abs_diff_mean and logprob/abs_diff_max (learner against rollout). Then
            grad_norm (before clipping; last optimizer step), lr, batch/optimizer_steps (taken),
            batch/skipped_optimizer_steps, batch/tokens, batch/trained_tokens (that count in the
            loss), batch/computed_tokens (the policy's, without padding), batch/shared_share (of the
            trajectories' tokens, those that were computed for another one),
            batch/forward_only_share, batch/padding_share, batch/microbatches, time/learn_s,
            tokens_per_s (of trajectories); with a critic, over all tokens it learns, loss/value,
            value/mean, value/clip_fraction, grad/critic_norm, learn/critic_lr. A metric that
            nothing was computed for is left out.

        Raises:
            ValueError: a step of the loss "nll" has no token to learn.
            EngineError: see there. A loss that is not finite is refused before the step and names
                the samples; out-of-memory messages name the keys to lower, in order.
        """
        ...

    def token_logprobs(
        self, samples: Sequence[TrainSample], model: Model = "policy"
    ) -> list[FloatArray]:
        """Return [S][T] log-probability of each sample's trained tokens, 0.0 elsewhere.

        Args:
            samples: scored where loss_mask is True, at their own temperature.
            model: "reference" is the configured model, and needs an engine made with it.
        """
        ...

    def predictions(self, samples: Sequence[TrainSample]) -> list[Predictions]:
        """Return [S] the policy's log-probabilities and entropies, as `token_logprobs` asks."""
        ...

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """Return [S][T] the critic's value of choosing each token, where value_mask is True."""
        ...

    @property
    def adapter(self) -> AdapterHeader | None:
        """How what is trained changes the model; None where it is the model."""
        ...

    def weights(self) -> Weights:
        """Return the trained weights in memory that no later step changes."""
        ...

    def save_state(self, directory: Path) -> None:
        """Write weights, optimizer state and step count, with checksums, into `directory`."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote.

        Raises:
            ValueError: a file is missing, differs from its checksum, or was written with another
                stage or dtype.
        """
        ...

    def export_model(self, directory: Path) -> None:
        """Write a Hugging Face model directory: weights, config, tokenizer, chat template."""
        ...

    def snapshot_bytes(self) -> int:
        """Return the size of one published version."""
        ...

    def checkpoint_bytes(self) -> int:
        """Return about how many bytes `save_state` and `export_model` write together."""
        ...

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far, those before a resume included."""
        ...

    def check(self) -> None:
        """Look for a failure between two calls; at once, from any thread.

        Raises:
            EngineError: a rank has failed or ended.
        """
        ...

    def close(self, why: str = "") -> None:
        """End the other ranks; further calls are errors. May be called twice.

        Args:
            why: the error that ends the run, which the other ranks repeat; "" in order.
        """
        ...
