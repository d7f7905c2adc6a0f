"""The numbers of one tool service, as `GET /metrics` gives them to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class _OwnCounters(Collector):
    """The counts a tool keeps itself, as `agent_r1_tool_{name}_total`."""

    def __init__(self, tool: str, version: str, counters: Callable[[], Mapping[str, int]]) -> None:
        self._given = (tool, version)
        self._counters = counters

    def collect(self) -> Iterator[CounterMetricFamily]:
        for name, value in self._counters().items():
            family = CounterMetricFamily(
                f"agent_r1_tool_{name}", "Counted by the tool itself.", labels=("tool", "version")
            )
            family.add_metric(self._given, value)
            yield family


class ToolMetrics:
    """Counts calls by how they ended, and how long they took."""

    def __init__(
        self,
        tool: str,
        version: str,
        *,
        in_flight: Callable[[], int],
        sessions: Callable[[], int],
        counters: Callable[[], Mapping[str, int]],
    ) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OwnCounters(tool, version, counters))
        labels = ("tool", "version")
        self._given = (tool, version)
        self._calls = Counter(
            "agent_r1_tool_calls",
            "Calls, by how they ended: ok and error are answers, the rest outages.",
            (*labels, "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "agent_r1_tool_request_seconds",
            "Time of one POST /call.",
            labels,
            buckets=BUCKETS,
            registry=self._registry,
        ).labels(*self._given)
        for name, text, value in (
            ("agent_r1_tool_calls_in_flight", "Calls being worked on.", in_flight),
            ("agent_r1_tool_sessions", "Open sessions.", sessions),
        ):
            gauge = Gauge(name, text, labels, registry=self._registry)
            gauge.labels(*self._given).set_function(value)

    def count(self, status: str, calls: int = 1) -> None:
        """Count calls that ended with a status: ok, error, or the HTTP status of an outage."""
        self._calls.labels(*self._given, status).inc(calls)

    def observe(self, seconds: float) -> None:
        """Note how long one request took."""
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)
