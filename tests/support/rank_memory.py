"""One rank of test_rank_memory.py: private memory while it builds engines, as one JSON line.

    python -m tests.support.rank_memory FOLDER CASE

Started with the variables of a launcher. FOLDER holds the models of `Case.model`, and states to
resume from. What is counted is memory that no file holds (`Anonymous`; `Private_Dirty` would count
pages of the model's files until they are written to the disk), less what an engine of a tiny model
with as many modules takes: libraries, and the objects of Python that DeepSpeed makes of each
module. The loading of policy, reference and critic is measured on its own as well, in the same way:
what one of them takes in passing would hide in what an optimizer takes later.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.runtime.imports import quick_imports

with quick_imports():
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from torch import nn
    from transformers import AutoModelForCausalLM

    from agent_r1.learner.config import EngineConfig
    from agent_r1.learner.engine.model import DTYPES
    from agent_r1.learner.engine.model_files import POLICY_FILE
    from agent_r1.learner.engine.ranks import engine as rank_engine
    from agent_r1.learner.engine.ranks.messages import CriticSetup, EngineSetup
    from agent_r1.runtime.config import LoraConfig, ModelConfig

SAMPLE_S = 0.1
TINY = "tiny"
MASTER = GRADIENT = 4
ADAM = 8
"""Bytes a value: DeepSpeed's float32 weights and gradients, which are there from the start, and the
moments, which the first step or a resume makes."""


@dataclass(frozen=True)
class Case:
    """What a rank builds."""

    model: str = "untied"
    dtype: str = "float32"
    reference: bool = False
    critic: bool = False
    lora: bool = False
    offload: str = "none"
    resumes: bool = False

    def setup(self, folder: Path, ranks: int, model: str | None = None) -> EngineSetup:
        """Return the setup of an engine under ZeRO-3."""
        table = ModelConfig(
            path=str(folder / (model or self.model)),
            dtype=self.dtype,  # pyright: ignore[reportArgumentType]
            max_context=512,
            lora=LoraConfig(rank=4) if self.lora else None,
        )
        values = {"zero_stage": 3, "offload": self.offload, "ranks": ranks, "device": "cpu"}
        critic = CriticSetup(table, 1e-5) if self.critic else None
        config = EngineConfig.model_validate(values)
        return EngineSetup.of(table, config, with_reference=self.reference, critic=critic)

    def bound(self, weights: list[int], trained: int, ranks: int) -> float:
        """Return the bytes that a rank may take at start.

        Args:
            weights: numbers of values of the model's parameters.
            trained: of those that are trained, in all.
            ranks: over which they are divided.
        """
        value = DTYPES[self.dtype].itemsize
        moments = ADAM if self.resumes else 0
        # Offloaded, they are kept twice: as they are added up, and as the optimizer reads them.
        gradients = GRADIENT * (1 if self.offload == "none" else 2)
        own = sum(weights) * value + trained * (MASTER + gradients + moments)
        if self.reference and not self.lora:
            own += sum(weights) * value
        if self.critic:
            own += sum(weights) * (value + MASTER + gradients)
        return 1.1 * (own / ranks + 2 * max(weights) * value)

    def loading_bound(self, weights: list[int], ranks: int) -> float:
        """Return the bytes that the loading of one model may take; see `bound`."""
        value = DTYPES[self.dtype].itemsize
        # The files have float32: of another type, transformers holds what it has converted as well.
        whole = 2 if self.dtype == "float32" else 3
        return 1.1 * (sum(weights) / ranks + whole * max(weights)) * value


CASES = {
    "policy": Case(),
    "ppo": Case(reference=True, critic=True),
    "bfloat16": Case("tied", "bfloat16", reference=True, critic=True),
    "tied": Case("tied", reference=True),
    "lora": Case(reference=True, lora=True),
    "lora-bfloat16": Case("tied", "bfloat16", lora=True),
    "offload-optimizer": Case(reference=True, offload="optimizer"),
    "offload-all": Case(reference=True, critic=True, offload="all"),
    "offload-all-bfloat16": Case("tied", "bfloat16", reference=True, offload="all"),
    "resume": Case(resumes=True),
    "resume-bfloat16": Case("tied", "bfloat16", resumes=True, offload="optimizer"),
}


def private_bytes() -> int:
    """Return what this process has and no file holds."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    (line,) = (line for line in rollup.splitlines() if line.startswith("Anonymous:"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_of_private_bytes(peaks: list[int]) -> Iterator[None]:
    """Append the most that is private while the block runs."""
    ended = threading.Event()
    seen = [private_bytes()]

    def watch() -> None:
        while not ended.wait(SAMPLE_S):
            seen.append(private_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    ended.set()
    thread.join()
    peaks.append(max(*seen, private_bytes()))


@contextmanager
def measured_loading(peaks: dict[str, list[int]]) -> Iterator[None]:
    """Append what each model takes while it is loaded, by the function that loads it."""

    def measuring(load: Callable[..., Any], name: str) -> Callable[..., Any]:
        def measured(*arguments: Any) -> Any:
            tidy()
            before, seen = private_bytes(), list[int]()
            with peak_of_private_bytes(seen):
                loaded = load(*arguments)
            peaks.setdefault(name, []).append(seen[0] - before)
            return loaded

        return measured

    loads = {name: getattr(rank_engine, name) for name in ("load_causal_model",)}
    for name, load in loads.items():
        setattr(rank_engine, name, measuring(load, name))
    yield
    for name, load in loads.items():
        setattr(rank_engine, name, load)


def tidy() -> None:
    """Give freed memory back."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def whole(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a divided module, each gathered from all ranks when its turn comes."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        divided: Any = parameter
        divided.all_gather()
        yield name, parameter.detach()
        divided.partition()


def different(engine: Any, case: Case, folder: Path) -> list[str]:
    """Return the names of weights that are not, bit by bit, those of the files."""
    model = AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=DTYPES[case.dtype])
    expected = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    inner = {n.removeprefix("model."): p for n, p in expected.items()}
    policy = dict(expected)
    if case.resumes:
        policy = {}
        with safe_open(folder / case.model / POLICY_FILE, "pt") as file:
            for name in expected:
                key = name.replace("model.", "decoder.").replace("lm_head.", "head.")
                if case.model == "tied":
                    key = key.replace("head.weight", "decoder.embed_tokens.weight")
                policy[name] = file.get_tensor(f"{key}.weight").to(DTYPES[case.dtype])
    parts: list[tuple[str, nn.Module, dict[str, torch.Tensor]]] = [("policy", engine.model, policy)]
    if case.reference and not case.lora:
        parts.append(("reference", engine._reference.module.decoder, inner))
    if case.critic:
        parts.append(("critic", engine._critic._engine.module.decoder, inner))
    found: list[str] = []
    for part, module, tensors in parts:
        names = set()
        for name, tensor in whole(module):
            if "lora_" not in name:
                names.add(name.replace(".base_layer", ""))
                if not torch.equal(tensor, tensors[name.replace(".base_layer", "")]):
                    found.append(f"{part} {name}")
        if part == "policy":
            found += [f"{part} lacks {name}" for name in tensors.keys() - names]
    return found


def measure(case: Case, folder: Path) -> dict[str, Any]:
    """Build an engine; return what it took and what differs from the files."""
    ranks, device = dist.get_world_size(), torch.device("cpu")
    rank_engine.RankEngine(case.setup(folder, ranks, TINY), device)  # which loads libraries
    tidy()
    empty, peaks = private_bytes(), []
    of_tiny: dict[str, list[int]] = {}
    with measured_loading(of_tiny):
        tiny = rank_engine.RankEngine(case.setup(folder, ranks, TINY), device)
    tidy()
    before = 2 * private_bytes() - empty
    dist.barrier()
    loading: dict[str, list[int]] = {}
    with measured_loading(loading), peak_of_private_bytes(peaks):
        engine = rank_engine.RankEngine(case.setup(folder, ranks), device)
        if case.resumes:
            engine.load(folder / case.model)
        dist.barrier()
    tidy()
    held = private_bytes() - before
    del tiny
    sizes: Any = [getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters()]
    bound = case.bound(sizes, engine.num_weights(), ranks)
    answer = {"peak": peaks[0] - before, "held": held, "bound": round(bound)}
    took = {name: [peak - max(of_tiny[name]) for peak in peaks] for name, peaks in loading.items()}
    answer |= {"loading": took, "loading_bound": round(case.loading_bound(sizes, ranks))}
    return answer | {"different": different(engine, case, folder)}


def main(folder: Path, name: str) -> None:
    """Measure the case on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    line = {"case": name, "rank": dist.get_rank()} | measure(CASES[name], folder)
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # nothing has to end in order


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
