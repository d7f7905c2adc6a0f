"""Hands an answer over when it is whole: the scheduler of a CPU engine.

vLLM's scheduler sends every token to the server on its own, also for a request whose caller wants
the end only. There, each token costs as much CPU time as the small model takes to sample it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import RequestStatus


class WholeAnswerScheduler(Scheduler):
    """vLLM's scheduler, which keeps the tokens of `FINAL_ONLY` requests until they are finished.

    All tokens of an answer then carry the weight version of its last one; `FastCPUWorker` tells
    how many were sampled before an update.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parts: dict[str, list[EngineCoreOutput]] = {}
        """By request: what its steps so far brought."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Take what a step brought; return what is to be sent, by client."""
        outputs = super().update_from_output(*args, **kwargs)
        for batch in outputs.values():
            batch.outputs = [whole for part in batch.outputs if (whole := self._add(part))]
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """End requests that nobody waits for any more."""
        requests = super().finish_requests(request_ids, finished_status)
        for request in requests:
            self._parts.pop(request.request_id, None)
        return requests

    def _add(self, part: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return the whole answer if this part ends it, or the part if it is not to be kept."""
        if part.finish_reason is not None:
            parts = self._parts.pop(part.request_id, None)
            return part if parts is None else join([*parts, part])
        params = self.requests[part.request_id].sampling_params
        if params is None or params.output_kind != RequestOutputKind.FINAL_ONLY:
            return part
        self._parts.setdefault(part.request_id, []).append(part)
        return None


def join(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Return the last part with the tokens, log-probabilities and events of all."""
    first, last = parts[0], parts[-1]
    last.new_token_ids = [token for part in parts for token in part.new_token_ids]
    last.events = [event for part in parts for event in part.events or ()] or None
    last.prefill_stats = first.prefill_stats
    last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
    if found := [part.new_logprobs for part in parts if part.new_logprobs is not None]:
        last.new_logprobs = LogprobsLists(
            np.concatenate([step.logprob_token_ids for step in found]),
            np.concatenate([step.logprobs for step in found]),
            np.concatenate([step.sampled_token_ranks for step in found]),
        )
    return last
