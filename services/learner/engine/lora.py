"""LoRA: a model's linear layers with adapters, which alone are trained.

ranks/engine.py adds them to the policy, switches them off for the reference, and gathers them under
the names that PEFT gives them in a file. The only file that imports peft, and only when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from agent_r1.learner.engine.division import whole_shape
from agent_r1.learner.engine.linear import use_fast_products
from agent_r1.learner.engine.model import load_causal_model, parameter_names
from agent_r1.learner.engine.model_files import export_model
from agent_r1.runtime.config import LoraConfig, ModelConfig
from agent_r1.runtime.files.writing import replace_directory, report_full_disk
from agent_r1.runtime.imports import import_extra
from agent_r1.weights.adapters import (
    ADAPTER_FILE,
    PREFIX,
    adapter_shapes,
    check_start,
    write_adapter_config,
)
from agent_r1.weights.snapshot import Weights, write_safetensors

_NAME = "default"
"""What PEFT calls a model's only adapter in the names of parameters."""


def _import_peft() -> Any:
    return import_extra("peft", "learner", "model.lora")


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze a model and give its targets adapters, which start as `lora.path` says.

    Raises:
        ValueError: the adapters do not fit the model, or cannot be read.
        MissingPackageError: peft is not installed.
    """
    peft = _import_peft()
    adapter_shapes({name: tuple(whole_shape(p)) for name, p in model.named_parameters()}, lora)
    check_start(lora)
    model.requires_grad_(False)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets)
    peft.inject_adapter_in_model(config, model)
    for parameter in trained(model):
        parameter.data = parameter.data.to(model.dtype)
    use_fast_products(model)
    if lora.path is not None:
        _fill(model, lora.path)


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that have a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _fill(model: nn.Module, folder: Path) -> None:
    tensors = load_file(folder / ADAPTER_FILE)
    parameters = {id(parameter): parameter for parameter in trained(model)}
    for key, (name,) in adapter_names(model).items():
        if name not in tensors or tensors[name].shape != parameters[key].shape:
            raise ValueError(
                f"model.lora.path ({folder}) is not an adapter of this model: {name} is missing "
                "or has another shape; name the one that was trained on model.path"
            )
        parameters[key].data.copy_(tensors[name])


def adapter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the one name that each matrix of the adapters has in a file, by the id of it."""
    return {
        id(parameter): [PREFIX + name.replace(f".{_NAME}.", ".")]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Let a model compute what it did before it had adapters; for forward passes only."""
    adapted = _import_peft().tuners.tuners_utils.BaseTunerLayer
    layers: list[Any] = [module for module in model.modules() if isinstance(module, adapted)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def export_adapter(directory: Path, weights: Weights, lora: LoraConfig, base: str) -> None:
    """Write the folder of an adapter as PEFT reads it, complete when it appears.

    Args:
        directory: where; replaced when it exists.
        weights: the matrices by their names in a file.
        lora: their rank, alpha and targets.
        base: the model that they change.

    Raises:
        DiskFullError: there is no room; nothing is left behind.
    """
    remedy = "lower learner.keep_last and learner.keep_best, or move run.dir to a larger disk"
    with (
        report_full_disk("the adapter", directory, weights.size_bytes, remedy),
        replace_directory(directory) as staging,
    ):
        write_adapter_config(staging, lora, base)
        write_safetensors(staging / ADAPTER_FILE, weights)


def export_merged(out: Path, config: ModelConfig, folder: Path) -> None:
    """Write a model directory with an adapter added to the weights that it changes.

    Args:
        out: where; replaced when it exists.
        config: the model that the adapter was trained on.
        folder: of the adapter.

    Raises:
        ValueError: the model cannot be loaded.
        DiskFullError: there is no room; nothing is left behind.
    """
    peft = _import_peft()
    base = load_causal_model(config)
    model = peft.PeftModel.from_pretrained(base, str(folder)).merge_and_unload()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    aliases = {
        other: first for first, *others in parameter_names(model).values() for other in others
    }
    export_model(out, Weights(parameters, aliases), model, config.path)
