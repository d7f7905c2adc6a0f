"""One rank of the training engine: forward, loss, backward and step under DeepSpeed ZeRO.

policy_engine.py (rank 0) --TrainOrder--> RankEngine, on every rank --metrics--> policy_engine.py

The only file that imports deepspeed. Every method is called on all ranks with the same method and
equally many micro-batches, since each forward, backward and step may hold collectives.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from agent_r1.learner.algorithms.aggregation import batch_share
from agent_r1.learner.algorithms.kl import kl_per_token
from agent_r1.learner.algorithms.losses.nll import weighted_nll
from agent_r1.learner.algorithms.losses.ppo import clipped_policy_loss
from agent_r1.learner.batching import MicroBatch
from agent_r1.learner.config import EngineTable
from agent_r1.learner.engine import EngineError, LossSpec
from agent_r1.learner.logprobs import PolicyModule, load_causal_model
from agent_r1.learner.orders import StepOrder, TrainOrder
from agent_r1.learner.snapshot import Weights
from agent_r1.learner.tally import Tally, batch_metrics
from agent_r1_proto.config import ModelTable

logger = logging.getLogger(__name__)

STATE_TAG = "engine"
_GATHER_BUCKET_NUMEL = 64 * 1024 * 1024


class RankEngine:
    """The policy's share on this rank, with optimizer and optional reference."""

    def __init__(
        self,
        model: ModelTable,
        table: EngineTable,
        *,
        device: torch.device,
        seed: int,
        with_reference: bool,
        table_name: str,
    ) -> None:
        _ignore_vendor_deprecations()
        torch.manual_seed(seed)
        self.device = device
        self.ranks = dist.get_world_size()
        self.is_first = dist.get_rank() == 0
        self._model_table = model
        self._table = table
        self._table_name = table_name
        self.optimizer_steps = 0
        with self._explain_out_of_memory():
            self.model = load_causal_model(model)
            self._names = _parameter_names(self.model)
            module = PolicyModule(self.model, table.logprob_chunk_tokens)
            if table.activation_checkpointing:
                # ZeRO-3 frees weights between forward and recomputation; only the reentrant kind
                # runs the hooks that bring them back.
                reentrant = table.zero_stage == 3
                self.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                if reentrant:
                    self.model.enable_input_require_grads()
            module.train()
            self._engine = self._initialize(module)
            self._reference = self._make_reference() if with_reference else None

    def _initialize(self, module: PolicyModule) -> Any:
        """Wrap the policy and a torch AdamW into a DeepSpeed engine."""
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        vectors = [p for p in module.parameters() if p.ndim < 2]
        if self.device.type == "cuda" and self._table.offload == "none":
            module.to(self.device)
        # DeepSpeed's own AdamW would compile an extension for over a minute on first use.
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self._table.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self._table.lr,
            betas=self._table.betas,
            eps=self._table.adam_eps,
            fused=True,
        )
        _leave_out_shared_memory_op()
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(self._table, self._model_table.dtype),
            dist_init_required=False,
        )
        return engine

    def _make_reference(self) -> nn.Module:
        """Load the configured model once more, frozen; sharded when the policy is."""
        reference = load_causal_model(self._model_table)
        module = PolicyModule(reference, self._table.logprob_chunk_tokens)
        module.requires_grad_(False).eval()
        if self._table.zero_stage < 3:
            return module.to(self.device)
        config = deepspeed_config(self._table, self._model_table.dtype)
        engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
        return engine

    @contextmanager
    def _explain_out_of_memory(self) -> Iterator[None]:
        """Turn running out of memory into a message that names the keys to change, in order."""
        try:
            yield
        except (MemoryError, RuntimeError) as exc:
            cuda = isinstance(exc, torch.OutOfMemoryError)
            cpu = isinstance(exc, MemoryError) or "can't allocate memory" in str(exc)
            if not (cuda or cpu):
                raise
            table, name = self._table, self._table_name
            raise EngineError(
                f"the learner ran out of memory on {self.device}. In this order: lower "
                f"{name}.max_tokens_per_microbatch ({table.max_tokens_per_microbatch}) and "
                f"{name}.logprob_chunk_tokens ({table.logprob_chunk_tokens}); set "
                f"{name}.activation_checkpointing = true ({table.activation_checkpointing}); raise "
                f'{name}.zero_stage ({table.zero_stage}) and set {name}.offload ("{table.offload}")'
                f"; lower model.max_context ({self._model_table.max_context})"
            ) from exc

    # Forward and loss

    def _forward(self, module: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [N] log-probabilities and entropies of the micro-batch's trained tokens."""
        return module(
            self._tensor(batch.token_ids),
            self._tensor(batch.positions),
            self._tensor(batch.targets),
            self._tensor(batch.temperatures),
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _share_of_loss(
        self, batch: MicroBatch, spec: LossSpec, total_weight: float, tally: Tally
    ) -> torch.Tensor:
        """Run the micro-batch forward; return its share of the optimizer batch's loss."""
        ref_logprobs = None
        if self._reference is not None and spec.kl_coef > 0:
            with torch.no_grad():
                ref_logprobs, _ = self._forward(self._reference, batch)
        logprobs, entropies = self._forward(self._engine, batch)
        advantages = self._tensor(batch.advantages)
        tally.add("entropy", entropies)
        tally.add("tokens", torch.ones_like(logprobs))
        if spec.kind == "nll":
            losses = weighted_nll(logprobs, advantages)
            tally.add("policy", losses / total_weight)
        else:
            policy = clipped_policy_loss(
                logprobs,
                self._tensor(batch.old_logprobs),
                advantages,
                clip_low=spec.clip_low,
                clip_high=spec.clip_high,
                dual_clip=spec.dual_clip,
            )
            losses = policy.loss
            tally.add("policy", losses / total_weight)
            tally.add("clipped", policy.clipped / total_weight)
            tally.raise_max("ratio", policy.ratio)
            if spec.optimizer_steps == 1:
                self._tally_difference(logprobs, batch, tally)
            if ref_logprobs is not None:
                kl = kl_per_token(logprobs, ref_logprobs, spec.kl_estimator)
                losses = losses + spec.kl_coef * kl
                tally.add("kl_ref", kl)
            if spec.entropy_coef > 0:
                losses = losses - spec.entropy_coef * entropies
        share = batch_share(losses, total_weight)
        tally.add("loss", share)
        return share

    def _tally_difference(self, logprobs: torch.Tensor, batch: MicroBatch, tally: Tally) -> None:
        """Compare the learner's log-probabilities with the rollout's."""
        difference = (logprobs.detach() - self._tensor(batch.old_logprobs)).abs()
        tally.add("dlogp", difference)
        tally.raise_max("dlogp", difference)

    # Training

    def train(self, order: TrainOrder) -> dict[str, float]:
        """Take the ordered optimizer steps; return metrics over all ranks."""
        with self._explain_out_of_memory():
            tally = Tally(self.device)
            steps = order.steps
            if len(steps) > 1 and order.spec.kind == "ppo":
                steps = [self._with_learner_logprobs(step, tally) for step in steps]
            grad_norm = 0.0
            for step in steps:
                grad_norm = self._optimizer_step(step, order.spec, tally)
            sums, maxima = tally.reduce()
        return batch_metrics(order, sums, maxima) | {"grad_norm": grad_norm, "lr": steps[-1].lr}

    def _with_learner_logprobs(self, step: StepOrder, tally: Tally) -> StepOrder:
        """Replace the ratio's denominator by the learner's own, before the first step."""
        replaced: list[MicroBatch] = []
        for batch in step.microbatches:
            with torch.no_grad():
                logprobs, _ = self._forward(self._engine, batch)
            self._tally_difference(logprobs, batch, tally)
            replaced.append(batch.with_old_logprobs(logprobs.float().cpu().numpy()))
        return StepOrder(replaced, step.total_weight, step.lr)

    def accumulate(self, step: StepOrder, spec: LossSpec, tally: Tally | None = None) -> None:
        """Run all micro-batches forward and backward; gradients are then those of the step."""
        tally = tally or Tally(self.device)
        last = len(step.microbatches) - 1
        for i, batch in enumerate(step.microbatches):
            self._engine.set_gradient_accumulation_boundary(i == last)
            share = self._share_of_loss(batch, spec, step.total_weight, tally)
            # DeepSpeed averages gradients over ranks; the shares of all ranks are to be summed.
            self._engine.backward(share * self.ranks)

    def _optimizer_step(self, step: StepOrder, spec: LossSpec, tally: Tally) -> float:
        """Take one optimizer step; return the gradient norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = step.lr
        self.accumulate(step, spec, tally)
        norm: Any = None
        if self._clips_itself:
            norm = torch.nn.utils.clip_grad_norm_(
                self._engine.module.parameters(), self._table.max_grad_norm, foreach=True
            )
            self._check_finite(norm)
        self._engine.step()
        if norm is None:
            norm = self._engine.get_global_grad_norm()
            self._check_finite(norm)
        self.optimizer_steps += 1
        return float(norm)

    @property
    def _clips_itself(self) -> bool:
        """Whether gradients are whole on every rank, where DeepSpeed would not tell the norm."""
        return self._table.zero_stage == 0 and self._model_table.dtype == "float32"

    def _check_finite(self, norm: Any) -> None:
        if norm is None or not torch.isfinite(torch.as_tensor(norm)):
            raise EngineError(
                f"the gradient norm of optimizer step {self.optimizer_steps} is {norm}; resume "
                f"from the last checkpoint with a lower {self._table_name}.lr "
                f"({self._table.lr}) or max_grad_norm ({self._table.max_grad_norm})"
            )

    def score(self, microbatches: Sequence[MicroBatch]) -> list[Any]:
        """Return [N] log-probabilities of each micro-batch, as numpy float32."""
        with self._explain_out_of_memory(), torch.no_grad():
            return [
                self._forward(self._engine, batch)[0].float().cpu().numpy()
                for batch in microbatches
            ]

    # Weights and state

    def collect(self) -> Weights | None:
        """Gather all weights to the CPU of rank 0; None on the others.

        All ranks walk the parameters in the same order; nothing is written while weights are
        gathered.
        """
        pairs = [(self._names[id(p)], p) for p in self._engine.module.parameters()]
        tensors: dict[str, torch.Tensor] = {}
        for bucket in _buckets(pairs):
            parameters = [parameter for _, parameter in bucket]
            if self._table.zero_stage == 3:
                with deepspeed.zero.GatheredParameters(parameters):
                    if self.is_first:
                        tensors |= {n[0]: p.detach().to("cpu", copy=True) for n, p in bucket}
            elif self.is_first:
                tensors |= {n[0]: p.detach().cpu() for n, p in bucket}
        if not self.is_first:
            return None
        aliases = {alias: names[0] for names, _ in pairs for alias in names[1:]}
        known = set(tensors) | set(aliases)
        parameters_gone = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, value in self.model.state_dict().items():
            if name not in known and name not in parameters_gone:
                tensors[name] = value.detach().cpu()
        return Weights(tensors, aliases)

    def num_weights(self) -> int:
        """Return the number of weights over all ranks, shared ones once."""
        parameters = self._engine.module.parameters()
        return sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters)

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint must match to be read by this engine."""
        return {
            f"{self._table_name}.ranks": self.ranks,
            f"{self._table_name}.zero_stage": self._table.zero_stage,
            "model.dtype": self._model_table.dtype,
        }

    def save(self, directory: Path) -> None:
        """Write this rank's part of the engine's state under `directory`."""
        self._engine.save_checkpoint(
            str(directory),
            tag=STATE_TAG,
            client_state={"policy_optimizer_steps": self.optimizer_steps},
            save_latest=False,
        )

    def load(self, directory: Path) -> int:
        """Restore this rank's part; return the optimizer steps it had taken."""
        path, client_state = self._engine.load_checkpoint(str(directory), tag=STATE_TAG)
        if path is None:
            raise EngineError(f"DeepSpeed found no state tagged {STATE_TAG!r} in {directory}")
        self.optimizer_steps = int(client_state["policy_optimizer_steps"])
        return self.optimizer_steps


def _ignore_vendor_deprecations() -> None:
    """Keep DeepSpeed's calls of deprecated torch functions out of the logs: nothing is ours to do.

    Stages 1 to 3 import torch.jit, stage 3 gathers through renamed collectives.
    """
    script_method = "`torch.jit.script_method` is deprecated"
    warnings.filterwarnings("ignore", script_method, DeprecationWarning)
    renamed = "`torch.distributed.*` is deprecated"
    warnings.filterwarnings("ignore", renamed, FutureWarning)


def _leave_out_shared_memory_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory collectives, which takes minutes on a CPU.

    gloo does the same work; the table is the one DeepSpeed asks before it compiles.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def deepspeed_config(table: EngineTable, dtype: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration for an engine table and a weight dtype."""
    bf16 = dtype == "bfloat16"
    # Without ZeRO, DeepSpeed would accumulate bfloat16 gradients in bfloat16; stage 1 keeps
    # float32 gradients and master weights.
    stage = max(1, table.zero_stage) if bf16 else table.zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if table.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if table.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": table.max_grad_norm if stage > 0 else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def _parameter_names(model: PreTrainedModel) -> dict[int, list[str]]:
    """Return the Hugging Face names of each parameter, by its id; more than one when tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _buckets(
    pairs: Sequence[tuple[list[str], nn.Parameter]],
) -> Iterator[list[tuple[list[str], nn.Parameter]]]:
    """Cut the parameters, in order, into runs of a bounded number of values."""
    bucket: list[tuple[list[str], nn.Parameter]] = []
    size = 0
    for names, parameter in pairs:
        numel = int(getattr(parameter, "ds_numel", parameter.numel()))
        if bucket and size + numel > _GATHER_BUCKET_NUMEL:
            yield bucket
            bucket, size = [], 0
        bucket.append((names, parameter))
        size += numel
    if bucket:
        yield bucket
