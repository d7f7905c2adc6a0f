"""The worker of a CPU engine: vLLM's, with a sampler that draws for the whole batch.

engine_process.py names it in the engine's configuration. Import it nowhere else: vLLM's worker for
the CPU changes PyTorch when it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_worker import CPUWorker

from agent_r1.rollout.vllm.cpu.token_sampling import pick, uniforms

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata


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


class BatchSampler(Sampler):
    """Samples one token for each row of the batch, with the seeds of the requests.

    vLLM's sampler draws a number for every entry of the vocabulary and walks over the rows in
    Python. Here, a row needs one number (token_sampling.py).

    Args:
        runner: vLLM's model runner, whose batch holds seeds and positions.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__(logprobs_mode=runner.sampler.logprobs_mode)
        self._runner = runner
        self._batch: SamplingMetadata | None = None
        self._seeds = np.empty(0, np.uint64)

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [B] tokens and the [B, V] log-probabilities that they were drawn from."""
        batch = sampling_metadata
        if not batch.all_random or batch.top_k is not None or batch.top_p is not None:
            return super().sample(logits, batch, logprobs_mode_override)
        assert batch.temperature is not None  # there is one unless all rows are greedy
        logits = self.apply_temperature(logits, batch.temperature, batch.all_random)
        for processor in batch.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        return pick(logprobs, self._draws(batch)), logprobs

    def _draws(self, batch: SamplingMetadata) -> torch.Tensor:
        rows = self._runner.input_batch
        count = rows.num_reqs
        if batch is not self._batch:  # vLLM makes new metadata whenever the rows change
            self._batch = batch
            self._seeds = np.array([self._seed(name) for name in rows.req_ids], np.uint64)
        positions = rows.num_tokens_no_spec[:count] - rows.num_prompt_tokens[:count]
        return torch.from_numpy(uniforms(self._seeds, positions))

    def _seed(self, request_id: str) -> int:
        params = self._runner.requests[request_id].sampling_params
        if params is None or params.seed is None:
            return int(torch.randint(2**63 - 1, ()).item())
        return params.seed % 2**64

    @staticmethod
    def gather_logprobs(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """Return the log-probabilities of [N] tokens; their ranks, which nobody reads, are 0."""
        if num_logprobs:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        own = token_ids.unsqueeze(-1)
        ranks = torch.zeros_like(token_ids)
        return LogprobsTensors(own.to(torch.int32), logprobs.gather(-1, own), ranks)


def serve_one_adapter() -> None:
    """Let layers with adapters take two products for all tokens of a step.

    vLLM's own way serves many adapters at a time, and copies the matrices of the right one for
    every token. Here there is one, and all requests have it.
    """
    PunicaWrapperCPU.add_lora_linear = _add_adapter


def _add_adapter(
    self: PunicaWrapperCPU,
    y: torch.Tensor,
    x: torch.Tensor,
    lora_a_stacked: tuple[torch.Tensor, ...],
    lora_b_stacked: tuple[torch.Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **unused: Any,
) -> None:
    """Add x A' B' to each slice of y.

    Args:
        self: knows whether the requests of this step have the adapter.
        y: [T, O] what the layer itself makes of x; is changed.
        x: [T, I]
        lora_a_stacked: of each slice, [1, 1, rank, I].
        lora_b_stacked: of each slice, [1, 1, O of the slice, rank], times alpha / rank.
        scale: 1.
        output_slices: widths of the slices.
        unused: of other platforms.
    """
    if self.no_lora:
        return
    start = 0
    for a, b, width in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
        y[:, start : start + width] += (x @ a[0, 0].T) @ b[0, 0].T * scale
        start += width
