"""The vocabulary projection of the policy, giving log-probabilities instead of logits.

model.py --[N, H] hidden states, targets--> `LogprobHead` --[N] log-probabilities, entropies-->

Logits exist for `chunk_tokens` positions at a time, forward and backward; an [N, V] tensor is never
built. The head is a module of its own, so that DeepSpeed's hooks gather its weight.

Dimension key: N = trained tokens, n = those of a chunk, H = hidden size, V = vocabulary size.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from agent_r1.learner.engine.linear import multiply
from agent_r1.runtime.gpu_needs import check_compiler

logger = logging.getLogger(__name__)


class LogprobHead(nn.Module):
    """The vocabulary projection, giving log-probabilities instead of logits."""

    def __init__(self, projection: nn.Linear, chunk_tokens: int) -> None:
        super().__init__()
        self.weight = projection.weight
        self.bias = projection.bias
        self.chunk_tokens = chunk_tokens

    def forward(
        self, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [N] log-probabilities of `targets` and [N] entropies, float32, in nats.

        Args:
            hidden: [N, H] hidden states that predict the targets.
            targets: [N] token ids.
            temperatures: [N] each > 0; logits are divided by it.
        """
        result = _ChunkedLogprobs.apply(
            hidden, self.weight, self.bias, targets, temperatures, self.chunk_tokens
        )
        return cast("tuple[torch.Tensor, torch.Tensor]", result)


class _ChunkedLogprobs(torch.autograd.Function):
    """Log-probability and entropy from hidden states, recomputing logits in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperatures: torch.Tensor,
        chunk_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        score = _for_device(_score, hidden.device)
        for start in range(0, len(targets), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = multiply(hidden[chunk], weight, bias)
            found = score(logits, targets[chunk], temperatures[chunk])
            logprobs[chunk], entropies[chunk] = found
        ctx.save_for_backward(hidden, weight, bias, targets, temperatures)
        ctx.chunk_tokens = chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, temperatures = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        # One addition per chunk: in bfloat16 the small ones would be lost. None where it is frozen.
        grad_weight = grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        differentiate = _for_device(_differentiate, hidden.device)
        for start in range(0, len(targets), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits = multiply(hidden[chunk], weight, bias)
            grads_of_chunk = [None if grad is None else grad[chunk] for grad in grads]
            grad_logits = differentiate(
                logits, targets[chunk], temperatures[chunk], *grads_of_chunk
            )
            grad_hidden[chunk] = multiply(grad_logits, weight.T, None)
            if grad_weight is not None:
                grad_weight += multiply(grad_logits.T, hidden[chunk].T, None).float()
            if grad_bias is not None:
                grad_bias += grad_logits.float().sum(dim=0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _score(
    logits: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [n] log-probabilities of targets and [n] entropies, float32, of [n, V] logits."""
    log_p = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


def _differentiate(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperatures: torch.Tensor,
    grad_logprobs: torch.Tensor | None,
    grad_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """Return [n, V] the gradient of logits, in their dtype, from those of `_score`'s results."""
    log_p = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    p = log_p.exp()
    grad_scaled = torch.zeros_like(p)
    if grad_logprobs is not None:
        grad = grad_logprobs[:, None]
        grad_scaled = p * -grad
        if torch.compiler.is_compiling():  # one kernel, in which no column waits for another
            columns = torch.arange(p.shape[1], device=p.device)
            grad_scaled = torch.where(columns == targets[:, None], grad_scaled + grad, grad_scaled)
        else:
            grad_scaled.scatter_add_(1, targets[:, None], grad)
    if grad_entropies is not None:
        # dH/dz_j = -p_j (log p_j + H)
        entropy = -(p * log_p).sum(dim=-1, keepdim=True)
        grad_scaled = grad_scaled - grad_entropies[:, None] * p * (log_p + entropy)
    return (grad_scaled / temperatures[:, None]).to(logits.dtype)


def _for_device(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a function of logits as a device runs it fastest.

    A GPU waits for memory in each of their dozen passes over all logits; one kernel does them in
    two. A vocabulary of 150,000 makes these passes almost half of a step of a small model.
    """
    return _compiled(function) if device.type == "cuda" else function


class _OrAsItIs:
    """A compiled function; where it cannot be compiled, the function itself."""

    def __init__(self, function: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._function, self._compiled = function, compiled

    def __call__(self, *arguments: Any) -> Any:
        try:
            return self._compiled(*arguments)
        except RuntimeError as exc:  # of the compiler; to import its classes takes seconds
            if not type(exc).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            logger.warning("log-probabilities take about twice as long, not compiled error=%s", exc)
            self._compiled = self._function
            return self._function(*arguments)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiler = check_compiler()
    if compiler.remedy:
        logger.warning(
            "log-probabilities take about twice as long without a C compiler found=%s remedy=%s",
            compiler.text,
            compiler.remedy,
        )
        return function
    return _OrAsItIs(function, torch.compile(function, dynamic=True))
