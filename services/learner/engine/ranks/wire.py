"""Messages between ranks: a JSON header of declared types, and the arrays that it numbers.

group.py (rank 0) --a command and its argument--> worker.py --results--> group.py

Nothing that is received is code, or chooses a type: the command names one of `ARGUMENTS`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from agent_r1.learner.engine.interface import Model
from agent_r1.learner.engine.ranks.messages import Float32, MicroBatch, RankBatch, ValueBatch

BUILD = "build"
"""Build the next engine; every other command is a method of RankEngine."""
GATHERED = ("score", "values")
"""Commands whose results rank 0 waits for."""
RESULTS = "results"
"""Command by which a rank answers them."""
ARGUMENTS: dict[str, TypeAdapter[Any]] = {
    BUILD: TypeAdapter(None),
    "train": TypeAdapter(RankBatch),
    "score": TypeAdapter(tuple[Model, list[MicroBatch]]),
    "values": TypeAdapter(list[ValueBatch]),
    "collect": TypeAdapter(None),
    "save": TypeAdapter(Path),
    "load": TypeAdapter(Path),
    "load_old": TypeAdapter(Path),
    RESULTS: TypeAdapter(list[Float32]),
}


def encode(name: str, value: Any) -> tuple[bytes, bytes]:
    """Return the header and the arrays of one message."""
    arrays: list[np.ndarray] = []
    body = ARGUMENTS[name].dump_json(value, context=arrays).decode()
    shapes = [(array.dtype.name, array.shape) for array in arrays]
    return json.dumps([name, body, shapes]).encode(), b"".join(a.tobytes() for a in arrays)


def decode(header: bytes, data: bytes) -> tuple[str, Any]:
    """Return the name and the value of one message.

    Raises:
        ValueError: it does not have the form that its name declares.
    """
    name, body, shapes = json.loads(header)
    arrays: list[np.ndarray] = []
    offset = 0
    for dtype, shape in shapes:
        count = int(np.prod(shape))
        arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape).copy())
        offset += arrays[-1].nbytes
    return name, ARGUMENTS[name].validate_json(body, context=arrays)


def send(rank: int, control: Any, name: str, value: Any) -> None:
    """Send one message to a rank."""
    header, data = encode(name, value)
    dist.send(torch.tensor([len(header), len(data)]), rank, group=control)
    dist.send(torch.frombuffer(bytearray(header + data), dtype=torch.uint8), rank, group=control)


def receive(rank: int, control: Any) -> tuple[str, Any]:
    """Wait for one message of a rank; return its name and value."""
    sizes = torch.zeros(2, dtype=torch.int64)
    dist.recv(sizes, rank, group=control)
    parts = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    dist.recv(parts, rank, group=control)
    header, data = parts.split(sizes.tolist())
    return decode(header.numpy().tobytes(), data.numpy().tobytes())
