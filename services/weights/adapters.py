"""LoRA adapters on disk, in the format of the PEFT library: a folder with two files.

The learner writes them into checkpoints, and rollout servers hand them to vLLM; both compute here
which tensors the adapter of a model has. `read_adapter` reads one that a run starts from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.runtime.config import LoraConfig

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of the name of every module, in the names of an adapter's tensors."""

Shape = tuple[int, ...]


def adapter_shapes(shapes: Mapping[str, Shape], lora: LoraConfig) -> dict[str, Shape]:
    """Return the tensors of an adapter by name: A is [rank, I] and B [O, rank] of a layer [O, I].

    Args:
        shapes: of the model's tensors, by their Hugging Face names.
        lora: which layers have an adapter.

    Raises:
        ValueError: a target is no linear layer of the model, or smaller than the rank.
    """
    found: dict[str, Shape] = {}
    missing = set(lora.targets)
    for module, shape in _layers(shapes).items():
        target = module.rpartition(".")[2]
        if target not in lora.targets:
            continue
        if lora.rank > min(shape):
            raise ValueError(
                f"model.lora.rank ({lora.rank}) must be <= {min(shape)}, the smaller side of "
                f"{module} {list(shape)}; lower it, or leave {target} out of model.lora.targets"
            )
        missing.discard(target)
        found[f"{PREFIX}{module}.lora_A.weight"] = (lora.rank, shape[1])
        found[f"{PREFIX}{module}.lora_B.weight"] = (shape[0], lora.rank)
    if missing:
        raise ValueError(
            f"model.lora.targets names {min(missing)!r}, and the model has no linear layer of that "
            f"name in its blocks; choose among {', '.join(_names(shapes))}"
        )
    return found


def _layers(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the linear layers in a model's blocks, by their names in the model."""
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if ".layers." in name and name.endswith(".weight") and len(shape) == 2
    }


def _names(shapes: Mapping[str, Shape]) -> list[str]:
    return sorted({module.rpartition(".")[2] for module in _layers(shapes)})


def write_adapter_config(folder: Path, lora: LoraConfig, base: str) -> None:
    """Write what PEFT and vLLM read beside the tensors of an adapter.

    Args:
        folder: of the adapter.
        lora: its rank, alpha and targets.
        base: the model that it changes: a folder, or a name on the hub.
    """
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": lora.targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    text = json.dumps(values, indent=2) + "\n"
    (folder / ADAPTER_CONFIG_FILE).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Adapter:
    """An adapter as its folder describes it."""

    base: str
    """The model that it changes."""
    lora: LoraConfig
    """Settings of the adapter, with the folder as its path."""


def is_adapter(folder: Path) -> bool:
    """Say whether a folder holds an adapter."""
    return (folder / ADAPTER_CONFIG_FILE).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read the description of an adapter, without its tensors.

    Raises:
        ValueError: the folder holds no adapter, or one that is not plain LoRA.
    """
    try:
        values = json.loads((folder / ADAPTER_CONFIG_FILE).read_text(encoding="utf-8"))
        if not (folder / ADAPTER_FILE).is_file():
            raise ValueError(f"it has no {ADAPTER_FILE}")
        if strange := _unsupported(values):
            raise ValueError(f"{strange} is not supported: only plain LoRA is")
        lora = LoraConfig(
            rank=values["r"],
            alpha=values["lora_alpha"],
            targets=sorted(values["target_modules"]),
            path=folder,
        )
        return Adapter(base=str(values["base_model_name_or_path"]), lora=lora)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ValueError(
            f"{folder} holds no LoRA adapter that can be used ({exc!r}); name a folder that "
            "agent-r1 or PEFT has written"
        ) from exc


def _unsupported(values: Mapping[str, Any]) -> str | None:
    """Name the first setting of a PEFT configuration that plain LoRA does not have."""
    if values.get("peft_type") != "LORA":
        return f"peft_type = {values.get('peft_type')!r}"
    if not isinstance(values.get("target_modules"), list):
        return f"target_modules = {values.get('target_modules')!r}"
    plain: dict[str, tuple[Any, ...]] = {
        "bias": ("none", None),
        **dict.fromkeys(("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out"), (False, None)),
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), ({}, None)),
        **dict.fromkeys(("modules_to_save", "layers_to_transform", "exclude_modules"), (None, [])),
    }
    for name, allowed in plain.items():
        if values.get(name) not in allowed:
            return f"{name} = {values[name]!r}"
    return None


def check_start(lora: LoraConfig) -> None:
    """Check that the adapter a run starts from is of the configured form.

    Raises:
        ValueError: it has another rank, alpha or targets, or is none.
    """
    if lora.path is None:
        return
    own = read_adapter(lora.path).lora
    for name in ("rank", "alpha"):
        if getattr(own, name) != getattr(lora, name):
            raise ValueError(
                f"model.lora.{name} ({getattr(lora, name)}) differs from {getattr(own, name)}, "
                f"which the adapter in model.lora.path ({lora.path}) has; set the same"
            )
    if set(own.targets) != set(lora.targets):
        raise ValueError(
            f"model.lora.targets ({', '.join(sorted(lora.targets))}) differ from those of the "
            f"adapter in model.lora.path ({lora.path}): {', '.join(own.targets)}; set the same"
        )
