"""One rank of the training engine: the policy, its reference and its critic.

policy_engine.py (rank 0) --RankBatch--> RankEngine, on every rank --metrics--> policy_engine.py

Every method is called on all ranks with equally many micro-batches, since each forward, backward
and step may hold collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from agent_r1.learner.algorithms import find_policy_loss
from agent_r1.learner.algorithms.kl import kl_per_token
from agent_r1.learner.algorithms.losses import LossInputs, LossOptions
from agent_r1.learner.algorithms.losses.nll import weighted_nll
from agent_r1.learner.algorithms.losses.value import clipped_value_loss
from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.attention import check_kernel, plan_attention
from agent_r1.learner.engine.critic import CriticModule
from agent_r1.learner.engine.division import check_same_weights, divided_loading, is_divided
from agent_r1.learner.engine.interface import EngineError, FloatArray, LossSpec, Model
from agent_r1.learner.engine.lora import adapter_names, adapters_off, add_adapters
from agent_r1.learner.engine.metric_accumulator import MetricAccumulator, batch_metrics
from agent_r1.learner.engine.model import (
    CHECKED_ATTENTION,
    DTYPES,
    PolicyModule,
    checkpoint_activations,
    load_causal_model,
    parameter_names,
    prepare_layout,
)
from agent_r1.learner.engine.model_files import (
    CRITIC_FILE,
    OLD_CRITIC_TAG,
    OLD_POLICY_TAG,
    POLICY_FILE,
)
from agent_r1.learner.engine.ranks.host_copies import HostCopies
from agent_r1.learner.engine.ranks.messages import (
    CriticSetup,
    EngineSetup,
    MicroBatch,
    OptimizerStep,
    RankBatch,
    TokenBatch,
    TrainReply,
    ValueBatch,
)
from agent_r1.learner.engine.zero import ZeroModule, divider, freeze, ignore_vendor_deprecations
from agent_r1.runtime.config import ModelConfig
from agent_r1.weights.snapshot import Weights


class RankEngine:
    """This rank's share of the policy with its optimizer, the reference and the critic."""

    def __init__(self, setup: EngineSetup, device: torch.device) -> None:
        ignore_vendor_deprecations()
        torch.manual_seed(setup.seed)
        torch.use_deterministic_algorithms(setup.deterministic)
        self.device = device
        self.ranks = dist.get_world_size()
        self.is_first = dist.get_rank() == 0
        self._setup = setup
        self._config = config = setup.config
        with self._explain_out_of_memory():
            self.model = self._load_model(setup.model)
            if setup.model.lora is not None:
                add_adapters(self.model, setup.model.lora)
            whole = [p for p in self.model.parameters() if not is_divided(p)]
            check_same_weights(setup.model.path, whole, device)
            names = parameter_names if setup.model.lora is None else adapter_names
            self._names = names(self.model)
            policy = PolicyModule(self.model, config.logprob_chunk_tokens)
            self._policy = self._wrap(policy, self.model, config, setup.table_name)
            self._reference = self._make_reference() if setup.with_reference else None
            self._critic = None if setup.critic is None else self._make_critic(setup.critic)

    def _load_model(self, config: ModelConfig) -> PreTrainedModel:
        model = load_causal_model(config, self._loading(config.path))
        prepare_layout(model, self._config.layout)
        if self._plans:
            text, dtype = model.config.get_text_config(), DTYPES[self._setup.model.dtype]
            check_kernel(text, self._config.layout, dtype, self.device)
        return model

    @property
    def _plans(self) -> bool:
        """Return whether the attention of rows that hold several trajectories is ours."""
        return self._setup.model.attention == CHECKED_ATTENTION

    def _make_reference(self) -> Callable[..., Any]:
        """Return the configured model: the policy without its adapters, or a model of its own."""
        setup, config = self._setup, self._config
        if setup.model.lora is None:
            module = PolicyModule(self._load_model(setup.model), config.logprob_chunk_tokens)
            return freeze(module, config, dtype=setup.model.dtype, device=self.device)

        def without_adapters(*inputs: Any, **more: Any) -> Any:
            with adapters_off(self.model):
                return self._policy(*inputs, **more)

        return without_adapters

    def _loading(self, path: str) -> AbstractContextManager[None]:
        """Return what a model is loaded in: whole, or under ZeRO-3 this rank's part."""
        if self._config.zero_stage < 3:
            return nullcontext()
        return divided_loading(path, divider(self._config, self._setup.model.dtype), self.device)

    def _wrap(
        self, module: torch.nn.Module, model: PreTrainedModel, config: EngineConfig, name: str
    ) -> ZeroModule:
        """Return a trained module, which runs a model's decoder, with its optimizer."""
        if config.activation_checkpointing:
            checkpoint_activations(model, config.zero_stage)
        dtype = self._setup.model.dtype
        return ZeroModule(module.train(), config, dtype=dtype, device=self.device, name=name)

    def _make_critic(self, setup: CriticSetup) -> ZeroModule:
        model = self._load_model(setup.model)
        config = self._config.model_copy(update={"lr": setup.lr})
        return self._wrap(CriticModule(model), model, config, "critic")

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the policy so far, those before a resume included."""
        return self._policy.optimizer_steps

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
            config, name = self._config, self._setup.table_name
            raise EngineError(
                f"the learner ran out of memory on {self.device}. In this order: lower "
                f"{name}.max_tokens_per_microbatch ({config.max_tokens_per_microbatch}) and "
                f"{name}.logprob_chunk_tokens ({config.logprob_chunk_tokens}); set "
                f"{name}.activation_checkpointing = true ({config.activation_checkpointing}); "
                f"raise {name}.zero_stage ({config.zero_stage}) and set "
                f'{name}.offload ("{config.offload}"); lower '
                f"model.max_context ({self._setup.model.max_context})"
            ) from exc

    # Forward and loss

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)

    def _layout(self, batch: TokenBatch) -> dict[str, Any]:
        """Return what the decoder is told about rows that hold several trajectories."""
        layout: dict[str, Any] = {}
        if batch.position_ids is not None:
            layout["position_ids"] = self._tensor(batch.position_ids)
        if self._plans and batch.paths is not None and batch.spans is not None:
            layout["plan"] = plan_attention(batch.paths, batch.spans, self.device)
        return layout

    def _forward(self, module: Any, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [N] log-probabilities and entropies of the micro-batch's trained tokens."""
        logprobs, entropies = module(
            self._tensor(batch.token_ids),
            self._tensor(batch.positions),
            self._tensor(batch.targets),
            self._tensor(batch.temperatures),
            **self._layout(batch),
        )
        predictions = self._tensor(batch.predictions)
        return logprobs.index_select(0, predictions), entropies.index_select(0, predictions)

    def _values(self, batch: TokenBatch) -> torch.Tensor:
        """Return [N] values of the states before the batch's tokens."""
        assert self._critic is not None
        positions = self._tensor(batch.positions)
        values = self._critic(self._tensor(batch.token_ids), positions, **self._layout(batch))
        return values.index_select(0, self._tensor(batch.predictions))

    def _policy_share(
        self, batch: MicroBatch, spec: LossSpec, metrics: MetricAccumulator, *, compares: bool
    ) -> torch.Tensor:
        """Run the micro-batch forward; return its share of the optimizer batch's loss.

        Args:
            batch: the micro-batch.
            spec: which loss.
            metrics: gets what is measured.
            compares: the weights are those of the start of the batch for all of its tokens, so
                log-probabilities are compared with the rollout's.
        """
        ref_logprobs = None
        if self._reference is not None and spec.kl_coef > 0:
            with torch.no_grad():
                ref_logprobs, _ = self._forward(self._reference, batch)
        logprobs, entropies = self._forward(self._policy, batch)
        weights = self._tensor(batch.weights)
        metrics.add("entropy", entropies)
        metrics.add("tokens", torch.ones_like(logprobs))
        if spec.kind == "nll":
            share = weighted_nll(logprobs, weights).sum()
            metrics.add("policy", share)
        else:
            inputs = LossInputs(
                logprobs=logprobs,
                old_logprobs=self._tensor(batch.old_logprobs),
                advantages=self._tensor(batch.advantages),
                sequences=self._tensor(batch.sequences),
                num_sequences=len(batch.indices),
            )
            options = LossOptions(
                clip_low=spec.clip_low, clip_high=spec.clip_high, dual_clip=spec.dual_clip
            )
            policy = find_policy_loss(spec.policy_loss)(inputs, options)
            share = (policy.loss * self._tensor(batch.importance_weights) * weights).sum()
            metrics.add("policy", share)
            metrics.add("clipped", policy.clipped)
            metrics.raise_max("ratio", policy.ratio)
            if compares:
                difference = (logprobs.detach() - self._tensor(batch.rollout_logprobs)).abs()
                metrics.add("dlogp", difference)
                metrics.add("compared", torch.ones_like(difference))
                metrics.raise_max("dlogp", difference)
            if ref_logprobs is not None:
                kl = kl_per_token(logprobs, ref_logprobs, spec.kl_estimator)
                share = share + spec.kl_coef * (kl * weights).sum()
                metrics.add("kl_ref", kl)
            if spec.entropy_coef > 0:
                share = share - spec.entropy_coef * (entropies * weights).sum()
        metrics.add("loss", share)
        return share

    def _value_share(
        self, batch: ValueBatch, spec: LossSpec, metrics: MetricAccumulator
    ) -> torch.Tensor:
        """Run the critic forward; return the micro-batch's share of its loss."""
        values = self._values(batch)
        old_values, returns = self._tensor(batch.old_values), self._tensor(batch.returns)
        losses = clipped_value_loss(values, old_values, returns, clip=spec.value_clip)
        share = (losses.loss * self._tensor(batch.weights)).sum()
        metrics.add("value_loss", share)
        metrics.add("values", values)
        metrics.add("value_tokens", torch.ones_like(values))
        metrics.add("values_clipped", losses.clipped)
        return share

    # Training

    def train(self, order: RankBatch) -> TrainReply:
        """Take the ordered optimizer steps; return metrics over all ranks."""
        with self._explain_out_of_memory():
            metrics = MetricAccumulator(self.device)
            norms: dict[str, float] = {}
            compares = len(order.steps) == 1
            for step in order.steps:
                finite = self.accumulate(step, order.spec, metrics, compares=compares)
                finite += self._accumulate_critic(step, order.spec, metrics)
                if not_finite := self._collect_not_finite(finite):
                    return TrainReply(not_finite=not_finite)
                if step.lr is not None:
                    norms["grad_norm"] = self._policy.step(step.lr)
                if self._critic is not None and step.critic_lr is not None:
                    norms["grad/critic_norm"] = self._critic.step(step.critic_lr)
            sums, maxima = metrics.reduce()
        return TrainReply(batch_metrics(order, sums, maxima) | norms)

    def accumulate(
        self,
        step: OptimizerStep,
        spec: LossSpec,
        metrics: MetricAccumulator | None = None,
        *,
        compares: bool = True,
    ) -> list[tuple[torch.Tensor, TokenBatch]]:
        """Run all micro-batches forward and backward; gradients are then those of the step.

        Returns:
            Each micro-batch with whether its loss is finite, still on the device.
        """
        metrics = metrics or MetricAccumulator(self.device)
        finite: list[tuple[torch.Tensor, TokenBatch]] = []
        with torch.no_grad():
            for batch in step.measured:
                share = self._policy_share(batch, spec, metrics, compares=compares)
                finite.append((torch.isfinite(share), batch))
        for i, batch in enumerate(step.microbatches):
            share = self._policy_share(batch, spec, metrics, compares=compares)
            finite.append((torch.isfinite(share.detach()), batch))
            self._policy.backward(share, last=i == len(step.microbatches) - 1)
        return finite

    def _accumulate_critic(
        self, step: OptimizerStep, spec: LossSpec, metrics: MetricAccumulator
    ) -> list[tuple[torch.Tensor, TokenBatch]]:
        finite: list[tuple[torch.Tensor, TokenBatch]] = []
        for i, batch in enumerate(step.value_batches):
            assert self._critic is not None  # there are no value batches without one
            share = self._value_share(batch, spec, metrics)
            finite.append((torch.isfinite(share.detach()), batch))
            self._critic.backward(share, last=i == len(step.value_batches) - 1)
        return finite

    def _collect_not_finite(
        self, finite: Sequence[tuple[torch.Tensor, TokenBatch]]
    ) -> tuple[int, ...]:
        """Return the samples, on any rank, of micro-batches whose loss is not finite."""
        good = torch.stack([flag for flag, _ in finite]).all().to(torch.int32)
        dist.all_reduce(good, dist.ReduceOp.MIN)
        if good.item():
            return ()
        own = [i for flag, batch in finite if not flag.item() for i in batch.indices]
        count = torch.tensor(max(own, default=-1) + 1, device=self.device)
        dist.all_reduce(count, dist.ReduceOp.MAX)
        marks = torch.zeros(int(count), dtype=torch.int32, device=self.device)
        marks.index_fill_(0, torch.tensor(own, dtype=torch.int64, device=self.device), 1)
        dist.all_reduce(marks, dist.ReduceOp.MAX)
        return tuple(marks.nonzero().flatten().tolist())

    # Scoring

    def score(self, order: tuple[Model, list[MicroBatch]]) -> list[FloatArray]:
        """Return [2, N] log-probabilities and entropies of each micro-batch under a model."""
        which, microbatches = order
        module = self._policy if which == "policy" else self._reference
        with self._explain_out_of_memory(), torch.no_grad():
            scores = (torch.stack(self._forward(module, batch)) for batch in microbatches)
            return [pair.float().cpu().numpy() for pair in scores]

    def values(self, batches: Sequence[ValueBatch]) -> list[FloatArray]:
        """Return [N] values of each micro-batch."""
        with self._explain_out_of_memory(), torch.no_grad():
            return [self._values(batch).cpu().numpy() for batch in batches]

    # Weights and state

    def collect(self) -> Weights | None:
        """Gather the policy's trained weights to the CPU of rank 0; None on the others.

        Those on a GPU, and divided ones, are copied. Nothing is written while weights are gathered.
        """
        tensors: dict[str, torch.Tensor] = {}
        aliases: dict[str, str] = {}
        copies = HostCopies(self.num_weights() * DTYPES[self._setup.model.dtype].itemsize)
        divided = self._config.zero_stage == 3

        def to_host(weight: torch.Tensor) -> torch.Tensor:
            return copies.copy(weight) if weight.is_cuda else weight.to("cpu", copy=divided)

        for bucket in self._policy.gathered():
            for parameter in bucket:
                first, *others = self._names[id(parameter)]
                aliases |= dict.fromkeys(others, first)
                if self.is_first:
                    tensors[first] = to_host(parameter.detach())
        if not self.is_first:
            return None
        if self._setup.model.lora is not None:
            return Weights(tensors)
        known = set(tensors) | set(aliases)
        parameters_gone = {n for n, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, value in self.model.state_dict().items():
            if name not in known and name not in parameters_gone:
                tensors[name] = to_host(value.detach())
        return Weights(tensors, aliases)

    def num_weights(self) -> int:
        """Return the number of the policy's trained weights over all ranks, shared ones once."""
        return self._policy.num_weights()

    def num_critic_weights(self) -> int:
        """Return the number of the critic's weights over all ranks; 0 without one."""
        return 0 if self._critic is None else self._critic.num_weights()

    def save(self, directory: Path) -> None:
        """Write the engine's state, which rank 0 gathers, under `directory` of rank 0."""
        self._policy.save(directory / POLICY_FILE)
        if self._critic is not None:
            self._critic.save(directory / CRITIC_FILE)

    def load(self, directory: Path) -> None:
        """Restore it from there."""
        self._policy.load(directory / POLICY_FILE)
        if self._critic is not None:
            self._critic.load(directory / CRITIC_FILE)

    def load_old(self, directory: Path) -> None:
        """Restore what DeepSpeed wrote there, each rank its own file."""
        self._policy.load_old(directory, OLD_POLICY_TAG)
        if self._critic is not None:
            self._critic.load_old(directory, OLD_CRITIC_TAG)
