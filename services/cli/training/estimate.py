"""Memory and disk that a run will take, for `agent-r1 check`, before anything is started.

config/estimate.py does the sums; this module finds the model, asks the machine, and says which keys
make a run fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from agent_r1.cli.training.remedies import changed, make_fit, tried_keys
from agent_r1.config.boxes import (
    Load,
    Machine,
    gpu_loads,
    gpu_problems,
    memory_loads,
    placed,
    verdict_on_gpus,
)
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
    value_bytes,
)
from agent_r1.config.machine import usable_gpus
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.runtime.config import LoraConfig
from agent_r1.runtime.files.disk_space import free_bytes, readable_size
from agent_r1.runtime.files.hub import model_folder
from agent_r1.runtime.gpus import read_gpus
from agent_r1.runtime.memory import GIB, MIB, free_memory_bytes

PROGRAMS = 1.7e9
"""Python, torch and vLLM in the services of a run on a CPU, without models: docs/benchmarks.md."""
ADAPTERS = LoraConfig(rank=32)
"""Adapters that are proposed where training all weights does not fit."""
RESERVE = 0.2
"""Share of GPU and memory that proposed keys leave free: a peak may be larger than estimated."""
LARGEST_ERROR = 0.21
"""Share of a peak that was missing in the sum, at most: docs/benchmarks.md."""
BY_HAND = (
    "the shares (rollout.gpu_memory_utilization and engine.gpu_memory_share), the servers "
    "(placement.rollout_replicas) or the ranks (engine.ranks)"
)
"""Keys that other values than those tried may help."""
WIDTH = 52
ENOUGH = "memory and disk: enough"


@dataclass(frozen=True)
class RunEstimate:
    """Memory and disk that a configuration takes."""

    learner: list[Part]
    rollout: list[Part]
    disk: list[Part]
    gpus: list[Load] = field(default_factory=list)
    memory: list[Load] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Problems: parts that do not fit."""


def estimate(config: Config, machine: Machine) -> tuple[list[str], list[str]]:
    """Work out what a run takes.

    Returns:
        lines that say so, and which keys make it fit; and what does not fit.

    Raises:
        ValueError: the size of a model cannot be read.
    """
    config = with_layout(config)
    model = config.model
    policy = size_of(model.path, model.revision, model.lora)
    critic = None
    if config.learner.has_critic:
        critic = size_of(model.path, model.revision)
        if config.learner.critic_path is not None:
            critic = size_of(config.learner.critic_path, None)
    scorers = [size_of(str(table.path), None) for table in config.reward.to_serve().values()]

    def fits(config: Config, policy: ModelSize = policy, reserve: float = RESERVE) -> bool:
        return not sum_up(config, policy, critic, with_reserve(machine, reserve), scorers).problems

    found = sum_up(config, policy, critic, machine, scorers)
    lines = list(_lines(config, policy, found, machine))
    if not found.problems:
        lines.append(verdict(lambda reserve: fits(config, reserve=reserve)))
        return lines, []
    lines += [f"!! {problem}" for problem in found.problems]
    lines += _proposal(config, lambda one, reserve: fits(one, reserve=reserve), machine)
    if model.lora is None:
        adapted = size_of(model.path, model.revision, ADAPTERS)
        lora = changed(config, [("model", "lora", ADAPTERS)])
        if fits(lora, adapted):
            lines.append(
                f"or with adapters alone (LoRA): --set model.lora.rank={ADAPTERS.rank}, and about "
                f"ten times engine.lr ({config.engine.lr:g})"
            )
    return lines, found.problems


def verdict(fits_with: Callable[[float], bool]) -> str:
    """Say that there is enough, and what is left where that is less than proposed keys leave.

    Args:
        fits_with: whether it fits with this share of GPU and memory left free.
    """
    return ENOUGH if fits_with(RESERVE) else f"{ENOUGH}, {_spare(fits_with)}"


def _spare(fits_with: Callable[[float], bool]) -> str:
    """Say what a run that fits leaves, of which `verdict` was asked."""
    percents = range(int(100 * RESERVE), 0, -1)
    spare = next((percent for percent in percents if fits_with(percent / 100)), 0)
    return f"with {spare} % to spare; the sums have been up to {100 * LARGEST_ERROR:.0f} % too low"


def _proposal(
    config: Config, fits: Callable[[Config, float], bool], machine: Machine
) -> Iterator[str]:
    """Yield which keys make a run fit, with as much to spare as can be had.

    Args:
        config: of the run.
        fits: whether a configuration fits with a share of GPU and memory left free.
        machine: what there is.
    """
    changes = make_fit(config, lambda one: fits(one, RESERVE), machine)
    if changes is not None:
        yield f"memory and disk are enough, with {RESERVE:.0%} to spare, with:"
    else:
        keys = ", ".join(tried_keys(config, machine))
        yield (
            f"no key that is tried makes it fit with {RESERVE:.0%} to spare (tried: {keys}); by "
            f"hand, change {BY_HAND}, or take a smaller model, a larger machine, or more of them"
        )
        changes = make_fit(config, lambda one: fits(one, 0.0), machine)
    if changes is None:
        return
    closest = changed(config, changes)
    if not fits(closest, RESERVE):
        yield f"they are enough {_spare(lambda reserve: fits(closest, reserve))}, with:"
    yield from (f"  --set {table}.{key}={str(value).lower()}" for table, key, value in changes)


def size_of(path: str, revision: str | None, lora: LoraConfig | None = None) -> ModelSize:
    """Return what memory depends on, of a model in a folder or on the hub, and its adapters."""
    return read_model_size(model_folder(path, revision, small=True), lora)


def with_layout(config: Config) -> Config:
    """Return the configuration with the layout that the engine will choose."""
    from agent_r1.learner.engine.ranks.messages import EngineSetup

    shares = EngineSetup.of(config.model, config.engine).config.share_prefixes
    return changed(config, [("engine", "share_prefixes", shares)])


def find_machine(
    config: Config,
    gpu_gb: float | None,
    *,
    gpus: int | None = None,
    boxes: int = 1,
    memory_gb: float | None = None,
) -> Machine:
    """Return what this machine has; with `gpu_gb`, what machines with GPUs of this size have.

    Raises:
        ConfigError: GPUs are counted, and the size of one is not known.
    """
    memory = None if memory_gb is None else memory_gb * 1e9
    if gpu_gb is not None:
        return Machine(gpu_gb * 1e9, memory, None, gpus or 1, boxes)
    count = usable_gpus() if config.engine.device != "cpu" else 0
    if not count and (gpus is not None or boxes > 1):
        option = "--boxes" if gpus is None else "--gpus"
        raise ConfigError(
            f"{option} ({boxes if gpus is None else gpus}) counts GPUs, and this machine has none "
            "that the run would use; say with --gpu-gb how large one is, or leave it out"
        )
    return Machine(
        gpu_bytes=min((gpu.memory_bytes for gpu in read_gpus()), default=None) if count else None,
        memory_bytes=free_memory_bytes() if memory is None else memory,
        disk_bytes=free_bytes(config.run.folder().absolute()),
        gpus=gpus or count or 1,
        boxes=boxes,
    )


def with_reserve(machine: Machine, reserve: float = RESERVE) -> Machine:
    """Return a machine with less GPU and memory, for keys that are to fit with some to spare."""

    def less(size: float | None) -> float | None:
        return None if size is None else (1 - reserve) * size

    return replace(
        machine, gpu_bytes=less(machine.gpu_bytes), memory_bytes=less(machine.memory_bytes)
    )


def sum_up(
    config: Config,
    policy: ModelSize,
    critic: ModelSize | None,
    machine: Machine,
    scorers: Sequence[ModelSize] = (),
) -> RunEstimate:
    """Return what a configuration takes, and what of it does not fit.

    Args:
        config: of the run.
        policy: its size.
        critic: its size; None without one.
        machine: what there is.
        scorers: models that the run serves for its rewards, which it does on CPUs only.
    """
    learner = learner_parts(config, policy, critic, on_gpu=machine.gpu_bytes is not None)
    rollout = rollout_parts(config, policy, machine.gpu_bytes)
    found = RunEstimate(learner, rollout, disk_parts(config, policy, critic))
    add = found.problems.append
    if machine.gpu_bytes is None:
        bytes_of_run = memory_of_run(config, learner, rollout, scorers)
        need = Part("all processes of the run", bytes_of_run)
        found.memory.append(Load("memory", (need,)))
    else:
        try:
            where = placed(config, machine)
        except ValueError as exc:
            add(str(exc))
        else:
            found.gpus.extend(gpu_loads(config, where, learner, machine.gpu_bytes))
            found.memory.extend(memory_loads(config, where, machine, policy, critic))
            found.problems.extend(gpu_problems(where, found.gpus, learner, machine.gpu_bytes))
    for load in found.memory:
        if machine.memory_bytes is not None and load.size > machine.memory_bytes:
            free = readable_size(machine.memory_bytes)
            add(f"{load.name}: {readable_size(load.size)} are needed, and {free} are free")
    found.problems.extend(_cache_problems(config, policy, found.rollout, machine))
    if machine.disk_bytes is not None and total(found.disk) > machine.disk_bytes:
        free = readable_size(machine.disk_bytes)
        add(f"disk: {readable_size(total(found.disk))} are needed, and {free} are free")
    return found


def _cache_bytes(config: Config, rollout: Sequence[Part], machine: Machine) -> float:
    """Return the KV cache of one server, over all of its GPUs."""
    parts = config.rollout.tensor_parallel_size if machine.gpu_bytes is not None else 1
    return parts * next(part.size for part in rollout if "cache" in part.name)


def _cache_problems(
    config: Config, policy: ModelSize, rollout: Sequence[Part], machine: Machine
) -> Iterator[str]:
    sequence = kv_bytes_per_token(policy, config.model.dtype) * config.model.max_context
    cache = _cache_bytes(config, rollout, machine)
    if cache < sequence:
        yield (
            f"rollout: the KV cache holds {readable_size(max(cache, 0))}, and one trajectory of "
            f"model.max_context tokens takes {readable_size(sequence)}"
        )


def memory_of_run(
    config: Config,
    learner: Sequence[Part],
    rollout: Sequence[Part],
    scorers: Sequence[ModelSize] = (),
) -> float:
    """Return the bytes of every process of a run that shares one machine without GPUs."""
    servers = config.placement.num_rollout_servers * total(rollout)
    own = value_bytes(config.model.dtype)
    for scorer in scorers:
        servers += scorer.weights * own + config.rollout.kv_cache_gib * GIB
    redis = config.redis.maxmemory_mb * MIB if config.redis.url is None else 0
    return config.engine.ranks * total(learner) + servers + PROGRAMS + redis


def _lines(
    config: Config, policy: ModelSize, found: RunEstimate, machine: Machine
) -> Iterator[str]:
    on_gpu = machine.gpu_bytes is not None
    yield f"model: {policy.weights / 1e6:,.1f}M weights, {policy.layers} layers of {policy.hidden}"
    if config.model.lora is not None:
        yield f"adapters: {policy.trained / 1e6:,.3f}M weights, which alone are trained"
    ranks, servers = config.engine.ranks, config.placement.num_rollout_servers
    where = "with a GPU each" if on_gpu else "on the CPU"
    tokens = microbatch_tokens(config)
    title = f"learner, {_count(ranks, 'rank')} {where}, {tokens} tokens at a time"
    yield from _table(title, found.learner)
    if on_gpu and config.rollout.tensor_parallel_size > 1:
        where = f"with {config.rollout.tensor_parallel_size} GPUs each"
    yield from _table(f"rollout, {_count(servers, 'server')} {where}", found.rollout)
    of_one = kv_bytes_per_token(policy, config.model.dtype) * config.model.max_context
    fits = max(0, int(_cache_bytes(config, found.rollout, machine) / of_one))
    yield f"  {fits} trajectories of {config.model.max_context} tokens at a time in a server"
    yield from _table("disk", found.disk)
    if on_gpu:
        for load in (*found.gpus, *found.memory):
            yield from _table(load.name, load.parts)
        yield verdict_on_gpus()
        return
    for load in found.memory:
        yield f"{load.parts[0].name:{WIDTH}} {readable_size(load.size):>10}"
    memory = machine.memory_bytes
    free = "an unknown amount" if memory is None else readable_size(memory)
    disk = "" if machine.disk_bytes is None else f" and {readable_size(machine.disk_bytes)} of disk"
    yield f"this machine has {free} of memory{disk}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _table(title: str, parts: Sequence[Part]) -> Iterator[str]:
    yield f"{title:{WIDTH}} {readable_size(total(parts)):>10}"
    for part in parts:
        if part.size:
            yield f"  {part.name:{WIDTH - 2}} {readable_size(part.size):>10}"
