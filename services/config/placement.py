"""`[placement]` and `[ray]`: what each process of a run gets, of one machine and of a Ray cluster.

config/machine.py checks `[placement]` before anything starts, and the launcher does what it says. A
service that is started by hand has the GPUs that CUDA_VISIBLE_DEVICES names. deploy/ray reads
`[ray]`; nothing else does. Resources are Ray's: "CPU", "GPU", and names of your own that `ray start
--resources` gives to nodes, which is how a process gets to certain machines.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from agent_r1.runtime.config import ListenConfig, StrictConfig

if TYPE_CHECKING:
    from agent_r1.config.run import Config


def _each_once(devices: list[int]) -> list[int]:
    if len(set(devices)) < len(devices):
        raise ValueError(f"({devices}) names a GPU or core twice; name each once")
    return devices


Devices = Annotated[list[NonNegativeInt], Field(min_length=1), AfterValidator(_each_once)]

Resources = dict[str, Annotated[float, Field(ge=0)]]

GPU = "GPU"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
MOST_SHARED = 0.95
"""Largest sum of the shares of one GPU's memory. The rest is for what no share counts: a CUDA
context of each process, and NCCL's buffers. vLLM refuses to start, or to start again, where less is
free than its own share."""
ROUNDING = 1e-9
LEAST_SHARE = 0.05
"""Smallest share that a learner is given where it names none."""


class PlacementConfig(StrictConfig):
    """`[placement]`: the processes the local launcher starts, where, and how it watches them."""

    rollout_replicas: Annotated[int, Field(ge=1)] | None = None
    """Rollout servers started on this machine; None: as many as `rollout` names, else 1."""
    rollout: Annotated[list[Devices], Field(min_length=1)] | None = None
    """GPUs of each rollout server, `rollout.tensor_parallel_size` of them; without GPUs its cores.
    [[0], [1]] starts two servers. None: the first GPUs, or every core. Servers may share a GPU,
    each with `rollout.gpu_memory_utilization` of its memory; they start one after the other."""
    learner: Devices | None = None
    """GPUs of the learner, one for each of `engine.ranks`, or its cores. None: the GPUs after the
    rollout servers', or every core. A GPU that a rollout server has too is shared; see
    `engine.gpu_memory_share`."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest a service may take to be up, in seconds."""
    stop_timeout_s: PositiveFloat = 60.0
    """Time a service gets to stop cleanly (the learner checkpoints), in seconds."""
    max_restarts: Annotated[int, Field(ge=0)] = 6
    """Restarts of one service within `restart_window_s`; one more death stops the run. With each
    entry that is dead-lettered because it ends processes, they are counted anew."""
    restart_window_s: PositiveFloat = 1800.0
    """Deaths older than this are forgotten, in seconds."""
    metrics_server: ListenConfig = ListenConfig()
    """Address at which the launcher listens: for its `GET /metrics`, and `GET /targets`, by which
    Prometheus finds every service of the run."""

    @property
    def num_rollout_servers(self) -> int:
        """Rollout servers started on this machine."""
        return len(self.rollout) if self.rollout else self.rollout_replicas or 1

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.rollout and self.rollout_replicas not in (None, len(self.rollout)):
            raise ValueError(
                f"rollout ({self.rollout}) has {len(self.rollout)} servers and rollout_replicas is "
                f"{self.rollout_replicas}; leave rollout_replicas out"
            )
        return self


class RayConfig(StrictConfig):
    """`[ray]`: replicas and resources."""

    rollout_replicas: PositiveInt = 1
    """Rollout servers; with `max_rollout_replicas` the fewest."""
    max_rollout_replicas: PositiveInt | None = None
    """Most rollout servers; None never adds any."""
    samples_per_server: PositiveFloat = 64.0
    """Samples for each server with `max_rollout_replicas`: servers are added while there are more
    than this for each, and removed while fewer would do. Samples count while they wait and while
    they run."""
    tool_replicas: PositiveInt = 1
    """Instances of each tool; with 2, one serves while the other is replaced."""
    reward_replicas: PositiveInt = 1
    """Reward workers."""
    rollout_resources: Resources = {"CPU": 1.0}
    """Resources of one rollout server; "GPU" is `rollout.tensor_parallel_size` where there are
    GPUs."""
    rank_resources: Resources = {"CPU": 1.0}
    """Resources of one learner rank; "GPU" is 1 where there are GPUs."""
    tool_resources: Resources = {"CPU": 0.5}
    """Resources of one instance of a tool."""
    reward_resources: Resources = {"CPU": 0.5}
    """Resources of one reward worker."""
    stop_timeout_s: PositiveFloat = 60.0
    """Time a replica gets to give back its samples, or to finish its calls, and a rank to write a
    checkpoint, in seconds; then it is killed."""
    api_port: Annotated[int, Field(ge=1, le=65535)] = 8000
    """Port of Serve's proxy on the head's loopback address; every service's API is behind it."""

    @field_validator("rank_resources")
    @classmethod
    def _check_rank(cls, value: Resources) -> Resources:
        if value.get(GPU, 0) not in (0, 1):
            raise ValueError(
                f'"GPU" ({value[GPU]:g}) must be 0 or 1: a rank uses one GPU; set engine.ranks '
                "for more"
            )
        return value

    @model_validator(mode="after")
    def _check_replicas(self) -> Self:
        if self.max_rollout_replicas is not None and self.max_rollout_replicas < (
            self.rollout_replicas
        ):
            raise ValueError(
                f"max_rollout_replicas ({self.max_rollout_replicas}) must be at least "
                f"rollout_replicas ({self.rollout_replicas}); raise it or leave it out"
            )
        return self


@dataclass(frozen=True)
class Place:
    """GPUs and cores that one process may use; nothing named is everything."""

    gpus: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the variable that shows these GPUs alone; numbers count those visible now."""
        if not self.gpus:
            return {}
        visible = inherited.get(VISIBLE_GPUS)
        names = visible.split(",") if visible else None
        return {VISIBLE_GPUS: ",".join(names[gpu] if names else str(gpu) for gpu in self.gpus)}


@dataclass(frozen=True)
class Placement:
    """Places of the processes of a run."""

    rollout: tuple[Place, ...]
    learner: Place = Place()
    learner_share: float | None = None
    """`engine.gpu_memory_share`, or what rollout servers leave on a GPU that they share."""

    @property
    def shares_gpus(self) -> bool:
        """Return whether the learner is on a GPU of a rollout server."""
        return bool(set(self.learner.gpus) & set(chain(*(one.gpus for one in self.rollout))))


def place(config: Config, *, num_gpus: int, trains: bool) -> Placement:
    """Give the processes of a run their GPUs or cores.

    Args:
        config: the run's.
        num_gpus: GPUs of this machine that CUDA shows.
        trains: there is a learner.

    Raises:
        ValueError: this machine has not what `[placement]` names, or too little of it.
    """
    table = config.placement
    if num_gpus == 0:
        rollout = table.rollout or [[]] * table.num_rollout_servers
        learner = table.learner if trains else None
        _check_there(
            {"placement.rollout": chain(*rollout), "placement.learner": learner or []},
            sorted(os.sched_getaffinity(0)),
            "cores",
        )
        return Placement(
            tuple(Place(cores=tuple(one)) for one in rollout), Place(cores=tuple(learner or ()))
        )
    on_gpu = trains and config.engine.device != "cpu"
    rollout, learner = _give_gpus(config, num_gpus, on_gpu=on_gpu)
    _check_there(
        {"placement.rollout": chain(*rollout), "placement.learner": learner},
        range(num_gpus),
        "GPUs",
    )
    _check_gpus(config, rollout, learner)
    cores = tuple(table.learner or ()) if trains and not on_gpu else ()
    return Placement(
        tuple(Place(tuple(one)) for one in rollout),
        Place(tuple(learner), cores),
        _share_memory(config, rollout, learner),
    )


def _give_gpus(
    config: Config, num_gpus: int, *, on_gpu: bool
) -> tuple[Sequence[Sequence[int]], Sequence[int]]:
    """Return the GPUs of each rollout server and of the learner: those named, else in order."""
    table, each = config.placement, config.rollout.tensor_parallel_size
    servers = table.num_rollout_servers
    ranks = config.engine.ranks if on_gpu else 0
    named = table.learner if on_gpu else []
    if num_gpus == 1 and each == 1 and ranks <= 1:  # everything shares it
        return table.rollout or [[0]] * servers, named or [0] * ranks
    taken = set(chain(*(table.rollout or []))) | set(named or [])
    free = [gpu for gpu in range(num_gpus) if gpu not in taken]
    wanted = (0 if table.rollout else servers * each) + (ranks if named is None else 0)
    if wanted > len(free):
        raise ValueError(
            f"{servers} rollout servers of {each} GPUs (rollout.tensor_parallel_size) and "
            f"{ranks} learner ranks need {wanted - len(free)} GPUs more than the {num_gpus} of "
            "this machine; lower placement.rollout_replicas or engine.ranks, or let them share "
            "GPUs by naming those of both in placement.rollout and placement.learner"
        )
    rollout = table.rollout or [free[i * each : (i + 1) * each] for i in range(servers)]
    rest = free if table.rollout else free[servers * each :]
    return rollout, rest[:ranks] if named is None else named


def _check_there(wanted: Mapping[str, Iterable[int]], there: Sequence[int], what: str) -> None:
    for key, devices in wanted.items():
        missing = sorted(set(devices) - set(there))
        if missing:
            raise ValueError(
                f"{key} names {missing}, and the {what} of this machine are {list(there)}; name "
                "some of these"
            )


def _check_gpus(config: Config, rollout: Sequence[Sequence[int]], learner: Sequence[int]) -> None:
    each = config.rollout.tensor_parallel_size
    for gpus in rollout:
        if len(gpus) != each:
            raise ValueError(
                f"placement.rollout gives a server the GPUs {list(gpus)}, and "
                f"rollout.tensor_parallel_size is {each}; give each server as many"
            )
    if learner and len(learner) != config.engine.ranks:
        raise ValueError(
            f"placement.learner ({list(learner)}) must name engine.ranks ({config.engine.ranks}) "
            "GPUs"
        )


def _share_memory(
    config: Config, rollout: Sequence[Sequence[int]], learner: Sequence[int]
) -> float | None:
    """Return the learner's share, derived where it shares a GPU and names none.

    Raises:
        ValueError: those who share a GPU are given too much of it.
    """
    each, share = config.rollout.gpu_memory_utilization, config.engine.gpu_memory_share
    servers = Counter(chain(*rollout))
    shared = [gpu for gpu in learner if servers[gpu]]
    if shared and share is None:
        left = MOST_SHARED - max(servers[gpu] for gpu in shared) * each
        share = max(LEAST_SHARE, math.floor(left * 100 + ROUNDING) / 100)
    for gpu, count in servers.items():
        total = count * each + (share or 0.0 if gpu in shared else 0.0)
        if (count > 1 or gpu in shared) and total > MOST_SHARED + ROUNDING:
            raise ValueError(
                f"GPU {gpu} is given {total:.2f} times its memory by "
                f"rollout.gpu_memory_utilization ({each:g}) for each of the {count} servers on it "
                f"and engine.gpu_memory_share ({config.engine.gpu_memory_share}); lower them to "
                f"at most {MOST_SHARED} together"
            )
    return share
