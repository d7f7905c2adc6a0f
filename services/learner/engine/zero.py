"""One module under DeepSpeed ZeRO: forward, backward, step, gather, save and load.

rank_engine.py wraps the policy, its reference and the critic in it. The only file that imports
deepspeed. Every method is called on all ranks, since each may hold collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from agent_r1.learner.config import EngineConfig
from agent_r1.learner.engine.interface import EngineError

_GATHER_BUCKET_NUMEL = 64 * 1024 * 1024


class ZeroModule:
    """A trained module with its AdamW, sharded as the table says.

    Args:
        module: on the CPU; moved to the device.
        config: ZeRO stage, offload, AdamW's numbers, gradient clipping.
        dtype: of the weights, "float32" or "bfloat16".
        device: this rank's.
        name: what messages call it: "learner", "critic" or "sft".
    """

    def __init__(
        self, module: nn.Module, table: EngineConfig, *, dtype: str, device: torch.device, name: str
    ) -> None:
        self._config = table
        self._name = name
        self._clips_itself = table.zero_stage == 0 and dtype == "float32"
        """Gradients are whole on every rank, where DeepSpeed would not tell the norm."""
        self.optimizer_steps = 0
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        vectors = [p for p in module.parameters() if p.ndim < 2]
        if device.type == "cuda" and table.offload == "none":
            module.to(device)
        # DeepSpeed's own AdamW would compile an extension for over a minute on first use.
        optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": table.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=table.lr,
            betas=table.betas,
            eps=table.adam_eps,
            fused=True,
        )
        ignore_vendor_deprecations()
        _leave_out_shared_memory_op()
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            config=deepspeed_config(table, dtype),
            dist_init_required=False,
        )

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        """Run the module forward."""
        return self._engine(*inputs)

    def backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradient of a loss that is already this rank's share; `last` ends the step's."""
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks; the shares of all ranks are to be summed.
        self._engine.backward(loss * torch.distributed.get_world_size())

    def step(self, lr: float) -> float:
        """Take one optimizer step; return the gradient norm before clipping.

        Raises:
            EngineError: the norm is not finite.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        norm: Any = None
        if self._clips_itself:
            norm = torch.nn.utils.clip_grad_norm_(
                self._engine.module.parameters(), self._config.max_grad_norm, foreach=True
            )
            self._check_finite(norm)
        self._engine.step()
        if norm is None:
            norm = self._engine.get_global_grad_norm()
            self._check_finite(norm)
        self.optimizer_steps += 1
        return float(norm)

    def _check_finite(self, norm: Any) -> None:
        if norm is None or not torch.isfinite(torch.as_tensor(norm)):
            raise EngineError(
                f"the gradient norm of optimizer step {self.optimizer_steps} is {norm}; resume "
                f"from the last checkpoint with a lower {self._name} learning rate "
                f"({self._config.lr}) or max_grad_norm ({self._config.max_grad_norm})"
            )

    def gathered(self) -> Iterator[list[nn.Parameter]]:
        """Yield all parameters in runs of a bounded number of values, whole while yielded.

        All ranks walk them in the same order.
        """
        for bucket in _buckets(list(self._engine.module.parameters())):
            if self._config.zero_stage == 3:
                with deepspeed.zero.GatheredParameters(bucket):
                    yield bucket
            else:
                yield bucket

    def num_weights(self) -> int:
        """Return the number of weights over all ranks, shared ones once."""
        return sum(_numel(p) for p in self._engine.module.parameters())

    def save(self, directory: Path, tag: str) -> None:
        """Write this rank's part of weights and optimizer state under `directory`."""
        self._engine.save_checkpoint(
            str(directory),
            tag=tag,
            client_state={"policy_optimizer_steps": self.optimizer_steps},
            save_latest=False,
        )

    def load(self, directory: Path, tag: str) -> None:
        """Restore this rank's part."""
        path, client_state = self._engine.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise EngineError(f"DeepSpeed found no state tagged {tag!r} in {directory}")
        self.optimizer_steps = int(client_state["policy_optimizer_steps"])


def freeze(module: nn.Module, table: EngineConfig, *, dtype: str, device: torch.device) -> Any:
    """Return a module that is only run forward; sharded when the policy's weights are."""
    module.requires_grad_(False).eval()
    if table.zero_stage < 3:
        return module.to(device)
    config = deepspeed_config(table, dtype)
    engine, *_ = deepspeed.initialize(model=module, config=config, dist_init_required=False)
    return engine


def ignore_vendor_deprecations() -> None:
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


def deepspeed_config(table: EngineConfig, dtype: str) -> dict[str, Any]:
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


def _numel(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut the parameters, in order, into runs of a bounded number of values."""
    bucket: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + _numel(parameter) > _GATHER_BUCKET_NUMEL:
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += _numel(parameter)
    if bucket:
        yield bucket
