"""A pool of tools: who serves a tool, in which version, and what new trajectories are given.

Tool services announce a `ToolInstance` and rollout servers a `PinReport` through registry.py;
`ToolState` shares new trajectories out among versions. No Redis here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from agent_r1_proto.messages import Message
from agent_r1_proto.tools import ToolSpec


class ToolInstance(Message):
    """One process that serves a tool, as it announces itself."""

    instance: str
    """Unique name of the process."""
    url: str
    """Base URL of its HTTP routes."""
    spec: ToolSpec
    capacity: Annotated[int, Field(ge=1)]
    """Calls it takes at a time."""
    draining: bool = False
    """Whether it finishes what it has and takes nothing new."""
    pid: int = 0
    host: str = ""
    started_at: float = 0.0
    """Start of the instance, as Unix time in seconds."""

    @property
    def tool(self) -> str:
        """Name of the tool it serves."""
        return self.spec.name

    @property
    def version(self) -> str:
        """Version of the tool it serves."""
        return self.spec.version


class Pin(Message):
    """Number of trajectories that keep one version of one tool."""

    tool: str
    version: str
    count: Annotated[int, Field(ge=0)]


class ToolUse(Message):
    """Use that one rollout server makes of the versions of one tool."""

    tool: str
    shares: dict[str, float]
    """Shares of its new trajectories, by version."""
    refused: dict[str, str] = {}
    """Reasons why it does not take versions up, by version."""


class PinReport(Message):
    """Report of one rollout server on its trajectories, and on the tools it calls."""

    pins: list[Pin]
    tools: list[ToolUse] = []


NewVersionRule = Literal["all", "none"] | float
"""Share of new trajectories for a version that was never announced: all, none, or a number."""


@dataclass(frozen=True)
class ToolState:
    """State of one tool in the registry."""

    instances: Sequence[ToolInstance] = ()
    """Instances whose announcement has not expired, by name; draining ones are marked."""
    versions: Sequence[str] = ()
    """Versions ever announced, oldest first."""
    weights: Mapping[str, float] = field(default_factory=dict[str, float])
    """Shares of new traffic, by version; empty: the newest version gets all."""

    def live_versions(self) -> list[str]:
        """Return the versions that take new work, oldest first."""
        live = {one.version for one in self.instances if not one.draining}
        known = [version for version in self.versions if version in live]
        return known + sorted(live - set(known))

    def shares(self) -> dict[str, float]:
        """Return the share of new trajectories each version gets, summing to 1.

        Weights count among the versions that take new work. Where they leave none, the newest
        gets everything: a weight that names a dead version must not stop a run.
        """
        live = self.live_versions()
        if not live:
            return {}
        weighted = {version: self.weights.get(version, 0.0) for version in live}
        return _parts(weighted) if any(weighted.values()) else {live[-1]: 1.0}

    def weights_with(self, version: str, rule: NewVersionRule) -> dict[str, float] | None:
        """Return the weights that let a version in which has never been announced.

        Args:
            version: the new one.
            rule: what it gets of new trajectories.

        Returns:
            None where nothing has to be set: weights name the version already, nobody else takes
            new work, or `rule` is "all", for which no weight is needed.
        """
        others = self.shares()
        if rule == "all" or version in self.weights or not others:
            return None
        # A version that is away at the moment keeps its weight.
        weighs = any(self.weights.get(name, 0.0) > 0 for name in others)
        known = self.weights if weighs else {**self.weights, **others}
        share = 0.0 if rule == "none" else rule
        return {name: part * (1 - share) for name, part in _parts(known).items()} | {version: share}


def _parts(weights: Mapping[str, float]) -> dict[str, float]:
    """Return weights scaled to a sum of 1, without those that are 0; one is above 0."""
    most = max(weights.values())  # the sum of large ones may be infinite
    scaled = {version: weight / most for version, weight in weights.items() if weight > 0}
    total = sum(scaled.values())
    return {version: weight / total for version, weight in scaled.items()}


def check_weights(weights: Mapping[str, float]) -> None:
    """Check the traffic weights of a tool.

    Raises:
        ValueError: a name is empty or has blanks, a weight is no finite number >= 0, or all are 0.
    """
    for version, weight in weights.items():
        if not version or any(character.isspace() for character in version):
            raise ValueError(f"version ({version!r}) must be a name without blanks, such as 1.2")
        if not math.isfinite(weight) or weight < 0:
            raise ValueError(f"weight of version {version} ({weight}) must be a number >= 0")
    if weights and max(weights.values()) == 0:
        raise ValueError(
            f"weights ({dict(weights)}) give no version any traffic; set one above 0, or take "
            "all weights away"
        )
