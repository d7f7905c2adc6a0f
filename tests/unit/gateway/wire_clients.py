"""A client of each wire: the SDK that agents have, and what it reads in words of no wire."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import anthropic
import openai

from tests.unit.gateway.wire_fakes import KEY, WAIT_S

PARAMETERS: Any = {"type": "object", "properties": {"query": {"type": "string"}}}


@dataclass
class Answer:
    """What a client reads of an answer, whatever its wire."""

    raw: Any
    thought: str = ""
    content: str = ""
    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list[Any])
    """Id, name and arguments."""
    reason: str | None = None
    usage: tuple[int, int, int] = (0, 0, 0)
    """Tokens that were read, those of them that were cached, and those that were sampled."""


class Wire(ABC):
    """A client of one wire. A history is a list in the form of that wire."""

    name: str
    path: str

    sdk: Any
    """Client of the wire; unset where a test writes its requests itself."""

    def __init__(self, url: str = "") -> None:
        if url:
            self.sdk = self.open(url)

    def open(self, url: str) -> Any:
        """Open the client that the wire's own package has."""
        return openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=WAIT_S)

    @abstractmethod
    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Answer: ...

    @abstractmethod
    def user(self, text: str) -> Any: ...

    @abstractmethod
    def said(self, answer: Answer) -> list[Any]: ...

    @abstractmethod
    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        """Results of calls, by their ids."""

    @abstractmethod
    def tool(self) -> Any: ...

    def body(self, **more: Any) -> dict[str, Any]:
        return {"model": "policy", **more}


class Chat(Wire):
    name, path = "chat", "chat/completions"

    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Answer:
        request: Any = self.body(messages=history) | more
        completions = self.sdk.chat.completions
        if not stream:
            return self._read(await completions.create(**request))
        usage, thought = {"include_usage": True}, ""
        async with completions.stream(**request, stream_options=usage) as events:
            async for one in events:
                if one.type == "chunk" and one.chunk.choices:
                    delta = one.chunk.choices[0].delta
                    thought += getattr(delta, "reasoning_content", None) or ""
            answer = self._read(await events.get_final_completion())
        answer.thought = thought
        return answer

    def _read(self, got: Any) -> Answer:
        said, usage = got.choices[0].message, got.usage
        calls = [
            (c.id, c.function.name, json.loads(c.function.arguments)) for c in said.tool_calls or ()
        ]
        counts = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens)
        return Answer(
            got,
            getattr(said, "reasoning_content", None) or "",
            said.content or "",
            calls,
            got.choices[0].finish_reason,
            (*counts, usage.completion_tokens),
        )

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def said(self, answer: Answer) -> list[Any]:
        calls = [
            {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
            for i, n, a in answer.calls
        ]
        said: dict[str, Any] = {"role": "assistant", "content": answer.content}
        return [said | ({"tool_calls": calls} if calls else {})]

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        return [{"role": "tool", "tool_call_id": i, "content": text} for i, text in pairs]

    def tool(self) -> Any:
        return {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}


class Responses(Wire):
    name, path = "responses", "responses"

    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Answer:
        request: Any = self.body(input=history) | more
        if not stream:
            return self._read(await self.sdk.responses.create(**request))
        async with self.sdk.responses.stream(**request) as events:
            last = [one async for one in events][-1]
        return self._read(last.response)

    def _read(self, got: Any) -> Answer:
        answer = Answer(got, content=got.output_text, reason=got.status)
        for item in got.output:
            if item.type == "reasoning":
                answer.thought += "".join(part.text for part in item.summary)
            elif item.type == "function_call":
                answer.calls.append((item.call_id, item.name, json.loads(item.arguments)))
        if got.usage:
            cached = got.usage.input_tokens_details.cached_tokens
            answer.usage = (got.usage.input_tokens, cached, got.usage.output_tokens)
        return answer

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def said(self, answer: Answer) -> list[Any]:
        return [item.model_dump(exclude_unset=True) for item in answer.raw.output]

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        return [{"type": "function_call_output", "call_id": i, "output": text} for i, text in pairs]

    def tool(self) -> Any:
        return {"type": "function", "name": "search", "parameters": PARAMETERS}


class Messages(Wire):
    name, path = "messages", "messages"

    def open(self, url: str) -> Any:
        base = url.removesuffix("/v1")
        return anthropic.AsyncAnthropic(base_url=base, api_key=KEY, max_retries=0, timeout=WAIT_S)

    async def ask(self, history: list[Any], *, stream: bool = False, **more: Any) -> Answer:
        request = self.body(messages=history) | more
        messages = self.sdk.beta.messages
        if not stream:
            return self._read(await messages.create(**request))
        async with messages.stream(**request) as events:
            return self._read(await events.get_final_message())

    def body(self, **more: Any) -> dict[str, Any]:
        thinking = {"type": "enabled", "budget_tokens": 1024}
        return {"model": "policy", "max_tokens": 4000, "thinking": thinking, **more}

    def _read(self, got: Any) -> Answer:
        usage = got.usage
        cached = usage.cache_read_input_tokens
        answer = Answer(
            got,
            reason=got.stop_reason,
            usage=(usage.input_tokens + cached, cached, usage.output_tokens),
        )
        for block in got.content:
            if block.type == "thinking":
                answer.thought += block.thinking
            elif block.type == "text":
                answer.content += block.text
            else:
                answer.calls.append((block.id, block.name, block.input))
        return answer

    def user(self, text: str) -> Any:
        return {"role": "user", "content": text}

    def said(self, answer: Answer) -> list[Any]:
        return [{"role": "assistant", "content": [b.to_dict() for b in answer.raw.content]}]

    def results(self, *pairs: tuple[str, str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": name, "content": text} for name, text in pairs
        ]
        return [{"role": "user", "content": blocks}]

    def tool(self) -> Any:
        return {"name": "search", "input_schema": PARAMETERS}


WIRES: dict[str, type[Wire]] = {one.name: one for one in (Chat, Responses, Messages)}
