"""What one thread of this machine can do at best: move memory, and multiply matrices.

    python scripts/machine_limits.py

profile_run.py and bench_rollout.py compare times with these limits. Each figure is the best of
several tries, in CPU time, because other work on the machine can only make a try slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FLOAT_BYTES = 4
COPY_BYTES = 2**28  # far more than the caches hold
GEMM_SIZE = 1536
TRIES = 7


@dataclass(frozen=True)
class Limits:
    """Best speeds of one thread, in float32."""

    bytes_per_s: float
    """Bytes read and written by copying a large tensor."""
    flops_per_s: float
    """Floating-point operations of a product of two large square matrices."""


def _best_s(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(TRIES):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def measure_limits() -> Limits:
    """Measure both limits; takes a second or two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source = torch.ones(COPY_BYTES // FLOAT_BYTES)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source))
        left, right = (torch.rand(GEMM_SIZE, GEMM_SIZE) for _ in range(2))
        out = torch.empty_like(left)
        # PyTorch's own product is MKL's, which takes no AVX-512 on processors of AMD.
        one_dnn = torch.ops.mkldnn._linear_pointwise
        gemm_s = min(
            _best_s(lambda: torch.mm(left, right, out=out)),
            _best_s(lambda: one_dnn(left, right, None, "none", [], "")),
        )
    finally:
        torch.set_num_threads(before)
    return Limits(2 * COPY_BYTES / copy_s, 2 * GEMM_SIZE**3 / gemm_s)


@dataclass(frozen=True)
class Weights:
    """How many weights a model has, by how often they are multiplied."""

    all: int
    layers: int
    """Multiplied for every token."""
    head: int
    """Of the output layer: multiplied for tokens that are sampled or trained."""


def count_weights(model: Path) -> Weights:
    """Count the weights of a model directory."""
    from safetensors import safe_open

    sizes: dict[str, int] = {}
    for path in model.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            for name in file.offset_keys():
                sizes[name] = math.prod(file.get_slice(name).get_shape())
    rows = {name: size for name, size in sizes.items() if "embed_tokens" in name}
    head = sum(size for name, size in sizes.items() if name.startswith("lm_head"))
    total = sum(sizes.values())
    return Weights(total, total - sum(rows.values()) - head, head or sum(rows.values()))


if __name__ == "__main__":
    found = measure_limits()
    print(f"{found.bytes_per_s / 1e9:.1f} GB/s, {found.flops_per_s / 1e9:.0f} GFLOP/s")
