"""The learner's numbers, as `GET /metrics` gives them to Prometheus.

Nothing is counted here: the values are those of `metrics.jsonl` (step_report.py), of the group
buffer, and of what the collector last saw in Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from agent_r1.learner.assembly import TrainingRun
from agent_r1.learner.groups import AcceptResult
from agent_r1.runtime.files.disk_space import nearest_existing
from agent_r1.runtime.metrics import Metric, MetricsPage, Value, scrape_target
from agent_r1_proto.registry import ToolRegistry


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"agent_r1_learner_{name}", "gauge", text, labels)


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(f"agent_r1_learner_{name}_total", "counter", text, labels)


OF_STEP = {
    "reward/mean": _gauge("reward_mean", "Mean reward of the last batch."),
    "reward/std": _gauge("reward_std", "Standard deviation of its rewards."),
    "policy/entropy": _gauge("entropy_nats", "Mean entropy of the policy at its tokens."),
    "loss/kl_ref": _gauge("kl_nats", "Mean KL divergence from the reference at its tokens."),
    "loss/clip_fraction": _gauge("clip_ratio", "Share of its tokens that a bound decides."),
    "loss/total": _gauge("loss", "Loss, mean over the optimizer steps."),
    "grad/norm": _gauge("gradient_norm", "Norm of the gradients before clipping."),
    "learn/lr": _gauge("learning_rate", "Learning rate."),
    "logprob/abs_diff_max": _gauge(
        "logprob_difference_max_nats",
        "Largest difference of a token's log-probability between learner and rollout server.",
    ),
    "response/length_mean": _gauge("response_mean_tokens", "Sampled tokens of a trajectory, mean."),
    "response/length_max": _gauge("response_max_tokens", "Sampled tokens of a trajectory, most."),
    "trajectory/length_mean": _gauge("trajectory_mean_tokens", "Tokens of a trajectory, mean."),
    "turns/mean": _gauge("turns_mean", "Turns of a trajectory, mean."),
    "tools/calls_mean": _gauge("tool_calls_mean", "Tool calls of a trajectory, mean."),
    "tools/error_share": _gauge("tool_error_ratio", "Share of tool calls without a result."),
    "trajectory/truncated_share": _gauge("truncated_ratio", "Share of TRUNCATED trajectories."),
    "group/equal_reward_share": _gauge(
        "equal_reward_groups_ratio", "Share of groups whose rewards are all equal."
    ),
    "staleness/mean": _gauge("staleness_mean_steps", "Age of a trajectory, mean."),
    "staleness/max": _gauge("staleness_max_steps", "Age of the oldest trajectory."),
    "staleness/late_share": _gauge("late_ratio", "Share of trajectories over `max_staleness`."),
    "push/servers": _gauge("push_servers", "Servers that had the weights when training went on."),
    "push/size_bytes": _gauge("push_bytes", "What a server takes to load the newest weights."),
    "push/pause_s": _gauge("push_pause_seconds", "Longest time a server stood still for a push."),
    "canary/dlogp_mean": _gauge(
        "canary_difference_mean_nats",
        "Difference of log-probabilities between learner and server after the last push, mean.",
    ),
    "time/step_s": _gauge("step_seconds", "Duration of the last step."),
}
"""Metrics of a step, by their names in `metrics.jsonl`."""

COMPONENT = _gauge("reward_component_mean", "Mean of one reward component.", "component")
SCORE = _gauge("evaluation_score", "Score of the newest evaluation.", "set", "score")
STEPS = _counter("steps", "Steps trained, those before a resume included.")
STEPS_PLANNED = _gauge("planned_steps", "Steps of the whole run.")
POLICY_VERSION = _gauge("policy_version", "Newest published version of the weights.")
LAST_STEP = _gauge(
    "last_step_timestamp_seconds", "When the last step ended, or this start began; Unix time."
)
ACTIVITY_SECONDS = _counter(
    "activity_seconds",
    "Time of trained steps: waiting for samples, learning, pushing weights, or all together.",
    "activity",
)
SAMPLED_TOKENS = _counter("sampled_tokens", "Sampled tokens of the trained trajectories.")
TRAINED = _counter("trajectories_trained", "Trajectories trained.")
RESULTS = _counter(
    "results", "Results by what became of them: filled and failed are final.", "outcome"
)
FAILED_ATTEMPTS = _counter(
    "failed_attempts", "Attempts that failed since this start, repeated ones included."
)
REISSUED = _counter("reissued_samples", "Samples asked for again because no answer came.")
LOST = _counter("lost_samples", "Samples among them that Redis had lost.")
DROPPED = _counter(
    "dropped_groups", "Groups not trained: too many samples failed, or equal rewards.", "reason"
)
DEAD_LETTERS = _counter("dead_letters", "Messages that could not be processed.")
CANARY_WARNINGS = _counter("canary_warnings", "Canaries out of bounds that did not end the run.")
GROUPS = _gauge("groups", "Groups asked for and not trained: waiting or complete.", "state")

QUEUE = Metric(
    "agent_r1_queue_entries",
    "gauge",
    "Entries of a stream, waiting or being worked on; of dead_letters, those that are kept.",
    ("stream",),
)
QUEUE_WAITING = Metric(
    "agent_r1_queue_waiting_entries",
    "gauge",
    "Entries of a stream that no consumer has taken.",
    ("stream",),
)
OLDEST_SAMPLE = Metric(
    "agent_r1_queue_oldest_sample_age_seconds",
    "gauge",
    "Time since the oldest sample without a result was asked for.",
)
REDIS_MEMORY = Metric("agent_r1_redis_memory_used_bytes", "gauge", "Memory that Redis uses.")
REDIS_LIMIT = Metric(
    "agent_r1_redis_memory_limit_bytes", "gauge", "Its maxmemory; absent where it has none."
)

_ACTIVITIES = {"rollout_s": "waiting", "learn_s": "learning", "push_s": "pushing", "step_s": "all"}
_DROPPED = {"dropped_groups": "failed", "equal_groups": "equal_rewards"}


def learner_page(run: TrainingRun) -> MetricsPage:
    """Return the page of one start of a run."""
    spec = run.spec
    weights_dir = nearest_existing(spec.weights_dir)
    folders = {"run.dir": spec.folder.path, "learner.weights_dir": weights_dir}
    page = MetricsPage("learner", folders)
    newest = run.reporter.newest
    for name, metric in OF_STEP.items():
        page.read(metric, lambda name=name: newest.get(name))
    for metric, read in (_of_learning(run) | _of_flow(run)).items():
        page.read(metric, read)
    return page


async def scrape_targets(run: TrainingRun, url: str) -> list[dict[str, object]]:
    """Return what Prometheus is to ask: this learner, and all that announces itself in Redis.

    Args:
        run: whose rollout servers and tools come and go.
        url: of this learner's server.
    """
    run_id, pool = run.spec.run.id, run.spec.run.tool_pool
    servers = await run.registry.rollout_servers()
    tools = await ToolRegistry(run.broker, pool or run_id).read()
    return [
        scrape_target(url, "learner", run_id),
        *(scrape_target(server.url, "rollout", run_id) for server in servers),
        *(
            scrape_target(instance.url, "tools", run_id)
            for tool in tools.values()
            for instance in tool.instances
        ),
    ]


def _of_learning(run: TrainingRun) -> dict[Metric, Callable[[], Value | None]]:
    newest, summary = run.reporter.newest, run.summary
    return {
        COMPONENT: lambda: _components(newest),
        SCORE: lambda: _scores(newest),
        STEPS: lambda: run.step,
        STEPS_PLANNED: lambda: run.spec.total_steps,
        POLICY_VERSION: lambda: run.policy_version,
        LAST_STEP: lambda: run.reporter.written_at,
        ACTIVITY_SECONDS: lambda: {
            (activity,): sum(summary.history.get(part, []))
            for part, activity in _ACTIVITIES.items()
        },
        SAMPLED_TOKENS: lambda: summary.totals.get("sampled_tokens", 0),
        TRAINED: lambda: summary.totals.get("trajectories_trained", 0),
        CANARY_WARNINGS: lambda: run.publisher.canary_warnings,
    }


def _of_flow(run: TrainingRun) -> dict[Metric, Callable[[], Value | None]]:
    collector = run.collector
    buffer, counts = collector.groups, collector.groups.counts
    return {
        RESULTS: lambda: {(outcome,): counts[outcome] for outcome in AcceptResult},
        FAILED_ATTEMPTS: lambda: run.monitor.attempts,
        REISSUED: lambda: counts["reissued"],
        LOST: lambda: counts["lost"],
        DROPPED: lambda: {(reason,): counts[name] for name, reason in _DROPPED.items()},
        DEAD_LETTERS: lambda: counts["dead_letters"],
        GROUPS: lambda: {
            ("waiting",): len(buffer) - buffer.num_ready,
            ("complete",): buffer.num_ready,
        },
        QUEUE: lambda: {(name,): depth for name, depth in collector.depths.items()},
        QUEUE_WAITING: lambda: {(name,): n for name, n in collector.waiting.items()},
        OLDEST_SAMPLE: lambda: buffer.oldest_age_s(time.monotonic()),
        REDIS_MEMORY: lambda: collector.redis_memory.used,
        REDIS_LIMIT: lambda: collector.redis_memory.limit,
    }


def _components(newest: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    own = {"mean", "std", "min", "max", "process_mean", "kl"}
    named = {
        name.removeprefix("reward/"): v for name, v in newest.items() if name.startswith("reward/")
    }
    return {(name,): value for name, value in named.items() if name not in own}


def _scores(newest: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    scores: dict[tuple[str, ...], float] = {}
    for name, value in newest.items():
        area, _, rest = name.partition("/")
        set_name, _, score = rest.partition("/")
        if area == "eval" and score:
            scores[set_name, score] = value
    return scores
