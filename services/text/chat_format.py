"""The model's chat template in tokens: prompts, the glue between turns, and where calls end.

agent_loop.py gets prompt tokens from here; turns.py gets reply tokens, and reads the model's turns
through it. What the model sampled is never re-encoded: the glue that follows a sampled end-of-turn
token is the difference of two renderings of a fixed dummy dialogue, tokenized once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

from agent_r1.text.chat_template import (
    ChatTemplateError,
    render,
    render_calls,
    template_message,
)
from agent_r1.text.control_tokens import (
    ControlTokens,
    Origin,
    SpelledOut,
    as_json,
    map_texts,
    unused_word,
)
from agent_r1.text.reading import MARKUP, THINK_CLOSE, THINK_OPEN, TurnReader
from agent_r1.text.template_checks import (
    ANY_FUNCTION,
    ANY_TOOL,
    QUESTION,
    REPLY,
    SAID,
    Dialogue,
    count_alike,
    dummy_id,
    keeping_key,
    keeps_turns,
    outside_message,
    short_dialogue,
)
from agent_r1.text.tool_formats import HERMES, ParsedCall, ToolFormat
from agent_r1_proto.parts import StoredImage, with_images
from agent_r1_proto.tasks import ChatMessage, Role, Task, added_system_prompt
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import Reply

_QUOTED = f'{REPLY} "quoted"\nnext.'
"""A reply that looks different where a template writes it as a string of JSON."""
_HIDES = (
    "the chat template does not show messages of role {role!r} after an assistant turn; use a "
    "template that does"
)
_THOUGHT_TAG = re.compile(f"{THINK_OPEN}|{THINK_CLOSE}")
_MAX_UTF8_TAIL = 4
_MOST_GLUE = 4096


@dataclass(frozen=True)
class Rendered:
    """A prompt as text, for the log, and as the tokens the policy gets."""

    text: str
    token_ids: list[int]
    opening: str = ""
    """The thought that the template begins for the model, as it writes it; "" where it begins
    none."""


@dataclass(frozen=True)
class OutsideMessage:
    """A message of a tool or of the environment, as the model sees it."""

    role: Role
    text: str
    """Text, as the template writes it."""
    token_ids: list[int]
    """Tokens of its text, from `encode_text` or `outside_message`."""
    call_id: str = ""
    """Id that the model gave the call that it answers, for templates that repeat it beside the
    result; "" where it gave none."""
    content: str = ""
    """Text, but for what a template does to write that as JSON."""
    call: int | None = None
    """Number of the call of the turn that it answers."""

    def recorded(self, images: Sequence[StoredImage] = ()) -> Reply:
        """Return it as a trajectory keeps it.

        Args:
            images: that its text names, where no model was to see them.
        """
        assert self.role in ("tool", "user")
        return Reply(role=self.role, parts=with_images(self.content, images), call=self.call)


class OwnMessage(ChatMessage):
    """A message of whoever runs this (`env.system_prompt`): control tokens in it are meant."""


PromptMessage = ChatMessage | OutsideMessage


def asked_dialogue(
    task: Task, system_prompt: str | None, result: Callable[[str], OutsideMessage]
) -> list[PromptMessage]:
    """Return the dialogue of a task; the results it ends with look as they do between turns.

    Args:
        task: has the prompt.
        system_prompt: `env.system_prompt`.
        result: makes a message of the text of a result.
    """
    messages = task.messages()
    if (told := added_system_prompt(task, system_prompt)) is not None:
        messages.insert(0, OwnMessage(role="system", content=told))
    asked = list(messages)
    while asked[-1].role == "tool":
        asked.pop()
    return [
        *asked,
        *(replace(result(m.text()), call_id=m.tool_call_id) for m in messages[len(asked) :]),
    ]


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
        segments: the template may rewrite earlier turns; `rewrites` says when.

    Raises:
        ChatTemplateError: the template rewrites earlier turns and may not, or ends a turn with
            anything but one end-of-turn token, or text does not survive the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_of_turn_ids: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
        reply_roles: Sequence[Role] = ("tool",),
        tool_format: ToolFormat = HERMES,
        segments: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._glue_of = cache(self._make_glue)
        self._glue_ids = lru_cache(_MOST_GLUE)(self.encode)  # ids of calls are many
        self._opening_after = cache(self._find_opening)
        # A template may put the tools into a message, and move them when another one follows.
        self._offered = [ANY_FUNCTION] if "tool" in reply_roles else None
        self._tool_format = tool_format
        close_ids = self.encode(tool_format.closing_tag)
        self._call_close_id = close_ids[0] if len(close_ids) == 1 else None
        rewriting: list[Role] = [
            role for role in reply_roles if not keeps_turns(self._render_with, role, {})
        ]
        self._rewriting = frozenset(rewriting)
        if rewriting and not segments:
            raise ChatTemplateError(
                "the chat template rewrites earlier turns (drops their thinking, say), so the "
                "model would be trained on a dialogue it never saw; "
                f"{self._keeping_key(rewriting[0])}; or train every rewritten history as a "
                'sequence of its own: env.rewritten_history = "segments"'
            )
        self._json_roles = frozenset(role for role in reply_roles if self._writes_json(role))
        written = [piece for role in reply_roles for piece in self._glue_of((role,))]
        glue = {token for piece in (*written, *self._beginnings()) for token in self.encode(piece)}
        markup = (*MARKUP, *tool_format.markup)
        self._outside = ControlTokens(tokenizer, glue, markup)
        self._said = ControlTokens(tokenizer, glue, (), spared=markup)
        self.spelled_out = SpelledOut()
        for role in reply_roles:
            self._check_round_trip((role, role) if role == "tool" else (role,))
        if len(reply_roles) > 1:
            self._check_round_trip(tuple(reply_roles))  # results, and a message behind them
        self.reader = TurnReader(tool_format)
        """Reads turns; `env.answer_pattern` is not the template's, and whether a turn begins inside
        a thought is up to what stands before it."""

    # -- prompts and replies ---------------------------------------------------------------------

    def render_prompt(
        self, messages: Sequence[PromptMessage], tools: Sequence[ToolSpec] = ()
    ) -> Rendered:
        """Render a dialogue up to the first token the model samples next.

        A message from outside keeps its tokens, so that it looks as it does between turns. One
        before the last turn may be missing: a template may drop what it likes of the past. Control
        tokens in the other messages and in the tools are spelled out; those of the model's turns
        may hold the tags of thoughts, answers and calls.

        Args:
            messages: the dialogue.
            tools: the tools that are offered.
        """
        outside = [message for message in messages if isinstance(message, OutsideMessage)]
        in_template = tools if self._tool_format.in_template else ()
        functions = [tool.as_function() for tool in in_template]
        mark = _unused_mark(messages, functions)
        cut = f"{mark}-cut."
        marks = [f"{mark}-{i}." for i in range(len(outside))]
        numbers = iter(range(len(outside)))
        dialogue = [
            template_message(m, partial(self._cut_text, m, cut))
            if isinstance(m, ChatMessage)
            else outside_message(i := next(numbers), m.role, marks[i])
            for m in messages
        ]
        functions = map_texts(functions, lambda text: self._cut(text, cut, "tools"))
        whole = self._render_calls(dialogue, functions or None)
        rest = _with_call_ids(whole, outside)
        pieces: list[tuple[str, list[int]]] = []
        for i in reversed(range(len(outside))):
            before, found, piece = rest.rpartition(marks[i])
            if found:
                rest = before
                shown = outside[i].text, outside[i].token_ids
                pieces += [self._joined(piece, cut), shown]
            elif i >= len(outside) - _count_newest(messages):
                raise ChatTemplateError(_HIDES.format(role=outside[i].role))
        pieces.append(self._joined(rest, cut))
        return Rendered(
            "".join(text for text, _ in reversed(pieces)),
            [token for _, token_ids in reversed(pieces) for token in token_ids],
            self._opening_of(whole, dialogue, partial(self._render_calls, tools=functions or None)),
        )

    def _opening_of(self, rendered: str, dialogue: Dialogue, render: Callable[..., str]) -> str:
        """Return the thought that the template begins for the model; "" where it begins none.

        That is in the generation prompt: what a message says of thoughts begins none.

        Args:
            rendered: of `render`, which takes a dialogue and whether to add the generation prompt.
            dialogue: what was rendered.
            render: does it.
        """
        if THINK_OPEN not in rendered:
            return ""
        unprompted = render(dialogue, prompted=False)
        if unprompted != rendered:
            opening = _opening(rendered, count_alike(rendered, unprompted))
        else:  # the template writes the same without one: what stands behind the last message?
            last = dialogue[-1]
            marked = render([*dialogue[:-1], {**last, "content": last["content"] + QUESTION}])
            opening = _opening(marked, marked.rfind(QUESTION) + len(QUESTION))
        begun = rendered.endswith(opening) and self._end_of_turn_ids.isdisjoint(
            self.encode(opening)
        )
        return opening if begun else ""

    def _cut_text(self, message: ChatMessage, cut: str, text: str) -> str:
        """Return a text of a message with a word wherever a control token is cut in two."""
        if isinstance(message, OwnMessage):
            return text
        return self._cut(text, cut, "prompt", said=message.role == "assistant")

    def _render_calls(
        self, dialogue: Dialogue, tools: list[dict[str, Any]] | None, *, prompted: bool = True
    ) -> str:
        render = partial(self._render, tools=tools, prompted=prompted)
        return render_calls(render, dialogue, self._tool_format.write)

    def _cut(self, text: str, cut: str, origin: Origin, *, said: bool = False) -> str:
        outside = self._said if said else self._outside
        pieces = outside.pieces(text)
        if pieces != [text]:
            self.spelled_out.note(origin, outside.spelled_out(text))
        return cut.join(pieces)

    def _joined(self, rendered: str, cut: str) -> tuple[str, list[int]]:
        """Return what was rendered as it reads, and its tokens: each piece is encoded alone."""
        pieces = rendered.split(cut)
        return "".join(pieces), [token for piece in pieces for token in self.encode(piece)]

    def check_system_prompt(self, system_prompt: str | None) -> None:
        """Check that a dialogue may begin with `env.system_prompt`.

        Raises:
            ChatTemplateError: the template cannot render it.
        """
        if system_prompt is None:
            return
        asked = ChatMessage(role="user", content=QUESTION)
        told = OwnMessage(role="system", content=system_prompt)
        try:
            self.render_prompt([told, asked], [ANY_TOOL] if self._offered else [])
        except ChatTemplateError as exc:
            raise ChatTemplateError(
                f"env.system_prompt: {exc}; leave it out, put its text into the prompts of the "
                "tasks, or put a chat_template.jinja that takes it beside the model"
            ) from exc

    @staticmethod
    def said(text: str, opening: str = "") -> ChatMessage:
        """Return a turn of the model, from `decode_turn`, as a message of the dialogue.

        Args:
            text: of the turn.
            opening: the thought that the template began before it.
        """
        return ChatMessage(role="assistant", content=opening + text)

    def rewrites(self, reply: Sequence[OutsideMessage]) -> bool:
        """Say whether the template rewrites what came before such a reply.

        `render_prompt` then says what the model sees, and `encode_reply` does not.
        """
        return any(message.role in self._rewriting for message in reply)

    def encode_text(self, text: str) -> list[int]:
        """Encode text from outside (a tool's) so that nothing in it becomes a control token."""
        return self._outside.encode(text)

    def outside_message(
        self, role: Role, text: str, *, max_chars: int, max_tokens: int | None
    ) -> OutsideMessage:
        """Return a message from outside as the template writes it, cut to both limits.

        Args:
            role: of the message; some templates write the text of a tool as a string of JSON.
            text: of the message.
            max_chars: most characters of it; a visible marker stands for the rest.
            max_tokens: most tokens of it; None is no limit.
        """
        in_json = role in self._json_roles
        shown, token_ids = self._outside.encode_limited(
            text, max_chars=max_chars, max_tokens=max_tokens, in_json=in_json
        )
        self.spelled_out.note("reply", self._outside.spelled_out(shown))
        whole = as_json(text) if in_json else text
        return OutsideMessage(role, shown, token_ids, content=text if shown == whole else shown)

    def encode_reply(self, reply: Sequence[OutsideMessage], *, is_ended: bool = True) -> list[int]:
        """Return the tokens between a turn and the model's next one.

        Args:
            reply: what follows the turn, in order; several results go in one rendering.
            is_ended: the turn ends with a sampled end-of-turn token; otherwise the template's
                stands first.
        """
        glue = self._glue_of(tuple(message.role for message in reply))
        for i, message in enumerate(reply):
            if message.call_id:
                glue = [piece.replace(dummy_id(i), message.call_id) for piece in glue]
        token_ids = self._glue_ids(glue[0])[is_ended:]
        for message, piece in zip(reply, glue[1:], strict=True):
            token_ids += message.token_ids
            token_ids += self._glue_ids(piece)
        return token_ids

    def opening_after(self, reply: Sequence[OutsideMessage]) -> str:
        """Return the thought that `encode_reply` begins for the model; "" where it begins none."""
        return self._opening_after(tuple(message.role for message in reply))

    def _find_opening(self, roles: tuple[Role, ...]) -> str:
        dialogue = short_dialogue(roles, _dummy_replies(roles))
        render = partial(self._render, tools=self._offered)
        return self._opening_of(render(dialogue), dialogue, render)

    # -- the model's turns -----------------------------------------------------------------------

    def is_ended(self, token_ids: Sequence[int]) -> bool:
        """Say whether tokens of a turn end with an end-of-turn token."""
        return bool(token_ids) and token_ids[-1] in self._end_of_turn_ids

    def decode_turn(self, token_ids: Sequence[int]) -> str:
        """Decode one turn for reading, without its end-of-turn token."""
        return self.decode(token_ids[:-1] if self.is_ended(token_ids) else token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens as they are, control tokens included."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def call_end_indexes(
        self, token_ids: Sequence[int], text: str, calls: Sequence[ParsedCall]
    ) -> list[int]:
        """Return, for each call, the index of the sampled token that closes it.

        That is the last token of the shortest prefix of `token_ids` whose text has the whole call.

        Args:
            token_ids: [N] one turn as sampled.
            text: `decode_turn(token_ids)`.
            calls: what the reader found in it.
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
        extra: Mapping[str, Any] | None = None,
        prompted: bool = True,
    ) -> str:
        return render(
            self._tokenizer,
            dialogue,
            "a dialogue of the roles " + ", ".join(message["role"] for message in dialogue),
            tools=tools,
            add_generation_prompt=prompted,
            **{**self._kwargs, **(extra or {})},
        )

    def _beginnings(self) -> list[str]:
        """Return what prompts begin with, as far as the template can write it."""
        asked = {"role": "user", "content": QUESTION}
        beginnings: list[str] = []
        for dialogue in ([asked], [{"role": "system", "content": QUESTION}, asked]):
            with suppress(ChatTemplateError):
                beginnings.append(self._render(dialogue, tools=self._offered))
        return beginnings

    def _writes_json(self, role: Role) -> bool:
        """Say whether the template writes such a message as a string of JSON, as Llama 3's do."""
        shown = self._render(short_dialogue((role,), [_QUOTED]), tools=self._offered)
        return _QUOTED not in shown and as_json(_QUOTED) in shown

    def _make_glue(self, roles: tuple[Role, ...]) -> list[str]:
        replies = _dummy_replies(roles)
        full = self._render(short_dialogue(roles, replies), tools=self._offered)
        before, _, rest = full.rpartition(SAID)
        if not before:
            raise ChatTemplateError(
                "the chat template drops what the assistant said earlier; "
                + self._keeping_key(roles[-1])
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

    def _render_with(self, dialogue: Dialogue, extra: Mapping[str, Any]) -> str:
        """Render a dialogue up to where a thought is begun for the model, or its turn begins."""
        render = partial(self._render, tools=self._offered, extra=extra)
        rendered = render(dialogue)
        return rendered.removesuffix(self._opening_of(rendered, dialogue, render))

    def _keeping_key(self, role: Role) -> str:
        return keeping_key(self._render_with, role, self._tokenizer.chat_template)

    def _check_round_trip(self, roles: tuple[Role, ...]) -> None:
        """Check that glue and text, tokenized apart, read as the template's own rendering."""
        replies = [f"{i} {_QUOTED}" for i in range(len(roles))]
        expected = self._render(short_dialogue(roles, replies), tools=self._offered)
        before = expected[: expected.rindex(SAID) + len(SAID)]
        end = self.encode(expected[len(before) :])[0]
        bodies = [
            self.encode_text(as_json(text) if role in self._json_roles else text)
            for role, text in zip(roles, replies, strict=True)
        ]
        reply = self.encode_reply(list(map(OutsideMessage, roles, replies, bodies)))
        rendered = self.decode([*self.encode(before), end, *reply])
        if rendered != expected:
            raise ChatTemplateError(
                f"text does not survive this tokenizer and chat template: {rendered!r} instead of "
                f"{expected!r}; use a byte-level tokenizer without a normalizer or an added prefix "
                "space, and a template that writes messages as they are"
            )


def _opening(rendered: str, start: int) -> str:
    """Return the thought in which a rendering ends, if it is begun behind `start`; else ""."""
    tags = [tag for tag in _THOUGHT_TAG.finditer(rendered) if tag.end() > start]
    return rendered[tags[-1].start() :] if tags and tags[-1][0] == THINK_OPEN else ""


def _dummy_replies(roles: Sequence[Role]) -> list[str]:
    return [f"{REPLY}-{i}." for i in range(len(roles))]


def _unused_mark(messages: Sequence[PromptMessage], tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a word that stands for messages from outside, and in nothing else."""
    texts = [message.shown() for message in messages if isinstance(message, ChatMessage)]
    return unused_word(REPLY, [*texts, json.dumps(tools)])


def _count_newest(messages: Sequence[PromptMessage]) -> int:
    """Return how many messages from outside the next turn answers."""
    theirs = [isinstance(message, OutsideMessage) for message in reversed(messages)]
    return theirs.index(False) if False in theirs else len(theirs)


def _with_call_ids(rendered: str, outside: Sequence[OutsideMessage]) -> str:
    """Put the ids that the model gave its calls where the template wrote those of the dialogue."""
    done = 0
    for i, message in enumerate(outside):
        place = rendered.find(dummy_id(i), done)
        if message.role == "tool" and place >= 0:
            call_id = message.call_id or dummy_id(i)
            rendered = rendered[:place] + call_id + rendered[place + len(dummy_id(i)) :]
            done = place + len(call_id)
    return rendered
