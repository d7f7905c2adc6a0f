"""The numbers of one learner step: from trained groups to a flat `area/name` dictionary.

step_report.py --groups, advantages--> `batch_metrics` --> run_folder.py (`metrics.jsonl`,
TensorBoard). Pure; every mean runs over the trajectories that were trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from agent_r1.learner.groups import Group, staleness, total_reward
from agent_r1.runs.store import TOOL_FAILURES
from agent_r1.runtime.evaluation_client import mean_by_name
from agent_r1_proto.rewards import ScoredTrajectory


def _spread(area: str, values: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values, dtype=np.float64)
    return {
        f"{area}/mean": float(array.mean()),
        f"{area}/std": float(array.std()),
        f"{area}/min": float(array.min()),
        f"{area}/max": float(array.max()),
    }


def _reward_metrics(
    groups: Sequence[Group], trajectories: Sequence[ScoredTrajectory]
) -> dict[str, float]:
    values = _spread("reward", [total_reward(scored) for scored in trajectories])
    process_rewards = [scored.trajectory.process_reward() for scored in trajectories]
    values["reward/process_mean"] = float(np.mean(process_rewards))
    components = mean_by_name(s.reward.components for s in trajectories if s.reward is not None)
    values |= {f"reward/{name}": mean for name, mean in components.items()}
    asked = {
        pair for s in trajectories if s.reward is not None for pair in s.reward.versions.items()
    }
    values |= {
        f"versions/{name}": float(count) for name, count in Counter(n for n, _ in asked).items()
    }
    compared = [group.survivors for group in groups if len(group.survivors) > 1]
    if compared:  # one reward always equals itself
        equal = [len({total_reward(s) for s in survivors}) == 1 for survivors in compared]
        values["group/equal_reward_share"] = float(np.mean(equal))
    values["group/survivors_mean"] = len(trajectories) / len(groups)
    return values


def _tool_metrics(trajectories: Sequence[ScoredTrajectory]) -> dict[str, float]:
    calls = [scored.trajectory.calls() for scored in trajectories]
    flat = [call for group in calls for call in group]
    values = {
        "turns/mean": float(np.mean([len(s.trajectory.turns) for s in trajectories])),
        "tools/calls_mean": len(flat) / len(trajectories),
        "tools/calls_max": float(max(len(group) for group in calls)),
    }
    if flat:
        tools: Counter[str] = Counter()
        for scored in trajectories:
            tools.update(scored.trajectory.answered_calls())
        values |= {f"calls/{tool}": count / len(trajectories) for tool, count in tools.items()}
        failed = [call.status in TOOL_FAILURES for call in flat]
        values["tools/error_share"] = float(np.mean(failed))
        values["tools/latency_ms_mean"] = float(np.mean([call.latency_ms for call in flat]))
    return values


def batch_metrics(
    groups: Sequence[Group],
    advantages: Sequence[float],
    newest_version: int,
    max_staleness: int,
) -> dict[str, float]:
    """Describe one batch.

    Args:
        groups: the groups trained on.
        advantages: one advantage per surviving trajectory, in the order of groups and samples.
        newest_version: policy version that the batch was trained on.
        max_staleness: age beyond which a trajectory is late.

    Returns:
        Values by `area/name`; lengths in tokens, latencies in ms, staleness in learner steps.
    """
    trajectories = [scored for group in groups for scored in group.survivors]
    sampled = [scored.trajectory.num_action_tokens for scored in trajectories]
    lengths = [len(scored.trajectory.token_ids) for scored in trajectories]
    ages = [staleness(scored.trajectory, newest_version) for scored in trajectories]
    truncated = [scored.trajectory.status == "TRUNCATED" for scored in trajectories]
    return {
        **_reward_metrics(groups, trajectories),
        **_spread("advantage", advantages),
        "response/length_mean": float(np.mean(sampled)),
        "response/length_max": float(max(sampled)),
        "trajectory/length_mean": float(np.mean(lengths)),
        "trajectory/length_max": float(max(lengths)),
        "trajectory/truncated_share": float(np.mean(truncated)),
        "trajectory/latency_ms_mean": float(
            np.mean([scored.trajectory.latency_ms for scored in trajectories])
        ),
        "mask/share": sum(sampled) / max(1, sum(lengths)),
        "staleness/mean": float(np.mean(ages)),
        "staleness/max": float(max(ages)),
        "staleness/late_share": float(np.mean([age > max_staleness for age in ages])),
        **_tool_metrics(trajectories),
    }


def reward_delay_s(groups: Sequence[Group]) -> float:
    """Return the mean time from the end of a trajectory to its score, in seconds.

    It holds waiting in the stream and scoring; both times are by the clock of the rollout server.
    """
    delays = [
        max(0.0, s.scored_at - s.trajectory.started_at - s.trajectory.latency_ms / 1000.0)
        for group in groups
        for s in group.survivors
        if s.trajectory.started_at > 0 and s.scored_at > 0
    ]
    return float(np.mean(delays)) if delays else 0.0
