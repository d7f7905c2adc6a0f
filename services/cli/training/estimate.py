"""`agent-r1 estimate CONFIG`: memory and disk that a run will take, before anything is started.

config/estimate.py does the sums; this module finds the model, asks the machine, and says which keys
make a run fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.config.estimate import (
    ModelSize,
    Part,
    disk_parts,
    kv_bytes_per_token,
    learner_parts,
    microbatch_tokens,
    read_model_size,
    rollout_parts,
    total,
)
from agent_r1.config.gpu_report import verdict_on_gpus
from agent_r1.config.run import Config, load_config
from agent_r1_service.config import LoraConfig
from agent_r1_service.exit_status import EXIT_FAILED
from agent_r1_service.files.hub import model_folder
from agent_r1_service.files.room import free_bytes, readable_size
from agent_r1_service.gpus import read_gpus
from agent_r1_service.memory import MIB, free_memory_bytes

PROGRAMS = 1.7e9
"""Python, torch and vLLM in the services of a run on a CPU, without models: docs/benchmarks.md."""
SMALL_CHUNK = 256
MOST_RANKS = 64
MOST_PARTS = 8
WIDTH = 52

Change = tuple[str, str, Any]
"""Table, key and value."""


@dataclass(frozen=True)
class Machine:
    """What there is to fit into."""

    gpu_bytes: float | None
    """Of one GPU; None: the run is on the CPU."""
    memory_bytes: float | None
    """What this process may still take; None: the system does not say."""
    disk_bytes: float


@dataclass(frozen=True)
class RunEstimate:
    """What a configuration takes."""

    learner: list[Part]
    rollout: list[Part]
    disk: list[Part]
    problems: list[str]
    """What does not fit."""


def estimate(arguments: argparse.Namespace) -> int:
    """Print what a run takes; the exit status is 1 where it does not fit."""
    config = load_config(arguments.config, arguments.options).config
    config = with_layout(config)
    policy = size_of(config.model.path, config.model.revision, config.model.lora)
    critic = None
    if config.learner.has_critic:
        critic = size_of(config.model.path, config.model.revision)
        if config.learner.critic_path is not None:
            critic = size_of(config.learner.critic_path, None)
    machine = look_at(config, arguments.gpu_gb)
    found = sum_up(config, policy, critic, machine)
    for line in _lines(config, policy, found, machine):
        print(line)
    if not found.problems:
        print("it fits")
        return 0
    for problem in found.problems:
        print(f"!! {problem}")
    changes = make_fit(config, lambda c: not sum_up(c, policy, critic, machine).problems, machine)
    if changes is None:
        print("no key makes it fit; take a smaller model, a larger machine, or more of them")
    else:
        print("it fits with:")
        for table, key, value in changes:
            print(f"  --set {table}.{key}={str(value).lower()}")
    return EXIT_FAILED


def size_of(path: str, revision: str | None, lora: LoraConfig | None = None) -> ModelSize:
    """Return what memory depends on, of a model in a folder or on the hub, and its adapters."""
    return read_model_size(model_folder(path, revision, small=True), lora)


def with_layout(config: Config) -> Config:
    """Return the configuration with the layout that the engine will choose."""
    from agent_r1.learner.engine.ranks.messages import EngineSetup

    shares = EngineSetup.of(config.model, config.learner).config.share_prefixes
    return changed(config, [("learner", "share_prefixes", shares)])


def look_at(config: Config, gpu_gb: float | None) -> Machine:
    """Return what the machine has; `gpu_gb` stands for GPUs of this size."""
    gpus = read_gpus() if config.learner.device != "cpu" else []
    gpu = gpus[0].memory_bytes if gpus else None
    return Machine(
        gpu_bytes=gpu if gpu_gb is None else gpu_gb * 1e9,
        memory_bytes=free_memory_bytes(),
        disk_bytes=free_bytes(config.run.folder().absolute()),
    )


def sum_up(
    config: Config, policy: ModelSize, critic: ModelSize | None, machine: Machine
) -> RunEstimate:
    """Return what a configuration takes, and what of it does not fit."""
    on_gpu = machine.gpu_bytes is not None
    learner = learner_parts(config, policy, critic, on_gpu=on_gpu)
    rollout = rollout_parts(config, policy, machine.gpu_bytes)
    disk = disk_parts(config, policy, critic)
    problems = list(_memory_problems(config, policy, learner, rollout, machine))
    if total(disk) > machine.disk_bytes:
        free = readable_size(machine.disk_bytes)
        problems.append(f"disk: {readable_size(total(disk))} are needed, and {free} are free")
    return RunEstimate(learner, rollout, disk, problems)


def _memory_problems(
    config: Config,
    policy: ModelSize,
    learner: Sequence[Part],
    rollout: Sequence[Part],
    machine: Machine,
) -> Iterator[str]:
    sequence = kv_bytes_per_token(policy, config.model.dtype) * config.model.max_context
    if machine.gpu_bytes is None:
        need = memory_of_run(config, learner, rollout)
        if machine.memory_bytes is not None and need > machine.memory_bytes:
            free = readable_size(machine.memory_bytes)
            yield f"memory: {readable_size(need)} are needed, and {free} are free"
        cache = rollout[-1].size
    else:
        size = readable_size(machine.gpu_bytes)
        if total(learner) > machine.gpu_bytes:
            yield f"learner: {readable_size(total(learner))} are needed on a GPU of {size}"
        cache = rollout[1].size * config.rollout.tensor_parallel_size
    if cache < sequence:
        yield (
            f"rollout: the KV cache holds {readable_size(max(cache, 0))}, and one trajectory of "
            f"model.max_context tokens takes {readable_size(sequence)}"
        )


def memory_of_run(config: Config, learner: Sequence[Part], rollout: Sequence[Part]) -> float:
    """Return the bytes of every process of a run that shares one machine without GPUs."""
    servers = config.placement.num_rollout_servers
    redis = config.redis.maxmemory_mb * MIB if config.redis.url is None else 0
    return config.learner.ranks * total(learner) + servers * total(rollout) + PROGRAMS + redis


def changed(config: Config, changes: Sequence[Change]) -> Config:
    """Return a configuration with other values."""
    for table, key, value in changes:
        updated = getattr(config, table).model_copy(update={key: value})
        config = config.model_copy(update={table: updated})
    return config


def make_fit(
    config: Config, fits: Callable[[Config], bool], machine: Machine
) -> list[Change] | None:
    """Return changes that make a run fit, the cheapest first; None where none do."""
    made: list[Change] = []
    for change in _candidates(config, machine):
        made = [one for one in made if one[:2] != change[:2]] + [change]
        if fits(changed(config, made)):
            break
    else:
        return None
    # What was tried before the change that helped may not be needed.
    for change in list(made):
        rest = [one for one in made if one != change]
        if fits(changed(config, rest)):
            made = rest
    return made


def _candidates(config: Config, machine: Machine) -> Iterator[Change]:
    """Yield changes in the order of what they cost in time."""
    learner, rollout = config.learner, config.rollout
    if learner.keep_last + learner.keep_best > 1:
        yield "learner", "keep_best", 0
        yield "learner", "keep_last", 1
    tokens = learner.max_tokens_per_microbatch
    while tokens > config.model.max_context:
        tokens = max(tokens // 2, config.model.max_context)
        yield "learner", "max_tokens_per_microbatch", tokens
    if learner.logprob_chunk_tokens > SMALL_CHUNK:
        yield "learner", "logprob_chunk_tokens", SMALL_CHUNK
    if machine.gpu_bytes is None and rollout.kv_cache_gib > 1:
        yield "rollout", "kv_cache_gib", 1.0
    yield "learner", "activation_checkpointing", True
    if machine.gpu_bytes is None:
        return
    if learner.offload == "none":
        yield "learner", "zero_stage", max(1, learner.zero_stage)
        yield "learner", "offload", "optimizer"
    ranks = learner.ranks
    while ranks < MOST_RANKS:
        ranks *= 2
        yield "learner", "zero_stage", 3
        yield "learner", "ranks", ranks
    parts = rollout.tensor_parallel_size
    while parts < MOST_PARTS:
        parts *= 2
        yield "rollout", "tensor_parallel_size", parts


def _lines(
    config: Config, policy: ModelSize, found: RunEstimate, machine: Machine
) -> Iterator[str]:
    on_gpu = machine.gpu_bytes is not None
    yield f"model: {policy.weights / 1e6:,.1f}M weights, {policy.layers} layers of {policy.hidden}"
    if config.model.lora is not None:
        yield f"adapters: {policy.trained / 1e6:,.3f}M weights, which alone are trained"
    ranks, servers = config.learner.ranks, config.placement.num_rollout_servers
    where = "with a GPU each" if on_gpu else "on the CPU"
    tokens = microbatch_tokens(config)
    title = f"learner, {_count(ranks, 'rank')} {where}, {tokens} tokens at a time"
    yield from _table(title, found.learner)
    yield from _table(f"rollout, {_count(servers, 'server')} {where}", found.rollout)
    cache = next(part.size for part in found.rollout if "cache" in part.name)
    parts = config.rollout.tensor_parallel_size if on_gpu else 1
    of_one = kv_bytes_per_token(policy, config.model.dtype) * config.model.max_context
    fits = max(0, int(cache * parts / of_one))
    yield f"  {fits} trajectories of {config.model.max_context} tokens at a time"
    yield from _table("disk", found.disk)
    if on_gpu:
        yield verdict_on_gpus()
    else:
        whole = memory_of_run(config, found.learner, found.rollout)
        yield f"{'all processes of the run':{WIDTH}} {readable_size(whole):>10}"
        memory = machine.memory_bytes
        free = "an unknown amount" if memory is None else readable_size(memory)
        yield f"this machine has {free} of memory and {readable_size(machine.disk_bytes)} of disk"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _table(title: str, parts: Sequence[Part]) -> Iterator[str]:
    yield f"{title:{WIDTH}} {readable_size(total(parts)):>10}"
    for part in parts:
        yield f"  {part.name:{WIDTH - 2}} {readable_size(part.size):>10}"
