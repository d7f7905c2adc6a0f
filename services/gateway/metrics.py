"""The numbers of one gateway, as `GET /metrics` gives them to Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import numpy as np

from agent_r1.gateway.servers import RolloutServers
from agent_r1.gateway.session import AgentSession
from agent_r1.runtime.metrics import WORK_BUCKETS, Metric, MetricsPage
from agent_r1_proto.trajectory import Status, Trajectory

SESSIONS = Metric("agent_r1_gateway_sessions", "gauge", "Attempts of agents being worked on.")
CAPACITY = Metric(
    "agent_r1_gateway_sessions_capacity",
    "gauge",
    "Most attempts worked on at a time (`agent.max_concurrent`).",
)
ATTEMPTS = Metric(
    "agent_r1_gateway_attempts_total",
    "counter",
    "Attempts that ended, by status: COMPLETED, TRUNCATED or FAILED.",
    ("status",),
)
ATTEMPT_SECONDS = Metric(
    "agent_r1_gateway_attempt_seconds",
    "histogram",
    "Time from the start of an attempt to its end.",
    buckets=WORK_BUCKETS,
)
REQUESTS = Metric("agent_r1_gateway_requests_total", "counter", "Requests of agents for a turn.")
TOKENS = Metric(
    "agent_r1_gateway_tokens_total",
    "counter",
    "Tokens that were sampled for agents: trained, or excluded for the reason that is named.",
    ("fate",),
)
MOVES = Metric(
    "agent_r1_gateway_moves_total",
    "counter",
    "Sessions that went on at another rollout server, which computes their prefix anew.",
)
CHANGED_TEXTS = Metric(
    "agent_r1_gateway_changed_texts_total",
    "counter",
    "Messages shown as first seen, because only volatile text had changed (`agent.volatile`).",
)
MALFORMED = Metric(
    "agent_r1_gateway_malformed_calls_total",
    "counter",
    "Tool calls of the policy that cannot be read, which agents are shown as text.",
)
TRAINED = "trained"


class GatewayMetrics:
    """The metrics page of one gateway."""

    def __init__(
        self, servers: RolloutServers, *, in_flight: Callable[[], int], max_concurrent: int
    ) -> None:
        self.page = page = MetricsPage("gateway")
        self._attempts = page.counter(ATTEMPTS)
        self._seconds = page.histogram(ATTEMPT_SECONDS)
        self._requests = page.counter(REQUESTS)
        self._tokens = page.counter(TOKENS)
        self._texts = page.counter(CHANGED_TEXTS)
        self._malformed = page.counter(MALFORMED)
        page.read(SESSIONS, in_flight)
        page.read(CAPACITY, lambda: max_concurrent)
        page.read(MOVES, lambda: servers.moves)
        for status in get_args(Status):
            self._attempts.labels(status)

    def note_end(self, session: AgentSession, trajectory: Trajectory) -> None:
        """Count an attempt that has ended."""
        self._attempts.labels(trajectory.status).inc()
        self._seconds.observe(trajectory.latency_ms / 1000)
        self._requests.inc(session.requests)
        self._texts.inc(session.forest.changed_texts)
        self._tokens.labels(TRAINED).inc(int(np.sum(trajectory.trained_mask())))
        calls = (call for turn in trajectory.turns for call in turn.calls)
        self._malformed.inc(sum(call.status == "malformed" for call in calls))
        bounds = trajectory.lineage_bounds()
        for lineage, (start, end) in zip(trajectory.lineages, bounds, strict=False):
            if lineage.excluded:
                sampled = int(np.sum(trajectory.action_mask[start:end]))
                self._tokens.labels(lineage.excluded).inc(sampled)
