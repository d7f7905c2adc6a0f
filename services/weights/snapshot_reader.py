"""Verifies a published weight snapshot, before anything pauses for it.

Compares the manifest and the safetensors file that `agent_r1.rollout.weights` fetched with the
tensors of the configured model, and hands policy.py files it can load blindly.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.weights.adapters import adapter_shapes, check_start
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.weights import AdapterHeader, TensorEntry, WeightManifest
from agent_r1_service.config import LoraConfig

LM_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
DTYPE_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class ModelLayout:
    """The tensors of a model, under their Hugging Face names, or those of an adapter."""

    files: tuple[Path, ...]
    """The model's own safetensors files."""
    shapes: Mapping[str, tuple[int, ...]]
    """Every tensor with values of its own."""
    aliases: Mapping[str, str]
    """Tied tensors: name -> the tensor it shares."""

    adapter: AdapterHeader | None = None
    """Of the tensors of an adapter: how they change the model."""

    @property
    def num_values(self) -> int:
        """Values of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes.values())


def _open(path: Path, framework: str) -> Any:
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
    file = _open(path, "np")
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.offset_keys()}


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
    shapes = adapter_shapes(model.shapes, lora)
    header = AdapterHeader(rank=lora.rank, alpha=lora.alpha)
    return ModelLayout(files=(), shapes=shapes, aliases={}, adapter=header)


def verify_snapshot(manifest: WeightManifest, layout: ModelLayout, dtype: str) -> Path:
    """Check every tensor of a snapshot against its manifest and the model.

    Hashes the whole file, so that it is also in the page cache afterwards.

    Args:
        manifest: what the learner says it wrote; `size_bytes` is the size of the file.
        layout: the tensors of the configured model.
        dtype: the number format of the run, "float32" or "bfloat16".

    Returns:
        The safetensors file.

    Raises:
        WeightsRefusedError: file, manifest and model do not agree.
    """
    path = Path(manifest.location)
    try:
        _check_names(manifest, layout, dtype)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a regular file")
        size = status.st_size
        if size != manifest.size_bytes:
            raise ValueError(f"{path} has {size} bytes; its manifest says {manifest.size_bytes}")
        file = _open(path, "pt")
        own = [entry for entry in manifest.tensors if entry.alias_of is None]
        stored, named = set(file.offset_keys()), {entry.name for entry in own}
        if extra := stored - named:
            raise ValueError(f"{path} holds {min(extra)!r}, which its manifest does not name")
        if lacking := named - stored:
            raise ValueError(f"{path} lacks the tensor {min(lacking)!r}")
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda entry: _check_tensor(path, file, entry), own))
    except OSError as exc:
        raise WeightsRefusedError(
            f"weights of version {manifest.policy_version}: {path} cannot be read "
            f"({exc.strerror or exc})"
        ) from exc
    except ValueError as exc:
        raise WeightsRefusedError(f"weights of version {manifest.policy_version}: {exc}") from exc
    return path


def _check_names(manifest: WeightManifest, layout: ModelLayout, dtype: str) -> None:
    if manifest.adapter != layout.adapter:
        raise ValueError(
            f"the manifest is of {_kind(manifest.adapter)}, and this server has "
            f"{_kind(layout.adapter)}; learner and rollout servers need the same [model.lora]"
        )
    entries = {entry.name: entry for entry in manifest.tensors}
    if len(entries) != len(manifest.tensors):
        raise ValueError("the manifest names a tensor twice")
    aliases = {e.name: e.alias_of for e in manifest.tensors if e.alias_of is not None}
    if unknown := {n: t for n, t in aliases.items() if layout.aliases.get(n) != t}:
        name, target = min(unknown.items())
        raise ValueError(f"{name!r} is an alias of {target!r} in the manifest, not in the model")
    own = entries.keys() - aliases.keys()
    if missing := layout.shapes.keys() - own:
        raise ValueError(f"tensor {min(missing)!r} of the model is missing")
    if extra := own - layout.shapes.keys():
        raise ValueError(f"the model has no tensor {min(extra)!r}")
    for name, shape in layout.shapes.items():
        entry = entries[name]
        if tuple(entry.shape) != shape:
            raise ValueError(f"{name!r} has shape {entry.shape}; the model's is {list(shape)}")
        if entry.dtype != dtype:
            raise ValueError(f"{name!r} is {entry.dtype}; model.dtype is {dtype}")


def _kind(adapter: AdapterHeader | None) -> str:
    if adapter is None:
        return "a whole model"
    return f"an adapter of rank {adapter.rank} and alpha {adapter.alpha:g}"


def _check_tensor(path: Path, file: Any, entry: TensorEntry) -> None:
    import torch

    stored = file.get_slice(entry.name)
    dtype, shape = stored.get_dtype(), stored.get_shape()
    if dtype != DTYPE_CODES[entry.dtype] or shape != entry.shape:
        raise ValueError(
            f"{path} holds {entry.name!r} as {dtype} {shape}; its manifest says "
            f"{entry.dtype} {entry.shape}"
        )
    data = file.get_tensor(entry.name).reshape(-1).view(torch.uint8).numpy()
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise ValueError(
            f"{path}: the bytes of {entry.name!r} have another sha256 than its manifest says"
        )
