"""The numbers of one reward service, as `GET /metrics` gives them to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_r1.reward.versions import Versions
from agent_r1.reward.worker import RewardWorker
from agent_r1.runtime.metrics import WORK_BUCKETS, Metric, MetricsPage

TRAJECTORIES = Metric(
    "agent_r1_reward_trajectories_total",
    "counter",
    "Trajectories by what became of them: scored, passed_on (they had FAILED) or dead_lettered.",
    ("outcome",),
)
IN_FLIGHT = Metric("agent_r1_reward_in_flight", "gauge", "Trajectories being scored.")
SCORING_SECONDS = Metric(
    "agent_r1_reward_scoring_seconds",
    "histogram",
    "Time to score one trajectory.",
    buckets=(0.001, *WORK_BUCKETS),
)
MODEL_REQUESTS = Metric(
    "agent_r1_reward_model_requests_total",
    "counter",
    "What judge, reward_model and critic asked their models: requests sent, unanswered ones among "
    "them (away), and scores that were known already (cached).",
    ("component", "what"),
)
SPELLED_OUT = Metric(
    "agent_r1_reward_spelled_out_tokens_total",
    "counter",
    "Control tokens, or text that looks like one, in what judge and reward_model asked their "
    "models: their brackets were changed.",
    ("component",),
)


def reward_page(worker: RewardWorker, asking: Mapping[str, Versions[Any]]) -> MetricsPage:
    """Return the page of a worker, which from now on reports its times, and of what was asked."""
    page = MetricsPage("reward")
    page.read(IN_FLIGHT, lambda: worker.num_in_flight)
    page.read(
        TRAJECTORIES,
        lambda: {
            ("scored",): worker.num_scored,
            ("passed_on",): worker.num_passed,
            ("dead_lettered",): worker.num_dead,
        },
    )
    page.read(
        MODEL_REQUESTS,
        lambda: {
            (name, what): count
            for name, versions in asking.items()
            for what, count in (
                ("sent", sum(server.num_asked for server in versions.servers)),
                ("away", sum(server.num_away for server in versions.servers)),
                ("cached", sum(server.num_cached for server in versions.servers)),
            )
        },
    )
    page.read(
        SPELLED_OUT,
        lambda: {
            (name,): sum(server.num_spelled_out for server in versions.servers)
            for name, versions in asking.items()
        },
    )
    worker.on_scored = page.histogram(SCORING_SECONDS).observe
    return page
