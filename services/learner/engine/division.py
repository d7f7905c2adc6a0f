"""Weights of which each rank holds a part, as under ZeRO-3, from the first moment on.

model.py (each weight when it has been read) --> divided_loading --DeepSpeed's parameters--> zero.py

transformers builds a model without memory, and then reads weight after weight. DeepSpeed would
divide a model that every rank has whole, and on its GPU. Knows DeepSpeed's parameters, but does not
import it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from agent_r1.learner.engine.interface import EngineError
from agent_r1.weights.snapshot import raw_bytes

ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Lets transformers read a weight when its turn comes, instead of all of them in threads."""
SAMPLED_WEIGHTS = 1024
"""Weights of each tensor, about, in a checksum."""


def is_divided(parameter: nn.Parameter) -> bool:
    """Return whether this rank holds its part of a weight only."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a weight, of which this rank may hold a part."""
    return getattr(parameter, "ds_shape", parameter.shape)


@contextmanager
def divided_loading(
    path: str, divide: Callable[[list[nn.Parameter]], None], device: torch.device
) -> Iterator[None]:
    """Divide what is loaded meanwhile: each weight over the ranks when it has been read.

    Args:
        path: of the model, for messages.
        divide: leaves each rank its part of rank 0's weights.
        device: this rank's.

    Raises:
        EngineError: this rank reads other weights than rank 0.
        ValueError: the model ties two weights that differ.
    """

    def take(module: nn.Module, name: str, weight: Any) -> None:
        if weight is None or weight.is_meta:
            return
        if is_divided(weight):
            _check_tied(path, module._parameters[name], weight)
            return
        check_same_weights(path, [weight], device)
        weight.checksum = sample_checksum([weight])
        # A copy: what rank 0 sends would else be written into pages of this rank's file.
        weight.data = weight.data.to(device, copy=True)
        divide([weight])

    os.environ[ONE_BY_ONE] = "1"
    handle = register_module_parameter_registration_hook(take)
    try:
        yield
    finally:
        handle.remove()


def _check_tied(path: str, before: Any, weight: Any) -> None:
    """Refuse to tie two weights that differ: transformers, which would not, cannot see them."""
    if before is not None and not before.is_meta and before.checksum != weight.checksum:
        raise ValueError(
            f"model.path ({path}) ties weights that differ in its files; set tie_word_embeddings = "
            "false in its config.json"
        )


def check_same_weights(path: str, weights: Iterable[torch.Tensor], device: torch.device) -> None:
    """Compare weights with rank 0's: each rank has read its own files.

    Raises:
        EngineError: this rank's are others.
    """
    own = torch.tensor(sample_checksum(weights), device=device)
    first = own.clone()
    dist.broadcast(first, 0)
    if own != first:
        raise EngineError(
            f"{path} has other weights here than on rank 0's machine; give every rank the same "
            "model"
        )


def sample_checksum(weights: Iterable[torch.Tensor]) -> int:
    """Return a checksum of shapes and of values all over: enough to tell one model from another."""
    checksum = 0
    for weight in weights:
        every = max(1, weight.numel() // SAMPLED_WEIGHTS)
        checksum = zlib.crc32(json.dumps(weight.shape).encode(), checksum)
        checksum = zlib.crc32(raw_bytes(weight.flatten()[::every].cpu()).data, checksum)
    return checksum


@contextmanager
def gathered_in_turn(model: nn.Module) -> Iterator[None]:
    """Let a model run forward on the CPU of every rank, though it may be divided.

    Each module then has its own weights whole while it runs. An engine's hooks do better, but there
    is none yet.
    """

    def gather(module: Any, _: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.all_gather()
            weight.data = weight.data.cpu()

    def free(module: Any, *_: Any) -> None:
        for weight in module.parameters(recurse=False):
            weight.partition()

    handles: list[Any] = []
    for module in model.modules():
        if any(map(is_divided, module.parameters(recurse=False))):
            handles.append(module.register_forward_pre_hook(gather))
            handles.append(module.register_forward_hook(free))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
