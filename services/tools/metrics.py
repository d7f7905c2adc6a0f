"""The numbers of one tool service, as `GET /metrics` gives them to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agent_r1.runtime.metrics import LATENCY_BUCKETS, Metric, MetricsPage

_LABELS = ("tool", "version")

CALLS = Metric(
    "agent_r1_tool_calls_total",
    "counter",
    "Calls, by how they ended: ok and error are answers, an HTTP status is an outage.",
    (*_LABELS, "status"),
)
REQUEST_SECONDS = Metric(
    "agent_r1_tool_request_seconds",
    "histogram",
    "Time of one POST /call.",
    _LABELS,
    (*LATENCY_BUCKETS, 30.0),
)
IN_FLIGHT = Metric("agent_r1_tool_calls_in_flight", "gauge", "Calls being worked on.", _LABELS)
SESSIONS = Metric("agent_r1_tool_sessions", "gauge", "Open sessions.", _LABELS)
EVENTS = Metric(
    "agent_r1_tool_events_total",
    "counter",
    "What the tool counts itself (`Tool.counters`), by its own names.",
    (*_LABELS, "event"),
)


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
        given = (tool, version)
        self.page = MetricsPage("tool")
        self._given = given
        self._calls = self.page.counter(CALLS)
        for status in ("ok", "error"):  # at 0: from nothing to 1 is no change to Prometheus
            self._calls.labels(*given, status)
        self._seconds = self.page.histogram(REQUEST_SECONDS).labels(*given)
        self.page.read(IN_FLIGHT, lambda: {given: in_flight()})
        self.page.read(SESSIONS, lambda: {given: sessions()})
        self.page.read(EVENTS, lambda: {(*given, name): n for name, n in counters().items()})

    def count(self, status: str, calls: int = 1) -> None:
        """Count calls that ended with a status: ok, error, or the HTTP status of an outage."""
        self._calls.labels(*self._given, status).inc(calls)

    def observe(self, seconds: float) -> None:
        """Note how long one request took."""
        self._seconds.observe(seconds)
