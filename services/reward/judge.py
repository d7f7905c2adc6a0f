"""The component `judge`: what a language model says an interaction is worth, asked with a prompt.

model_server.py asks; equal prompts are asked once.
"""

from __future__ import annotations

import json
import re
from string import Template

from agent_r1.reward.config import JudgeConfig
from agent_r1.reward.model_server import ChatServer
from agent_r1.runtime.files.file_formats import read_text
from agent_r1.runtime.unicode import escaped, escaped_line
from agent_r1.text.verdicts import count_control_tokens, without_control_tokens
from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreReply, ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import ChatMessage

TABLE = "reward.servers.judge"
PLACES = ("question", "transcript", "answer", "answers", "payload", "status")
"""Names that a prompt may have, as `$question` or `${question}`; `$$` is a dollar sign."""


class Judge:
    """Scores interactions by asking a model.

    Args:
        config: `[reward.servers.judge]`.
        patience_s: how long a server that is away is asked again, in seconds.

    Raises:
        ValueError: the prompt cannot be read, or names something unknown.
    """

    def __init__(self, config: JudgeConfig, patience_s: float) -> None:
        self._config = config
        self._template = read_template(config)
        self._pattern = re.compile(config.pattern, re.IGNORECASE)
        self.server = ChatServer(config, TABLE, patience_s)

    async def score(self, request: ScoreRequest) -> tuple[float, str]:
        """Return the score of one interaction, from 0.0 to 1.0, and what the model says.

        Raises:
            ServerAwayError: the server did not answer in time.
            ValueError: it refuses the request, or its answer has no score.
        """
        prompt = self._template.substitute(places_of(request))

        async def ask() -> tuple[float, str]:
            places = _texts_of(request)
            named = (places[name] for name in self._template.get_identifiers())
            self.server.num_spelled_out += sum(map(count_control_tokens, named))
            choice = await self.server.complete(
                [ChatMessage(role="user", content=prompt)], max_tokens=self._config.max_tokens
            )
            text = (choice.get("message") or {}).get("content")
            return self._read_score(text), str(text)

        return await self.server.score_once(prompt, ask)

    def _read_score(self, text: object) -> float:
        if not isinstance(text, str):
            raise ValueError(f"the judge's message has content {text!r:.300}; it must be a text")
        found = self._pattern.findall(text)
        low, high = self._config.scale
        if not found:
            raise ValueError(
                f"the judge says {text!r:.300}, in which reward.servers.judge.pattern "
                f"({self._config.pattern!r}) finds no score; ask for one in the prompt, or correct "
                "the pattern"
            )
        value = float(found[-1])
        if not low <= value <= high:
            raise ValueError(
                f"the judge gives {value:g}, outside reward.servers.judge.scale [{low:g}, "
                f"{high:g}]; tell it the scale in the prompt, or correct reward.servers.judge.scale"
            )
        return (value - low) / (high - low)


def places_of(request: ScoreRequest) -> dict[str, str]:
    """Return what a prompt may name of an interaction, without control tokens."""
    return {name: without_control_tokens(text) for name, text in _texts_of(request).items()}


def _texts_of(request: ScoreRequest) -> dict[str, str]:
    question = next((m.content for m in reversed(request.prompt) if m.role == "user"), "")
    answers = request.payload.get("answers")
    return {
        "question": shown_text(question),
        "transcript": transcript_of(request),
        "answer": escaped(request.turns[-1].answer or ""),
        "answers": "; ".join(map(str, answers)) if isinstance(answers, list) else "",
        "payload": json.dumps(request.payload, ensure_ascii=False),
        "status": request.status,
    }


def transcript_of(request: ScoreRequest) -> str:
    """Return the turns of the model, each followed by what the model read after it.

    Only who speaks begins a line: further lines of a text are indented.
    """
    lines: list[str] = []
    for turn in request.turns:
        lines.append(_spoken("assistant", turn.text.strip()))
        lines += [
            _spoken(_speaker(turn, reply), shown_text(reply.content)) for reply in turn.shown()
        ]
    return "\n".join(lines)


def _spoken(speaker: str, text: str) -> str:
    return f"{escaped_line(speaker)}: " + escaped(text).replace("\n", "\n  ")


def _speaker(turn: ScoreTurn, reply: ScoreReply) -> str:
    if reply.call is None or reply.call >= len(turn.calls):
        return reply.role
    call = turn.calls[reply.call]
    return f"{call.tool or 'tool'} ({call.status})"


def read_template(config: JudgeConfig) -> Template:
    """Return the prompt of a judge.

    Raises:
        ValueError: it cannot be read, or names something unknown.
    """
    text, named = config.prompt, "reward.servers.judge.prompt"
    if config.prompt_file is not None:
        named = f"reward.servers.judge.prompt_file ({config.prompt_file})"
        try:
            text = read_text(config.prompt_file)
        except (OSError, ValueError) as exc:
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
