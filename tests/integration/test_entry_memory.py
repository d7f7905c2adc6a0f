"""What an entry takes in a real Redis, against what the check before a run allows for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import redis as redis_client

from agent_r1.learner.redis_memory import BYTES_PER_ENTRY, BYTES_PER_TOKEN
from agent_r1_proto.messages import encode_entry
from agent_r1_proto.parts import TextPart
from agent_r1_proto.trajectory import Reply, ToolCallRecord, Turn, VersionSpan
from tests.support.builders import scored

pytestmark = pytest.mark.redis

WORD = "and "
"""Four bytes, which is what a token of English text has."""
NUM_ENTRIES = 32
SHORT, LONG = 1024, 8192
"""Tokens of an entry."""


def turn(num_tokens: int, text: str, said: str, answer: str | None, *calls: ToolCallRecord) -> Turn:
    replies = [Reply(role="tool", parts=call.parts, call=0) for call in calls]
    return Turn(
        start=num_tokens - 1,
        end=num_tokens,
        text=text,
        finish_reason="stop",
        calls=list(calls),
        well_formed=True,
        thought="",
        said=said,
        answer=answer,
        replies=replies or None,
    )


def call(num_tokens: int, arguments: str, result: str) -> ToolCallRecord:
    return ToolCallRecord(
        end_token_index=num_tokens - 1,
        tool="search",
        arguments={"query": arguments},
        status="ok",
        parts=[TextPart(text=result)],
    )


def answer(num_tokens: int) -> Turn:
    """Return an answer behind an empty thought: its text three times."""
    text = WORD * num_tokens
    return turn(num_tokens, text, text, text)


def long_call(num_tokens: int) -> Turn:
    text = WORD * num_tokens
    return turn(num_tokens, text, text, None, call(num_tokens, text, ""))


def call_and_result(num_tokens: int) -> Turn:
    """Return a call as long as its result, which was shown in another way."""
    half = WORD * (num_tokens // 2)
    return turn(num_tokens, half, half, None, call(num_tokens, half, half))


def memory_of(client: redis_client.Redis, key: str, num_tokens: int, last: Turn) -> float:
    tokens: dict[str, Any] = {
        "prompt_length": 1,
        "num_sampled": num_tokens - 1,
        "token_ids": np.full(num_tokens, 151_935, np.int32),
        "version_spans": [VersionSpan(policy_version=1, start=1, end=num_tokens)],
    }
    entry: Any = encode_entry(scored(turns=[last], **tokens))
    for _ in range(NUM_ENTRIES):
        client.xadd(key, entry)
    taken: Any = client.memory_usage(key, samples=0)
    client.delete(key)
    return taken / NUM_ENTRIES


@pytest.mark.parametrize("last", [answer, long_call, call_and_result])
def test_an_entry_takes_no_more_memory_than_the_check_allows(
    redis_url: str, run_id: str, last: Callable[[int], Turn]
):
    key = f"agent_r1:{run_id}:memory"
    with redis_client.Redis.from_url(redis_url) as client:
        short, long = (memory_of(client, key, n, last(n)) for n in (SHORT, LONG))
    per_token = (long - short) / (LONG - SHORT)
    # At least 3 bytes of the id, 4 of the log-probability, and the text twice.
    assert 15 <= per_token <= BYTES_PER_TOKEN
    assert short - SHORT * per_token <= BYTES_PER_ENTRY
