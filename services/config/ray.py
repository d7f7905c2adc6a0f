"""`[ray]`: how many replicas of each service a Ray cluster runs, and what each of them takes there.

deploy/ray reads it; nothing else does. Resources are Ray's: "CPU", "GPU", and names of your own
that `ray start --resources` gives to nodes, which is how a process gets to certain machines.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from agent_r1.runtime.config import StrictConfig

Resources = dict[str, Annotated[float, Field(ge=0)]]

GPU = "GPU"


class RayConfig(StrictConfig):
    """`[ray]`: replicas and resources."""

    rollout_replicas: PositiveInt = 1
    """Rollout servers; with `max_rollout_replicas` the fewest."""
    max_rollout_replicas: PositiveInt | None = None
    """Most rollout servers; None never adds any."""
    samples_per_server: PositiveFloat = 64.0
    """With `max_rollout_replicas`: servers are added while there are more samples than this for
    each, and removed while fewer would do. Samples count while they wait and while they run."""
    tool_replicas: PositiveInt = 1
    """Instances of each tool; with 2, one serves while the other is replaced."""
    reward_replicas: PositiveInt = 1
    """Reward workers."""
    rollout_resources: Resources = {"CPU": 1.0}
    """Of one rollout server; "GPU" is `rollout.tensor_parallel_size` where there are GPUs."""
    rank_resources: Resources = {"CPU": 1.0}
    """Of one learner rank; "GPU" is 1 where there are GPUs."""
    tool_resources: Resources = {"CPU": 0.5}
    """Of one instance of a tool."""
    reward_resources: Resources = {"CPU": 0.5}
    """Of one reward worker."""
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
                f'"GPU" ({value[GPU]:g}) must be 0 or 1: a rank uses one GPU; set learner.ranks '
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
