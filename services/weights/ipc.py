"""Weights in a GPU that learner and engine share: the engine maps the learner's copy, and reads it.

collective.py --handle, over its group--> a file of the server --> vllm/weight_transfer.py, in the
engine's process

What CUDA needs to map another process's memory travels as JSON: nothing is unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from agent_r1.weights.layout import DTYPES
from agent_r1.weights.snapshot import Weights, raw_bytes
from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.weights import TensorEntry

if TYPE_CHECKING:
    import torch

DEVICE = "cuda"
Size = Annotated[int, Field(ge=0)]


class SharedMemory(StrictMessage):
    """Memory of a GPU in which the tensors of a version lie, one behind the other."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    gpu: str
    """UUID of the GPU."""
    tensors: list[TensorEntry]
    handle: bytes
    """Handle of the allocation, as CUDA gives it to other processes."""
    allocation_bytes: Size
    offset_bytes: Size
    """Offset in the allocation."""
    counter: bytes
    """Counter by which torch knows when the last process has let go."""
    counter_offset: Size
    event: bytes
    """Event that is set when the bytes are there."""
    waits_for_event: bool


def gpu_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU, whatever number it has in this process."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def share(weights: Weights, tensors: Sequence[TensorEntry]) -> tuple[torch.Tensor, SharedMemory]:
    """Copy weights to this process's GPU, for other processes to map.

    Args:
        weights: in CPU memory.
        tensors: what the manifest says of them.

    Returns:
        The copy, which is there as long as it is kept, and how to map it.
    """
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    copy = torch.empty(weights.size_bytes, dtype=torch.uint8, device=DEVICE)
    parts = copy.split([tensor.nbytes for tensor in weights.tensors.values()])
    for part, tensor in zip(parts, weights.tensors.values(), strict=True):
        part.copy_(torch.from_numpy(raw_bytes(tensor)))
    arguments: Any = reduce_tensor(copy)[1]
    handle, allocation, offset, _, counter, counter_offset, event, waits = arguments[7:]
    memory = SharedMemory(
        gpu=gpu_uuid(copy.device),
        tensors=stored(tensors),
        handle=handle,
        allocation_bytes=allocation,
        offset_bytes=offset,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits_for_event=waits,
    )
    return copy, memory


def stored(tensors: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Return the tensors without the other names that some of them have."""
    return [entry for entry in tensors if entry.alias_of is None]


def open_shared(path: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """Map the tensors that a file of `SharedMemory` names.

    Args:
        path: of the file.
        device: the GPU of this process.

    Raises:
        ValueError: they lie in another GPU.
    """
    import torch
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    memory = SharedMemory.model_validate_json(path.read_bytes())
    own = gpu_uuid(device)
    if memory.gpu != own:
        raise ValueError(
            f"the learner's weights lie in GPU {memory.gpu}, and this engine runs on {own}; set "
            'learner.collective_backend = "gloo" or "nccl"'
        )
    sizes = [math.prod(entry.shape) * DTYPES[entry.dtype][1] for entry in memory.tensors]
    copy: torch.Tensor = rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=(sum(sizes),),
        tensor_stride=(1,),
        tensor_offset=0,
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=device.index,
        storage_handle=memory.handle,
        storage_size_bytes=memory.allocation_bytes,
        storage_offset_bytes=memory.offset_bytes,
        requires_grad=False,
        ref_counter_handle=memory.counter,
        ref_counter_offset=memory.counter_offset,
        event_handle=memory.event,
        event_sync_required=memory.waits_for_event,
    )
    return {
        entry.name: part.view(getattr(torch, entry.dtype)).view(entry.shape)
        for entry, part in zip(memory.tensors, copy.split(sizes), strict=True)
    }
