"""The model's chat template in tokens: prompts, the glue between turns, and where calls end.

agent_loop.py gets prompt and reply tokens from here, and reads the model's turns through it. What
the model sampled is never re-encoded: the glue that follows a sampled end-of-turn token is the
difference of two renderings of a fixed dummy dialogue, tokenized once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_r1.rollout.chat_template import ChatTemplateError, render
from agent_r1.rollout.outside_text import OutsideText, as_json
from agent_r1.rollout.parsing import MARKUP, THINK_CLOSE, THINK_OPEN, TurnText, parse_turn
from agent_r1.rollout.tool_formats import HERMES, ParsedCall, ToolFormat
from agent_r1_proto.tasks import ChatMessage, Role
from agent_r1_proto.tools import ToolSpec

# Words that no template writes by itself, without whitespace at their ends (templates may strip).
_QUESTION, _THOUGHT, _SAID = "Question-7f3a", "Thought-7f3a", "Said-7f3a"
_SPOKEN = f"<think>\n{_THOUGHT}\n</think>\n\n{_SAID}"
_REPLY = "Reply-7f3a"
_QUOTED = f'{_REPLY} "quoted"\nnext.'
"""A reply that looks different where a template writes it as a string of JSON."""
_HIDES = (
    "the chat template does not show messages of role {role!r} after an assistant turn; use a "
    "template that does"
)
_MAX_UTF8_TAIL = 4
_MOST_GLUE = 4096
_CALL_ID = "call7f3a{}"  # nine letters and digits: some templates accept no other length
_TOOL = ToolSpec(
    name="tool7f3a",
    version="1",
    description="Any tool.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}},
).as_function()

Dialogue = list[dict[str, str]]


@dataclass(frozen=True)
class Rendered:
    """A prompt as text, for the log, and as the tokens the policy gets."""

    text: str
    token_ids: list[int]


def reply_roles(*, tools: bool, messages: bool) -> tuple[Role, ...]:
    """Return the roles of what may follow a turn.

    Args:
        tools: tools are offered.
        messages: the environment sends messages (`ToolEnv.sends_messages`).
    """
    return ("tool",) * tools + ("user",) * messages


class ChatFormat:
    """Token-level view of one model's chat template.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        end_of_turn_ids: tokens at which the policy ends a turn.
        template_kwargs: `env.chat_template_kwargs`, given to every rendering.
        reply_roles: roles of the messages that may follow a turn; each is checked now.
        tool_format: how the model writes tool calls.

    Raises:
        ChatTemplateError: the template rewrites earlier turns, or ends a turn with anything but
            one end-of-turn token, or text does not survive the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_of_turn_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        reply_roles: Sequence[Role] = ("tool",),
        tool_format: ToolFormat = HERMES,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._glue: dict[tuple[Role, ...], list[str]] = {}
        self._glue_tokens: dict[str, list[int]] = {}
        # A template may put the tools into a message, and move them when another one follows.
        self._offered = [_TOOL] if "tool" in reply_roles else None
        self._tool_format = tool_format
        close_ids = self.encode(tool_format.closing_tag)
        self._call_close_id = close_ids[0] if len(close_ids) == 1 else None
        for role in reply_roles:
            self._check_keeps_turns(role)
        self._json_roles = frozenset(role for role in reply_roles if self._writes_json(role))
        glue = {
            token
            for role in reply_roles
            for piece in self._glue_of((role,))
            for token in self.encode(piece)
        }
        self._outside = OutsideText(tokenizer, glue, (*MARKUP, *tool_format.markup))
        for role in reply_roles:
            self._check_round_trip((role, role) if role == "tool" else (role,))
        question: Dialogue = [{"role": "user", "content": _QUESTION}]
        asked = self._render(question, generation_prompt=False)
        prompt = self._render(question).removeprefix(asked)
        self.opens_in_thought = prompt.count(THINK_OPEN) > prompt.count(THINK_CLOSE)
        """The generation prompt ends inside a thought, so every turn begins in one."""

    # -- prompts and replies ---------------------------------------------------------------------

    def render_prompt(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolSpec] = (),
        results: Sequence[tuple[str, list[int]]] = (),
    ) -> Rendered:
        """Render a dialogue up to the first token the model samples.

        Args:
            messages: the dialogue.
            tools: the tools that are offered.
            results: what tools answered to the last message, an assistant's: text and tokens of
                each, from `encode_limited`, so that they look as they do between turns.
        """
        replies = [f"{_REPLY}-{i}." for i in range(len(results))]
        dialogue = [{"role": m.role, "content": m.content} for m in messages]
        dialogue += [{"role": "tool", "content": reply} for reply in replies]
        in_template = tools if self._tool_format.in_template else ()
        functions = [tool.as_function() for tool in in_template] or None
        rest = self._render(dialogue, tools=functions)
        text, token_ids = "", list[int]()
        # From the end, where the replies are: nothing before them can be taken for one.
        for reply, (shown, result_ids) in zip(reversed(replies), reversed(results), strict=True):
            rest, found, piece = rest.rpartition(reply)
            if not found:
                raise ChatTemplateError(_HIDES.format(role="tool"))
            text = shown + piece + text
            token_ids = [*result_ids, *self.encode(piece), *token_ids]
        return Rendered(rest + text, [*self.encode(rest), *token_ids])

    def encode_text(self, text: str) -> list[int]:
        """Encode text from outside (a tool's) so that nothing in it becomes a control token."""
        return self._outside.encode(text)

    def encode_limited(
        self, text: str, *, max_chars: int, max_tokens: int | None, role: Role = "tool"
    ) -> tuple[str, list[int]]:
        """Encode outside text as the template writes it, cut to both limits with a visible marker.

        Args:
            text: of a message.
            max_chars: most characters of it.
            max_tokens: most tokens; None is no limit.
            role: of the message; some templates write the text of a tool as a string of JSON.

        Returns:
            The text as the model sees it, and its tokens (never more than `max_tokens`).
        """
        in_json = role in self._json_roles
        return self._outside.encode_limited(
            text, max_chars=max_chars, max_tokens=max_tokens, in_json=in_json
        )

    def encode_reply(
        self, roles: Sequence[Role], bodies: Sequence[list[int]], call_ids: Sequence[str] = ()
    ) -> list[int]:
        """Return the tokens between a sampled end-of-turn token and the model's next turn.

        Args:
            roles: role of each message; several tool results go in one rendering, in order.
            bodies: tokens of each message's text, from `encode_text` or `encode_limited`.
            call_ids: what the model called each of its calls, for templates that repeat it beside
                the result; "" where it did not say.
        """
        glue = self._glue_of(tuple(roles))
        for i, call_id in enumerate(call_ids):
            if call_id:
                glue = [piece.replace(_CALL_ID.format(i), call_id) for piece in glue]
        token_ids = self._glue_ids(glue[0])[1:]  # the end-of-turn token is sampled
        for body, piece in zip(bodies, glue[1:], strict=True):
            token_ids += body
            token_ids += self._glue_ids(piece)
        return token_ids

    def _glue_ids(self, piece: str) -> list[int]:
        if piece not in self._glue_tokens:
            if len(self._glue_tokens) >= _MOST_GLUE:  # ids of calls are many
                self._glue_tokens.clear()
            self._glue_tokens[piece] = self.encode(piece)
        return self._glue_tokens[piece]

    # -- the model's turns -----------------------------------------------------------------------

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Decode one turn for reading, without its end-of-turn token."""
        ids = list(token_ids)
        if ids and ids[-1] in self._end_of_turn_ids:
            ids.pop()
        return self.decode(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens as they are, control tokens included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def read_turn(self, text: str) -> TurnText:
        """Read the text of a turn, from `decode_turn`."""
        return parse_turn(
            text, tool_format=self._tool_format, opens_in_thought=self.opens_in_thought
        )

    def call_end_indexes(
        self, token_ids: Sequence[int], text: str, calls: Sequence[ParsedCall]
    ) -> list[int]:
        """Return, for each call, the index of the sampled token that closes it.

        That is the last token of the shortest prefix of `token_ids` whose text has the whole call.

        Args:
            token_ids: [N] one turn as sampled.
            text: `decode_turn(token_ids)`.
            calls: what `read_turn(text)` found.
        """
        if not calls:
            return []
        if self._call_close_id is not None:
            closing = [i for i, token in enumerate(token_ids) if token == self._call_close_id]
            closing_tag = re.escape(self._tool_format.closing_tag)
            tag_ends = [found.end() for found in re.finditer(closing_tag, text)]
            # Equal counts: every tag in the text is one token, so they pair off in order.
            if len(closing) == len(tag_ends):
                index_of = dict(zip(tag_ends, closing, strict=True))
                found = [index_of.get(call.end) for call in calls]
                if all(index is not None for index in found):
                    return [index for index in found if index is not None]
        return [self._closing_token(token_ids, text[: call.end]) for call in calls]

    def _closing_token(self, token_ids: Sequence[int], wanted: str) -> int:
        """Find the token by decoding prefixes: bisection, then a walk back.

        A prefix that ends inside a character of several byte tokens decodes to something else, so
        "has the whole call" may be false again shortly after it was true; such a gap is shorter
        than a UTF-8 character, and the walk back crosses it.
        """

        def has_it(length: int) -> bool:
            return self.decode(token_ids[:length]).startswith(wanted)

        low, high = 0, len(token_ids)
        while high - low > 1:
            middle = (low + high) // 2
            if has_it(middle):
                high = middle
            else:
                low = middle
        while True:
            nearer = [n for n in range(max(high - _MAX_UTF8_TAIL, 1), high) if has_it(n)]
            if not nearer:
                return high - 1
            high = nearer[0]

    # -- the template ----------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Return the tokens of text that the template or the model writes: markup is a token."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def _render(
        self,
        dialogue: Dialogue,
        *,
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        return render(
            self._tokenizer,
            dialogue,
            "a dialogue of the roles " + ", ".join(message["role"] for message in dialogue),
            tools=tools,
            add_generation_prompt=generation_prompt,
            **{**self._kwargs, **(extra or {})},
        )

    def _writes_json(self, role: Role) -> bool:
        """Say whether the template writes such a message as a string of JSON, as Llama 3's do."""
        shown = self._render(_dialogue((role,), [_QUOTED]), tools=self._offered)
        return _QUOTED not in shown and as_json(_QUOTED) in shown

    def _glue_of(self, roles: tuple[Role, ...]) -> list[str]:
        """Return the text before, between and after the messages of a reply."""
        if roles not in self._glue:
            self._glue[roles] = self._make_glue(roles)
        return self._glue[roles]

    def _make_glue(self, roles: tuple[Role, ...]) -> list[str]:
        replies = [f"{_REPLY}-{i}." for i in range(len(roles))]
        full = self._render(_dialogue(roles, replies), tools=self._offered)
        before, _, rest = full.rpartition(_SAID)
        if not before:
            raise ChatTemplateError(
                "the chat template drops what the assistant said earlier; "
                + self._keep_key(_dialogue(roles, replies))
            )
        pieces: list[str] = []
        for reply in replies:
            piece, found, rest = rest.partition(reply)
            if not found:
                raise ChatTemplateError(_HIDES.format(role=roles[len(pieces)]))
            pieces.append(piece)
        pieces.append(rest)
        end = self.encode(pieces[0])[:1]
        if not self._end_of_turn_ids.issuperset(end) or not end:
            raise ChatTemplateError(
                f"the chat template ends an assistant turn with {pieces[0][:40]!r}, whose first "
                f"token is none of the model's end-of-turn tokens {sorted(self._end_of_turn_ids)}; "
                "list that token under eos_token_id in the model's generation_config.json"
            )
        return pieces

    def _check_keeps_turns(self, role: Role) -> None:
        """Refuse a template that renders earlier turns differently once there is a later one."""
        if not self._keeps_turns(role, {}):
            raise ChatTemplateError(
                "the chat template rewrites earlier turns (drops their thinking, say), so the "
                "model would be trained on a dialogue it never saw; "
                + self._keep_key(_dialogue((role,), [_REPLY]))
            )

    def _keeps_turns(self, role: Role, extra: Mapping[str, Any]) -> bool:
        question: Dialogue = [{"role": "user", "content": _QUESTION}]
        one = _dialogue((role,), [_REPLY])
        two = [*one, *one[1:]]
        asked = self._render(question, tools=self._offered, generation_prompt=False, extra=extra)
        first = self._render(one, tools=self._offered, generation_prompt=False, extra=extra)
        second = self._render(two, tools=self._offered, generation_prompt=False, extra=extra)
        turn = first[len(asked) :]
        return first.startswith(asked) and second == first + turn and turn.count(_THOUGHT) == 1

    def _keep_key(self, dialogue: Dialogue) -> str:
        """Name the setting under which this template keeps earlier turns, by trying them."""
        from jinja2 import Environment, TemplateError, meta

        template = self._tokenizer.chat_template
        role: Role = "user" if dialogue[-1]["role"] == "user" else "tool"
        names: set[str] = set()
        try:
            parsed = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(
                template
            )
            names = meta.find_undeclared_variables(parsed)
        except TemplateError:
            pass
        for name in sorted(n for n in names if re.search("think|reason|keep|preserve|clear", n)):
            for value in (True, False):
                try:
                    keeps = self._keeps_turns(role, {name: value})
                except ChatTemplateError:
                    continue
                if keeps:
                    return f"set env.chat_template_kwargs = {{{name} = {json.dumps(value)}}}"
        return (
            "env.chat_template_kwargs has no variable of this template that keeps them; put a "
            "chat_template.jinja that renders every turn as it was written beside the model"
        )

    def _check_round_trip(self, roles: tuple[Role, ...]) -> None:
        """Check that glue and text, tokenized apart, read as the template's own rendering."""
        replies = [f"{i} {_QUOTED}" for i in range(len(roles))]
        expected = self._render(_dialogue(roles, replies), tools=self._offered)
        before = expected[: expected.rindex(_SAID) + len(_SAID)]
        end = self.encode(expected[len(before) :])[0]
        bodies = [
            self.encode_text(as_json(text) if role in self._json_roles else text)
            for role, text in zip(roles, replies, strict=True)
        ]
        reply = self.encode_reply(roles, bodies)
        rendered = self.decode([*self.encode(before), end, *reply])
        if rendered != expected:
            raise ChatTemplateError(
                f"text does not survive this tokenizer and chat template: {rendered!r} instead of "
                f"{expected!r}; use a byte-level tokenizer without a normalizer or an added prefix "
                "space, and a template that writes messages as they are"
            )


def _dialogue(roles: Sequence[Role], replies: Sequence[str]) -> Dialogue:
    return [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _SPOKEN},
        *map(_message, range(len(roles)), roles, replies),
    ]


def _message(index: int, role: Role, text: str) -> dict[str, str]:
    call = {"tool_call_id": _CALL_ID.format(index), "name": _TOOL["function"]["name"]}
    return {"role": role, "content": text, **(call if role == "tool" else {})}
