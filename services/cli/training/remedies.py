"""Keys that make a run fit: the fewest of them, and of those the ones that cost the least time.

`agent-r1 check` asks, and says which of the tried configurations fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

from agent_r1.config.boxes import Machine, placed
from agent_r1.config.run import Config

Change = tuple[str, str, Any]
"""Table, key and value."""
Remedy = tuple[Change, ...]
"""Changes that belong together."""

MOST_TOGETHER = 3
"""Remedies that are tried at a time."""
SMALL_CHUNK = 256
SHARES = tuple(tenths / 10 for tenths in range(9, 0, -1))


def changed(config: Config, changes: Sequence[Change]) -> Config:
    """Return a configuration with other values."""
    for table, key, value in changes:
        updated = getattr(config, table).model_copy(update={key: value})
        config = config.model_copy(update={table: updated})
    return config


def make_fit(
    config: Config, fits: Callable[[Config], bool], machine: Machine
) -> list[Change] | None:
    """Return the fewest changes that make a run fit, what frees most first; None where none do."""
    remedies = list(_remedies(config, machine))
    for together in range(1, MOST_TOGETHER + 1):
        chosen = combinations(range(len(remedies)), together)
        # By the dearest of them, then the next: a cheap one does not excuse a dear one.
        for numbers in sorted(chosen, key=lambda numbers: numbers[::-1]):
            changes = _joined([remedies[number] for number in reversed(numbers)])
            if changes is not None and fits(changed(config, changes)):
                return changes
    return None


def tried_keys(config: Config, machine: Machine) -> list[str]:
    """Return the keys whose values `make_fit` changes, in its order."""
    changes = (change for remedy in _remedies(config, machine) for change in remedy)
    return list(dict.fromkeys(f"{table}.{key}" for table, key, _ in changes))


def _joined(remedies: Sequence[Remedy]) -> list[Change] | None:
    """Return all changes, each key once; None where two want different values of one."""
    values: dict[tuple[str, str], Any] = {}
    for table, key, value in (change for remedy in remedies for change in remedy):
        if values.setdefault((table, key), value) != value:
            return None
    return [(table, key, value) for (table, key), value in values.items()]


def _remedies(config: Config, machine: Machine) -> Iterator[Remedy]:
    """Yield what may help, in the order of what it costs in time, without what is set already."""
    for remedy in _all_remedies(config, machine):
        new = tuple(one for one in remedy if getattr(getattr(config, one[0]), one[1]) != one[2])
        if new:
            yield new


def _all_remedies(config: Config, machine: Machine) -> Iterator[Remedy]:
    learner, rollout = config.learner, config.rollout
    if learner.keep_last + learner.keep_best > 1:
        yield ("learner", "keep_best", 0), ("learner", "keep_last", 1)
    if machine.gpu_bytes is None:
        if rollout.kv_cache_gib > 1:
            yield (("rollout", "kv_cache_gib", 1.0),)
    else:
        yield from _share_remedies(config, machine)
    if config.engine.logprob_chunk_tokens > SMALL_CHUNK:
        yield (("engine", "logprob_chunk_tokens", SMALL_CHUNK),)
    tokens = config.engine.max_tokens_per_microbatch
    while tokens > config.model.max_context:
        tokens = max(tokens // 2, config.model.max_context)
        yield (("engine", "max_tokens_per_microbatch", tokens),)
    yield (("engine", "activation_checkpointing", True),)
    if machine.gpu_bytes is not None:
        yield from _gpu_remedies(config, machine)


def _share_remedies(config: Config, machine: Machine) -> Iterator[Remedy]:
    """Yield shares of the engines, and with each what is left for a learner that names its own."""
    for share in (config.rollout.gpu_memory_utilization, *SHARES):
        engines: Remedy = (("rollout", "gpu_memory_utilization", share),)
        left = _left_for_learner(changed(config, engines), machine)
        yield engines if left is None else (*engines, ("engine", "gpu_memory_share", left))


def _left_for_learner(config: Config, machine: Machine) -> float | None:
    """Return what engines leave of a GPU that the learner has too; None if it names no share."""
    if config.engine.gpu_memory_share is None:
        return None
    unnamed = changed(config, [("engine", "gpu_memory_share", None)])
    try:
        return placed(unnamed, machine).learner_share
    except ValueError:  # too large for those who share a GPU
        return None


def _gpu_remedies(config: Config, machine: Machine) -> Iterator[Remedy]:
    stage, offload = config.engine.zero_stage, config.engine.offload
    stage_3 = ("engine", "zero_stage", 3)
    for higher in range(max(2, stage + 1), 4):
        yield (("engine", "zero_stage", higher),)
    gpus, ranks = machine.gpus * machine.boxes, config.engine.ranks
    while (ranks := 2 * ranks) <= gpus:
        yield stage_3, ("engine", "ranks", ranks)
    if offload == "none":
        yield ("engine", "zero_stage", max(2, stage)), ("engine", "offload", "optimizer")
    if offload != "all":
        yield stage_3, ("engine", "offload", "optimizer")
        yield stage_3, ("engine", "offload", "all")
    parts = config.rollout.tensor_parallel_size
    while (parts := 2 * parts) <= machine.gpus:
        yield (("rollout", "tensor_parallel_size", parts),)
