"""Memory of a run for its summary: numbers of steps --run_end.py--> `summary.json`.

Everything here is part of the checkpoint, so that a resumed run summarizes all of its starts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, PrivateAttr

from agent_r1.learner.checkpoints.run_checkpoint import LearnerState
from agent_r1.runtime.evaluation_client import SetScores, mean_over_sets, means_over_sets

STEP_PARTS = ("step_s", "rollout_s", "reward_s", "learn_s", "push_s")


class RunSummary(BaseModel):
    """Totals, per-step times and evaluations of one run."""

    totals: dict[str, float]
    history: dict[str, list[float]]
    evaluations: dict[str, dict[str, Any]]
    best_score: float | None
    evaluations_since_best: int
    """Number of evaluations in a row that were no better than the best one before them."""
    wall_before_s: float
    _started: float = PrivateAttr(default_factory=time.monotonic)

    @classmethod
    def of(cls, state: LearnerState) -> RunSummary:
        """Return what a checkpoint remembers."""
        kept = state.model_dump(include=set(cls.model_fields))
        return cls(**kept, wall_before_s=state.wall_s)

    @property
    def wall_s(self) -> float:
        """Seconds the run has taken so far, all its starts together."""
        return self.wall_before_s + time.monotonic() - self._started

    def save_into(self, state: LearnerState) -> LearnerState:
        """Return the state with what the summary remembers in it."""
        kept = self.model_dump(exclude={"wall_before_s"})  # a copy: training goes on meanwhile
        return state.model_copy(update=kept | {"wall_s": self.wall_s})

    def add_batch(self, trajectories: int, sampled_tokens: int, max_staleness: int) -> None:
        """Count a trained batch."""
        self._add("trajectories_trained", trajectories)
        self._add("sampled_tokens", sampled_tokens)
        self._raise("max_staleness_seen", max_staleness)

    def add_times(self, times: Mapping[str, float]) -> None:
        """Note how long a step and its parts took, in seconds."""
        for name in STEP_PARTS:
            self.history.setdefault(name, []).append(round(times[name], 6))
        self._add("train_s", times["step_s"])

    def note_canary(self, max_dlogp: float | None) -> None:
        """Note the largest canary difference so far."""
        if max_dlogp is not None:
            self._raise("canary_max_dlogp", max_dlogp)

    def add_evaluation(self, name: str, record: dict[str, Any], score: float | None) -> None:
        """Keep the scores of an evaluation.

        Args:
            name: `before`, `after` or the step of one during training.
            record: as `Evaluation.record`.
            score: the mean of `evaluation.score` over the in-domain sets; None where none has it.
        """
        self.evaluations[name] = record
        if score is None:
            return
        self.evaluations_since_best += 1
        if self.best_score is None or score > self.best_score:
            self.best_score, self.evaluations_since_best = score, 0

    def _add(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0) + value

    def _raise(self, name: str, value: float) -> None:
        self.totals[name] = max(self.totals.get(name, 0.0), value)

    def median_step_s(self, last: int = 10) -> float | None:
        """Return the median duration of the last steps, in seconds."""
        steps = self.history.get("step_s", [])[-last:]
        return statistics.median(steps) if steps else None

    def summary(self, in_domain: Sequence[str]) -> dict[str, Any]:
        """Return what the run contributes to `summary.json`.

        Args:
            in_domain: the sets that the means before and after run over.
        """
        sets: dict[str, dict[str, SetScores]] = {}
        for name in ("before", "after"):
            scores = self.evaluations.get(name, {}).get("sets", {})
            sets[name] = {key: SetScores.model_validate(value) for key, value in scores.items()}
        train_s = self.totals.get("train_s", 0.0)
        tokens = self.totals.get("sampled_tokens", 0)
        names = sorted({*sets["before"], *sets["after"]})
        return {
            "wall_s": self.wall_s,
            **_means(sets, in_domain),
            "sets": {
                name: {
                    "in_domain": name in in_domain,
                    **{
                        when: scores[name].model_dump(mode="json") if name in scores else None
                        for when, scores in sets.items()
                    },
                }
                for name in names
            },
            "best_score": self.best_score,
            "evaluations_since_best": self.evaluations_since_best,
            "trajectories_trained": int(self.totals.get("trajectories_trained", 0)),
            "sampled_tokens": int(tokens),
            "tokens_per_s": tokens / train_s if train_s else None,
            **{
                name: statistics.median(self.history[name]) if self.history.get(name) else None
                for name in STEP_PARTS
            },
            "max_staleness_seen": int(self.totals.get("max_staleness_seen", 0)),
            "canary_max_dlogp": self.totals.get("canary_max_dlogp"),
        }


def _means(
    sets: Mapping[str, dict[str, SetScores]], in_domain: Sequence[str]
) -> dict[str, float | dict[str, float] | None]:
    """Return the means over sets before and after; exact match only where it was measured."""
    means: dict[str, float | dict[str, float] | None] = {}
    for when, scores in sets.items():
        means[f"reward_{when}"] = mean_over_sets(scores, "reward", in_domain)
        for field in ("components", "calls"):
            means[f"{field}_{when}"] = means_over_sets(scores, field, in_domain)
        means[f"em_{when}"] = mean_over_sets(scores, "em", in_domain)
    if means["em_before"] is None and means["em_after"] is None:
        del means["em_before"], means["em_after"]
    return means
