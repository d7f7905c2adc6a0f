"""Weights on disk: a safetensors file, and the manifest that describes one published version.

engine.collect --Weights--> write_snapshot --model.safetensors, manifest.json--> rollout servers

The file is written tensor by tensor, so that a checksum of each is taken on the way and no second
copy of the weights is held. Tied embeddings are stored once; the other name is an alias.

`safetensors.torch.save_file` (0.8) is neither faster nor slower (316 MiB and their checksums take
0.3 to 0.9 s either way), but its errors carry no errno, by which a full disk is told from others,
and its file is readable by its owner alone, whatever the umask; so the header is written here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from agent_r1_proto.weights import (
    MANIFEST_FILE,
    SNAPSHOT_FILE,
    AdapterHeader,
    TensorEntry,
    WeightManifest,
)
from agent_r1_service.files.writing import replace_directory, report_full_disk

DtypeName = Literal["float32", "bfloat16", "float16"]
_NAMES: dict[torch.dtype, tuple[DtypeName, str]] = {
    torch.float32: ("float32", "F32"),
    torch.bfloat16: ("bfloat16", "BF16"),
    torch.float16: ("float16", "F16"),
}
_HEADER_ALIGNMENT = 8


@dataclass(frozen=True)
class Weights:
    """The trained weights of a model, in CPU memory: all of them, or those of its adapter."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str] = field(default_factory=dict)
    """Other names of tensors above (tied embeddings): alias -> name."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def write_safetensors(path: Path, weights: Weights) -> list[TensorEntry]:
    """Write one safetensors file, aliases left out, and describe every tensor, aliases included.

    Raises:
        ValueError: a tensor has a dtype other than float32, bfloat16 and float16.
    """
    header = safetensors_header(weights.tensors)
    entries: dict[str, TensorEntry] = {}
    with path.open("wb") as file:
        file.write(header)
        for name, tensor in weights.tensors.items():
            data = raw_bytes(tensor)
            file.write(data.data)
            entries[name] = TensorEntry(
                name=name,
                shape=list(tensor.shape),
                dtype=_NAMES[tensor.dtype][0],
                sha256=hashlib.sha256(data.data).hexdigest(),
            )
    for alias, name in weights.aliases.items():
        entries[alias] = entries[name].model_copy(update={"name": alias, "alias_of": name})
    return list(entries.values())


def safetensors_header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the JSON header of the safetensors format with its length, padded with spaces.

    Args:
        tensors: in the order of the data that follows; those of the device "meta" will do.
        metadata: more of what the header says of the file.

    Raises:
        ValueError: a tensor has a dtype other than float32, bfloat16 and float16.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"weight {name!r} has dtype {tensor.dtype}; a snapshot holds float32, bfloat16 or "
                "float16: load the model in one of them (model.dtype)"
            )
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype][1],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded


def raw_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the little-endian bytes of a CPU tensor, without a copy where it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def write_snapshot(
    directory: Path,
    run_id: str,
    policy_version: int,
    weights: Weights,
    *,
    adapter: AdapterHeader | None = None,
) -> WeightManifest:
    """Write one weight version into `directory`: complete when it appears, synced to the disk.

    Args:
        directory: of the version.
        run_id: the run it belongs to.
        policy_version: its number.
        weights: all weights of the model, or the matrices of its adapter.
        adapter: how those change the model.

    Raises:
        DiskFullError: there is no room; nothing is left behind.
    """
    size = weights.size_bytes
    remedy = "set learner.weights_dir to a larger disk"
    with (
        report_full_disk(f"weight version {policy_version}", directory, size, remedy),
        replace_directory(directory) as staging,
    ):
        entries = write_safetensors(staging / SNAPSHOT_FILE, weights)
        manifest = WeightManifest(
            run_id=run_id,
            policy_version=policy_version,
            kind="dense" if adapter is None else "adapter",
            adapter=adapter,
            location=str((directory / SNAPSHOT_FILE).absolute()),
            size_bytes=(staging / SNAPSHOT_FILE).stat().st_size,
            tensors=entries,
        )
        (staging / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return manifest
