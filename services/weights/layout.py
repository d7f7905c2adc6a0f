"""Layouts: the tensors that a model, or its adapter, has by the headers of its files.

Reads a model directory for rollout/vllm/settings.py; snapshot.py compares snapshots with it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent_r1.runtime.config import LoraConfig
from agent_r1.weights.adapters import adapter_shapes, check_start
from agent_r1_proto.weights import AdapterHeader

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[DtypeName, tuple[str, int]] = {
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
}
"""The number formats of snapshots: what safetensors calls each, and the bytes of a value."""


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model, under their Hugging Face names, or those of an adapter."""

    files: tuple[Path, ...]
    """The model's own safetensors files."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of every tensor with values of its own."""
    aliases: Mapping[str, str]
    """Tied tensors: name -> the tensor it shares."""

    adapter: AdapterHeader | None = None
    """Rank and scale of an adapter, where the tensors are of one."""

    @property
    def num_values(self) -> int:
        """Values of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def read_model_layout(model_dir: Path, *, tied: bool) -> ModelLayout:
    """Read which tensors a model directory holds, from its safetensors headers.

    Args:
        model_dir: a Hugging Face model directory.
        tied: the model's configuration ties the output layer to the embedding.

    Raises:
        ValueError: the directory has no readable safetensors files.
    """
    index = model_dir / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = tuple(model_dir / name for name in sorted(names))
        else:
            files = tuple(sorted(model_dir.glob("*.safetensors")))
        shapes = {name: shape for file in files for name, shape in _shapes(file).items()}
    except (OSError, ValueError, KeyError, AttributeError) as exc:
        raise ValueError(
            f"model.path ({model_dir}) cannot be read: {exc}; copy the model again"
        ) from exc
    if not shapes:
        raise ValueError(
            f"model.path ({model_dir}) holds no *.safetensors file; save the model with "
            "save_pretrained, which writes them"
        )
    aliases = {LM_HEAD: EMBEDDING} if tied and EMBEDDING in shapes else {}
    own = {name: shape for name, shape in shapes.items() if name not in aliases}
    return ModelLayout(files=files, shapes=own, aliases=aliases)


def adapter_layout(model: ModelLayout, lora: LoraConfig) -> ModelLayout:
    """Return the tensors of a model's adapter.

    Raises:
        ValueError: it does not fit the model.
    """
    check_start(lora)
    header = AdapterHeader(rank=lora.rank, alpha=lora.alpha)
    shapes = adapter_shapes(model.shapes, lora)
    return ModelLayout(files=(), shapes=shapes, aliases={}, adapter=header)


def open_safetensors(path: Path, framework: str) -> Any:
    """Open a safetensors file, whose header must be sound and account for every byte.

    Raises:
        ValueError: it is damaged or cut off.
    """
    # Not at the top: the command line and the tools' image do without it.
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework)
    except SafetensorError as exc:
        raise ValueError(f"{path} is no complete safetensors file: {exc}") from exc


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    file = open_safetensors(path, "np")
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}
