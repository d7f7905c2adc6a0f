"""A pytest plugin: `VllmPolicy` starts its engine as on a GPU, with Model Runner V2, on this CPU.

vLLM's own scheduler, sampler and norms take the place of those that a CPU engine has from
services/rollout/vllm. Only what a CPU cannot do otherwise is changed. Not covered: the order of
streams and events, pinned memory, CUDA graphs, kernels of attention and LoRA for GPUs, tensor
parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.rollout.policy import EngineWork
from agent_r1.rollout.vllm import engine_process, policy
from agent_r1.rollout.vllm.engine_process import StartedEngine
from agent_r1.rollout.vllm.settings import ModelFacts, VllmSettings, choose_model_runner

KV_CACHE_BYTES = 64 << 20
BATCHED_TOKENS = 512
"""Less than several prompts have, so that some are computed in chunks."""
BLOCK = 32
"""vLLM takes 16 on a GPU and 128 on a CPU, which would never find a short prompt again."""


def start_engine(settings: VllmSettings, facts: ModelFacts, work: EngineWork) -> StartedEngine:
    """Stand in for `engine_process.start_engine`."""
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    args: Any = engine_process._engine_args(settings, facts, on_cpu=False)
    args.kv_cache_memory_bytes = KV_CACHE_BYTES
    args.enforce_eager = True
    args.block_size = BLOCK
    args.max_num_batched_tokens = args.max_num_batched_tokens or BATCHED_TOKENS
    args.distributed_executor_backend = UniProcExecutor
    runner = choose_model_runner(settings.rollout.model_runner, on_cpu=False)
    started = engine_process.launch_engine(args, settings, work, runner, forks=True)
    assert started.model_runner == "v2"
    assert "asynchronous=True" in started.description
    return started


@pytest.fixture(autouse=True, scope="session")
def _gpu_engine() -> None:
    policy.start_engine = start_engine
