"""Kubernetes as the engine of agents' containers: an attempt is a Job of one pod.

containers.py starts attempts by it, with the rights of the service's own account
(deploy/k8s/agent-jobs.yaml). Jobs end and go by themselves too, where the service dies.
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
from agent_r1.tools.agents.engine import USER, Api, Container, Ended, EngineError, Json, keep_end

DEFAULT_URL = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Folder of the token, the namespace and the certificate that a pod has."""
LABEL = "agent-r1/attempt"
NETWORK_LABEL = "agent-r1/network"
KEPT_S = 300
"""An ended Job is kept for so long, where the service does not remove it."""
START_S = 600
"""A Job whose pod has no place is kept for so long beside its time, where the service is gone."""
STOP_S = 5
WATCH_S = 300
_CANNOT_START = {
    *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
}
_NOT_FOUND = 404


class Kubernetes:
    """The API of the cluster that the service is in."""

    joins_outputs = True

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._api: Api | None = None
        self._pods: dict[str, Json] = {}
        """The pod of every attempt, as it was last seen."""

    async def connect(self) -> str:
        """Read the service's account; returns the address of its pod."""
        url = httpx.URL(self._settings.engine or DEFAULT_URL)
        try:
            self._namespace = (ACCOUNT / "namespace").read_text("utf-8").strip()
            secure = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        except OSError as exc:
            raise EngineError(
                f"{ACCOUNT} has no service account ({exc.strerror}); run the agents' service in a "
                "pod whose account may start Jobs (deploy/k8s/agent-jobs.yaml)"
            ) from exc
        self._api = Api(str(url), "Kubernetes", verify=secure, auth=_Account())
        return url.host

    @property
    def _jobs(self) -> str:
        return f"/apis/batch/v1/namespaces/{self._namespace}/jobs"

    @property
    def _pods_path(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    async def create(self, container: Container) -> None:
        """Start a Job."""
        assert self._api is not None
        await self._api.call("POST", self._jobs, _job(self._settings, container))

    async def wait(self, name: str, deadline: float) -> Ended:
        """Wait for the pod's end, or the deadline."""
        try:
            async with asyncio.timeout_at(deadline):
                while True:
                    async with contextlib.aclosing(self._watch(name)) as pods:
                        async for pod in pods:
                            self._pods[name] = pod
                            if (ended := read_pod(pod)) is not None:
                                return ended
        except TimeoutError:
            pod = self._pods.get(name, {})
            if "running" in _state(pod):
                return Ended("timeout")
            raise EngineError(
                f"the pod of the Job {name} did not start in its time: {_why_pending(pod)}"
            ) from None

    async def _watch(self, name: str) -> AsyncGenerator[Json]:
        assert self._api is not None
        query = {"watch": 1, "labelSelector": f"{LABEL}={name}", "timeoutSeconds": WATCH_S}
        async with self._api.stream("GET", self._pods_path, **query) as response:
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "DELETED":
                    raise EngineError(f"the pod of the Job {name} was deleted")
                if event["type"] in ("ADDED", "MODIFIED"):
                    yield event["object"]

    async def read_log(self, name: str) -> tuple[bytes, bytes]:
        """Return the end of what it printed."""
        assert self._api is not None
        path = f"{self._pods_path}/{self._pods[name]['metadata']['name']}/log"
        output = bytearray()
        async with self._api.stream("GET", path, waits=False) as response:
            async for chunk in response.aiter_bytes():
                keep_end(output, chunk)
        return bytes(output), b""

    async def remove(self, name: str) -> None:
        """Delete a Job and its pod."""
        assert self._api is not None
        self._pods.pop(name, None)
        path = f"{self._jobs}/{name}"
        try:
            await self._api.call("DELETE", path, propagationPolicy="Background")
        except EngineError as exc:
            if exc.status != _NOT_FOUND:
                raise

    async def find(self) -> dict[str, Mapping[str, str]]:
        """Return the labels of every Job of an agent, by name."""
        assert self._api is not None
        found = await self._api.call("GET", self._jobs, labelSelector=LABEL)
        return {one["metadata"]["name"]: one["metadata"]["labels"] for one in found["items"]}

    async def close(self) -> None:
        """Close the connections."""
        if self._api is not None:
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
    state = _state(pod)
    ended, waiting = state.get("terminated"), state.get("waiting", {})
    if pod["status"].get("reason") == "DeadlineExceeded":
        return Ended("timeout")
    if ended is not None:
        why = "memory" if ended.get("reason") == "OOMKilled" else "ended"
        return Ended(why, ended["exitCode"])
    if waiting.get("reason") in _CANNOT_START or pod["status"].get("phase") == "Failed":
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


def _job(settings: AgentSettings, container: Container) -> Json:
    labels = {**container.labels, LABEL: container.name}
    labels[NETWORK_LABEL] = "open" if settings.network else "closed"
    limit_s = container.limit_s + STOP_S
    memory = f"{settings.memory_mb + settings.file_mb}Mi"  # the folder is in memory
    resources = {
        "limits": {"cpu": str(settings.cpus), "memory": memory},
        # An agent waits for the model most of its time.
        "requests": {"cpu": str(settings.cpus / 10), "memory": memory},
    }
    agent = {
        "name": "agent",
        "image": settings.image,
        "command": [_literal(word) for word in container.command],
        "env": [{"name": n, "value": _literal(v)} for n, v in container.environment.items()],
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "workingDir": "/tmp",
    }
    folder = {"medium": "Memory", "sizeLimit": f"{settings.file_mb}Mi"}
    pod = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": limit_s,
        "terminationGracePeriodSeconds": STOP_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [agent],
        "volumes": [{"name": "tmp", "emptyDir": folder}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": container.name, "labels": labels},
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": limit_s + START_S,
            "ttlSecondsAfterFinished": KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _literal(text: str) -> str:
    """Return text that Kubernetes, which replaces `$(NAME)`, makes the given one of."""
    return text.replace("$", "$$")
