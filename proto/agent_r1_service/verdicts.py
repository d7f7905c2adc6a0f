"""How a reward model is asked about an interaction: the dialogue so far, then a yes-no question.

Training (`agent-r1 train-reward`) and scoring (the component `reward_model`) build it here, so that
the model is asked what it has learned. It sees prompt, turns and tool results, and no payload.

Source: a verifier that answers by its next token, arXiv:2408.15240, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreTurn
from agent_r1_proto.tasks import ChatMessage, Role

QUESTION = "Does this lead to the right answer?"
GOOD, BAD = "yes", "no"

_CONTROL = re.compile(
    r"""
    <[|\uff5c](?:(?!<[|\uff5c])\S)*?[|\uff5c]>   # <|im_end|>, and DeepSeek's with wide bars
    | <\|\w+> | <\w+\|>                     # <|turn>, <turn|>
    | </?(?:start|begin|end)_of_\w+>         # <end_of_turn>
    | </?s> | <(?:bos|eos|eop|eot|eod|sop|pad|unk)(?:_token)?>
    | <</?sys>>
    | \[/?(?:inst|system_prompt|available_tools|tool_results|tool_content|model_settings)\]
    | \[(?:gmask|sop|eop|bos|eos|pad|unk|cls|sep)\]
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""How models write what stands between turns; in an interaction's text it could forge the question.
The tags of thoughts, answers and calls (`<tool_call>`, `[TOOL_CALLS]`) are no such tokens."""


def verdict_dialogue(
    prompt: Sequence[ChatMessage],
    turns: Sequence[ScoreTurn],
    question: str = QUESTION,
    *,
    thoughts: bool = True,
) -> list[ChatMessage]:
    """Return the dialogue whose next assistant message is the verdict on the turns so far.

    Args:
        prompt: of the interaction.
        turns: of the interaction, so far; they say what they are.
        question: asked at the end.
        thoughts: whether the model's thoughts are part of a turn.
    """
    messages = [_message(message.role, message.shown()) for message in prompt]
    for turn in turns:
        said = turn.text if thoughts or turn.said is None else turn.said
        messages.append(_message("assistant", said))
        messages += [_message(reply.role, shown_text(reply.content)) for reply in turn.shown()]
    return [*messages, ChatMessage(role="user", content=question)]


def without_control_tokens(text: str) -> str:
    """Return a text with a space in the place of every control token, so that what was around it
    makes no new one."""
    return _CONTROL.sub(" ", text)


def _message(role: Role, text: str) -> ChatMessage:
    return ChatMessage(role=role, content=without_control_tokens(text))
