"""Private memory of ranks under ZeRO-3 at start: their parts, and never the whole model.

`make test-ranks` runs this. In the suite, test_two_ranks.py compares what two such ranks compute
with what one does, and test_estimate_memory.py measures the memory of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from agent_r1.launch.local_redis import free_port
from agent_r1.learner.engine.model import PolicyModule
from agent_r1.learner.engine.model_files import POLICY_FILE
from agent_r1.learner.engine.ranks.rank_env import RankPlace
from tests.support.rank_memory import CASES, TINY

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    TINY: {"hidden_size": 64, "intermediate_size": 64},
}
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
"""Lets the C library give back at once what is freed: it would keep some for later."""


def save(folder: Path, shape: dict[str, Any], *, resumes: bool) -> None:
    """Write a random model, in several files, and a state of it as a checkpoint has it."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **shape}))
    model.save_pretrained(folder, max_shard_size="50MB")
    if not resumes:
        return
    state = {
        f"{name}.{key}": torch.randn(parameter.shape) ** power
        for name, parameter in PolicyModule(model, 16).named_parameters()
        for key, power in (("weight", 1), ("exp_avg", 1), ("exp_avg_sq", 2))
    }
    steps = {"optimizer_steps": "3", "adam_steps": "3"}
    save_file(state, folder / POLICY_FILE, steps)


def run(folder: Path, ranks: int, case: str) -> list[dict]:
    """Measure the case on every rank."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.rank_memory", str(folder), case],
            cwd=Path(__file__).resolve().parents[2],
            env={
                **os.environ,
                **RankPlace(rank, ranks, rank, port=port).environment(),
                **MALLOC,
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
            },
            stdout=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(line) for output in outputs for line in output.splitlines()]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_takes_its_part_of_the_memory_and_the_weights_are_those_of_the_files(
    tmp_path: Path, ranks: int, case: str
):
    for name in (CASES[case].model, TINY):
        save(tmp_path / name, MODELS[name], resumes=CASES[case].resumes)
    answers = run(tmp_path, ranks, case)
    assert len(answers) == ranks
    assert [answer for answer in answers if answer["different"]] == []
    assert [answer for answer in answers if answer["peak"] > answer["bound"]] == []
    loaded = [(answer, peaks) for answer in answers for peaks in answer["loading"].values()]
    assert len(loaded) >= len(answers)
    assert [answer for answer, peaks in loaded if max(peaks) > answer["loading_bound"]] == []
