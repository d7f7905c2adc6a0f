"""Checks what vLLM is asked and reads what it hands back.

policy.py calls it with vLLM's objects; this module imports none of vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_r1.text.tokens import Generation, PolicyError, PromptError, PromptTooLongError
from agent_r1_proto.generation import GeneratedPart
from agent_r1_proto.trajectory import VersionSpan


def check_prompt(
    token_ids: list[int], max_context: int, vocab_size: int, *, min_tokens: int
) -> int:
    """Return how many tokens the context has left after a prompt, at least 1.

    Raises:
        PromptError: the prompt is too short, too long, or holds an unknown token.
    """
    room = max_context - len(token_ids)
    if len(token_ids) < min_tokens:
        raise PromptError(f"prompt has {len(token_ids)} tokens; at least {min_tokens} needed")
    if room < 1:
        raise PromptTooLongError(
            f"prompt has {len(token_ids)} tokens; with model.max_context ({max_context}) at most "
            f"{max_context - 1} leave room to sample; shorten the prompt or raise "
            "model.max_context"
        )
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise PromptError(
            f"prompt holds a token id outside the model's vocabulary of {vocab_size}; the "
            "tokenizer does not belong to this model"
        )
    return room


def to_prompt_logprobs(output: Any, num_tokens: int, cached: int) -> list[float]:
    """Read log-probabilities of a prompt's tokens from a finished request.

    vLLM's model runner V1 returns [T-1] values, of which the first `cached` are void; V2 returns
    only those after the cached prefix.

    Args:
        output: the request.
        num_tokens: T, of the prompt.
        cached: tokens of the prompt whose keys and values the engine had already.

    Returns:
        [T - 1 - cached], or [0] if all but the last token were cached.

    Raises:
        PolicyError: the engine returned another number of values.
    """
    flat = output.prompt_logprobs
    # Position 0 has no log-probability; the actual token comes first at every other one.
    values = [flat.logprobs[start] for start in flat.start_indices[1:]]
    wanted = max(0, num_tokens - 1 - cached)
    if len(values) not in (wanted, num_tokens - 1):
        raise PolicyError(
            f"the engine returned {len(values)} log-probabilities for a prompt of {num_tokens} "
            f"tokens, {cached} of them cached, and {wanted} or {num_tokens - 1} were expected; "
            'try the other of rollout.model_runner = "v1" and "v2"'
        )
    return values[len(values) - wanted :]


def to_generation(completion: Any, earlier: Sequence[VersionSpan]) -> Generation:
    """Read one finished vLLM completion.

    Args:
        completion: the answer, which the engine has labelled as it was sent.
        earlier: the versions of its first tokens, where they were sent later than sampled.

    Raises:
        PolicyError: the engine did not label every token with a version.
    """
    token_ids, logprobs = _sampled(completion)
    known = earlier[-1].end if earlier else 0
    spans = list(earlier) + [
        VersionSpan(policy_version=int(span.version), start=max(span.start, known), end=span.end)
        for span in completion.weight_versions or []
        if span.end > known
    ]
    labelled = sum(span.end - span.start for span in spans)
    if not len(token_ids) == len(logprobs) == labelled:
        raise PolicyError(
            f"the engine returned {len(token_ids)} tokens, {len(logprobs)} log-probabilities and "
            f"version labels for {labelled}"
        )
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=spans,
        finish_reason="stop" if completion.finish_reason == "stop" else "length",
    )


def to_part(completion: Any, labels: Sequence[tuple[str, int]], start: int) -> GeneratedPart:
    """Read tokens that an answer has grown by.

    Args:
        completion: they alone.
        labels: of the answer so far: versions, each with its first token; the last part brings its
            own.
        start: tokens of the answer before these.

    Raises:
        PolicyError: the engine did not label every token with a version.
    """
    token_ids, logprobs = _sampled(completion)
    end = start + len(token_ids)
    known = [(span.version, span.start) for span in completion.weight_versions or ()] or labels
    ends = [first for _, first in known[1:]] + [end]
    spans = [
        VersionSpan(policy_version=int(version), start=max(first, start), end=min(last, end))
        for (version, first), last in zip(known, ends, strict=False)
        if first < end and last > start
    ]
    labelled = sum(span.end - span.start for span in spans)
    if not len(token_ids) == len(logprobs) == labelled:
        raise PolicyError(
            f"the engine returned {len(token_ids)} tokens, {len(logprobs)} log-probabilities and "
            f"version labels for {labelled}"
        )
    reason = completion.finish_reason
    return GeneratedPart(
        token_ids=token_ids,
        logprobs=logprobs,
        version_spans=spans,
        finish_reason=None if reason is None else "stop" if reason == "stop" else "length",
    )


def _sampled(completion: Any) -> tuple[list[int], list[float]]:
    flat = completion.logprobs
    # The sampled token's log-probability comes first at every position.
    return list(completion.token_ids), [flat.logprobs[start] for start in flat.start_indices]
