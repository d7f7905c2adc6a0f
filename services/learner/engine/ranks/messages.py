"""Messages of rank 0 to every rank: how to build its part of the engine, what to compute.

policy_engine.py (rank 0) --EngineSetup, RankBatch--> engine.py (every rank) --TrainReply-->
policy_engine.py. Arrays and configuration only; wire.py carries them between processes.

Dimension key: S = segments in a micro-batch, T = tokens of one, N = trained tokens, M = their
predictions; padded, B = S rows of L = the longest; else B = 1 row of L = all that is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import GetPydanticSchema, ValidationInfo
from pydantic_core import core_schema

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import LossSpec
from agent_r1.runtime.config import ModelConfig
from agent_r1.runtime.files.state import read_object


def _set_aside(array: npt.NDArray[Any], info: core_schema.SerializationInfo) -> int:
    arrays: list[npt.NDArray[Any]] = info.context  # pyright: ignore[reportAssignmentType]
    arrays.append(array)
    return len(arrays) - 1


def _array(dtype: type[np.generic]) -> GetPydanticSchema:
    """Let a field hold an array: in JSON its number among the arrays, which are the context."""

    def pick(number: Any, info: ValidationInfo) -> npt.NDArray[Any]:
        array = info.context[number]  # pyright: ignore[reportOptionalSubscript]
        if array.dtype != dtype:
            raise ValueError(f"array {number} is {array.dtype}, and not {np.dtype(dtype)}")
        return array

    schema = core_schema.with_info_plain_validator_function(
        pick,
        serialization=core_schema.plain_serializer_function_ser_schema(_set_aside, info_arg=True),
    )
    return GetPydanticSchema(lambda _source, _handler: schema)


Int64 = Annotated[npt.NDArray[np.int64], _array(np.int64)]
Float32 = Annotated[npt.NDArray[np.float32], _array(np.float32)]


def differences(
    own: Mapping[str, Any], found: Mapping[str, Any], under: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield each key in which two nested tables differ, as `a.b`, with both values."""
    for key in sorted(own.keys() | found.keys()):
        ours, theirs = own.get(key), found.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            yield from differences(ours, theirs, f"{under}{key}.")
        elif ours != theirs:
            yield f"{under}{key}", ours, theirs


@dataclass(frozen=True)
class CriticSetup:
    """The critic's backbone and learning rate."""

    model: ModelConfig
    lr: float
    """Learning rate after warm-up."""
    warmup_steps: int = 0
    """Optimizer steps at the start of the run that train the critic alone."""


def _runs_on_cpu(config: EngineConfig) -> bool:
    if config.device != "auto":
        return config.device == "cpu"
    import torch  # takes seconds, but whoever sets an engine up needs it next

    return not torch.cuda.is_available()


def _has_sliding_layers(folder: Path) -> bool:
    """Say whether layers of a model look back a limited number of tokens (Gemma 3, Mistral 0.1)."""
    path = folder / "config.json"
    try:
        values = read_object(path) if path.is_file() else {}
    except ValueError as exc:
        raise ValueError(f"{path} is no JSON ({exc}); copy the model again") from exc
    if values.get("layer_types"):
        return "sliding_attention" in values["layer_types"]
    return bool(values.get("sliding_window") and values.get("use_sliding_window", True))


@dataclass(frozen=True)
class EngineSetup:
    """Everything a rank needs to build its part of the engine; each reads it in its own file."""

    model: ModelConfig
    config: EngineConfig
    seed: int = 0
    """Seed of torch, on every rank."""
    with_reference: bool = False
    """Keep the configured model for the KL term."""
    table_name: str = "engine"
    """Name of the engine's table, such as "sft.engine", in messages about keys."""
    critic: CriticSetup | None = None
    deterministic: bool = False
    """Use deterministic kernels only."""

    @classmethod
    def of(
        cls, model: ModelConfig, config: EngineConfig, *, seed: int = 0, **more: Any
    ) -> EngineSetup:
        """Return the setup of a table, with `share_prefixes` decided."""
        if config.share_prefixes is None:
            shares = (
                model.attention == "sdpa"
                and not _has_sliding_layers(Path(model.path))
                and _runs_on_cpu(config)
            )
            config = config.model_copy(update={"share_prefixes": shares})
        return cls(model, config, seed, **more)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must match to be read by this engine."""
        facts = {
            f"{self.table_name}.zero_stage": self.config.zero_stage,
            "model.dtype": self.model.dtype,
        }
        return facts if self.critic is None else facts | {"a critic": True}

    def shared(self) -> dict[str, Any]:
        """Return what must be equal on every rank: a model may lie elsewhere on each machine."""
        own = {"torch_threads", "device", "rank_interface", "rank_join_timeout_s"}
        critic = self.critic
        return {
            "model": self.model.model_dump(exclude={"path", "revision"}),
            self.table_name: self.config.model_dump(exclude=own),
            "seed": self.seed,
            "reference": self.with_reference,
            "critic": critic and (critic.model.model_dump(exclude={"path"}), critic.lr),
            "deterministic": self.deterministic,
        }


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one forward pass."""

    indices: tuple[int, ...]
    """[S] which segments of the batch these are."""
    token_ids: Int64
    """[B, L] the tokens that are computed; right-padded with 0 in the layout "padded"."""
    position_ids: Int64 | None
    """[B, L] each token's place in its own trajectory; None when padded."""
    paths: Int64 | None
    """[sum of T] where each token of each trajectory stands in the one row; None when padded."""
    spans: Int64 | None
    """[S, 2] how many tokens of each trajectory's path were there before it, and all its tokens."""
    positions: Int64
    """[M] index into [B * L] of the hidden state of each prediction."""
    predictions: Int64
    """[N] the prediction of each trained token: trajectories that share a prefix share those."""
    num_tokens: int
    """Tokens of the trajectories."""
    num_computed: int
    """Tokens of them that are computed: one that several trajectories share counts once."""

    @property
    def num_padded(self) -> int:
        """Tokens computed, padding included."""
        return int(self.token_ids.size)


@dataclass(frozen=True)
class MicroBatch(TokenBatch):
    """One forward pass of the policy."""

    targets: Int64
    """[M] the predicted tokens."""
    temperatures: Float32
    """[M] their sampling temperature."""
    sequences: Int64
    """[N] which trajectory of the micro-batch each trained token belongs to."""
    rollout_logprobs: Float32
    """[N] log-probabilities at sampling."""
    old_logprobs: Float32
    """[N] the probability ratio's denominator."""
    advantages: Float32
    """[N] advantages."""
    importance_weights: Float32
    """[N] factor of the policy loss."""
    weights: Float32
    """[N] what each token's loss counts in the optimizer batch; see aggregation.py."""


@dataclass(frozen=True)
class ValueBatch(TokenBatch):
    """One forward pass of the critic."""

    returns: Float32
    """[N] value targets."""
    old_values: Float32
    """[N] the critic's values before the batch."""
    weights: Float32
    """[N] what each token's loss counts in the optimizer batch."""


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one rank."""

    microbatches: list[MicroBatch]
    """Run forward and backward."""
    lr: float | None
    """The policy's; None leaves the policy alone."""
    measured: list[MicroBatch] = field(default_factory=list[MicroBatch])
    """Run forward only, for the metrics: their gradient is exactly 0."""
    value_batches: list[ValueBatch] = field(default_factory=list[ValueBatch])
    """The critic's; [] where it learns nothing."""
    critic_lr: float | None = None
    """The critic's; None leaves it alone."""


@dataclass(frozen=True)
class RankBatch:
    """One batch of one rank."""

    spec: LossSpec
    steps: list[OptimizerStep]
    """Steps with something to learn: fewer than `spec.optimizer_steps` where filters left
    nothing."""

    def policy_batches(self) -> Iterator[TokenBatch]:
        """Yield every micro-batch that the policy runs forward."""
        for step in self.steps:
            yield from step.microbatches
            yield from step.measured


@dataclass(frozen=True)
class TrainReply:
    """Results of training on one batch."""

    metrics: dict[str, float] = field(default_factory=dict[str, float])
    not_finite: tuple[int, ...] = ()
    """Samples of micro-batches whose loss is not finite; the optimizer step was not taken."""
