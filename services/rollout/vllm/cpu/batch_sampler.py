"""Samples one token for each row of a CPU engine's batch, with the seeds of the requests.

worker.py puts it in the place of vLLM's sampler, which draws a number for every entry of the
vocabulary and walks over the rows in Python. Here, a row needs one number (token_sampling.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from agent_r1.rollout.vllm.cpu.token_sampling import pick, uniforms

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata


class BatchSampler(Sampler):
    """vLLM's sampler, with another way to draw from the whole vocabulary.

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
