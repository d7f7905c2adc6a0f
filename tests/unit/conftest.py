"""A chat format over a small real tokenizer, shared by the tests of text and rollout."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.text.chat_format import ChatFormat
from tests.support.fakes import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="session")
def end_id(tokenizer: Any) -> int:
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.fixture(scope="session")
def chat(tokenizer: Any, end_id: int) -> ChatFormat:
    return ChatFormat(tokenizer, end_of_turn_ids=[end_id])
