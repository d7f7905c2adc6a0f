"""The training engine alone: its start, tokens a second, memory, share of the GPU's peak (MFU).

    python -m scripts.gpu_test.learner FOLDER MODEL DEVICE

__main__.py runs it in a process of its own, and keeps its figures and its log.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time
from pathlib import Path

from scripts.gpu_test.model import SHAPES, flops_of_a_token, peak_flops
from scripts.gpu_test.parts import Figures

LENGTH = {"cuda": 2048, "cpu": 128}
COUNT = 8
"""Trajectories of a batch."""
STEPS = 4
"""The first warms up."""


def run(folder: Path, model: str, device: str) -> None:
    """Train some batches and note what they take."""
    import torch

    from agent_r1.cli.training.estimate import size_of
    from agent_r1.learner.config import EngineConfig
    from agent_r1.learner.engine.interface import LossSpec
    from agent_r1.learner.engine.policy_engine import DeepSpeedPolicyEngine
    from agent_r1.learner.engine.ranks.messages import EngineSetup
    from agent_r1.runtime.config import ModelConfig
    from benchmarks.samples import random_samples

    figures, length, shape = Figures(folder), LENGTH[device], SHAPES[device]
    config = EngineConfig.model_validate(
        {
            "device": device,
            "max_tokens_per_microbatch": 2 * length,
            "logprob_chunk_tokens": 512,
            "activation_checkpointing": True,
        }
    )
    table = ModelConfig(path=model, dtype="bfloat16", max_context=length)
    started = time.perf_counter()
    engine = DeepSpeedPolicyEngine(EngineSetup.of(table, config))
    figures.note(load_s=round(time.perf_counter() - started, 1))
    samples = random_samples([length] * COUNT, shape["vocab_size"])
    seconds: list[float] = []
    losses: list[float] = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        losses.append(engine.train_batch(samples, LossSpec())["loss/total"])
        seconds.append(time.perf_counter() - begun)
    speed = COUNT * length / statistics.median(seconds[1:])
    figures.note(
        first_step_s=round(seconds[0], 2),
        step_s=round(statistics.median(seconds[1:]), 3),
        tokens_per_s=round(speed, 1),
        last_loss=losses[-1],
    )
    weights = size_of(model, None).weights
    if device == "cuda":
        name = torch.cuda.get_device_name()
        figures.note(peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2))
        if (peak := peak_flops(name)) is not None:
            used = speed * flops_of_a_token(shape, weights, length)
            figures.note(mfu=round(used / peak, 3), peak_tflops=peak / 1e12)
    engine.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    out, model_path, device_name = sys.argv[1:]
    run(Path(out), model_path, device_name)
