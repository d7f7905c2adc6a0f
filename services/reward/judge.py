"""The component `judge`: what a language model says an interaction is worth, asked with a prompt.

model_server.py asks; equal prompts are asked once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from string import Template

from agent_r1.reward.chat_server import ChatServer
from agent_r1.reward.config import JudgeConfig
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.tasks import ChatMessage

FindAnswer = Callable[[ScoreRequest], str | None]

TABLE = "reward.judge"
PLACES = ("question", "transcript", "answer", "answers", "payload", "status")
"""What a prompt may name, as `$question` or `${question}`; `$$` is a dollar sign."""


class Judge:
    """Scores interactions by asking a model.

    Args:
        config: `[reward.judge]`.
        patience_s: how long a server that is away is asked again, in seconds.
        find_answer: returns the answer of an interaction.

    Raises:
        ValueError: the prompt cannot be read, or names something unknown.
    """

    def __init__(self, config: JudgeConfig, patience_s: float, find_answer: FindAnswer) -> None:
        self._config = config
        self._template = read_template(config)
        self._find_answer = find_answer
        self._pattern = re.compile(config.pattern, re.IGNORECASE)
        self.server = ChatServer(config, TABLE, patience_s)

    async def score(self, request: ScoreRequest) -> float:
        """Return the score of one interaction, from 0.0 to 1.0.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: it refuses the request, or its answer has no score.
        """
        prompt = self._template.substitute(places_of(request, self._find_answer(request)))

        async def ask() -> float:
            choice = await self.server.complete(
                [ChatMessage(role="user", content=prompt)], max_tokens=self._config.max_tokens
            )
            return self._read_score((choice.get("message") or {}).get("content"))

        return await self.server.score_once(prompt, ask)

    def _read_score(self, text: object) -> float:
        if not isinstance(text, str):
            raise ValueError(f"the judge's message has content {text!r:.300}; it must be a text")
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


def places_of(request: ScoreRequest, answer: str | None) -> dict[str, str]:
    """Return what a prompt may name of an interaction."""
    question = next((m.content for m in reversed(request.prompt) if m.role == "user"), "")
    answers = request.payload.get("answers")
    return {
        "question": question,
        "transcript": transcript_of(request),
        "answer": answer or "",
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


def read_template(config: JudgeConfig) -> Template:
    """Return the prompt of a judge.

    Raises:
        ValueError: it cannot be read, or names something unknown.
    """
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
