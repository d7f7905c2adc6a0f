"""The worker of a CPU engine: vLLM's, with a sampler that draws for the whole batch.

engine_process.py names it in the engine's configuration. Import it nowhere else: vLLM's worker for
the CPU changes PyTorch when it is imported.
"""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from agent_r1.rollout.vllm.cpu.adapter import serve_one_adapter
from agent_r1.rollout.vllm.cpu.batch_sampler import BatchSampler


class FastCPUWorker(CPUWorker):
    """vLLM's worker with `BatchSampler`; it also tells how far each answer is."""

    def init_device(self) -> None:
        """Make the model runner, and give it the sampler."""
        if self.vllm_config.lora_config is not None:
            serve_one_adapter()
        super().init_device()
        self.model_runner.sampler = BatchSampler(self.model_runner)

    def count_sampled(self) -> dict[str, int]:
        """Return how many tokens each request has so far, by the engine's own request ids."""
        requests = self.model_runner.requests
        return {name: len(state.output_token_ids) for name, state in requests.items()}
