"""Metrics page: the numbers of one process, in Prometheus' text format.

Each service names its metrics in a module of its own, and fills a `MetricsPage` with numbers that
it keeps anyway. docs/metrics.md is written from the same names.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast
from urllib.parse import urlsplit

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import Response

from agent_r1.runtime.gpus import read_gpus
from agent_r1.runtime.memory import meminfo_bytes

if TYPE_CHECKING:
    from fastapi import FastAPI

PREFIX = "agent_r1_"
LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets of an answer over the network, in seconds."""
WORK_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of what may take minutes, in seconds."""

Value = float | Mapping[tuple[str, ...], float]
"""A number, or one for each combination of labels."""


@dataclass(frozen=True)
class Metric:
    """One metric, as docs/metrics.md describes it."""

    name: str
    """agent_r1_, the part, what is measured, the base unit; a counter ends with _total."""
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    """Meaning, in one sentence."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = LATENCY_BUCKETS
    """Buckets of a histogram."""

    def series(self) -> list[str]:
        """Return the names under which Prometheus stores it."""
        if self.kind != "histogram":
            return [self.name]
        return [f"{self.name}_{part}" for part in ("bucket", "count", "sum")]


INFO = Metric(
    "agent_r1_service_info",
    "gauge",
    "Always 1; the labels say what runs here.",
    ("service", "version"),
)
CPUS = Metric("agent_r1_machine_cpus", "gauge", "Cores of the machine.", ("host",))
LOAD = Metric(
    "agent_r1_machine_load_average",
    "gauge",
    "Processes that run or wait for a core, mean of one minute.",
    ("host",),
)
MEMORY = Metric("agent_r1_machine_memory_bytes", "gauge", "Memory of the machine.", ("host",))
MEMORY_AVAILABLE = Metric(
    "agent_r1_machine_memory_available_bytes",
    "gauge",
    "Memory that a process may still take.",
    ("host",),
)
SHARED_MEMORY_FREE = Metric(
    "agent_r1_machine_shared_memory_free_bytes", "gauge", "Free space of /dev/shm.", ("host",)
)
GPU_MEMORY = Metric("agent_r1_gpu_memory_bytes", "gauge", "Memory of a GPU.", ("host", "gpu"))
GPU_MEMORY_USED = Metric(
    "agent_r1_gpu_memory_used_bytes",
    "gauge",
    "Memory of a GPU that is in use, by any process.",
    ("host", "gpu"),
)
GPU_BUSY = Metric(
    "agent_r1_gpu_busy_ratio",
    "gauge",
    "Share of the last moment in which a GPU computed anything.",
    ("host", "gpu"),
)
DISK = Metric(
    "agent_r1_disk_bytes", "gauge", "Size of the disk that holds a folder.", ("host", "folder")
)
DISK_FREE = Metric(
    "agent_r1_disk_free_bytes",
    "gauge",
    "Free space of the disk that holds a folder.",
    ("host", "folder"),
)


class MetricsPage(Collector):
    """The metrics of one process; those that have a reader are read when Prometheus asks.

    Args:
        service: rollout, reward, tool, learner or launcher.
        folders: folders whose disks are watched, by the key that names them.
    """

    def __init__(self, service: str, folders: Mapping[str, Path] | None = None) -> None:
        disable_created_metrics()  # a second series for each counter that nobody asks for
        self._registry = CollectorRegistry()
        self._readers: list[tuple[Metric, Callable[[], Value | None]]] = []
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        version = importlib.metadata.version("agent-r1")
        self.read(INFO, lambda: {(service, version): 1.0})
        host = (socket.gethostname(),)
        for metric, read in _MACHINE.items():
            self.read(metric, lambda read=read: {host: read()})
        for metric, field in _GPU.items():
            self.read(metric, lambda field=field: _gpus(host[0], field))
        self._folders = {(*host, key): path for key, path in (folders or {}).items()}
        self.read(DISK, lambda: self._disks("total"))
        self.read(DISK_FREE, lambda: self._disks("free"))

    def _disks(self, what: Literal["total", "free"]) -> dict[tuple[str, ...], float]:
        there = {key: path for key, path in self._folders.items() if path.exists()}
        return {key: getattr(shutil.disk_usage(path), what) for key, path in there.items()}

    def counter(self, metric: Metric) -> Counter:
        """Add a counter, which the service increments."""
        return Counter(metric.name, metric.text, metric.labels, registry=self._registry)

    def histogram(self, metric: Metric) -> Histogram:
        """Add a histogram, which the service gives observations to."""
        return Histogram(
            metric.name,
            metric.text,
            metric.labels,
            buckets=metric.buckets,
            registry=self._registry,
        )

    def read(self, metric: Metric, read: Callable[[], Value | None]) -> None:
        """Add a counter or gauge whose value is read when Prometheus asks; None leaves it out."""
        self._readers.append((metric, read))

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics that have a reader, for the registry."""
        for metric, read in self._readers:
            value = read()
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.text, labels=metric.labels)
            if isinstance(value, Mapping):
                for labels, one in value.items():
                    family.add_metric(labels, one)
            elif value is not None:
                family.add_metric((), value)
            yield family

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def add_route(self, app: FastAPI) -> None:
        """Let an application answer `GET /metrics`."""

        async def metrics() -> Response:
            return Response(self.text(), media_type=CONTENT_TYPE_LATEST)

        app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response)


def scrape_target(url: str, job: str, run: str) -> dict[str, object]:
    """Return one service as Prometheus' HTTP service discovery wants it.

    Args:
        url: base URL of the service.
        job: rollout, reward, tools, learner or launcher.
        run: id of the run.
    """
    return {"targets": [urlsplit(url).netloc], "labels": {"job": job, "run": run}}


def _gpus(host: str, field: str) -> dict[tuple[str, ...], float]:
    return {(host, str(gpu.index)): getattr(gpu, field) for gpu in read_gpus()}


def _memory(field: str) -> float:
    found = meminfo_bytes(field)
    return float("nan") if found is None else float(found)


def _shared_memory_free() -> float:
    shared = Path("/dev/shm")
    return float(shutil.disk_usage(shared).free) if shared.exists() else 0.0


_MACHINE: dict[Metric, Callable[[], float]] = {
    CPUS: lambda: float(os.cpu_count() or 1),
    LOAD: lambda: os.getloadavg()[0],
    MEMORY: lambda: _memory("MemTotal"),
    MEMORY_AVAILABLE: lambda: _memory("MemAvailable"),
    SHARED_MEMORY_FREE: _shared_memory_free,
}


_GPU = {GPU_MEMORY: "memory_bytes", GPU_MEMORY_USED: "used_bytes", GPU_BUSY: "busy"}


def metrics_of(module: object) -> list[Metric]:
    """Return the metrics that a module names, in their order."""
    named: list[object] = []
    for value in vars(module).values():
        named += (
            cast("dict[object, object]", value).values() if isinstance(value, dict) else [value]
        )
    return [one for one in named if isinstance(one, Metric)]
