"""Docker as the engine of agents' containers, or what has its API.

containers.py starts attempts by it. With `agent.network = false`, containers are on a network of
their own that has no way out but the address of this machine on it; there, the service listens.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from agent_r1.runtime.agent_settings import FILES, AgentSettings
from agent_r1.tools.agents.engine import (
    CALL_TIMEOUT_S,
    CONFLICT,
    LABEL,
    NOT_FOUND,
    Api,
    Container,
    Ended,
    EngineError,
    keep_end,
    render,
)

DEFAULT_URL = "unix:///var/run/docker.sock"
NETWORK = "agent-r1-agents"
_HEADER = struct.Struct(">BxxxI")
_STDERR = 2
_LATE_S = 2


class Docker:
    """The engine behind a socket; each method raises `EngineError`."""

    joins_outputs = False
    """Whether the log has standard output and error in one."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._network = "bridge" if settings.network else NETWORK
        self._api = Api(settings.engine or DEFAULT_URL)

    async def connect(self) -> str:
        """Find the image and the network; returns an address to reach containers of it from."""
        image = self._settings.image
        try:
            await self._api.call("GET", f"/images/{image}/json")
        except EngineError as exc:
            if exc.status != NOT_FOUND:
                raise
            raise EngineError(
                f"agent.image ({image}) is not on the machine of Docker; pull or build it there: "
                f"docker pull {image}"
            ) from exc
        network = await self._find_network()
        if not self._settings.network and not network["Internal"]:
            raise EngineError(
                f"the network {NETWORK} of Docker leads outside, and agent.network is false; "
                f"remove it (docker network rm {NETWORK}): it is made again as an internal one"
            )
        return network["IPAM"]["Config"][0]["Gateway"]

    async def _find_network(self) -> Any:
        path = f"/networks/{self._network}"
        try:
            return await self._api.call("GET", path)
        except EngineError as exc:
            if exc.status != NOT_FOUND:
                raise
        options = {"com.docker.network.bridge.enable_icc": "false"}  # attempts do not meet
        body = {"Name": NETWORK, "Internal": True, "CheckDuplicate": True, "Options": options}
        try:
            await self._api.call("POST", "/networks/create", body)
        except EngineError as exc:
            if exc.status != CONFLICT:  # another service has just made it
                raise
        return await self._api.call("GET", path)

    async def create(self, container: Container) -> None:
        """Start a container; what could not be started is left, to be removed."""
        body = render(
            "docker.json.jinja",
            settings=self._settings,
            container=container,
            variables=[f"{name}={value}" for name, value in container.environment.items()],
            labels={**container.labels, LABEL: container.name},
            network=self._network,
            files=FILES,
        )
        await self._api.call("POST", "/containers/create", json.loads(body), name=container.name)
        await self._api.call("POST", f"/containers/{container.name}/start")

    async def wait(self, name: str, deadline: float) -> Ended:
        """Wait for a container's end, or the deadline by the clock of the event loop."""
        try:
            async with (
                asyncio.timeout_at(deadline),
                self._api.stream("POST", f"/containers/{name}/wait") as response,
            ):
                said = json.loads(await response.aread())
        except TimeoutError:
            return Ended("timeout")
        state = (await self._api.call("GET", f"/containers/{name}/json"))["State"]
        return Ended("memory" if state["OOMKilled"] else "ended", said["StatusCode"])

    async def was_stopped(self, name: str) -> bool:
        """Return whether somebody has sent a signal to a container that has ended; what is in it
        cannot do that."""
        state = (await self._api.call("GET", f"/containers/{name}/json"))["State"]
        end = int(datetime.fromisoformat(state["FinishedAt"][:19] + "+00:00").timestamp())
        filters = json.dumps({"container": [name], "event": ["kill"]})
        # What is said of a signal may come behind the end that it has caused.
        query = {"since": 0, "until": end + _LATE_S, "filters": filters}
        async with self._api.stream("GET", "/events", None, CALL_TIMEOUT_S, **query) as response:
            return bool((await response.aread()).strip())

    async def read_log(self, name: str) -> tuple[bytes, bytes]:
        """Return the end of its standard output and error."""
        outputs, waiting = (bytearray(), bytearray()), bytearray()
        async with self._api.stream(
            *("GET", f"/containers/{name}/logs", None, CALL_TIMEOUT_S), stdout=1, stderr=1
        ) as response:
            async for chunk in response.aiter_bytes():
                waiting += chunk
                while len(waiting) >= _HEADER.size:
                    kind, length = _HEADER.unpack_from(waiting)
                    if len(waiting) < (end := _HEADER.size + length):
                        break
                    keep_end(outputs[kind == _STDERR], bytes(waiting[_HEADER.size : end]))
                    del waiting[:end]
        return bytes(outputs[0]), bytes(outputs[1])

    async def remove(self, name: str) -> None:
        """Kill and remove a container with its volumes, if it is there."""
        await self._api.delete(f"/containers/{name}", force=1, v=1)

    async def find(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of every container of an agent, by name."""
        labels = json.dumps({"label": [LABEL]})
        found = await self._api.call("GET", "/containers/json", all=1, filters=labels)
        return {one["Labels"][LABEL]: one["Labels"] for one in found}

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()
