"""A search over branches with real tool services over HTTP, each branch with its own session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import bind, serving
from agent_r1.text.chat_format import ChatFormat
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1.tools.pages import PageFetcher
from agent_r1_proto.rewards import ScoreRequest
from tests.support.branching import asks, searching
from tests.support.fakes import FakeToolServer, build_tokenizer, call_text


class Served:
    """A tool as `searching` takes it."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url


@contextlib.asynccontextmanager
async def served(tool: Tool) -> AsyncIterator[FakeToolServer]:
    listen = ListenConfig()
    listener = bind(tool.name, listen, None)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with serving(create_app(ToolService(tool, instance="one")), listener, listen, None):
        yield cast(FakeToolServer, Served(tool.name, url))
    listener.close()


class Replaying(PageFetcher):
    """Reads the same pages, and forks no session."""

    fork = Tool.fork

    def __init__(self, folder: str, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.calls: list[str] = []
        self.open_sessions: set[str] = set()

    async def open(self, rollout_id: str, tool_context: Any) -> None:
        await super().open(rollout_id, tool_context)
        self.open_sessions.add(rollout_id)

    async def close(self, rollout_id: str) -> None:
        await super().close(rollout_id)
        self.open_sessions.discard(rollout_id)

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        self.calls.append(context.rollout_id)
        return await super().call(arguments, context)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "story.txt").write_text("once upon\na time at\nthe river\na fox sat\n")
    return tmp_path


def reader(dialogue: str, path: str, seed: int) -> str:
    """Open the story; then the last candidate leafs ahead, and the others read on."""
    match dialogue.count("</tool_response>"):
        case 0:
            return call_text("fetch_page", document="story.txt")
        case 1 if path.endswith("1"):
            return call_text("fetch_page", page=4)
        case 1 | 2:
            return call_text("fetch_page")
    return "<answer>the end</answer>"


def likes_the_second_page(interaction: ScoreRequest) -> float:
    last = interaction.turns[-1].calls
    return float(bool(last) and "page 2 of 4" in last[0].text)


@pytest.mark.parametrize("kind", [PageFetcher, Replaying])
async def test_a_branch_reads_on_from_where_it_was_and_no_other_has_read_for_it(
    kind: type[PageFetcher], folder: Path
):
    tokenizer: Any = build_tokenizer()
    end_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = ChatFormat(tokenizer, end_of_turn_ids=[end_id])
    tool = kind(str(folder), page_chars=10)
    async with (
        served(tool) as server,
        searching(chat, end_id, reader, likes_the_second_page, server) as built,
    ):
        trajectory = await built.loop.run(asks("value_guided", candidates=2))
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer")
    read = [call.text().partition("\n")[0] for turn in trajectory.turns for call in turn.calls]
    # The sibling went to page 4; the next page of the branch that was kept is still the third.
    assert read == [f"story.txt, page {number} of 4" for number in (1, 2, 3)]
    cost = trajectory.decoding
    assert cost is not None
    # Page 1 once (both candidates are equal), 2 and 4, and 3 once.
    assert cost.calls == 4
    if isinstance(tool, Replaying):
        assert len(tool.calls) == cost.calls + cost.replayed_calls
        assert cost.replayed_calls == 1  # page 1, in the session of the candidate that forked
        assert tool.open_sessions == set()
    else:
        assert cost.replayed_calls == 0
