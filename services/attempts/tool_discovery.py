"""Tool directory: the one place that decides which instance of a tool gets a call.

Instances come from the registry in Redis (`watch_forever` reads it twice a second) or, with a fixed
URL, from the configuration. tool_client.py asks for an endpoint per call and says how it went;
agent_loop.py pins versions at the start of a trajectory.

A trajectory keeps the versions it started with (`env.pin = "trajectory"`): new ones are drawn by
the registry's weights among versions that take new work, and a pinned version stays reachable on
instances that drain. A version whose schema would change the prompt is not taken up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agent_r1.attempts.tool_transport import BREAKER_OPEN_S, Endpoint, RequestError
from agent_r1_proto.registry import WITHDRAW_TIMEOUT_S, ToolRegistry
from agent_r1_proto.tool_pool import Pin, PinReport, ToolInstance, ToolState, ToolUse
from agent_r1_proto.tools import ToolSpec

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Time between two reads of the registry: additions and removals are seen within a second."""


@dataclass
class _Tool:
    """One tool as this process knows it."""

    spec: ToolSpec
    """Spec that this run offers."""
    specs: dict[str, ToolSpec] = field(default_factory=dict)
    """Specs by version, as first seen."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """Instances by name."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of new work, by acceptable version."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why a version that is announced is not taken up, in full or in part."""
    logged: set[str] = field(default_factory=set)
    """Refusals that the log has."""


@dataclass
class ToolDirectory:
    """The instances of the tools of one rollout server."""

    server_id: str = "rollout"
    """Name under which pins are reported."""
    follow_schemas: bool = False
    """Whether versions are taken up whose schema changes the prompt."""
    clock: Callable[[], float] = time.monotonic
    random_: random.Random = field(default_factory=random.Random)
    """Draws versions and breaks ties."""
    _tools: dict[str, _Tool] = field(default_factory=dict, init=False)
    _pins: Counter[tuple[str, str]] = field(default_factory=Counter, init=False)

    # -- what is there ---------------------------------------------------------------------------

    @property
    def specs(self) -> dict[str, ToolSpec]:
        """Specifications of the tools, by name."""
        return {name: tool.spec for name, tool in self._tools.items()}

    def spec(self, name: str, version: str | None = None) -> ToolSpec:
        """Return what a tool is in a version."""
        tool = self._tools[name]
        return tool.spec if version is None else tool.specs.get(version, tool.spec)

    def add_fixed(self, name: str, url: str, spec: ToolSpec) -> None:
        """Add the tool behind a URL of the configuration."""
        endpoint = Endpoint(url=url, instance=url, version=None)
        self._tools[name] = _Tool(spec=spec, endpoints={url: endpoint})

    def update(self, name: str, state: ToolState) -> bool:
        """Take over what the registry says of a tool; return whether it is known now."""
        tool = self._tools.get(name)
        if tool is None:
            shares = state.shares()
            if not shares:
                return False
            version = max(shares, key=lambda v: shares[v])
            live = (one for one in state.instances if not one.draining)
            spec = next(one.spec for one in live if one.version == version)
            tool = self._tools[name] = _Tool(spec=spec)
        accepted = self._accepted(name, tool, state.instances)
        self._note_changes(name, tool, accepted)
        tool.endpoints = {one.instance: self._endpoint(tool, one) for one in accepted}
        versions = {one.version for one in accepted}
        usable = ToolState(
            instances=accepted,
            versions=[version for version in state.versions if version in versions],
            weights=state.weights,
        )
        tool.shares = usable.shares()
        if self.follow_schemas and tool.shares:
            newest = max(tool.shares, key=lambda v: tool.shares[v])
            tool.spec = tool.specs[newest]
        return True

    def _accepted(
        self, name: str, tool: _Tool, instances: Sequence[ToolInstance]
    ) -> list[ToolInstance]:
        tool.refused = {}
        accepted: list[ToolInstance] = []
        for one in instances:
            problem = self._problem(tool, one)
            if problem is None:
                accepted.append(one)
                continue
            tool.refused[one.version] = problem
            if problem not in tool.logged:
                tool.logged.add(problem)
                logger.error(
                    "tool version not taken up tool=%s version=%s instance=%s reason=%s",
                    name,
                    one.version,
                    one.instance,
                    problem,
                )
        return accepted

    def _problem(self, tool: _Tool, one: ToolInstance) -> str | None:
        if tool.specs.setdefault(one.version, one.spec) != one.spec:
            return (
                f"{one.instance} has another description, schema or session setting than the "
                f"version {one.version} known before; give the changed tool its own version"
            )
        same = one.spec.as_function() == tool.spec.as_function()
        if (same and one.spec.sessions == tool.spec.sessions) or self.follow_schemas:
            return None
        return (
            f"the schema of version {one.version} would change the prompt in the middle of the "
            "run; set env.follow_tool_schemas = true to take it"
        )

    @staticmethod
    def _note_changes(name: str, tool: _Tool, accepted: Sequence[ToolInstance]) -> None:
        now = {one.instance: one for one in accepted}
        for instance in now.keys() - tool.endpoints.keys():
            logger.info(
                "tool instance added tool=%s version=%s instance=%s url=%s",
                name,
                now[instance].version,
                instance,
                now[instance].url,
            )
        for instance in tool.endpoints.keys() - now.keys():
            logger.info("tool instance gone tool=%s instance=%s", name, instance)

    @staticmethod
    def _endpoint(tool: _Tool, one: ToolInstance) -> Endpoint:
        endpoint = tool.endpoints.get(one.instance)
        if endpoint is None or endpoint.url != one.url:
            endpoint = Endpoint(url=one.url, instance=one.instance, version=one.version)
        endpoint.capacity = one.capacity
        endpoint.draining = one.draining
        return endpoint

    async def watch_forever(self, registry: ToolRegistry, names: Sequence[str]) -> None:
        """Follow the registry, and report the pinned versions there, until cancelled."""
        try:
            while True:
                try:
                    for name, state in (await registry.read(names)).items():
                        self.update(name, state)
                    await registry.report(self.server_id, self.report(names), 10 * POLL_S)
                except Exception:  # what is known stays in use
                    logger.exception("tool registry not followed")
                await asyncio.sleep(POLL_S)
        finally:
            # Tools that stop too need not wait until the report expires.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WITHDRAW_TIMEOUT_S):
                    await registry.withdraw_report(self.server_id)

    def report(self, names: Sequence[str]) -> PinReport:
        """Return what this server does with the versions of the named tools."""
        known = {name: self._tools[name] for name in names if name in self._tools}
        return PinReport(
            pins=[Pin(tool=t, version=v, count=n) for (t, v), n in self._pins.items()],
            tools=[
                ToolUse(tool=name, shares=tool.shares, refused=tool.refused)
                for name, tool in known.items()
            ],
        )

    # -- versions --------------------------------------------------------------------------------

    def pin(self, names: Sequence[str]) -> dict[str, str]:
        """Draw a version of each named tool for one trajectory; `unpin` gives them back.

        Tools behind a fixed URL have no pin.
        """
        tools = {name: self._tools[name] for name in names}
        pins = {name: self._draw(tool) for name, tool in tools.items() if tool.shares}
        self._pins.update(pins.items())
        return pins

    def pin_again(self, pins: Mapping[str, str]) -> None:
        """Count the pins of a trajectory once more, for a branch of it that ends by itself."""
        self._pins.update(pins.items())

    def unpin(self, pins: Mapping[str, str]) -> None:
        """Give the pins of a trajectory that has ended back."""
        for key in pins.items():
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]

    # -- instances -------------------------------------------------------------------------------

    def choose(self, name: str, version: str | None = None) -> Endpoint:
        """Return the instance for one call: the least loaded whose breaker is closed.

        Where every breaker is open, the call goes to the instance that failed longest ago: the
        client's own retries and back-off bound what that costs.

        Args:
            name: of the tool.
            version: the pinned one; None draws by the weights.

        Raises:
            RequestError: no instance has the version ("tool_version_gone": others have another), or
                none is announced ("tool_absent").
        """
        tool = self._tools[name]
        if version is None and tool.shares:
            version = self._draw(tool)
        fitting = [e for e in tool.endpoints.values() if version in (None, e.version)]
        if not fitting:
            if any(not e.draining for e in tool.endpoints.values()):
                raise RequestError(
                    "tool_version_gone",
                    f"no instance of version {version} is left; there are "
                    f"{', '.join(sorted(tool.shares)) or 'none'}",
                )
            raise RequestError("tool_absent", "no instance is announced")
        fresh = [e for e in fitting if not e.draining] or fitting
        now = self.clock()
        closed = [e for e in fresh if e.open_until <= now]
        if not closed:
            return min(fresh, key=lambda e: e.open_until)
        chosen = min(closed, key=lambda e: (e.load, self.random_.random()))
        if chosen.open_until:
            chosen.open_until = now + BREAKER_OPEN_S  # half open: this call tries, others wait
        return chosen

    def _draw(self, tool: _Tool) -> str:
        return self.random_.choices(list(tool.shares), list(tool.shares.values()))[0]

    def answering(self) -> dict[str, int]:
        """Return, by tool, the number of instances whose breaker is closed."""
        now = self.clock()
        return {
            name: sum(one.open_until <= now for one in tool.endpoints.values())
            for name, tool in self._tools.items()
        }

    def endpoints(self, name: str) -> Mapping[str, Endpoint]:
        """Return the instances of a tool that are announced, by their names."""
        return self._tools[name].endpoints
