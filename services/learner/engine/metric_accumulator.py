"""The engine's metrics: sums over the micro-batches of one batch and over all ranks.

ranks/engine.py --values of each micro-batch--> `MetricAccumulator` --> batch_metrics
--> policy_engine.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from agent_r1.learner.engine.ranks.messages import RankBatch

_SUMS = (
    "loss",
    "policy",
    "kl_ref",
    "entropy",
    "clipped",
    "dlogp",
    "compared",
    "tokens",
    "value_loss",
    "values",
    "values_clipped",
    "value_tokens",
)
_MAXIMA = ("dlogp", "ratio")


class MetricAccumulator:
    """Sums and maxima over micro-batches, kept on the device and read once per batch."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self.maxima = torch.zeros(len(_MAXIMA), dtype=torch.float64, device=device)

    def add(self, name: str, values: torch.Tensor) -> None:
        """Add the sum of `values`."""
        self.sums[_SUMS.index(name)] += values.detach().double().sum()

    def raise_max(self, name: str, values: torch.Tensor) -> None:
        """Raise the maximum to that of `values`, which may be empty."""
        if values.numel():
            i = _MAXIMA.index(name)
            self.maxima[i] = torch.maximum(self.maxima[i], values.detach().double().max())

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return sums and maxima over all ranks."""
        dist.all_reduce(self.sums, dist.ReduceOp.SUM)
        dist.all_reduce(self.maxima, dist.ReduceOp.MAX)
        sums = {name: float(self.sums[i]) for i, name in enumerate(_SUMS)}
        return sums, {name: float(self.maxima[i]) for i, name in enumerate(_MAXIMA)}


def batch_metrics(
    order: RankBatch, sums: dict[str, float], maxima: dict[str, float]
) -> dict[str, float]:
    """Name the metrics of one batch; what nothing was computed for is left out."""
    spec = order.spec
    policy_lrs = [step.lr for step in order.steps if step.lr is not None]
    critic_lrs = [step.critic_lr for step in order.steps if step.critic_lr is not None]
    metrics: dict[str, float] = {}
    if policy_lrs:
        metrics |= {
            "loss/total": sums["loss"] / len(policy_lrs),
            "loss/policy": sums["policy"] / len(policy_lrs),
            "lr": policy_lrs[-1],
        }
    if critic_lrs:
        metrics |= {
            "loss/value": sums["value_loss"] / len(critic_lrs),
            "learn/critic_lr": critic_lrs[-1],
            "value/mean": sums["values"] / sums["value_tokens"],
            "value/clip_fraction": sums["values_clipped"] / sums["value_tokens"],
        }
    if not sums["tokens"]:
        return metrics
    metrics["policy/entropy"] = sums["entropy"] / sums["tokens"]
    if spec.kind == "policy":
        metrics["loss/clip_fraction"] = sums["clipped"] / sums["tokens"]
        metrics["policy/ratio_max"] = maxima["ratio"]
        if sums["compared"]:
            metrics["logprob/abs_diff_mean"] = sums["dlogp"] / sums["compared"]
            metrics["logprob/abs_diff_max"] = maxima["dlogp"]
        if spec.kl_coef > 0:
            metrics["loss/kl_ref"] = sums["kl_ref"] / sums["tokens"]
    return metrics
