"""A language model's server, as reward components ask it over HTTP.

Limits requests, and asks a server that is away again until patience is nearly up: an outage is an
error of the component, never a score. judge.py, reward_model.py and critic.py ask.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import httpx

from agent_r1.reward.config import ModelServerConfig
from agent_r1_proto.tasks import ChatMessage

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
_AWAY = {408, 425, 429}
"""Statuses below 500 that another try may not get."""


TOKENS_ASKED: ContextVar[list[int] | None] = ContextVar("TOKENS_ASKED", default=None)
"""Gets the number of tokens that each request of this context reads and writes; None counts none.
"""


class ServerAwayError(Exception):
    """The server did not answer, or asks for patience; the text says what it said."""

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class ModelServer:
    """Asks one model.

    Args:
        config: its table under `[reward]`.
        table: its name, for messages.
        patience_s: how long a server that is away is asked again, in seconds.

    Raises:
        ValueError: the table names no server.
    """

    def __init__(self, config: ModelServerConfig, table: str, patience_s: float) -> None:
        if config.url is None:
            raise ValueError(
                f"{table}.url is not set, and {table}.path ({config.path}) is served only by "
                f"commands that start all services on one machine; start a server, and set "
                f"{table}.url"
            )
        self._config = config
        self._url = config.url.rstrip("/")
        self.table = table
        self.model = config.model
        self._patience_s = patience_s
        self._scores: OrderedDict[str, Any] = OrderedDict()
        self._being_asked: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._next_request_at = 0.0
        self._client: httpx.AsyncClient | None = None
        self.num_asked = 0
        """Requests that were sent."""
        self.num_away = 0
        """Requests that a server which is away did not answer."""
        self.num_cached = 0
        """Scores that were known already."""
        self.num_spelled_out = 0
        """Control tokens of interactions that were changed in what was asked."""

    async def score_once(self, key: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the score that is known under a key, else what `ask` returns.

        Equal keys are asked about once, at the same time too; an error is not kept.
        """
        lock = self._being_asked.setdefault(key, asyncio.Lock())
        async with lock:
            if key in self._scores:
                self.num_cached += 1
                self._scores.move_to_end(key)
                return self._scores[key]
            self._scores[key] = score = await ask()
            if len(self._scores) > self._config.cache_size:
                self._scores.popitem(last=False)
            return score

    async def post(
        self, path: str, body: dict[str, Any], read: Callable[[dict[str, Any]], T], fault: str
    ) -> T:
        """Return what the server answers.

        Args:
            path: below the configured URL.
            body: of the request; `model` and `extra_body` are added.
            read: takes what is wanted out of the answer's JSON object.
            fault: what an answer is from which it cannot be taken, and what to do about it.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: it refuses the request, or nothing can be read in its answer.
        """
        body = {"model": self._config.model, **body, **self._config.extra_body}
        deadline, delay_s = time.monotonic() + self._patience_s, FIRST_DELAY_S
        while True:
            try:
                async with self._places:
                    await self._wait_for_turn()
                    answer = await self._ask(path, body, deadline)
                return _read(answer, read, fault)
            except ServerAwayError as exc:
                self.num_away += 1
                wait_s = max(delay_s, exc.retry_after_s)
                if time.monotonic() + wait_s >= deadline:
                    raise
                logger.warning(
                    "server is away table=%s next_try_s=%.1f problem=%s", self.table, wait_s, exc
                )
                await asyncio.sleep(wait_s)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _wait_for_turn(self) -> None:
        """Keep to `requests_per_minute`."""
        if self._config.requests_per_minute is None:
            return
        at = max(self._next_request_at, time.monotonic())
        self._next_request_at = at + 60.0 / self._config.requests_per_minute
        await asyncio.sleep(at - time.monotonic())

    async def _ask(self, path: str, body: dict[str, Any], deadline: float) -> httpx.Response:
        if self._client is None:
            key = self._config.api_key
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            self._client = httpx.AsyncClient(headers=headers)
        url = f"{self._url}{path}"
        self.num_asked += 1
        try:
            left_s = max(deadline - time.monotonic(), FIRST_DELAY_S)
            answer = await self._client.post(url, json=body, timeout=left_s)
        except httpx.TransportError as exc:
            raise ServerAwayError(
                f"the server at {url} does not answer ({type(exc).__name__}: {exc}); start it, or "
                f"correct {self.table}.url"
            ) from exc
        if answer.status_code in _AWAY or answer.status_code >= 500:
            raise ServerAwayError(
                f"the server at {url} says {answer.status_code}: {answer.text:.300}",
                _retry_after_s(answer),
            )
        if answer.status_code != 200:
            raise ValueError(
                f"the server at {url} refuses the request with {answer.status_code}: "
                f"{answer.text:.300}; correct [{self.table}]"
            )
        return answer


class ChatServer(ModelServer):
    """A model behind OpenAI's chat API: asked to complete a dialogue."""

    async def complete(self, messages: list[ChatMessage], **options: Any) -> dict[str, Any]:
        """Return the first choice that the model gives.

        Args:
            messages: the dialogue.
            options: more keys of the request's body.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: it refuses the request, or its answer is no chat completion.
        """
        asked = [message.model_dump() for message in messages]
        return await self.post(
            "/chat/completions",
            {"messages": asked, "temperature": 0.0, **options},
            lambda answer: dict(answer["choices"][0]),
            f"no chat completion; correct {self.table}.url, which usually ends with /v1",
        )


def _read(answer: httpx.Response, read: Callable[[dict[str, Any]], T], fault: str) -> T:
    try:
        body = dict(answer.json())
        _count_tokens(body)
        return read(body)
    except (ValueError, LookupError, TypeError) as exc:
        raise ValueError(f"{answer.url} answers {answer.text!r:.300}, which is {fault}") from exc


def _count_tokens(body: dict[str, Any]) -> None:
    """Count what a request has cost, where somebody counts and the server says it."""
    tokens, usage = TOKENS_ASKED.get(), body.get("usage")
    if tokens is not None and usage is not None:
        tokens.append(int(usage["total_tokens"]))


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds that the server asks to wait; a date counts as none."""
    try:
        return max(float(answer.headers.get("retry-after", 0.0)), 0.0)
    except ValueError:
        return 0.0
