"""Prompts that are too long: `data.max_prompt_tokens` --> the tasks that fit, or an error.

prompts.py reads its sources through `fitting_reader`. Lengths are those of the model's own tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

from agent_r1.learner.config import DataConfig
from agent_r1.learner.prompts import ReadSource
from agent_r1.runtime.files.data_source import DataSource
from agent_r1.runtime.files.tasks import (
    TaskFileError,
    numbered_tasks,
    read_task_file,
    refuse_images,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1.text.chat_template import render_calls, template_message
from agent_r1.text.control_tokens import ControlTokens, as_json, unused_word
from agent_r1_proto.tasks import ChatMessage, Role, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CUT = "Cut-7f3a"
_QUOTED = 'Result-7f3a "quoted"\nnext.'
"""Looks different where a template writes it as a string of JSON."""
_Dialogue = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptFormat:
    """What turns a task into the prompt that the model sees."""

    model_path: str
    system_prompt: str | None
    template_kwargs: Mapping[str, Any]
    tool_format: str | None = "hermes"
    """`env.tool_format`; None where no tool is offered."""
    max_result_chars: int | None = None
    """`env.max_tool_response_chars`; None: results that a prompt ends with are measured whole."""
    max_result_tokens: int | None = None
    """`env.max_tool_response_tokens`."""

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer of the model."""
        with quick_imports():  # seconds, and not needed without a limit
            from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.model_path, trust_remote_code=False)


class PromptLengths:
    """Measures prompts as rollout encodes them: control tokens in tasks are spelled out.

    Args:
        form: what turns tasks into prompts.

    Raises:
        ValueError: there is no such format of tool calls.
    """

    def __init__(self, form: PromptFormat) -> None:
        from agent_r1.text.reading import MARKUP  # which most commands do without
        from agent_r1.text.tool_formats import NO_CALLS, load_tool_format

        self._form = form
        self._tokenizer: Any = form.load_tokenizer()
        named = form.tool_format
        tool_format = NO_CALLS if named is None else load_tool_format(named)
        results = form.tool_format is not None and tool_format.in_template
        glue = self._glue(results=results)
        self._write_calls = tool_format.write
        markup = (*MARKUP, *tool_format.markup)
        self._given = ControlTokens(self._tokenizer, glue, markup)
        self._said = ControlTokens(self._tokenizer, glue, (), spared=markup)
        self._in_json = results and self._writes_json()

    def measure(self, found: Sequence[tuple[str, Task]]) -> list[int]:
        """Return the tokens of each prompt, without the descriptions of tools.

        Args:
            found: tasks, and where each stands.

        Raises:
            TaskFileError: the chat template refuses one, or it holds an image; file and line are
                named.
        """
        for where, task in found:
            refuse_images(where, task)
        prompts = [self._pieces(where, task) for where, task in found]
        pieces = [piece for prompt in prompts for piece in prompt]
        encoded = self._tokenizer(pieces, add_special_tokens=False, verbose=False)["input_ids"]
        lengths = map(len, encoded)
        return [
            sum(islice(lengths, len(prompt))) + self._result_length(task)
            for prompt, (_, task) in zip(prompts, found, strict=True)
        ]

    def _pieces(self, where: str, task: Task) -> list[str]:
        """Return the text of a prompt, cut wherever a control token is spelled out.

        The results that it ends with are left out: see `_result_length`.
        """
        messages = task.messages()
        told = self._form.system_prompt if messages[0].role != "system" else None
        cut = unused_word(_CUT, [told or "", *(message.shown() for message in messages)])
        dialogue = [template_message(m, partial(self._cut, m.role, cut)) for m in messages]
        for shown in dialogue[len(messages) - len(_results(task)) :]:
            shown["content"] = cut
        if told is not None:  # control tokens in it are meant
            dialogue.insert(0, {"role": "system", "content": told})
        try:
            return render_calls(self._render, dialogue, self._write_calls).split(cut)
        except Exception as exc:  # a template is code, and may raise anything
            roles = ", ".join(message["role"] for message in dialogue)
            raise TaskFileError(
                f"{where}: the chat template cannot render a dialogue of the roles {roles}: {exc}; "
                "correct the prompt or env.system_prompt, or put a chat_template.jinja that takes "
                "such dialogues beside the model"
            ) from exc

    def _cut(self, role: Role, cut: str, text: str) -> str:
        control = self._said if role == "assistant" else self._given
        return cut.join(control.pieces(text))

    def _result_length(self, task: Task) -> int:
        """Return the tokens of the results that a prompt ends with, cut as rollout cuts them."""
        limits: dict[str, Any] = {
            "max_chars": self._form.max_result_chars,
            "max_tokens": self._form.max_result_tokens,
            "in_json": self._in_json,
        }
        return sum(
            len(self._given.encode_limited(result.text(), **limits)[1]) for result in _results(task)
        )

    def _writes_json(self) -> bool:
        """Say whether the template writes results as strings of JSON, as Llama 3's do."""
        asked, said = ({"role": role, "content": "x"} for role in ("user", "assistant"))
        with suppress(Exception):  # the prompts will say what it refuses
            shown = self._render([asked, said, {"role": "tool", "content": _QUOTED}])
            return _QUOTED not in shown and as_json(_QUOTED) in shown
        return False

    def _glue(self, *, results: bool) -> set[int]:
        """Return the tokens that the template puts around messages, as far as it can write them."""
        asked, said = ({"role": role, "content": "x"} for role in ("user", "assistant"))
        dialogues = [[asked], [{"role": "system", "content": "x"}, asked], [asked, said, asked]]
        if results:
            dialogues.append([asked, said, {"role": "tool", "content": "x"}])
        glue: set[int] = set()
        for dialogue in dialogues:
            with suppress(Exception):  # the prompts will say what it refuses
                text = self._render(dialogue)
                glue.update(self._tokenizer.encode(text, add_special_tokens=False))
        return glue

    def _render(self, dialogue: _Dialogue) -> str:
        return self._tokenizer.apply_chat_template(
            dialogue, tokenize=False, add_generation_prompt=True, **self._form.template_kwargs
        )


def _results(task: Task) -> list[ChatMessage]:
    """Return the results that a prompt ends with."""
    ending = takewhile(lambda message: message.role == "tool", reversed(task.messages()))
    return list(ending)[::-1]


def fitting_reader(data: DataConfig, form: PromptFormat) -> ReadSource:
    """Return what reads a source and keeps the tasks within `data.max_prompt_tokens`."""
    limit = data.max_prompt_tokens
    if limit is None:
        return read_task_file
    prompts = PromptLengths(form)

    def read(source: DataSource) -> list[Task]:
        found = list(numbered_tasks(source))
        lengths = prompts.measure(found)
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
