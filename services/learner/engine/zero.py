"""One module under DeepSpeed ZeRO: forward, backward, step, gather, save and load.

ranks/engine.py wraps the policy, its reference and the critic in it. The only file that imports
deepspeed. Every method is called on all ranks, since each may hold collectives.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors import safe_open
from torch import nn

from agent_r1.learner.config import GRADIENT_BUCKET, EngineConfig
from agent_r1.learner.engine.division import whole_shape
from agent_r1.learner.engine.interface import EngineError
from agent_r1.learner.engine.model_files import WEIGHT
from agent_r1.weights.snapshot import raw_bytes, safetensors_header

_GATHER_BUCKET_NUMEL = 64 * 1024 * 1024
STATE = (WEIGHT, "exp_avg", "exp_avg_sq")
_CLASSES_OF_OLD_STATE = (ZeroStageEnum, LossScaler, fragment_address)


class ZeroModule:
    """A trained module with its AdamW, sharded as the table says.

    Args:
        module: on the CPU; moved to the device. Under ZeRO-3, `divided_loading` has divided it.
        config: ZeRO stage, offload, AdamW's numbers, gradient clipping.
        dtype: of the weights, "float32" or "bfloat16".
        device: this rank's.
        name: what messages call it: "learner", "critic" or "sft".
    """

    def __init__(
        self,
        module: nn.Module,
        config: EngineConfig,
        *,
        dtype: str,
        device: torch.device,
        name: str,
    ) -> None:
        self._config = config
        self._name = name
        self._device = device
        self._clips_itself = config.zero_stage == 0 and dtype == "float32"
        """Gradients are whole on every rank, where DeepSpeed would not tell the norm."""
        self.optimizer_steps = 0
        self._trained = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        """By name; the others are frozen."""
        matrices = [p for _, p in self._trained if len(whole_shape(p)) >= 2]
        vectors = [p for _, p in self._trained if len(whole_shape(p)) < 2]
        if config.offload == "none" or config.zero_stage == 3:
            module.to(device)  # of what is divided, nothing
        # DeepSpeed's own AdamW would compile an extension for over a minute on first use.
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=config.betas,
            eps=config.adam_eps,
            fused=True,
        )
        ignore_vendor_deprecations()
        _leave_out_shared_memory_op()
        self._engine: Any
        self._adam = optimizer
        settings = deepspeed_config(config, dtype, trained=self.num_weights())
        self._stage: int = settings["zero_optimization"]["stage"]
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )

    def __call__(self, *inputs: torch.Tensor | None, **more: Any) -> Any:
        """Run the module forward."""
        return self._engine(*inputs, **more)

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
        """Yield what is trained in runs of a bounded number of values, whole while yielded.

        All ranks walk them in the same order.
        """
        for bucket in _buckets([parameter for _, parameter in self._trained]):
            if self._config.zero_stage == 3:
                with deepspeed.zero.GatheredParameters(bucket):
                    yield bucket
            else:
                yield bucket

    def num_weights(self) -> int:
        """Return the number of trained weights over all ranks, shared ones once."""
        return sum(_numel(parameter) for _, parameter in self._trained)

    def save(self, path: Path) -> None:
        """Write trained weights and optimizer state, whole, into a file of rank 0.

        Each tensor is gathered when its turn comes, so that no rank holds more than one. Any number
        of ranks reads the file.
        """
        self._prepare_state()
        shapes = {
            f"{name}.{key}": torch.empty(whole_shape(parameter), device="meta")
            for name, parameter in self._trained
            for key in STATE
        }
        steps = {"optimizer_steps": self.optimizer_steps, "adam_steps": int(self._adam_steps())}
        header = safetensors_header(shapes, {name: str(count) for name, count in steps.items()})
        with path.open("wb") if dist.get_rank() == 0 else nullcontext() as file:
            if file is not None:
                file.write(header)
            for _, parameter in self._trained:
                for key in STATE:
                    whole = self._gather_state(parameter, key)
                    if file is not None:
                        file.write(raw_bytes(whole.cpu()).data)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote, from the file of rank 0.

        Raises:
            ValueError: the file is of another model.
        """
        self._prepare_state()
        steps = torch.zeros(2, dtype=torch.int64, device=self._device)
        with safe_open(path, "pt") if dist.get_rank() == 0 else nullcontext() as file:
            if file is not None:
                names = {f"{name}.{key}" for name, _ in self._trained for key in STATE}
                if strange := sorted(names ^ set(file.keys())):
                    raise ValueError(f"{path} is of another model (different: {strange[0]})")
                counts = file.metadata()
                steps[0] = int(counts["optimizer_steps"])
                steps[1] = int(counts["adam_steps"])
            dist.broadcast(steps, 0)
            for name, parameter in self._trained:
                for key in STATE:
                    whole = torch.empty(whole_shape(parameter), device=self._device)
                    if file is not None:
                        whole.copy_(file.get_tensor(f"{name}.{key}"))
                    dist.broadcast(whole, 0)
                    self._set_state(parameter, key, whole)
        if self._stage in (1, 2):
            self._engine.optimizer.update_lp_params()
        self.optimizer_steps = int(steps[0])
        for state in self._adam.state.values():
            state["step"].fill_(float(steps[1]))

    def load_old(self, directory: Path, tag: str) -> None:
        """Restore this rank's part of a checkpoint that DeepSpeed wrote; runs no code in it."""

        def load(path: str, map_location: Any = None) -> Any:
            with torch.serialization.safe_globals(list(_CLASSES_OF_OLD_STATE)):
                return torch.load(path, map_location, weights_only=True)

        self._engine.checkpoint_engine.load = load
        path, client_state = self._engine.load_checkpoint(str(directory), tag=tag)
        if path is None:
            raise EngineError(f"DeepSpeed found no state tagged {tag!r} in {directory}")
        self.optimizer_steps = int(client_state["policy_optimizer_steps"])

    def _prepare_state(self) -> None:
        """Let AdamW have moments, of 0, before its first step too."""
        if self._stage == 3:
            parts = self._engine.optimizer.fp32_partitioned_groups_flat
        else:
            parts = [p for group in self._adam.param_groups for p in group["params"]]
        for parameter in parts:
            if not self._adam.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {key: torch.zeros_like(parameter) for key in STATE if key != WEIGHT}
                self._adam.state[parameter].update(step=step, **moments)
        if self._stage in (1, 2):
            # DeepSpeed links after its first group's first step, when the others have no moments.
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _adam_steps(self) -> float:
        """Return the steps that AdamW corrects its moments for."""
        return max(float(state["step"]) for state in self._adam.state.values())

    def _gather_state(self, parameter: nn.Parameter, key: str) -> torch.Tensor:
        """Return one float32 tensor of a parameter, whole, on every rank."""
        if self._stage == 0:
            return parameter.detach() if key == WEIGHT else self._adam.state[parameter][key]
        if key == WEIGHT:
            return safe_get_full_fp32_param(parameter)  # pyright: ignore[reportReturnType]
        return safe_get_full_optimizer_state(parameter, key)  # pyright: ignore[reportReturnType]

    def _set_state(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        """Put one tensor back: all of it, or this rank's part."""
        if self._stage == 0:
            target = parameter.data if key == WEIGHT else self._adam.state[parameter][key]
            target.copy_(whole)
        elif self._stage < 3:
            if key == WEIGHT:
                safe_set_full_fp32_param(parameter, whole)
            else:
                safe_set_full_optimizer_state(parameter, whole, key)
        else:
            self._set_part(parameter, key, whole)

    def _set_part(self, parameter: Any, key: str, whole: torch.Tensor) -> None:
        # DeepSpeed's setters of whole tensors fail where the ranks do not divide their size.
        size = -(-whole.numel() // dist.get_world_size())
        part = whole.flatten()[size * dist.get_rank() :][:size]
        part = nn.functional.pad(part, (0, size - part.numel()))
        if key != WEIGHT:
            safe_set_local_optimizer_state(parameter, part, key)
            return
        safe_set_local_fp32_param(parameter, part)
        parameter.ds_tensor.copy_(part)
        if parameter.numel():  # DeepSpeed keeps small ones whole between two steps
            parameter.data.copy_(whole)


def divider(config: EngineConfig, dtype: str) -> Callable[[list[nn.Parameter]], None]:
    """Return what leaves each rank its part of rank 0's parameters, on GPU or CPU as configured."""
    _leave_out_shared_memory_op()
    first: Any = nn.Parameter(torch.zeros(1))
    settings = deepspeed_config(config, dtype)
    deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=settings)
    return first.convert_to_zero_parameters


def freeze(module: nn.Module, config: EngineConfig, *, dtype: str, device: torch.device) -> Any:
    """Return a module that is only run forward; sharded when the policy's weights are."""
    module.requires_grad_(False).eval().to(device)
    if config.zero_stage < 3:
        return module
    settings = deepspeed_config(config, dtype)
    engine, *_ = deepspeed.initialize(model=module, config=settings, dist_init_required=False)
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


def deepspeed_config(
    config: EngineConfig, dtype: str, *, trained: int = GRADIENT_BUCKET
) -> dict[str, Any]:
    """Return the DeepSpeed configuration for an engine table, a weight dtype and a module.

    Args:
        config: the table.
        dtype: of the weights.
        trained: how many of the module's weights are trained.
    """
    bf16 = dtype == "bfloat16"
    # Without ZeRO, DeepSpeed would accumulate bfloat16 gradients in bfloat16; stage 1 keeps
    # float32 gradients and master weights.
    stage = max(1, config.zero_stage) if bf16 else config.zero_stage
    # Stages 2 and 3 make the whole bucket at once, also for adapters of a few million weights.
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(GRADIENT_BUCKET, trained)}
    if config.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm if stage > 0 else 0.0,
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
