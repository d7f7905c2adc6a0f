"""Prompts that are too long: `data.max_prompt_tokens` --> the tasks that fit, or an error.

prompts.py reads its sources through `fitting_reader`. Lengths are those of the model's own tokens,
as rollout encodes them (text/chat_format.py).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_r1.learner.config import DataConfig
from agent_r1.learner.prompts import ReadSource
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import (
    TaskFileError,
    numbered_tasks,
    read_task_file,
    refuse_images,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1_proto.tasks import Task

if TYPE_CHECKING:
    from agent_r1.text.chat_format import ChatFormat, OutsideMessage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptFormat:
    """Settings that turn a task into the prompt that the model sees."""

    model_path: str
    system_prompt: str | None
    template_kwargs: Mapping[str, Any]
    tool_format: str | None = "hermes"
    """`env.tool_format`; None where no tool is offered."""
    max_result_chars: int = sys.maxsize
    """`env.max_tool_response_chars`."""
    max_result_tokens: int | None = None
    """`env.max_tool_response_tokens`."""


class PromptLengths:
    """Measures prompts, without the descriptions of tools.

    Args:
        form: what turns tasks into prompts.

    Raises:
        ValueError: there is no such format of tool calls, or no tokenizer.
    """

    def __init__(self, form: PromptFormat) -> None:
        self._form = form
        self._chat = _chat_format(form)

    def measure(self, where: str, task: Task) -> int:
        """Return the tokens of a prompt.

        Args:
            where: file and line of the task, for messages.
            task: has the prompt.

        Raises:
            TaskFileError: the chat template refuses it, or it holds an image.
        """
        from agent_r1.text.chat_format import asked_dialogue

        refuse_images(where, task)
        try:
            asked = asked_dialogue(task, self._form.system_prompt, self._result)
            return len(self._chat.render_prompt(asked).token_ids)
        except ValueError as exc:
            raise TaskFileError(
                f"{where}: {exc}; correct the prompt or env.system_prompt, or put a "
                "chat_template.jinja that takes such dialogues beside the model"
            ) from exc

    def _result(self, text: str) -> OutsideMessage:
        """Return a result that a prompt ends with, cut as rollout cuts it."""
        form = self._form
        return self._chat.outside_message(
            "tool", text, max_chars=form.max_result_chars, max_tokens=form.max_result_tokens
        )


def _chat_format(form: PromptFormat) -> ChatFormat:
    with quick_imports():  # seconds, and not needed without a limit
        from agent_r1.text.chat_format import ChatFormat, reply_roles
        from agent_r1.text.chat_template import ChatTemplateError, load_tokenizer
        from agent_r1.text.tool_formats import NO_CALLS, load_tool_format

        tokenizer = load_tokenizer(form.model_path)
    tool_format = NO_CALLS if form.tool_format is None else load_tool_format(form.tool_format)
    results = form.tool_format is not None and tool_format.in_template
    make = partial(
        ChatFormat,
        tokenizer,
        end_of_turn_ids=list(tokenizer.added_tokens_decoder),
        template_kwargs=form.template_kwargs,
        tool_format=tool_format,
        segments=True,
    )
    try:
        return make(reply_roles=reply_roles(tools=results, messages=not results))
    except ChatTemplateError:  # rollout says what it refuses; prompts without replies may render
        return make(reply_roles=())


def fitting_reader(data: DataConfig, form: PromptFormat) -> ReadSource:
    """Return what reads a source and keeps the tasks within `data.max_prompt_tokens`."""
    limit = data.max_prompt_tokens
    if limit is None:
        return read_task_file
    prompts = PromptLengths(form)

    def read(source: DataSource) -> list[Task]:
        found = list(numbered_tasks(source))
        lengths = [prompts.measure(where, task) for where, task in found]
        long = [i for i, length in enumerate(lengths) if length > limit]
        if long and data.over_long == "refuse":
            raise TaskFileError(_too_long(found[long[0]][0], lengths[long[0]], limit, len(long)))
        if len(long) == len(found):
            raise TaskFileError(
                f"{source}: each of its {len(found)} prompts has more than "
                f"data.max_prompt_tokens ({limit}) tokens; raise it"
            )
        if long:
            logger.warning(
                "over-long prompts dropped source=%s dropped=%d of=%d limit=%d longest=%d",
                source,
                len(long),
                len(found),
                limit,
                max(lengths),
            )
        dropped = set(long)
        return [task for i, (_, task) in enumerate(found) if i not in dropped]

    return read


def _too_long(where: str, length: int, limit: int, count: int) -> str:
    more = f" (as have {count - 1} more of this file)" if count > 1 else ""
    return (
        f"{where}: the prompt has {length} tokens{more}, and data.max_prompt_tokens is {limit}; "
        'shorten the prompt, raise the limit, or set data.over_long = "drop"'
    )
