"""Verdict dialogues of a reward model: the interaction so far, then a yes-no question.

Training (`agent-r1 train-reward`) and scoring (the component `reward_model`) build it here, so that
the model is asked what it has learned. It sees prompt, turns and tool results, and no payload.

Source: a verifier that answers by its next token, arXiv:2408.15240, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreTurn
from agent_r1_proto.tasks import ChatMessage, Role

QUESTION = "Does this lead to the right answer?"
GOOD, BAD = "yes", "no"

_CONTROL = re.compile(
    r"""
    <[|\uff5c](?:(?!<[|\uff5c])\S)*?[|\uff5c]>   # <|im_end|>, and DeepSeek's with wide bars
    | <\|\w+> | <\w+\|>                     # <|turn>, <turn|>
    | \[\|\w+\|\]                           # [|user|]
    | </?role> | </?longcat_\w+> | <_(?:user|bot|system|start|end|pad)>
    | </?(?:start|begin|beginning|end)_of_\w+>  # <end_of_turn>
    | </?s> | <(?:bos|eos|eoh|eoa|eop|eot|eod|eom|sop|pad|unk|cls|sep|mask)(?:_token)?>
    | </?[\w.-]+:[\w.:-]+>                 # <seed:eos>
    | <[a-z]+(?:_[a-z]+)*_\d+>              # <extra_id_1>
    | <(?:unused|reserved|special|dummy|extra|control)\w*>
    | <fim_\w+>
    | <</?sys>>
    | \[/?(?:inst|system_prompt|available_tools|tool_results|tool_content|model_settings)\]
    | \[(?:gmask|smask|sop|eop|eot|eom|bos|eos|pad|unk|cls|sep|mask|user|bot)\]
    | \[(?:unused|reserved|special|control)(?:_token)?_?\d+\]
    | \[(?:start|end)_header_id\] | \[extra_id_\d+\]
    | [\[\]](?:~!?\w{1,12}|!?\w{1,12}~)[\[\]]  # ]~b], ]!p~[ and [e~[
    | \]<\][\w\x20]{1,20}\[>\[              # ]<]image[>[
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""How models write what stands between turns; in an interaction's text it could forge the question.
The tags of thoughts, answers and calls (`<tool_call>`, `[TOOL_CALLS]`) are no such tokens. Ordinary
text may match (`x[pad]`), and stays readable."""
_LOOK_ALIKES = str.maketrans("<>[]", "\u2039\u203a\u27e6\u27e7")
"""Brackets that no tokenizer's normalizer turns into those of control tokens."""


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
    messages = [
        ChatMessage(role=role, content=without_control_tokens(text))
        for role, text in _texts(prompt, turns, thoughts=thoughts)
    ]
    return [*messages, ChatMessage(role="user", content=question)]


def count_in_dialogue(
    prompt: Sequence[ChatMessage], turns: Sequence[ScoreTurn], *, thoughts: bool = True
) -> int:
    """Return how many control tokens `verdict_dialogue` changes in these texts."""
    texts = _texts(prompt, turns, thoughts=thoughts)
    return sum(count_control_tokens(text) for _, text in texts)


def without_control_tokens(text: str) -> str:
    """Return a text in which control tokens have brackets that only look like theirs."""
    return _CONTROL.sub(lambda token: token[0].translate(_LOOK_ALIKES), text)


def count_control_tokens(text: str) -> int:
    """Return how many control tokens `without_control_tokens` would change."""
    return sum(1 for _ in _CONTROL.finditer(text))


def _texts(
    prompt: Sequence[ChatMessage], turns: Sequence[ScoreTurn], *, thoughts: bool
) -> Iterator[tuple[Role, str]]:
    """Yield what was asked, said and shown."""
    for message in prompt:
        yield message.role, message.shown()
    for turn in turns:
        yield "assistant", turn.text if thoughts or turn.said is None else turn.said
        for reply in turn.shown():
            yield reply.role, shown_text(reply.content)
