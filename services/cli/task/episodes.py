"""Interactions run in this process: the real tools, ToolEnv and reward, with any writer of turns.

`agent-r1 try --policy none` plays scripted turns, `--policy openai:URL` asks a server. Tools run
as services (launch/local_client.py starts them); no engine is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import Field, ValidationError

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.cli.services.serve import rollout_settings
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.reward.scorer import Scorer
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.main import (
    RolloutSettings,
    build_chat_format,
    connect,
    make_agent_loop,
    make_tool_client,
)
from agent_r1.runtime.config import StrictConfig
from agent_r1.runtime.files.file_formats import read_text
from agent_r1.runtime.files.hub import model_folder
from agent_r1.runtime.imports import quick_imports
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.chat_template import read_end_tokens
from agent_r1.text.tokens import Generation, PolicyError
from agent_r1_proto.rewards import ScoredTrajectory
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import VersionSpan

SERVER_ID = "this-process"
WEIGHTS = 0
"""Version that the tokens are said to be of; no weights are involved."""

NextText = Callable[[], Awaitable[str]]
"""Writes the next turn of one interaction, without its end-of-turn token."""


class Episode(StrictConfig):
    """A scripted interaction: what the model writes in each turn, for one task."""

    task: str
    """Id of the task, in any file of the configuration."""
    turns: list[str] = Field(min_length=1)
    """Text of each turn, without the end-of-turn token."""


def read_episode(path: Path) -> Episode:
    """Read one episode.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise ConfigError(f"{path} cannot be read: {why}; write it, or correct the path") from exc
    try:
        return Episode.model_validate_json(text)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}: {where or 'the file'}: {first['msg']}; write "
            '{"task": "id of a task", "turns": ["text of the first turn", ...]}'
        ) from exc


@dataclass(frozen=True)
class TextSampler:
    """Gives turns that come as text to the agent loop, with log-probability 0."""

    chat: ChatFormat
    end_token: int
    max_context: int
    next_text: NextText

    async def generate(
        self,
        token_ids: list[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        request_id: str,
    ) -> Generation:
        """Return the next turn as tokens, cut to `max_tokens`."""
        whole = [*self.chat.encode(await self.next_text()), self.end_token]
        kept = whole[:max_tokens]
        return Generation(
            token_ids=kept,
            logprobs=[0.0] * len(kept),
            version_spans=[VersionSpan(policy_version=WEIGHTS, start=0, end=len(kept))],
            finish_reason="stop" if len(kept) == len(whole) else "length",
        )


def scripted(turns: Sequence[str]) -> NextText:
    """Return what writes the turns of a script."""
    left = list(turns)

    async def next_text() -> str:
        if not left:
            raise PolicyError(
                f"the interaction goes on after the {len(turns)} turns of the script; add the next "
                "turn, or let the ToolEnv end it"
            )
        return left.pop(0)

    return next_text


@dataclass(frozen=True)
class EpisodeRunner:
    """Runs interactions in this process."""

    settings: RolloutSettings
    chat: ChatFormat
    end_token: int
    tools: ToolClient
    scorer: Scorer

    @property
    def specs(self) -> Mapping[str, ToolSpec]:
        """Descriptions of the tools, by name."""
        return self.tools.specs

    def prompt_tokens(self, task: Task) -> list[int]:
        """Return the prompt of a task in tokens.

        Raises:
            ValueError: it cannot be rendered.
        """
        return self._reader.prompt_tokens(task)

    async def run(
        self,
        task: Task,
        next_text: NextText,
        *,
        chat: ChatFormat | None = None,
        group: int = 0,
        sample: int = 0,
    ) -> ScoredTrajectory:
        """Run one interaction to its end, and score it.

        Args:
            task: what is to be done.
            next_text: writes the turns.
            chat: stands in for the runner's own.
            group: number of the task among those that are run.
            sample: number of the attempt at it.

        Returns:
            The trajectory; without a reward when it FAILED.

        Raises:
            ComponentError: a reward component failed.
            ValueError: the payload lacks what a component needs.
        """
        key = RolloutKey(
            run_id=self.settings.run.id,
            incarnation=0,
            group_id=group,
            sample_index=sample,
        )
        rollout = RolloutTask(key=key, group_size=1, task=task, purpose="eval")
        trajectory = await self._loop(next_text, chat or self.chat).run(rollout)
        reward = None
        if trajectory.status != "FAILED":
            reward = await self.scorer.score_trajectory(trajectory)
        return ScoredTrajectory(trajectory=trajectory, reward=reward)

    @cached_property
    def _reader(self) -> AgentLoop:
        return self._loop(scripted(()), self.chat)

    def _loop(self, next_text: NextText, chat: ChatFormat) -> AgentLoop:
        sampler = TextSampler(chat, self.end_token, self.settings.model.max_context, next_text)
        return make_agent_loop(sampler, chat, self.tools, self.settings, SERVER_ID)


@contextlib.asynccontextmanager
async def open_runner(served: Config) -> AsyncIterator[EpisodeRunner]:
    """Load the tokenizer and reach the tools of a configuration that `local_client` serves.

    Raises:
        ValueError: the chat template cannot be used, or a tool is not what it should be.
    """
    settings = rollout_settings(served)
    with quick_imports():
        chat, end_token = await asyncio.to_thread(_load_chat, settings)
    async with await connect(settings) as broker:
        tools = make_tool_client(settings, broker, SERVER_ID)
        try:
            await tools.start(settings.rollout.tool_start_timeout_s)
            scorer = Scorer(served.reward, served.turn_reader())
            try:
                yield EpisodeRunner(settings, chat, end_token, tools, scorer)
            finally:
                await scorer.close()
        finally:
            await tools.stop()


def _load_chat(settings: RolloutSettings) -> tuple[ChatFormat, int]:
    folder = model_folder(settings.model.path, settings.model.revision, small=True)
    ends = read_end_tokens(folder)
    has_tools = bool(settings.tools)
    return build_chat_format(settings.env, str(folder), ends, has_tools=has_tools), ends[0]
