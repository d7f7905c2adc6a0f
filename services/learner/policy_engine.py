"""The PolicyEngine that training uses: cuts batches, drives the ranks, writes what they gather.

train.py, sft.py --TrainSample--> DeepSpeedPolicyEngine --TrainOrder--> RankEngine on every rank
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from agent_r1.learner import checkpoint_io, durable, snapshot
from agent_r1.learner.algorithms.aggregation import aggregation_weights
from agent_r1.learner.batching import (
    TokenBatch,
    build_microbatch,
    build_value_batch,
    plan_microbatches,
    scatter_back,
    scoring_sample,
    split_evenly,
    value_mask,
)
from agent_r1.learner.config import EngineTable
from agent_r1.learner.distributed import EngineSetup, RankGroup
from agent_r1.learner.durable import report_full_disk, require_space
from agent_r1.learner.engine import FloatArray, LossSpec, Model, TrainSample
from agent_r1.learner.orders import StepOrder, TrainOrder
from agent_r1.learner.rank_engine import CriticSetup, TrainReply
from agent_r1.learner.schedule import learning_rate
from agent_r1.learner.snapshot import Weights
from agent_r1_proto.config import ModelTable
from agent_r1_proto.weights import WeightManifest

ADAM_BYTES_PER_WEIGHT = 8
"""Two float32 moments."""
MASTER_BYTES_PER_WEIGHT = 4
"""The float32 copy that bfloat16 training keeps."""


@dataclass
class _Counts:
    """What the micro-batches of one batch hold."""

    tokens: int = 0
    padded: int = 0
    microbatches: int = 0

    def add(self, batch: TokenBatch) -> None:
        """Count a micro-batch; an empty one counts as padding."""
        self.tokens += batch.num_tokens
        self.padded += batch.num_padded
        self.microbatches += 1


class DeepSpeedPolicyEngine:
    """See `engine.PolicyEngine`, which this is."""

    def __init__(
        self,
        model: ModelTable,
        table: EngineTable,
        *,
        seed: int = 0,
        total_steps: int | None = None,
        with_reference: bool = False,
        critic: CriticSetup | None = None,
        deterministic: bool = False,
        table_name: str = "learner",
        group: RankGroup | None = None,
    ) -> None:
        """Load the model on every rank, and start the ranks.

        Args:
            model: which model, dtype and attention.
            table: engine settings; the fields of EngineTable are read.
            seed: seeds torch on every rank.
            total_steps: optimizer steps of the whole run; cosine and linear schedules need it.
            with_reference: keep the configured model for the KL term.
            critic: train a critic beside the policy; None is none.
            deterministic: use deterministic kernels only.
            table_name: "learner" or "sft", named in messages about keys.
            group: ranks that are joined already; None starts them.

        Raises:
            ValueError: the model cannot be loaded, or a setting does not fit the machine.
            EngineError: a rank failed.
        """
        learning_rate(table, table.warmup_steps, total_steps)
        fields = {name: getattr(table, name) for name in EngineTable.model_fields}
        self._table = EngineTable(**fields)
        self._model_table = model
        self._total_steps = total_steps
        self._has_reference = with_reference
        self._group = group or RankGroup(self._table)
        try:
            self._group.build(
                EngineSetup(
                    model, self._table, seed, with_reference, table_name, critic, deterministic
                )
            )
        except BaseException:
            self._group.close()
            raise

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps taken so far, those before a resume included."""
        return self._group.engine.optimizer_steps

    # Training

    def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec) -> dict[str, float]:
        """See `engine.PolicyEngine.train_batch`."""
        if not samples:
            raise ValueError("a batch of 0 samples cannot be trained on; wait for trajectories")
        if spec.kl_coef > 0 and not self._has_reference:
            raise ValueError(
                f"kl_coef ({spec.kl_coef}) needs an engine with a reference; it was made without"
            )
        started = time.perf_counter()
        orders, counts = self._plan_orders(samples, spec)
        reply: TrainReply = self._group.run("train", orders)
        if reply.not_finite:
            names = [samples[i].name or f"sample {i}" for i in reply.not_finite]
            self._group.fail(
                f"the loss of a micro-batch is not finite, so step {self.optimizer_steps + 1} was "
                f"refused; its trajectories are {', '.join(names)}; look at their log-probabilities"
                " and rewards, and resume from the last checkpoint"
            )
        elapsed = time.perf_counter() - started
        return reply.metrics | {
            "batch/tokens": float(sum(sample.num_tokens for sample in samples)),
            "batch/action_tokens": float(sum(int(s.loss_mask.sum()) for s in samples)),
            "batch/computed_tokens": float(counts.tokens),
            "batch/padding_share": 1.0 - counts.tokens / counts.padded,
            "batch/microbatches": float(counts.microbatches),
            "time/learn_s": elapsed,
            "tokens_per_s": counts.tokens / elapsed,
        }

    def _plan_orders(
        self, samples: Sequence[TrainSample], spec: LossSpec
    ) -> tuple[list[TrainOrder], _Counts]:
        """Cut a batch into optimizer steps, ranks and micro-batches."""
        counts = _Counts()
        orders = [TrainOrder(spec, []) for _ in range(self._table.ranks)]
        for offset, part in enumerate(split_evenly(len(samples), spec.optimizer_steps)):
            weights = token_weights(samples, part, spec)
            lr = learning_rate(self._table, self.optimizer_steps + offset, self._total_steps)
            kept = [i for i in part if not _is_skipped(samples[i], spec)]
            value_tokens = sum(int(value_mask(samples[i]).sum()) for i in part)
            learned = list(part) if value_tokens else []
            plans = zip(self._plan(samples, kept), self._plan(samples, learned), strict=True)
            for order, (share, value_share) in zip(orders, plans, strict=True):
                batches = [
                    build_microbatch(samples, indices, weights, packed=self._table.packing)
                    for indices in share
                ]
                for batch in batches:
                    counts.add(batch)
                value_batches = [
                    build_value_batch(
                        samples, indices, 1 / max(1, value_tokens), packed=self._table.packing
                    )
                    for indices in value_share
                ]
                order.steps.append(StepOrder(batches, lr, value_batches))
        return orders, counts

    def _plan(self, samples: Sequence[TrainSample], chosen: Sequence[int]) -> list[list[list[int]]]:
        """Return the micro-batches of each rank, as indices of samples."""
        plan = plan_microbatches(
            [samples[i].num_tokens for i in chosen],
            self._table.ranks,
            self._table.max_tokens_per_microbatch,
            self._table.max_padding_share,
            packed=self._table.packing,
        )
        return [[[chosen[i] for i in indices] for indices in share] for share in plan]

    # Scoring

    def logprobs(
        self, token_ids: Sequence[npt.NDArray[np.int32]], temperature: float = 1.0
    ) -> list[FloatArray]:
        """See `engine.PolicyEngine.logprobs`."""
        samples = [scoring_sample(ids, temperature) for ids in token_ids]
        return [values[1:] for values in self.token_logprobs(samples)]

    def token_logprobs(
        self, samples: Sequence[TrainSample], model: Model = "policy"
    ) -> list[FloatArray]:
        """See `engine.PolicyEngine.token_logprobs`."""
        if model == "reference" and not self._has_reference:
            raise ValueError("the reference was asked of an engine that was made without one")
        if not samples:
            return []
        plan = self._plan(samples, range(len(samples)))
        packed = self._table.packing
        cut = [
            [build_microbatch(samples, indices, packed=packed) for indices in share]
            for share in plan
        ]
        flat = self._group.gather("score", [(model, batches) for batches in cut])
        return scatter_back(cut, flat, [sample.loss_mask for sample in samples])

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        """See `engine.PolicyEngine.token_values`."""
        plan = self._plan(samples, range(len(samples)))
        packed = self._table.packing
        cut = [
            [build_value_batch(samples, indices, packed=packed) for indices in share]
            for share in plan
        ]
        flat = self._group.gather("values", cut)
        return scatter_back(cut, flat, [value_mask(sample) for sample in samples])

    # Weights and state

    def _collect(self) -> Weights:
        return self._group.run("collect", fatal=False)

    def write_snapshot(self, directory: Path, run_id: str, policy_version: int) -> WeightManifest:
        """See `engine.PolicyEngine.write_snapshot`."""
        return snapshot.write_snapshot(directory, run_id, policy_version, self._collect())

    def export_model(self, directory: Path) -> None:
        """See `engine.PolicyEngine.export_model`."""
        weights = self._collect()
        model = self._group.engine.model
        checkpoint_io.export_model(directory, weights, model, self._model_table.path)

    def save_state(self, directory: Path) -> None:
        """See `engine.PolicyEngine.save_state`."""
        what, need = "the engine's state", self._state_bytes()
        remedy = "lower learner.keep_last and learner.keep_best, or move run.dir to a larger disk"
        # Asked before any rank writes: several ranks are out of step after an error.
        require_space(what, directory, need, remedy)
        directory.mkdir(parents=True, exist_ok=True)
        with report_full_disk(what, directory, need, remedy):
            self._group.run("save", [directory] * self._table.ranks, fatal=False)
            durable.seal(directory, self._group.engine.facts())

    def load_state(self, directory: Path) -> None:
        """See `engine.PolicyEngine.load_state`."""
        checkpoint_io.open_state(directory, self._group.engine.facts())
        self._group.run("load", [directory] * self._table.ranks)

    def checkpoint_bytes(self) -> int:
        """See `engine.PolicyEngine.checkpoint_bytes`."""
        return self._state_bytes() + self._weight_bytes()

    def _weight_bytes(self) -> int:
        return self._group.engine.num_weights() * self._bytes_per_weight

    @property
    def _bytes_per_weight(self) -> int:
        return 2 if self._model_table.dtype == "bfloat16" else 4

    def _state_bytes(self) -> int:
        bytes_each = self._bytes_per_weight + ADAM_BYTES_PER_WEIGHT
        if self._model_table.dtype == "bfloat16":
            bytes_each += MASTER_BYTES_PER_WEIGHT
        engine = self._group.engine
        return (engine.num_weights() + engine.num_critic_weights()) * bytes_each

    def close(self) -> None:
        """See `engine.PolicyEngine.close`."""
        self._group.close()


def token_weights(
    samples: Sequence[TrainSample], part: Sequence[int], spec: LossSpec
) -> list[FloatArray]:
    """Return [S][T] what each token's loss counts in one optimizer batch.

    Args:
        samples: the whole batch.
        part: the samples of this optimizer batch; the others weigh 0.
        spec: the aggregation; for "nll" tokens are weighed by `advantages`.

    Raises:
        ValueError: no token counts in the loss.
    """
    masks = [samples[i].loss_mask for i in part]
    if spec.kind == "nll":
        total = sum(float(samples[i].advantages[samples[i].loss_mask].sum()) for i in part)
    else:
        total = sum(int(mask.sum()) for mask in masks)
    if not total > 0:
        raise ValueError(
            f"none of the tokens of {len(part)} samples counts in the loss; a batch needs at "
            "least one sampled token"
        )
    weights = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
    if spec.kind == "nll":
        for i in part:
            weights[i] = samples[i].advantages / np.float32(total)
        return weights
    scalars = aggregation_weights(
        [int(mask.sum()) for mask in masks], spec.aggregation, fixed_length=spec.fixed_length
    )
    for i, scalar in zip(part, scalars, strict=True):
        weights[i] += np.float32(scalar)
    return weights


def _is_skipped(sample: TrainSample, spec: LossSpec) -> bool:
    """Whether a sample's gradient is exactly 0, so that it need not be computed."""
    if not spec.drop_zero_advantages or spec.kl_coef > 0 or spec.entropy_coef > 0:
        return False
    return not np.any(sample.advantages[sample.loss_mask])
