"""The component `judge`: what a language model says an interaction is worth.

Asks any server with OpenAI's chat API, with a prompt of the user's. Equal prompts are asked once. A
server that is away is asked again until the component's time is nearly up; then the component has
failed, and the trajectory with it: an outage is never a score.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import OrderedDict
from string import Template
from typing import Any
from weakref import WeakValueDictionary

import httpx

from agent_r1.reward import scoring
from agent_r1.reward.config import JudgeConfig
from agent_r1_proto.rewards import ScoreRequest

logger = logging.getLogger(__name__)

FIRST_DELAY_S, LONGEST_DELAY_S = 0.5, 10.0
PLACES = ("question", "transcript", "answer", "answers", "payload", "status")
"""What a prompt may name, as `$question` or `${question}`; `$$` is a dollar sign."""
_AWAY = {408, 425, 429}
"""Statuses below 500 that another try may not get."""


class JudgeAwayError(Exception):
    """The server did not answer, or asks for patience; the text says what it said."""

    def __init__(self, problem: str, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s


class Judge:
    """Scores interactions by asking a model.

    Args:
        config: `[reward.judge]`.
        patience_s: how long a server that is away is asked again, in seconds.

    Raises:
        ValueError: the prompt cannot be read, or names something unknown.
    """

    def __init__(self, config: JudgeConfig, patience_s: float) -> None:
        self._config = config
        self._patience_s = patience_s
        self._template = _read_template(config)
        self._pattern = re.compile(config.pattern, re.IGNORECASE)
        self._scores: OrderedDict[str, float] = OrderedDict()
        self._being_asked: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._next_request_at = 0.0
        self._client: httpx.AsyncClient | None = None
        self.num_asked = 0
        """Requests that were sent."""
        self.num_away = 0
        """Requests that a server which is away did not answer."""
        self.num_cached = 0
        """Interactions whose prompt had been answered before."""

    async def score(self, request: ScoreRequest) -> float:
        """Return the score of one interaction, from 0.0 to 1.0.

        Raises:
            JudgeAwayError: the server did not answer in time.
            ValueError: it refuses the request, or its answer has no score.
        """
        prompt = self._template.substitute(places_of(request))
        lock = self._being_asked.setdefault(prompt, asyncio.Lock())
        async with lock:
            if prompt in self._scores:
                self.num_cached += 1
                self._scores.move_to_end(prompt)
                return self._scores[prompt]
            score = self._read_score(await self._ask_until_answered(prompt))
            self._scores[prompt] = score
            if len(self._scores) > self._config.cache_size:
                self._scores.popitem(last=False)
            return score

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _ask_until_answered(self, prompt: str) -> str:
        deadline, delay_s = time.monotonic() + self._patience_s, FIRST_DELAY_S
        while True:
            try:
                async with self._places:
                    await self._wait_for_turn()
                    return await self._ask(prompt, deadline)
            except JudgeAwayError as exc:
                self.num_away += 1
                wait_s = max(delay_s, exc.retry_after_s)
                if time.monotonic() + wait_s >= deadline:
                    raise
                logger.warning("judge is away next_try_s=%.1f problem=%s", wait_s, exc)
                await asyncio.sleep(wait_s)
                delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    async def _wait_for_turn(self) -> None:
        """Keep to `requests_per_minute`."""
        if self._config.requests_per_minute is None:
            return
        at = max(self._next_request_at, time.monotonic())
        self._next_request_at = at + 60.0 / self._config.requests_per_minute
        await asyncio.sleep(at - time.monotonic())

    async def _ask(self, prompt: str, deadline: float) -> str:
        if self._client is None:
            key = self._config.api_key
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            self._client = httpx.AsyncClient(headers=headers)
        url = f"{self._config.url.rstrip('/')}/chat/completions"
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": self._config.max_tokens,
            "temperature": 0.0,
            **self._config.extra_body,
        }
        self.num_asked += 1
        try:
            left_s = max(deadline - time.monotonic(), FIRST_DELAY_S)
            answer = await self._client.post(url, json=body, timeout=left_s)
        except httpx.TransportError as exc:
            raise JudgeAwayError(
                f"the judge at {url} does not answer ({type(exc).__name__}: {exc}); start it, or "
                "correct reward.judge.url"
            ) from exc
        if answer.status_code in _AWAY or answer.status_code >= 500:
            raise JudgeAwayError(
                f"the judge at {url} says {answer.status_code}: {answer.text:.300}",
                _retry_after_s(answer),
            )
        if answer.status_code != 200:
            raise ValueError(
                f"the judge at {url} refuses the request with {answer.status_code}: "
                f"{answer.text:.300}; correct [reward.judge]"
            )
        return _content_of(answer)

    def _read_score(self, text: str) -> float:
        found = self._pattern.findall(text)
        low, high = self._config.scale
        if not found:
            raise ValueError(
                f"the judge says {text!r:.300}, in which reward.judge.pattern "
                f"({self._config.pattern!r}) finds no score; ask for one in the prompt, or correct "
                "the pattern"
            )
        value = float(found[-1])
        if not low <= value <= high:
            raise ValueError(
                f"the judge gives {value:g}, outside reward.judge.scale [{low:g}, {high:g}]; tell "
                "it the scale in the prompt, or correct reward.judge.scale"
            )
        return (value - low) / (high - low)


def places_of(request: ScoreRequest) -> dict[str, str]:
    """Return what a prompt may name of an interaction."""
    question = next((m.content for m in reversed(request.prompt) if m.role == "user"), "")
    answers = request.payload.get("answers")
    return {
        "question": question,
        "transcript": transcript_of(request),
        "answer": scoring.extract_answer(request.turns[-1].text) or "",
        "answers": "; ".join(map(str, answers)) if isinstance(answers, list) else "",
        "payload": json.dumps(request.payload, ensure_ascii=False),
        "status": request.status,
    }


def transcript_of(request: ScoreRequest) -> str:
    """Return the turns of the model, each followed by what tools answered."""
    lines: list[str] = []
    for turn in request.turns:
        lines.append(f"assistant: {turn.text.strip()}")
        lines += [f"{call.tool or 'tool'} ({call.status}): {call.text}" for call in turn.calls]
    return "\n".join(lines)


def _read_template(config: JudgeConfig) -> Template:
    text, named = config.prompt, "reward.judge.prompt"
    if config.prompt_file is not None:
        named = f"reward.judge.prompt_file ({config.prompt_file})"
        try:
            text = config.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise ValueError(f"{named} cannot be read: {exc}; name a text file") from exc
    template = Template(text or "")
    if not template.is_valid():
        raise ValueError(f"{named} has a lone dollar sign; write $$ for a dollar sign")
    if unknown := sorted(set(template.get_identifiers()) - set(PLACES)):
        raise ValueError(
            f"{named} names ${', $'.join(unknown)}; a prompt may name ${', $'.join(PLACES)}, and "
            "$$ is a dollar sign"
        )
    return template


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds that the server asks to wait; a date counts as none."""
    try:
        return max(float(answer.headers.get("retry-after", 0.0)), 0.0)
    except ValueError:
        return 0.0


def _content_of(answer: httpx.Response) -> str:
    try:
        body: Any = answer.json()
        content = body["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as exc:
        raise ValueError(
            f"{answer.url} answers {answer.text!r:.300}, which is no chat completion; correct "
            "reward.judge.url, which mostly ends with /v1"
        ) from exc
    if not isinstance(content, str):
        raise ValueError(f"the judge's message has content {content!r:.300}; it must be a text")
    return content
