"""The numbers of one reward service, as `GET /metrics` gives them to Prometheus."""

from __future__ import annotations

from agent_r1.reward.judge import Judge
from agent_r1.reward.worker import RewardWorker
from agent_r1_service.metrics import WORK_BUCKETS, Metric, MetricsPage

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
JUDGE_REQUESTS = Metric(
    "agent_r1_reward_judge_requests_total",
    "counter",
    "What the component judge asked: requests sent, unanswered ones among them (away), and "
    "interactions whose prompt had been answered before (cached).",
    ("what",),
)


def reward_page(worker: RewardWorker, judge: Judge | None) -> MetricsPage:
    """Return the page of a worker, which from now on reports its times, and of its judge."""
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
    if judge is not None:
        page.read(
            JUDGE_REQUESTS,
            lambda: {
                ("sent",): judge.num_asked,
                ("away",): judge.num_away,
                ("cached",): judge.num_cached,
            },
        )
    worker.on_scored = page.histogram(SCORING_SECONDS).observe
    return page
