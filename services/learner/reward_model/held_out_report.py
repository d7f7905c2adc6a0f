"""Quality of a reward model on tasks it was not trained on.

Ranks the trajectories of one task against each other, so that easy and hard tasks do not count, and
compares with a logistic regression on what can be seen from outside: length, calls, how they ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agent_r1.learner.engine.interface import PolicyEngine
from agent_r1.learner.reward_model.data import JudgedEpisode, VerdictEncoder
from agent_r1.text.verdicts import BAD, GOOD
from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreTurn

Floats = npt.NDArray[np.float64]

GOOD_LABEL = 0.5
"""A label above it counts as good where two classes are needed."""
BINS = 10
RESAMPLES = 1_000


def report(
    engine: PolicyEngine,
    train: Sequence[JudgedEpisode],
    held_out: Sequence[JudgedEpisode],
    encoder: VerdictEncoder,
) -> dict[str, Any]:
    """Score the held-out episodes that were completed and are well formed.

    Returns:
        trajectories and tasks with both labels; auc within tasks, with a 95 % interval over tasks;
        auc_outside, of the regression; calibration_error (expected, over ten bins) and brier.
    """
    judged = [episode for episode in held_out if well_formed(episode)]
    scores, labels = scored(engine, judged, encoder)
    tasks = np.array([episode.place or episode.task_id for episode in judged])
    outside = _regression([e for e in train if well_formed(e)], judged)
    low, high = _interval(scores, labels, tasks)
    return {
        "held_out": {
            "trajectories": len(judged),
            "tasks": len(_auc_by_task(scores, labels, tasks)),
            "auc": auc_within_tasks(scores, labels, tasks),
            "auc_low": low,
            "auc_high": high,
            "auc_outside": auc_within_tasks(outside, labels, tasks),
            "calibration_error": calibration_error(scores, labels),
            "brier": float(np.mean((scores - labels) ** 2)) if len(scores) else None,
        }
    }


def well_formed(episode: JudgedEpisode) -> bool:
    """Tell whether an episode was completed without a malformed call."""
    return episode.status == "COMPLETED" and "malformed" not in episode.statuses


def scored(
    engine: PolicyEngine, episodes: Sequence[JudgedEpisode], encoder: VerdictEncoder
) -> tuple[Floats, Floats]:
    """Return [N] the model's probability of the good verdict, and [N] labels.

    Raises:
        ValueError: a dialogue is too long.
    """
    samples = []
    for episode in episodes:
        for verdict in (GOOD, BAD):
            sample = encoder.sample(episode, len(episode.turns), verdict, 1.0)
            if sample is None:
                raise ValueError(
                    f"a trajectory of task {episode.task_id!r} is longer than model.max_context; "
                    "raise it"
                )
            samples.append(sample)
    if not samples:
        return np.zeros(0), np.zeros(0)
    logprobs = np.array([values[-1] for values in engine.token_logprobs(samples)], np.float64)
    good, bad = logprobs.reshape(-1, 2).T
    return 1.0 / (1.0 + np.exp(bad - good)), np.array([episode.label for episode in episodes])


def auc_within_tasks(scores: Floats, labels: Floats, tasks: npt.NDArray[np.str_]) -> float | None:
    """Return the share of pairs of one task, one good and one bad, whose scores are in order.

    Args:
        scores: [N]
        labels: [N] above 0.5 is good.
        tasks: [N] ids.

    Returns:
        The mean over the tasks that have both; ties count half; None where no task has.
    """
    values = list(_auc_by_task(scores, labels, tasks).values())
    return float(np.mean(values)) if values else None


def _auc_by_task(scores: Floats, labels: Floats, tasks: npt.NDArray[np.str_]) -> dict[str, float]:
    members: dict[str, list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        members[str(task)].append(i)
    found: dict[str, float] = {}
    for task, indices in members.items():
        is_good = labels[indices] > GOOD_LABEL
        good, bad = scores[indices][is_good], scores[indices][~is_good]
        if len(good) and len(bad):
            difference = good[:, None] - bad[None, :]
            found[task] = float(np.mean((difference > 0) + 0.5 * (difference == 0)))
    return found


def _interval(
    scores: Floats, labels: Floats, tasks: npt.NDArray[np.str_]
) -> tuple[float | None, float | None]:
    """Return the 95 % bootstrap interval of the AUC over tasks."""
    values = np.array(list(_auc_by_task(scores, labels, tasks).values()))
    if len(values) == 0:
        return None, None
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(drawn.mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def calibration_error(scores: Floats, labels: Floats) -> float | None:
    """Return the mean distance of label and score over ten bins of scores, weighted by size."""
    if len(scores) == 0:
        return None
    bins = np.minimum((scores * BINS).astype(int), BINS - 1)
    errors = [
        np.sum(bins == b) * abs(np.mean(scores[bins == b]) - np.mean(labels[bins == b]))
        for b in np.unique(bins)
    ]
    return float(np.sum(errors) / len(scores))


def _shown(turn: ScoreTurn) -> list[str]:
    return [shown_text(reply.content) for reply in turn.shown()]


def _features(episodes: Sequence[JudgedEpisode]) -> Floats:
    """Return [N, 6] a constant, and what can be seen without reading."""
    rows = [
        (
            1.0,
            np.log1p(sum(len(turn.text) for turn in episode.turns)),
            np.log1p(sum(len(text) for turn in episode.turns for text in _shown(turn))),
            len(episode.turns),
            len(episode.statuses),
            sum(status == "ok" for status in episode.statuses),
        )
        for episode in episodes
    ]
    return np.array(rows, np.float64).reshape(-1, 6)


def _regression(train: Sequence[JudgedEpisode], judged: Sequence[JudgedEpisode]) -> Floats:
    """Return [N] scores of a logistic regression, fitted by Newton's method with a weak prior."""
    x, wanted = _features(train), np.array([episode.label for episode in train])
    if len(x) == 0:
        return np.zeros(len(judged))
    mean, scale = x[:, 1:].mean(0), x[:, 1:].std(0) + 1e-9

    def scaled(features: Floats) -> Floats:
        return np.hstack([features[:, :1], (features[:, 1:] - mean) / scale])

    x, weights = scaled(x), np.zeros(x.shape[1])
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-x @ weights))
        hessian = (x * (p * (1.0 - p))[:, None]).T @ x + 1e-3 * np.eye(len(weights))
        step = np.linalg.solve(hessian, x.T @ (wanted - p) - 1e-3 * weights)
        weights += step
        if np.abs(step).max() < 1e-8:
            break
    return scaled(_features(judged)) @ weights
