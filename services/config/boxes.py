"""Memory that a run puts on every GPU and into every machine that it is given.

estimate.py works out one learner rank and one rollout server, placement.py says where they are;
`agent-r1 check` prints what they add up to, and how far figures for GPUs may be believed.
`make test-gpu` writes the report that tells; copied beside this module, it is part of the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.config.estimate import (
    OUTSIDE,
    PROCESS,
    ModelSize,
    Part,
    host_parts,
    total,
    value_bytes,
)
from agent_r1.config.placement import Placement, place
from agent_r1.config.run import Config
from agent_r1.runtime.files.disk_space import readable_size
from agent_r1.runtime.memory import MIB

SERVICES = 4e9
"""Memory of the services without a GPU, and of their libraries; a corpus comes on top."""
REPORT = Path(__file__).with_name("gpu_report.json")
TOLERANCE = 0.2
"""Largest error of an estimate, as a share of what was measured."""


@dataclass(frozen=True)
class Machine:
    """Machine that a run has to fit into, or several of a kind."""

    gpu_bytes: float | None
    """Bytes of one GPU; None: the run is on the CPU."""
    memory_bytes: float | None
    """Bytes that the run may take of a machine; None: not known."""
    disk_bytes: float | None
    gpus: int = 1
    """GPUs of one machine."""
    boxes: int = 1
    """Machines. GPUs are counted through all of them: 0 to 7 are the first of eight's."""


@dataclass(frozen=True)
class Load:
    """Load of some GPUs, the same on each, or of a machine's memory."""

    name: str
    """Name of the GPUs or the machine."""
    parts: tuple[Part, ...]

    @property
    def size(self) -> float:
        """Bytes in all."""
        return total(self.parts)


def placed(config: Config, machine: Machine) -> Placement:
    """Return where the processes of a run are, with the GPUs of all machines in a row.

    Raises:
        ValueError: there are too few GPUs, or a server is spread over two machines.
    """
    where = place(config, num_gpus=machine.gpus * machine.boxes, trains=True)
    for server in where.rollout:
        if len({gpu // machine.gpus for gpu in server.gpus}) > 1:
            raise ValueError(
                f"a rollout server has the GPUs {list(server.gpus)}, of two machines; choose a "
                "rollout.tensor_parallel_size that divides the GPUs of one"
            )
    return where


def gpu_loads(
    config: Config, where: Placement, learner: Sequence[Part], gpu_bytes: float
) -> list[Load]:
    """Return what is on each GPU; GPUs with the same are one load."""
    on_gpu: dict[int, list[Part]] = {}
    share = config.rollout.gpu_memory_utilization
    for server in where.rollout:
        for gpu in server.gpus:
            taken = Part(f"rollout server ({share:g} of it)", share * gpu_bytes)
            on_gpu.setdefault(gpu, []).append(taken)
    for gpu in where.learner.gpus:
        on_gpu.setdefault(gpu, []).append(Part("learner rank", total(learner)))
    alike: dict[tuple[Part, ...], list[int]] = {}
    for gpu in sorted(on_gpu):
        alike.setdefault(tuple(on_gpu[gpu]), []).append(gpu)
    return [Load(_numbered(gpus), parts) for parts, gpus in alike.items()]


def memory_loads(
    config: Config,
    where: Placement,
    machine: Machine,
    policy: ModelSize,
    critic: ModelSize | None,
) -> list[Load]:
    """Return what is in the memory of each machine."""
    ranks = [gpu // machine.gpus for gpu in where.learner.gpus]
    servers = [server.gpus[0] // machine.gpus for server in where.rollout if server.gpus]
    own = value_bytes(config.model.dtype)
    # Below stage 3 a rank reads a whole model into memory; with it, a tensor at a time.
    whole = policy.weights if config.engine.zero_stage < 3 else 2 * policy.embedding
    offloaded = host_parts(config, policy, critic, page_locked=True)
    redis = config.redis.maxmemory_mb * MIB
    loads = []
    for box in range(machine.boxes):
        here, engines = ranks.count(box), servers.count(box)
        parts = [Part(part.name, here * part.size) for part in offloaded]
        parts.append(Part("learner: a model while it loads", here * whole * own))
        if ranks and ranks[0] == box:
            # A version is sent while the next one is gathered.
            parts.append(Part("learner: weights that are pushed", 2 * policy.trained * own))
        processes = here + engines * config.rollout.tensor_parallel_size
        parts.append(Part("processes with a GPU", processes * PROCESS))
        if box == 0:
            parts.append(Part("other services and Redis", SERVICES + redis))
        name = "the machine" if machine.boxes == 1 else f"machine {box}"
        loads.append(Load(f"memory of {name}", tuple(part for part in parts if part.size)))
    return loads


def gpu_problems(
    where: Placement, loads: Sequence[Load], learner: Sequence[Part], gpu_bytes: float
) -> Iterator[str]:
    """Say which GPUs are given more than they have, and whether a rank exceeds its share."""
    for load in loads:
        if load.size > gpu_bytes:
            parts = " + ".join(f"{part.name} {readable_size(part.size)}" for part in load.parts)
            yield (
                f"{load.name}: {readable_size(load.size)} are placed on "
                f"{readable_size(gpu_bytes)} ({parts})"
            )
    share = where.learner_share
    need = total([part for part in learner if part.name != OUTSIDE])  # what torch allocates
    if share is not None and need > share * gpu_bytes:
        yield (
            f"learner: a rank allocates {readable_size(need)}, and engine.gpu_memory_share "
            f"({share:g}) allows {readable_size(share * gpu_bytes)}; left out, it is what "
            "rollout.gpu_memory_utilization leaves of a GPU that both share"
        )


def _numbered(gpus: Sequence[int]) -> str:
    """Name one or several: GPU 0, GPUs 0-3."""
    if len(gpus) == 1:
        return f"GPU {gpus[0]}"
    in_a_row = gpus[-1] - gpus[0] == len(gpus) - 1
    return f"GPUs {gpus[0]}-{gpus[-1]}" if in_a_row else f"GPUs {', '.join(map(str, gpus))}"


def verdict_on_gpus(report: Path = REPORT) -> str:
    """Return the line that says whether figures for GPUs were compared with a GPU."""
    found: dict[str, Any] = {}
    errors: dict[str, float] = {}
    if report.is_file():
        found = json.loads(report.read_text(encoding="utf-8"))
        if found["outcome"] == "passed":
            errors = {entry["what"]: entry["error"] for entry in found["memory"]}
    if not errors:
        return "figures for GPUs are unverified: no report compares them with a GPU"
    what, error = max(errors.items(), key=lambda item: abs(item[1]))
    where = f"{what}, {error:+.0%} of what {found['machine']['device']} took"
    if abs(error) > TOLERANCE:
        return f"figures for GPUs are unverified: one is off by more than {TOLERANCE:.0%} ({where})"
    return f"figures for GPUs were compared with a GPU; the largest error is that of the {where}"
