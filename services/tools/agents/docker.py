"""Docker as the engine of agents' containers, or what has its API.

containers.py starts attempts by it. With `agent.network = false`, containers are on a network of
their own that has no way out but the address of this machine on it; there, the service listens.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

from agent_r1.runtime.agent_settings import FILES, AgentSettings
from agent_r1.tools.agents.engine import (
    OWN_PROCESSES,
    USER,
    Api,
    Container,
    Ended,
    EngineError,
    keep_end,
)

DEFAULT_URL = "unix:///var/run/docker.sock"
NETWORK = "agent-r1-agents"
"""Network of agents without one; it is made where it is not there."""
LABEL = "agent-r1/attempt"
PULL_TIMEOUT_S = 1800.0
_NOT_FOUND, _CONFLICT = 404, 409
_HEADER = struct.Struct(">BxxxI")
_STDERR = 2


class Docker:
    """The engine behind a socket."""

    joins_outputs = False

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._network = "bridge" if settings.network else NETWORK
        self._api = Api(settings.engine or DEFAULT_URL, "Docker")

    async def connect(self) -> str:
        """Pull the image, make the network; returns the machine's address on it."""
        await self._find_image()
        network = await self._find_network()
        if not self._settings.network and not network["Internal"]:
            raise EngineError(
                f"the network {NETWORK} of Docker leads outside, and agent.network is false; "
                f"remove it (docker network rm {NETWORK}): it is made again as an internal one"
            )
        return network["IPAM"]["Config"][0]["Gateway"]

    async def _find_image(self) -> None:
        image = self._settings.image or ""
        try:
            await self._api.call("GET", f"/images/{image}/json")
        except EngineError as exc:
            if exc.status != _NOT_FOUND:
                raise
        else:
            return
        name, at, tag = image.partition("@")
        if not at:
            name, _, tag = (
                image.rpartition(":") if ":" in image.rpartition("/")[2] else (image, "", "")
            )
        pulling = self._api.stream("POST", "/images/create", fromImage=name, tag=tag or "latest")
        try:
            async with asyncio.timeout(PULL_TIMEOUT_S), pulling as response:
                async for line in response.aiter_lines():
                    if "error" in (said := json.loads(line or "{}")):
                        raise EngineError(str(said["error"]))
        except (EngineError, TimeoutError) as exc:
            said = str(exc) or f"not pulled within {PULL_TIMEOUT_S:g} s"
            raise EngineError(
                f"agent.image ({image}) is not there, and cannot be pulled: {said}; build it, or "
                "pull it (docker pull) with your credentials"
            ) from exc

    async def _find_network(self) -> Any:
        path = f"/networks/{self._network}"
        try:
            return await self._api.call("GET", path)
        except EngineError as exc:
            if exc.status != _NOT_FOUND:
                raise
        options = {"com.docker.network.bridge.enable_icc": "false"}  # attempts do not meet
        body = {"Name": NETWORK, "Internal": True, "CheckDuplicate": True, "Options": options}
        try:
            await self._api.call("POST", "/networks/create", body)
        except EngineError as exc:
            if exc.status != _CONFLICT:  # another service has just made it
                raise
        return await self._api.call("GET", path)

    async def create(self, container: Container) -> None:
        """Start a container."""
        settings = self._settings
        memory = (settings.memory_mb + settings.file_mb) << 20  # the folder is in memory
        tmpfs = f"rw,exec,nosuid,nodev,mode=1777,size={settings.file_mb}m,nr_inodes={FILES}"
        host = {
            "NetworkMode": self._network,
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(settings.cpus * 1e9),
            "PidsLimit": settings.processes + OWN_PROCESSES,
            "ReadonlyRootfs": True,
            "Tmpfs": {"/tmp": tmpfs},
            "ShmSize": settings.file_mb << 20,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges"],
            "Init": False,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "16m", "max-file": "1"}},
        }
        body = {
            "Image": settings.image,
            "Entrypoint": container.command,
            "Env": [f"{name}={value}" for name, value in container.environment.items()],
            "Labels": {**container.labels, LABEL: container.name},
            "User": f"{USER}:{USER}",
            "WorkingDir": "/tmp",
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": host,
        }
        await self._api.call("POST", "/containers/create", body, name=container.name)
        await self._api.call("POST", f"/containers/{container.name}/start")

    async def wait(self, name: str, deadline: float) -> Ended:
        """Wait for a container's end, or the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                said = await self._api.call("POST", f"/containers/{name}/wait", waits=True)
        except TimeoutError:
            return Ended("timeout")
        state = (await self._api.call("GET", f"/containers/{name}/json"))["State"]
        return Ended("memory" if state["OOMKilled"] else "ended", said["StatusCode"])

    async def read_log(self, name: str) -> tuple[bytes, bytes]:
        """Return the end of its standard output and error."""
        outputs = bytearray(), bytearray()
        path, waiting = f"/containers/{name}/logs", bytearray()
        async with self._api.stream("GET", path, waits=False, stdout=1, stderr=1) as response:
            async for chunk in response.aiter_bytes():
                waiting += chunk
                while len(waiting) >= _HEADER.size:
                    kind, length = _HEADER.unpack_from(waiting)
                    end = _HEADER.size + length
                    if len(waiting) < end:
                        break
                    keep_end(outputs[kind == _STDERR], bytes(waiting[_HEADER.size : end]))
                    del waiting[:end]
        return bytes(outputs[0]), bytes(outputs[1])

    async def remove(self, name: str) -> None:
        """Kill and remove a container with its volumes."""
        try:
            await self._api.call("DELETE", f"/containers/{name}", force=1, v=1)
        except EngineError as exc:
            if exc.status not in (_NOT_FOUND, _CONFLICT):  # it is gone, or is being removed
                raise

    async def find(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of every container of an agent, by name."""
        labels = json.dumps({"label": [LABEL]})
        found = await self._api.call("GET", "/containers/json", all=1, filters=labels)
        return {one["Labels"][LABEL]: one["Labels"] for one in found}

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()
