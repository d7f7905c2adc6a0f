"""Dialogues as the policy would have seen and said them: token ids, and which tokens it said.

data.py, reward_model/data.py --messages--> DialogueEncoder --token ids, assistant mask--> back to
them

The template renders one message more at a time. What an assistant message adds, up to and with its
end-of-turn token, is said by the policy; everything else is given to it. Each stretch is tokenized
apart, and so is the text of each message between two turns, exactly as a rollout puts a trajectory
together, so the warm start trains on the token boundaries that reinforcement learning will meet.

No message and no tool becomes a control token: where one has the text of such a token, a word that
nothing else has is put into it, and what is rendered is encoded in pieces without that word.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import GenerationConfig

from agent_r1.text.chat_template import load_tokenizer, render, render_calls, template_message
from agent_r1.text.control_tokens import MARKUP, control_pattern, map_texts, spell_out, unused_word
from agent_r1.text.tool_formats import HERMES, ToolFormat
from agent_r1_proto.tasks import ChatMessage

_CUT = "Cut-7f3a"


@dataclass(frozen=True)
class EncodedDialogue:
    """One dialogue in tokens."""

    token_ids: npt.NDArray[np.int32]
    """[T]"""
    assistant_mask: npt.NDArray[np.bool_]
    """[T] True where the assistant said the token, its end-of-turn token included."""


class DialogueEncoder:
    """Encodes dialogues with one model's tokenizer and chat template.

    Args:
        model_path: Hugging Face model directory, or a model name.
        template_kwargs: given to every rendering.
        tool_format: how calls are written where the template shows none.

    Raises:
        ValueError: the model has no tokenizer, no chat template or no end-of-turn token.
    """

    def __init__(
        self,
        model_path: str,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_format: ToolFormat = HERMES,
    ) -> None:
        self._tool_format = tool_format
        self._tokenizer = load_tokenizer(model_path)
        self._backend = self._tokenizer.backend_tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._ends = self._end_of_turn_texts(model_path)
        self._cut = _CUT
        added = self._tokenizer.added_tokens_decoder.values()
        control = [t.content for t in added if t.special or MARKUP.match(t.content)]
        self._control = control_pattern(control)
        self._between = control_pattern({*self._between_turns(control), *self._ends})

    def _between_turns(self, control: Sequence[str]) -> set[str]:
        """Return the control tokens that no turn and no instruction holds.

        Others may be tags of calls, of a format that is not known here.
        """
        question = [ChatMessage(role="user", content="x")]
        named = [t for t in self._tokenizer.special_tokens_map.values() if isinstance(t, str)]
        shown = "\n".join([*self._ends, *named])
        with contextlib.suppress(ValueError):  # the dialogue will say what the template refuses
            shown += self._render(question, None, prompt=False)
        return {token for token in control if token in shown}

    def _end_of_turn_texts(self, model_path: str) -> list[str]:
        """Return the tokens at which the policy stops, as text."""
        ids: set[int] = set()
        if self._tokenizer.eos_token_id is not None:
            ids.add(self._tokenizer.eos_token_id)
        if not Path(model_path).is_dir() or (Path(model_path) / "generation_config.json").is_file():
            stops = GenerationConfig.from_pretrained(model_path).eos_token_id
            ids.update([stops] if isinstance(stops, int) else stops or [])
        if not ids:
            raise ValueError(
                f"model.path ({model_path}) has no end-of-turn token; set eos_token_id in its "
                "generation_config.json"
            )
        return [self._backend.decode([i], skip_special_tokens=False) for i in sorted(ids)]

    def encode(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> EncodedDialogue:
        """Encode a dialogue that ends with an assistant message.

        Args:
            messages: the dialogue.
            tools: function descriptions for the template; None renders none.

        Raises:
            ValueError: there is no last assistant message, or the template rewrites earlier turns.
        """
        if not messages or messages[-1].role != "assistant":
            raise ValueError(
                "the dialogue must end with an assistant message; drop what follows the last one"
            )
        texts = [*(message.shown() for message in messages), json.dumps(tools)]
        self._cut = unused_word(_CUT, texts)
        messages = [self._cut_message(message) for message in messages]
        tools = map_texts(list(tools), self._cut_outside) if tools else None
        token_ids: list[int] = []
        mask: list[bool] = []
        consumed = ""
        last_turn = -1
        for i, message in enumerate(messages):
            if message.role != "assistant":
                continue
            prefix = self._render(messages[:i], tools, prompt=True)
            full = self._render(messages[: i + 1], tools, prompt=False)
            for longer, shorter in ((prefix, consumed), (full, prefix)):
                if not longer.startswith(shorter):
                    raise ValueError(_rewrites(i, longer, shorter))
            given = prefix[len(consumed) :]
            between = messages[last_turn + 1 : i]
            given_ids = self._encode(given) if last_turn < 0 else self._encode_reply(given, between)
            said = self._through_end_of_turn(full[len(prefix) :])
            said_ids = self._encode(said)
            token_ids += given_ids + said_ids
            mask += [False] * len(given_ids) + [True] * len(said_ids)
            consumed = prefix + said
            last_turn = i
        return EncodedDialogue(np.array(token_ids, np.int32), np.array(mask, np.bool_))

    def _render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt: bool,
    ) -> str:
        shown = [template_message(m, str) for m in messages]
        roles = ", ".join(message.role for message in messages)
        render_text = partial(
            render,
            self._tokenizer,
            what=f"a dialogue of the roles {roles}",
            tools=list(tools) if tools else None,
            add_generation_prompt=prompt,
            **self._kwargs,
        )
        return render_calls(render_text, shown, self._tool_format.write)

    def _through_end_of_turn(self, turn: str) -> str:
        """Cut a rendered turn after its end-of-turn token: the first, which nothing in it can be.

        A template may write another one behind a turn that no message follows.
        """
        ends = [turn.find(end) + len(end) for end in self._ends if end in turn]
        if not ends:
            raise ValueError(
                f"the chat template ends an assistant turn with {turn[-20:]!r}, which holds none "
                f"of the model's end-of-turn tokens {self._ends}; list that token under "
                "eos_token_id in the model's generation_config.json"
            )
        return turn[: min(ends)]

    def _cut_message(self, message: ChatMessage) -> ChatMessage:
        """Return a message whose control tokens are cut in two.

        A turn and an instruction may hold the tags of thoughts and calls.
        """
        given = message.role in ("user", "tool")
        control = self._control if given else self._between

        def cut(text: str) -> str:
            return self._cut.join(spell_out(text, control))

        calls = [
            call.model_copy(
                update={"name": cut(call.name), "arguments": map_texts(call.arguments, cut)}
            )
            for call in message.tool_calls
        ]
        return message.model_copy(update={"content": cut(message.text()), "tool_calls": calls})

    def _cut_outside(self, text: str) -> str:
        return self._cut.join(spell_out(text, self._control))

    def _encode(self, text: str) -> list[int]:
        pieces = text.split(self._cut)
        return [token for piece in pieces for token in self._encode_piece(piece)]

    def _encode_piece(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def _encode_reply(self, given: str, between: Sequence[ChatMessage]) -> list[int]:
        """Encode what lies between two turns: glue and message texts, each apart."""
        token_ids: list[int] = []
        for message in between:
            # A template may strip a message's text.
            body = message.text() if message.text() in given else message.text().strip()
            before, found, given = given.partition(body)
            if body and not found:
                raise ValueError(
                    f"the chat template does not show a message of role {message.role!r} as it "
                    "was written; use a template that does"
                )
            token_ids += self._encode(before)
            token_ids += self._encode(body)
        return token_ids + self._encode(given)


def _rewrites(index: int, longer: str, shorter: str) -> str:
    """Say where two renderings part."""
    at = next(
        (i for i, (a, b) in enumerate(zip(longer, shorter, strict=False)) if a != b), len(longer)
    )
    return (
        f"the chat template renders what precedes message {index} differently once that message is "
        f"there ({shorter[at : at + 30]!r} becomes {longer[at : at + 30]!r}), so the model would "
        "be trained on a dialogue it never sees; set sft.chat_template_kwargs so that earlier "
        "turns stay as they are, or use another template"
    )
