"""Hands an answer over when it is whole: the scheduler of a CPU engine.

vLLM's scheduler sends every token to the server on its own, also for a request whose caller wants
the end only. For a small model, that was half of the CPU time that the server spent on its engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request, RequestStatus


class WholeAnswerScheduler(Scheduler):
    """vLLM's scheduler, which keeps the tokens of `FINAL_ONLY` requests until they are finished.

    All tokens of an answer then carry the weight version of its last one; `FastCPUWorker` tells
    how many were sampled before an update.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._answers: dict[str, GrowingAnswer] = {}
        """By request: what its steps so far brought."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take what a step brought; return what is to be sent, by client."""
        step = model_runner_output.logprobs
        rows = model_runner_output.req_id_to_index
        if step is not None:
            # vLLM would cut three arrays for each token, which takes as long as sampling it.
            model_runner_output.logprobs = None
            for name in scheduler_output.num_scheduled_tokens:
                if (request := self.requests.get(name)) and _wants_logprobs(request):
                    self._answers.setdefault(name, GrowingAnswer()).logprobs.append(
                        (step, rows[name])
                    )
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for batch in outputs.values():
            batch.outputs = [whole for part in batch.outputs if (whole := self._add(part))]
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> Any:
        """End requests that nobody waits for any more."""
        requests = super().finish_requests(request_ids, finished_status)
        for request in requests:
            self._answers.pop(request.request_id, None)
        return requests

    def _add(self, part: EngineCoreOutput) -> EngineCoreOutput | None:
        """Return the whole answer if this part ends it, or the part if it is not to be kept."""
        answer = self._answers.setdefault(part.request_id, GrowingAnswer())
        answer.parts.append(part)
        if part.finish_reason is None:
            params = self.requests[part.request_id].sampling_params
            if params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY:
                return None
        return self._answers.pop(part.request_id).join()


def _wants_logprobs(request: Request) -> bool:
    params = request.sampling_params
    return params is not None and params.num_logprobs is not None


@dataclass
class GrowingAnswer:
    """An answer while it grows: one token a step."""

    parts: list[EngineCoreOutput] = field(default_factory=list)
    logprobs: list[tuple[LogprobsLists, int]] = field(default_factory=list)
    """Log-probabilities of each token: those of its step, and the row of the request there."""

    def join(self) -> EngineCoreOutput:
        """Return the last part with the tokens, log-probabilities and events of all."""
        first, last = self.parts[0], self.parts[-1]
        last.new_token_ids = [token for part in self.parts for token in part.new_token_ids]
        last.events = [event for part in self.parts for event in part.events or ()] or None
        last.prefill_stats = first.prefill_stats
        last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
        if self.logprobs:
            last.new_logprobs = LogprobsLists(
                np.array([step.logprob_token_ids[row] for step, row in self.logprobs]),
                np.array([step.logprobs[row] for step, row in self.logprobs]),
                np.array([step.sampled_token_ranks[row] for step, row in self.logprobs]),
            )
        return last
