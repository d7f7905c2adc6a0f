"""The format of chats that most tests of sessions read."""

from __future__ import annotations

from typing import Any

import pytest

from agent_r1.text.chat_format import ChatFormat


@pytest.fixture(scope="module")
def chat(tokenizer: Any, end_id: int) -> ChatFormat:
    return ChatFormat(
        tokenizer, end_of_turn_ids=[end_id], reply_roles=("tool", "user"), segments=True
    )
