"""The tokens of an interaction, turn by turn: the model samples, and what it reads is appended.

rollout/turns.py --a trajectory's record, replies--> `TokenLoop` --sampled turns--> its record

Calls, tools and environments are others' work: whoever has replies appends them here. Every sampled
token is kept as it was sampled, with mask 1 and its log-probability; everything else (prompt, glue,
tool text) has mask 0. Where the chat template rewrites earlier turns, the dialogue is rendered anew
and begins a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.text.chat_format import ChatFormat, OutsideMessage
from agent_r1.text.sampler import PolicyError, Sampler
from agent_r1.text.trajectory_builder import TrajectoryBuilder


class UnreadableTurnError(Exception):
    """A tool format failed over a turn; its cause says how."""


@dataclass(frozen=True)
class TokenLoop:
    """Samples turns, and appends what the model reads between them."""

    policy: Sampler
    chat: ChatFormat
    max_context: int
    """Most tokens of one segment, prompt included."""
    max_tokens_per_turn: int
    answer_pattern: str | None = None
    """As `env.answer_pattern`."""

    async def sample(
        self, record: TrajectoryBuilder, *, temperature: float, seed: int, request_id: str
    ) -> str | None:
        """Let the model write the next turn.

        Args:
            record: gets the turn.
            temperature: 0 is greedy.
            seed: of this turn.
            request_id: unique among requests in flight.

        Returns:
            The limit that cut the turn; None where it ended by itself.

        Raises:
            PolicyError: nothing was sampled.
            UnreadableTurnError: the turn cannot be read.
        """
        room = self.max_context - len(record.context)
        generation = await self.policy.generate(
            record.context,
            max_tokens=min(self.max_tokens_per_turn, room),
            temperature=temperature,
            seed=seed,
            request_id=request_id,
        )
        if not generation.token_ids or len(generation.logprobs) != len(generation.token_ids):
            raise PolicyError(
                f"the policy returned {len(generation.token_ids)} tokens with "
                f"{len(generation.logprobs)} log-probabilities; expected one each, at least one"
            )
        reader = replace(
            self.chat.reader,
            answer_pattern=self.answer_pattern,
            opens_in_thought=bool(record.opening),
        )
        try:
            read = reader.read(self.chat.decode_turn(generation.token_ids))
        except Exception as exc:  # a user's tool format may raise anything
            raise UnreadableTurnError from exc
        record.add_sampled(generation, read)
        if generation.finish_reason != "length":
            return None
        full = len(record.context) >= self.max_context
        return "max_trajectory_tokens" if full else "max_tokens_per_turn"

    def append(self, record: TrajectoryBuilder, reply: Sequence[OutsideMessage]) -> bool:
        """Add what follows the last turn up to the next one; False where that leaves no room.

        Raises:
            ChatTemplateError: the template cannot render it.
        """
        record.messages += [self.chat.said(record.turns[-1].text, record.opening), *reply]
        is_rewritten = self.chat.rewrites(reply)
        if is_rewritten:
            rendered = self.chat.render_prompt(record.messages, record.tools)
            token_ids, opening = rendered.token_ids, rendered.opening
        else:
            token_ids, opening = self.chat.encode_reply(reply), self.chat.opening_after(reply)
        length = len(token_ids) + (0 if is_rewritten else len(record.context))
        if length >= self.max_context:
            return False
        record.opening = opening
        if is_rewritten:
            record.begin_segment(token_ids)
        else:
            record.token_ids += token_ids
        return True
