"""Kubernetes as the engine of agents' containers: an attempt is a Job of one pod.

containers.py starts attempts by it, with the rights of the service's own account
(deploy/k8s/agent-jobs.yaml).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from pathlib import Path

import httpx

from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1.tools.agents.engine import (
    CALL_TIMEOUT_S,
    LABEL,
    Api,
    Container,
    Ended,
    EngineError,
    Json,
    keep_end,
    render,
)

DEFAULT_URL = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of the token, the namespace and the certificate that a pod has."""
NETWORK_LABEL = "agent-r1/network"
WATCH_S = 300
_CANNOT_START = {
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
}


class Kubernetes:
    """The API of the cluster that the service is in; each method raises `EngineError`."""

    joins_outputs = True
    """Whether the log has standard output and error in one."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._url = settings.engine or DEFAULT_URL
        try:
            namespace = (ACCOUNT / "namespace").read_text("utf-8").strip()
            secure = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        except OSError as exc:
            raise EngineError(
                f"the folder {ACCOUNT} has no service account "
                f"({exc.strerror}); run the agents' service in a pod whose account may start Jobs "
                "(deploy/k8s/agent-jobs.yaml)"
            ) from exc
        self._jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        self._api = Api(self._url, verify=secure, auth=_Account())
        self._seen: dict[str, Json] = {}
        """The pod of every attempt, as it was last seen."""

    async def connect(self) -> str:
        """Return an address of the cluster, to reach its pods from."""
        return httpx.URL(self._url).host

    async def create(self, container: Container) -> None:
        """Start a Job."""
        network = "open" if self._settings.network else "closed"
        env = container.environment.items()
        body = render(
            "job.json.jinja",
            settings=self._settings,
            container=container,
            command=[_literal(word) for word in container.command],
            variables=[{"name": name, "value": _literal(value)} for name, value in env],
            labels={**container.labels, LABEL: container.name, NETWORK_LABEL: network},
        )
        await self._api.call("POST", self._jobs, json.loads(body))

    async def wait(self, name: str, deadline: float) -> Ended:
        """Wait for the pod's end, or the deadline by the clock of the event loop."""
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    async with contextlib.aclosing(self._watch(name)) as pods:
                        async for pod in pods:
                            self._seen[name] = pod
                            if (ended := read_pod(pod)) is not None:
                                return ended
        except TimeoutError:
            if "running" in _state(pod := self._seen.get(name, {})):
                return Ended("timeout")
            raise EngineError(
                f"the pod of the Job {name} did not start in its time: {_why_pending(pod)}"
            ) from None

    async def _watch(self, name: str) -> AsyncGenerator[Json]:
        query = {"watch": 1, "labelSelector": f"{LABEL}={name}", "timeoutSeconds": WATCH_S}
        async with self._api.stream("GET", self._pods, **query) as response:
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "DELETED":
                    raise EngineError(f"the pod of the Job {name} was deleted")
                if event["type"] in ("ADDED", "MODIFIED"):
                    yield event["object"]

    async def was_stopped(self, name: str) -> bool:
        """Return whether somebody has deleted the pod of a Job."""
        return "deletionTimestamp" in self._seen[name]["metadata"]

    async def read_log(self, name: str) -> tuple[bytes, bytes]:
        """Return the end of what it printed."""
        path, output = f"{self._pods}/{self._seen[name]['metadata']['name']}/log", bytearray()
        async with self._api.stream("GET", path, None, CALL_TIMEOUT_S) as response:
            async for chunk in response.aiter_bytes():
                keep_end(output, chunk)
        return bytes(output), b""

    async def remove(self, name: str) -> None:
        """Delete a Job and its pod, if they are there."""
        self._seen.pop(name, None)
        await self._api.delete(f"{self._jobs}/{name}", propagationPolicy="Background")

    async def find(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of every Job of an agent, by name."""
        found = await self._api.call("GET", self._jobs, labelSelector=LABEL)
        return {one["metadata"]["name"]: one["metadata"]["labels"] for one in found["items"]}

    async def close(self) -> None:
        """Close the connections."""
        await self._api.close()


class _Account(httpx.Auth):
    """The token of the service's account, which the cluster replaces now and then."""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response]:
        token = (ACCOUNT / "token").read_text("ascii").strip()
        request.headers["authorization"] = f"Bearer {token}"
        yield request


def read_pod(pod: Json) -> Ended | None:
    """Return how a pod ended; None: it has not.

    Raises:
        EngineError: it cannot start, or was ended by no fault of the agent.
    """
    state, status = _state(pod), pod["status"]
    if status.get("reason") == "DeadlineExceeded":
        return Ended("timeout")
    if "reason" in status:  # its node took it away: Evicted, NodeShutdown, Preempting
        raise EngineError(f"the pod of an agent was taken away: {_why_pending(pod)}")
    if (ended := state.get("terminated")) is not None:
        why = "memory" if ended.get("reason") == "OOMKilled" else "ended"
        return Ended(why, ended["exitCode"])
    waits_for = state.get("waiting", {}).get("reason")
    if waits_for in _CANNOT_START or status.get("phase") == "Failed":
        raise EngineError(f"the pod of an agent cannot run: {_why_pending(pod)}")
    return None


def _state(pod: Json) -> Json:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return statuses[0].get("state", {}) if statuses else {}


def _why_pending(pod: Json) -> str:
    """Return what a cluster says of a pod that does not run."""
    status = pod.get("status", {})
    told = [_state(pod).get("waiting", {}), status, *status.get("conditions", [])]
    words = [f"{one['reason']} {one.get('message', '')}".strip() for one in told if "reason" in one]
    return "; ".join(words) or "there is none (kubectl describe job says why)"


def _literal(text: str) -> str:
    """Return text that Kubernetes, which replaces `$(NAME)`, makes the given one of."""
    return text.replace("$", "$$")
