"""Snapshots: one weight version as a safetensors file, with the manifest that describes it.

learner engine --Weights--> `write_snapshot` --model.safetensors, manifest.json--> a transport -->
`verify_snapshot` on rollout servers --> vllm/policy.py, before generation pauses

Checksums are of chunks, taken while the file is written: the learner reads no byte twice, and
holds no second copy of the weights. With the transport `file`, a server reads them twice: to check
them, and to load them. Tied embeddings are stored once; the other name is an alias.

`safetensors.torch.save_file` (0.8) is neither faster nor slower (316 MiB and their checksums take
0.3 to 0.9 s either way), but its errors carry no errno, by which a full disk is told from others,
and its file is readable by its owner alone, whatever the umask; so the header is written here.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from agent_r1.runtime.files.writing import replace_directory, report_full_disk
from agent_r1.weights.chunks import check_chunks, write_chunks
from agent_r1.weights.layout import DTYPES, DtypeName, ModelLayout, open_safetensors
from agent_r1.weights.manifest import WeightsRefusedError
from agent_r1_proto.weights import (
    MANIFEST_FILE,
    SHARED_FILE,
    SNAPSHOT_FILE,
    AdapterHeader,
    FileChunks,
    TensorEntry,
    WeightManifest,
)

if TYPE_CHECKING:  # `agent-r1 check` verifies no tensor, and does without torch
    import numpy as np
    import numpy.typing as npt
    import torch

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
        chunks = write_chunks(staging / SNAPSHOT_FILE, safetensors_bytes(weights))
        location = str((directory / SNAPSHOT_FILE).absolute())
        manifest = describe(
            run_id, policy_version, weights, location, adapter=adapter, chunks=chunks
        )
        (staging / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return manifest


def describe(
    run_id: str,
    policy_version: int,
    weights: Weights,
    location: str,
    *,
    adapter: AdapterHeader | None = None,
    chunks: FileChunks | None = None,
) -> WeightManifest:
    """Return the manifest of a version.

    Args:
        run_id: the run it belongs to.
        policy_version: its number.
        weights: all weights of the model, or the matrices of its adapter.
        location: of its file, or of who sends it.
        adapter: how the matrices of an adapter change the model.
        chunks: of its file; None where there is none, and the version is sent from memory.

    Raises:
        ValueError: a tensor has a dtype other than float32, bfloat16 and float16.
    """
    header = safetensors_header(weights.tensors)
    return WeightManifest(
        run_id=run_id,
        policy_version=policy_version,
        kind="dense" if adapter is None else "adapter",
        adapter=adapter,
        transport="file" if chunks else "collective",
        location=location,
        size_bytes=len(header) + weights.size_bytes,
        chunks=chunks,
        tensors=_describe_tensors(weights),
    )


def _describe_tensors(weights: Weights) -> list[TensorEntry]:
    entries = {
        name: TensorEntry(name=name, shape=list(tensor.shape), dtype=_dtype_name(name, tensor))
        for name, tensor in weights.tensors.items()
    }
    for alias, name in weights.aliases.items():
        entries[alias] = entries[name].model_copy(update={"name": alias, "alias_of": name})
    return list(entries.values())


def write_safetensors(path: Path, weights: Weights) -> None:
    """Write one safetensors file, aliases left out.

    Raises:
        ValueError: a tensor has a dtype other than float32, bfloat16 and float16.
    """
    with path.open("wb") as file:
        file.writelines(safetensors_bytes(weights))


def safetensors_bytes(weights: Weights) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file, without copies of tensors that are contiguous."""
    yield memoryview(safetensors_header(weights.tensors))
    for tensor in weights.tensors.values():
        yield raw_bytes(tensor).data


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
        code, width = DTYPES[_dtype_name(name, tensor)]
        end = offset + tensor.numel() * width
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % _HEADER_ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded


def _dtype_name(name: str, tensor: torch.Tensor) -> DtypeName:
    for dtype in DTYPES:
        if str(tensor.dtype) == f"torch.{dtype}":
            return dtype
    raise ValueError(
        f"weight {name!r} has dtype {tensor.dtype}; a snapshot holds float32, bfloat16 or "
        "float16: load the model in one of them (model.dtype)"
    )


def raw_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the little-endian bytes of a CPU tensor, without a copy where it is contiguous."""
    import torch

    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def verify_snapshot(manifest: WeightManifest, layout: ModelLayout, dtype: str) -> Path:
    """Check a snapshot against its manifest and the model.

    A file in a shared folder is read and hashed, so that it is also in the page cache afterwards.
    What came over the network was verified when it came.

    Args:
        manifest: what the learner says it wrote; `size_bytes` is the size of the file.
        layout: the tensors of the configured model.
        dtype: the number format of the run, "float32" or "bfloat16".

    Returns:
        The safetensors file, or that of `SharedMemory`.

    Raises:
        WeightsRefusedError: file, manifest and model do not agree.
    """
    path = Path(manifest.location)
    try:
        _check_names(manifest, layout, dtype)
        if path.name == SHARED_FILE:
            return path  # whose tensors the engine maps
        _check_size(path, manifest.size_bytes)
        _check_header(path, [entry for entry in manifest.tensors if entry.alias_of is None])
        if manifest.transport == "file" and manifest.chunks is not None:
            check_chunks(path, manifest.chunks)
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


def _check_size(path: Path, size_bytes: int) -> None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    if status.st_size != size_bytes:
        raise ValueError(f"{path} has {status.st_size} bytes; its manifest says {size_bytes}")


def _check_header(path: Path, entries: Sequence[TensorEntry]) -> None:
    file = open_safetensors(path, "np")
    stored, named = set(file.offset_keys()), {entry.name for entry in entries}
    if extra := stored - named:
        raise ValueError(f"{path} holds {min(extra)!r}, which its manifest does not name")
    if lacking := named - stored:
        raise ValueError(f"{path} lacks the tensor {min(lacking)!r}")
    for entry in entries:
        found = file.get_slice(entry.name)
        dtype, shape = found.get_dtype(), found.get_shape()
        if dtype != DTYPES[entry.dtype][0] or shape != entry.shape:
            raise ValueError(
                f"{path} holds {entry.name!r} as {dtype} {shape}; its manifest says "
                f"{entry.dtype} {entry.shape}"
            )
