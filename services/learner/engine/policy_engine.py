"""The PolicyEngine that training uses: cuts batches, drives the ranks, writes what they gather.

train.py, sft/supervised.py --TrainSample--> DeepSpeedPolicyEngine --RankBatch--> ranks/engine.py,
on every rank
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, TypeVar

from agent_r1.learner.engine import model_files
from agent_r1.learner.engine.interface import (
    FloatArray,
    LossSpec,
    Model,
    PolicyEngine,
    Predictions,
    TrainSample,
)
from agent_r1.learner.engine.layout import (
    Mask,
    SegmentBatch,
    build_microbatch,
    build_value_batch,
    loss_mask,
    value_mask,
)
from agent_r1.learner.engine.lora import export_adapter
from agent_r1.learner.engine.microbatches import cut_evenly, plan_batch, scatter_back
from agent_r1.learner.engine.ranks.group import RankGroup
from agent_r1.learner.engine.ranks.heartbeat import STOP
from agent_r1.learner.engine.ranks.messages import (
    EngineSetup,
    MicroBatch,
    RankBatch,
    TrainReply,
    ValueBatch,
)
from agent_r1.learner.engine.schedule import LearningRates
from agent_r1.runtime.files import writing as durable
from agent_r1.runtime.files.writing import report_full_disk, require_space
from agent_r1.weights.snapshot import Weights
from agent_r1_proto.weights import AdapterHeader

logger = logging.getLogger(__name__)
B = TypeVar("B", MicroBatch, ValueBatch)

STATE_BYTES_PER_WEIGHT = 12
"""A float32 weight and AdamW's two moments."""


class DeepSpeedPolicyEngine(PolicyEngine):
    """The PolicyEngine over one or more ranks, under DeepSpeed ZeRO."""

    def __init__(
        self,
        setup: EngineSetup,
        *,
        total_steps: int | None = None,
        group: RankGroup | None = None,
    ) -> None:
        """Load the model on every rank.

        Args:
            setup: the engine's; every other rank has read the same.
            total_steps: optimizer steps of the whole run; cosine and linear schedules need it.
            group: ranks that are joined already; None starts them on this machine.

        Raises:
            ValueError: the model cannot be loaded, or a setting does not fit the machine.
            EngineError: a rank failed.
        """
        critic = setup.critic
        self._setup, self._config = setup, setup.config
        self._rates = LearningRates(
            self._config,
            total_steps,
            critic_lr=None if critic is None else critic.lr,
            policy_starts=0 if critic is None else critic.warmup_steps,
        )
        self._told_skipped = False
        self._group = group or RankGroup(setup)
        try:
            self._group.build(self._setup)
        except BaseException as exc:
            self._group.close(str(exc))
            raise

    @property
    def optimizer_steps(self) -> int:
        return self._group.engine.optimizer_steps

    # Training

    def train_batch(self, samples: Sequence[TrainSample], spec: LossSpec) -> dict[str, float]:
        assert samples
        assert self._setup.with_reference or spec.kl_coef == 0
        started = time.perf_counter()
        steps_before = self.optimizer_steps if spec.steps_before is None else spec.steps_before
        orders = plan_batch(samples, spec, self._config, self._rates, steps_before)
        taken = len(orders[0].steps)
        self._note_skipped(spec.optimizer_steps - taken)
        metrics = {
            "batch/optimizer_steps": float(taken),
            "batch/skipped_optimizer_steps": float(spec.optimizer_steps - taken),
            "batch/segments": float(sum(sample.num_segments for sample in samples)),
            "batch/tokens": float(sum(sample.num_tokens for sample in samples)),
            "batch/trained_tokens": float(sum(int(s.loss_mask.sum()) for s in samples)),
        }
        if taken:
            metrics |= self._train(samples, orders) | _count_computed(orders)
        elapsed = time.perf_counter() - started
        metrics["time/learn_s"] = elapsed
        if "batch/computed_tokens" in metrics:
            metrics["tokens_per_s"] = metrics["batch/tokens"] / elapsed
        return metrics

    def _train(self, samples: Sequence[TrainSample], orders: list[RankBatch]) -> dict[str, float]:
        reply: TrainReply = self._group.call("train", orders)
        if reply.not_finite:
            owners = SegmentBatch(samples).owners
            named = dict.fromkeys(owners[i] for i in reply.not_finite)
            names = [samples[i].name or f"sample {i}" for i in named]
            self._group.fail(
                f"the loss of a micro-batch is not finite, so step {self.optimizer_steps + 1} was "
                f"refused; its trajectories are {', '.join(names)}; look at their log-probabilities"
                " and rewards, and resume from the last checkpoint"
            )
        return reply.metrics

    def _note_skipped(self, skipped: int) -> None:
        """Say once that a batch has fewer optimizer steps than asked for; the metrics count."""
        if skipped and not self._told_skipped:
            self._told_skipped = True
            logger.warning(
                "optimizer steps skipped: failures and filters left them nothing to train on; "
                "further ones are only counted in batch/skipped_optimizer_steps count=%d",
                skipped,
            )

    # Scoring

    def token_logprobs(
        self, samples: Sequence[TrainSample], model: Model = "policy"
    ) -> list[FloatArray]:
        assert self._setup.with_reference or model == "policy"
        return self._scores(samples, model)[0]

    def predictions(self, samples: Sequence[TrainSample]) -> list[Predictions]:
        return [
            Predictions(*of_one) for of_one in zip(*self._scores(samples, "policy"), strict=True)
        ]

    def _scores(self, samples: Sequence[TrainSample], model: Model) -> list[list[FloatArray]]:
        """Return [2][S][T] log-probabilities and entropies of the trained tokens, 0.0 elsewhere."""
        if not samples:
            return [[], []]
        batch = SegmentBatch(samples)
        cut = self._cut(batch, build_microbatch, loss_mask)
        orders: list[tuple[Model, list[MicroBatch]]] = [(model, batches) for batches in cut]
        scores = self._group.call("score", orders)
        masks = [segment.loss_mask for segment in batch.segments]
        return [
            batch.join(scatter_back(cut, [[pair[row] for pair in rank] for rank in scores], masks))
            for row in range(2)
        ]

    def token_values(self, samples: Sequence[TrainSample]) -> list[FloatArray]:
        batch = SegmentBatch(samples)
        cut = self._cut(batch, build_value_batch, value_mask)
        flat = self._group.call("values", cut)
        return batch.join(scatter_back(cut, flat, [value_mask(s) for s in batch.segments]))

    def _cut(self, batch: SegmentBatch, build: Callable[..., B], mask: Mask) -> list[list[B]]:
        """Return [rank][micro-batch] what is asked of every token that counts."""
        asked = [[q] for q, segment in enumerate(batch.segments) if mask(segment).any()]
        plan = cut_evenly(batch.segments, asked, self._config)
        layout = self._config.layout
        return [[build(batch.segments, chosen, layout=layout) for chosen in s] for s in plan]

    # Weights and state

    def _collect(self) -> Weights:
        return self._group.call("collect", fatal=False)

    @property
    def adapter(self) -> AdapterHeader | None:
        lora = self._setup.model.lora
        return None if lora is None else AdapterHeader(rank=lora.rank, alpha=lora.alpha)

    def weights(self) -> Weights:
        found = self._collect()
        if self._config.zero_stage == 3 or self._config.device != "cpu":
            return found  # copied already
        tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
        return Weights(tensors, found.aliases)

    def export_model(self, directory: Path) -> None:
        weights, table = self._collect(), self._setup.model
        if table.lora is None:
            model = self._group.engine.model
            model_files.export_model(directory, weights, model, table.path)
        else:
            export_adapter(directory, weights, table.lora, table.path)

    def save_state(self, directory: Path) -> None:
        what, need = "the engine's state", self._state_bytes()
        remedy = "lower learner.keep_last and learner.keep_best, or move run.dir to a larger disk"
        # Asked before any rank writes: several ranks are out of step after an error.
        require_space(what, directory, need, remedy)
        directory.mkdir(parents=True, exist_ok=True)
        with report_full_disk(what, directory, need, remedy):
            self._group.call("save", [directory] * self._config.ranks, fatal=False)
            durable.seal(directory, self._setup.facts())

    def load_state(self, directory: Path) -> None:
        ranks, facts = self._config.ranks, self._setup.facts()
        old = model_files.is_old(directory)
        if old:
            facts[f"{self._setup.table_name}.ranks"] = ranks
        durable.check_seal(directory, facts)
        self._group.call("load_old" if old else "load", [directory] * ranks)

    def snapshot_bytes(self) -> int:
        bytes_per_weight = 2 if self._setup.model.dtype == "bfloat16" else 4
        return self._group.engine.num_weights() * bytes_per_weight

    def checkpoint_bytes(self) -> int:
        return self._state_bytes() + self.snapshot_bytes()

    def _state_bytes(self) -> int:
        engine = self._group.engine
        return (engine.num_weights() + engine.num_critic_weights()) * STATE_BYTES_PER_WEIGHT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self.stop()
        else:
            self.close("" if error is None else str(error) or type(error).__name__)

    def stop(self) -> None:
        """End in order before the work is done, which the statuses of the other ranks say."""
        self._group.close(STOP)

    def check(self) -> None:
        self._group.check()

    def close(self, why: str = "") -> None:
        self._group.close(why)


def _count_computed(orders: Sequence[RankBatch]) -> dict[str, float]:
    """Describe what the policy runs forward; {} where it runs nothing."""
    batches = [batch for order in orders for batch in order.policy_batches()]
    tokens, computed = sum(b.num_tokens for b in batches), sum(b.num_computed for b in batches)
    if not tokens:
        return {}
    measured = sum(b.num_tokens for order in orders for s in order.steps for b in s.measured)
    return {
        "batch/computed_tokens": float(computed),
        "batch/forward_only_share": measured / tokens,
        "batch/shared_share": 1.0 - computed / tokens,
        "batch/padding_share": 1.0 - computed / sum(b.num_padded for b in batches),
        "batch/microbatches": float(len(batches)),
    }
