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
_CONTROL_OR_THOUGHT = re.compile(rf"{_CONTROL.pattern}|<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class VerdictTurn:
    """One turn of an interaction."""

    text: str
    """What the model wrote."""
    results: Sequence[str]
    """What tools answered, call after call."""


def verdict_dialogue(
    prompt: Sequence[ChatMessage],
    turns: Sequence[VerdictTurn],
    question: str = QUESTION,
    *,
    thoughts: bool = True,
) -> list[ChatMessage]:
    """Return the dialogue whose next assistant message is the verdict on the turns so far.

    Args:
        prompt: of the interaction.
        turns: of the interaction, so far.
        question: asked at the end.
        thoughts: whether what stands in `<think>` is part of a turn.
    """
    messages = list(prompt)
    for turn in turns:
        said = _without(_CONTROL if thoughts else _CONTROL_OR_THOUGHT, turn.text)
        messages.append(ChatMessage(role="assistant", content=said))
        answered = [_without(_CONTROL, text) for text in turn.results]
        messages += [ChatMessage(role="tool", content=text) for text in answered]
    return [*messages, ChatMessage(role="user", content=question)]


def _without(pattern: re.Pattern[str], text: str) -> str:
    """Put a space in the place of every match, so that what was around it makes no new one."""
    return pattern.sub(" ", text)
