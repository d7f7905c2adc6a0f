"""The numbers of one rollout server, as `GET /metrics` gives them to Prometheus.

worker.py hands in every trajectory as it ends, weight_versions.py every load; the rest is read
when Prometheus asks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import get_args

from agent_r1.attempts.tool_discovery import ToolDirectory
from agent_r1.attempts.tool_transport import OUTAGES
from agent_r1.rollout.policy import Policy
from agent_r1.runtime.metrics import LATENCY_BUCKETS, WORK_BUCKETS, Metric, MetricsPage
from agent_r1.text.control_tokens import SpelledOut
from agent_r1_proto.trajectory import Status, ToolCallRecord, Trajectory
from agent_r1_proto.weights import LoadReply

IN_FLIGHT = Metric("agent_r1_rollout_samples_in_flight", "gauge", "Samples being worked on.")
CAPACITY = Metric(
    "agent_r1_rollout_samples_capacity",
    "gauge",
    "Most samples worked on at a time (`rollout.max_concurrent`).",
)
TRAJECTORIES = Metric(
    "agent_r1_rollout_trajectories_total",
    "counter",
    "Trajectories published, by status: COMPLETED, TRUNCATED or FAILED.",
    ("status",),
)
FAILED_ATTEMPTS = Metric(
    "agent_r1_rollout_failed_attempts_total",
    "counter",
    "Attempts that failed, those that were made again included, by kind.",
    ("kind",),
)
TRAJECTORY_SECONDS = Metric(
    "agent_r1_rollout_trajectory_seconds",
    "histogram",
    "Time from the start of an attempt to its end.",
    buckets=WORK_BUCKETS,
)
TRAJECTORY_TOKENS = Metric(
    "agent_r1_rollout_tokens_total",
    "counter",
    "Tokens of published trajectories: sampled, or given (prompt, template and tool results).",
    ("origin",),
)
SPELLED_OUT = Metric(
    "agent_r1_rollout_spelled_out_tokens_total",
    "counter",
    "Control tokens in text from outside that were spelled out in ordinary tokens, by where it "
    "stood: prompt, tools (what they say of themselves) or reply (results and messages).",
    ("origin",),
)
TOOL_CALLS = Metric(
    "agent_r1_rollout_tool_calls_total",
    "counter",
    "Tool calls of the model by how they ended; status failed is an outage.",
    ("tool", "version", "status"),
)
TOOL_CALL_SECONDS = Metric(
    "agent_r1_rollout_tool_call_seconds",
    "histogram",
    "Time of a tool call as the rollout server sees it, retries included.",
    ("tool", "version"),
    (*LATENCY_BUCKETS, 30.0, 60.0),
)
TOOL_INSTANCES = Metric(
    "agent_r1_rollout_tool_instances",
    "gauge",
    "Instances of a tool that this server can call: announced, and answering.",
    ("tool",),
)
POLICY_VERSION = Metric(
    "agent_r1_rollout_policy_version", "gauge", "Version of the weights that this server holds."
)
WEIGHT_FETCH_SECONDS = Metric(
    "agent_r1_rollout_weight_fetch_seconds",
    "histogram",
    "Time to fetch and verify new weights, while generation goes on.",
    buckets=WORK_BUCKETS,
)
WEIGHT_PAUSE_SECONDS = Metric(
    "agent_r1_rollout_weight_pause_seconds",
    "histogram",
    "Time for which generation stood still while new weights were loaded.",
    buckets=WORK_BUCKETS,
)
ENGINE_STEPS = Metric(
    "agent_r1_rollout_engine_steps_total", "counter", "Steps of the sampling engine."
)
ENGINE_TOKENS = Metric(
    "agent_r1_rollout_engine_tokens_total",
    "counter",
    "Tokens that the engine has computed: prompt (not from its cache) or sampled.",
    ("kind",),
)
ENGINE_REQUESTS = Metric(
    "agent_r1_rollout_engine_requests",
    "gauge",
    "Turns in the engine: running, or waiting for room in a step.",
    ("state",),
)
KV_CACHE = Metric(
    "agent_r1_rollout_kv_cache_used_ratio", "gauge", "Share of the engine's KV cache in use."
)

FAILURE_KINDS = (
    *OUTAGES,
    "env_error",
    "env_timeout",
    "tool_format_error",
    "chat_template_error",
    "image_refused",
    "policy_error",
    "trajectory_timeout",
    "unknown_tool_in_task",
    "decoding_refused",
    "scorer_error",
    "scorer_unreachable",
)
"""Beginnings of the reason of a FAILED attempt."""


class RolloutMetrics:
    """Counts what ends on one rollout server.

    Args:
        folders: whose disks are watched.
    """

    def __init__(self, folders: Mapping[str, Path] | None = None) -> None:
        self.page = page = MetricsPage("rollout", folders)
        self._trajectories = page.counter(TRAJECTORIES)
        self._failed_attempts = page.counter(FAILED_ATTEMPTS)
        self._seconds = page.histogram(TRAJECTORY_SECONDS)
        self._tokens = page.counter(TRAJECTORY_TOKENS)
        self._calls = page.counter(TOOL_CALLS)
        self._call_seconds = page.histogram(TOOL_CALL_SECONDS)
        self._fetch = page.histogram(WEIGHT_FETCH_SECONDS)
        self._pause = page.histogram(WEIGHT_PAUSE_SECONDS)
        # A counter that begins at 1 is no change to Prometheus: the first time would not show.
        for kind in FAILURE_KINDS:
            self._failed_attempts.labels(kind)
        for status in get_args(Status):
            self._trajectories.labels(status)

    def watch(
        self,
        policy: Policy,
        directory: ToolDirectory,
        spelled_out: SpelledOut,
        *,
        in_flight: Callable[[], int],
        max_concurrent: int,
    ) -> None:
        """Read the server's own numbers from now on."""
        read = self.page.read
        read(IN_FLIGHT, in_flight)
        read(CAPACITY, lambda: max_concurrent)
        read(SPELLED_OUT, lambda: {(name,): n for name, n in spelled_out.counts.items()})
        read(POLICY_VERSION, lambda: policy.policy_version)
        read(TOOL_INSTANCES, lambda: {(name,): n for name, n in directory.answering().items()})
        read(ENGINE_STEPS, lambda: policy.work.steps)
        read(
            ENGINE_TOKENS,
            lambda: {
                ("prompt",): policy.work.prompt_tokens,
                ("sampled",): policy.work.sampled_tokens,
            },
        )
        read(
            ENGINE_REQUESTS,
            lambda: {("running",): policy.work.running, ("waiting",): policy.work.waiting},
        )
        read(KV_CACHE, lambda: policy.work.kv_cache_used)

    def note_attempt(self, trajectory: Trajectory, published: bool) -> None:
        """Count an attempt that has ended; one that is made again is not published."""
        self._seconds.observe(trajectory.latency_ms / 1000)
        for call in trajectory.calls():
            self._note_call(call)
        if trajectory.status == "FAILED":
            self._failed_attempts.labels(trajectory.reason.partition(":")[0]).inc()
        if published:
            sampled = trajectory.num_action_tokens
            self._trajectories.labels(trajectory.status).inc()
            self._tokens.labels("sampled").inc(sampled)
            self._tokens.labels("given").inc(len(trajectory.token_ids) - sampled)

    def _note_call(self, call: ToolCallRecord) -> None:
        # A name that no tool has may be anything: each would be a series for ever.
        tool = call.tool if call.version else ""
        version = call.version or ""
        self._calls.labels(tool, version, call.status).inc()
        if version:
            for other in ("ok", "error", "failed"):
                self._calls.labels(tool, version, other)
            self._call_seconds.labels(tool, version).observe(call.latency_ms / 1000)

    def note_load(self, load: LoadReply) -> None:
        """Note how long a weight load took."""
        self._fetch.observe(load.fetch_s)
        self._pause.observe(load.pause_s)
