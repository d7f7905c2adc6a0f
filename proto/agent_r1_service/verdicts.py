"""How a reward model is asked about an interaction: the dialogue so far, then a yes-no question.

Training (`agent-r1 train-reward`) and scoring (the component `reward_model`) build it here, so that
the model is asked what it has learned. It sees prompt, turns and tool results, and no payload.

Source: a verifier that answers by its next token, arXiv:2408.15240, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1_proto.tasks import ChatMessage

QUESTION = "Does this lead to the right answer?"
GOOD, BAD = "yes", "no"

_CONTROL = re.compile(r"<\|[^<>|\s]*\|>|</?s>")
"""How models write the ends of turns; in an interaction's text they could forge the question."""


@dataclass(frozen=True)
class VerdictTurn:
    """One turn of an interaction."""

    text: str
    """What the model wrote."""
    results: Sequence[str]
    """What tools answered, call after call."""


def verdict_dialogue(
    prompt: Sequence[ChatMessage], turns: Sequence[VerdictTurn], question: str = QUESTION
) -> list[ChatMessage]:
    """Return the dialogue whose next assistant message is the verdict on the turns so far."""
    messages = list(prompt)
    for turn in turns:
        messages.append(ChatMessage(role="assistant", content=_plain(turn.text)))
        messages += [ChatMessage(role="tool", content=_plain(text)) for text in turn.results]
    return [*messages, ChatMessage(role="user", content=question)]


def _plain(text: str) -> str:
    return _CONTROL.sub("", text)
