"""Prompts that are too long: `data.max_prompt_tokens` --> the tasks that fit, or an error.

prompts.py reads its sources through `fitting_reader`. Lengths are those of the model's own tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agent_r1.learner.config import DataConfig
from agent_r1.learner.prompts import ReadSource
from agent_r1_proto.tasks import Task
from agent_r1_service.files.data_source import DataSource
from agent_r1_service.files.tasks import TaskFileError, numbered_tasks, read_task_file
from agent_r1_service.imports import quick_imports

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptFormat:
    """What turns a task into the prompt that the model sees."""

    model_path: str
    system_prompt: str | None
    template_kwargs: Mapping[str, Any]

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the model."""
        with quick_imports():  # seconds, and not needed without a limit
            from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_path)

    def render(self, where: str, task: Task, tokenizer: PreTrainedTokenizerBase) -> str:
        """Return the text of a prompt, without the descriptions of tools.

        Raises:
            TaskFileError: the chat template refuses it; file and line are named.
        """
        messages = [{"role": m.role, "content": m.text()} for m in task.messages()]
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.template_kwargs
            )
        except Exception as exc:  # a template is code, and may raise anything
            roles = ", ".join(message["role"] for message in messages)
            raise TaskFileError(
                f"{where}: the chat template cannot render a dialogue of the roles {roles}: {exc}; "
                "correct the prompt or env.system_prompt, or put a chat_template.jinja that takes "
                "such dialogues beside the model"
            ) from exc
        assert isinstance(text, str)  # of one dialogue
        return text


def fitting_reader(data: DataConfig, form: PromptFormat) -> ReadSource:
    """Return what reads a source and keeps the tasks within `data.max_prompt_tokens`."""
    limit = data.max_prompt_tokens
    if limit is None:
        return read_task_file
    tokenizer = form.load_tokenizer()

    def read(source: DataSource) -> list[Task]:
        found = list(numbered_tasks(source))
        texts = [form.render(where, task, tokenizer) for where, task in found]
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = [len(token_ids) for token_ids in encoded]
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
