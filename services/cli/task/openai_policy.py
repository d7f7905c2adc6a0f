"""Turns from a server with the OpenAI chat API: `agent-r1 try CONFIG --policy openai:URL`.

The server sees messages, not tokens: it has a template and a tokenizer of its own. Its calls are
written down in the format of `env.tool_format` (episodes.py runs the interaction). That is good
enough to see whether a task can be solved, and nothing is trained on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from agent_r1.config.sources import ConfigError
from agent_r1.runtime.http import MAX_DETAIL_CHARS
from agent_r1.text.chat_format import ChatFormat, OutsideMessage, PromptMessage, Rendered
from agent_r1.text.chat_template import template_message, with_json_arguments
from agent_r1.text.tokens import PolicyError
from agent_r1.text.tool_formats import HERMES, ToolFormat
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.tools import ToolSpec

KEY_VARIABLE = "OPENAI_API_KEY"
TIMEOUT_S = 300.0

Message = dict[str, Any]


@dataclass(frozen=True)
class PolicyServer:
    """A server, and the model that it is asked for."""

    http: httpx.AsyncClient
    model: str

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], **sampling: Any
    ) -> Message:
        """Return the next message of the assistant.

        Raises:
            PolicyError: the server did not give one.
        """
        body: Message = {"model": self.model, "messages": list(messages), **sampling}
        if tools:
            body["tools"] = list(tools)
        try:
            answer = await self.http.post("chat/completions", json=body)
            answer.raise_for_status()
            return answer.json()["choices"][0]["message"]
        except httpx.HTTPStatusError as exc:
            told = exc.response.text[:MAX_DETAIL_CHARS]
            raise PolicyError(f"the server answered {exc.response.status_code}: {told}") from exc
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
            raise PolicyError(f"the server gave no message: {type(exc).__name__}: {exc}") from exc


def open_client(url: str) -> httpx.AsyncClient:
    """Return a client of the server at a base URL.

    Raises:
        ConfigError: it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--policy openai:{url} must name the base URL of a server after openai:, such as "
            "openai:http://localhost:8000/v1"
        )
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=url.rstrip("/") + "/", headers=headers, timeout=TIMEOUT_S)


async def find_model(http: httpx.AsyncClient, name: str | None) -> PolicyServer:
    """Return the server with the model of this name, or with the first it offers.

    Raises:
        ConfigError: the server cannot be reached, or lists no model.
    """
    if name is not None:
        return PolicyServer(http, name)
    try:
        answer = await http.get("models")
        answer.raise_for_status()
        return PolicyServer(http, str(answer.json()["data"][0]["id"]))
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
        raise ConfigError(
            f"{http.base_url}models does not list a model ({type(exc).__name__}: {exc}); correct "
            f"the URL, set {KEY_VARIABLE} if it asks for a key, or name the model with --model"
        ) from exc


@dataclass
class Dialogue:
    """One interaction as the server sees it."""

    server: PolicyServer
    temperature: float
    max_tokens: int
    tool_format: ToolFormat = HERMES
    """Format in which calls are written down."""
    messages: list[Message] = field(default_factory=list)
    tools: list[Mapping[str, Any]] = field(default_factory=list)

    async def next_text(self) -> str:
        """Ask for the next turn; return it with its calls written out."""
        message = await self.server.complete(
            self.messages, self.tools, temperature=self.temperature, max_tokens=self.max_tokens
        )
        said = message.get("content") or ""
        calls = message.get("tool_calls") or []
        kept: Message = {"role": "assistant", "content": said}
        if calls:
            kept["tool_calls"] = calls
        self.messages.append(kept)
        written = [_name_and_arguments(call) for call in calls]
        return said + (self.tool_format.write(written) if written else "")

    def add_replies(self, replies: Sequence[OutsideMessage]) -> None:
        """Add what the environment answered, each result to the call it belongs to."""
        ids = [call.get("id", "") for call in self.messages[-1].get("tool_calls", ())]
        for reply in replies:
            if reply.role == "tool" and ids:
                call_id = ids.pop(0)
                self.messages.append(
                    {"role": "tool", "tool_call_id": call_id, "content": reply.text}
                )
            else:  # the server did not take the text for a call
                self.messages.append({"role": "user", "content": reply.text})


class DialogueChat(ChatFormat):
    """A chat format that also writes down, as messages, what it renders."""

    def __init__(self, chat: ChatFormat, dialogue: Dialogue) -> None:
        # It has been checked, which takes longer than one interaction may wait.
        self.__dict__.update(chat.__dict__)
        self._rewriting = frozenset()  # the server renders every history itself
        self._dialogue = dialogue
        if not self._tool_format.write([("any", "{}")]):  # one of the user's own, which only reads
            self._tool_format = HERMES
        dialogue.tool_format = self._tool_format

    def render_prompt(
        self, messages: Sequence[PromptMessage], tools: Sequence[ToolSpec] = ()
    ) -> Rendered:
        """Render the prompt, and begin the dialogue with it."""
        asked = [m for m in messages if isinstance(m, ChatMessage)]
        dialogue = self._dialogue
        dialogue.messages = with_json_arguments([template_message(m, str) for m in asked])
        dialogue.tools = [tool.as_function() for tool in tools]
        dialogue.add_replies([m for m in messages if isinstance(m, OutsideMessage)])
        return super().render_prompt(messages, tools)

    def encode_reply(self, reply: Sequence[OutsideMessage], *, is_ended: bool = True) -> list[int]:
        """Render a reply, and add it to the dialogue."""
        self._dialogue.add_replies(reply)
        return super().encode_reply(reply)


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return the tool of a call and the JSON of its arguments."""
    function = call.get("function") or {}
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return function.get("name", ""), arguments
