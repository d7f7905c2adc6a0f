"""A session as the trajectory that is trained: which of its turns count, and in what order.

attempts.py asks at the end of an attempt. Every token that was sampled is in the trajectory once:
trained, or in a lineage that says why it is not. The main lineage stands first, since rewards are
about its turns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import JsonValue

from agent_r1.gateway.forest import TELLING_CHARS, TurnNode
from agent_r1.gateway.session import AgentSession
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.tokens import Generation, Interaction
from agent_r1_proto.parts import TextPart, shown_text
from agent_r1_proto.tasks import ChatMessage
from agent_r1_proto.trajectory import Lineage, Reply, Status, ToolCallRecord, Trajectory

UNDELIVERED = "undelivered"
"""The client never had it: it went away, or a server did."""
BRANCH = "branch_not_gone_on_with"
"""Another answer to the same history was gone on with, or came later."""
SIDE_CALL = "side_call"
"""Named by `agent.side_calls`, or with `agent.credit = "main"` not of the main lineage."""
CONSTRAINED = "constrained"
"""The request forced what was written."""
_WORD = re.compile(r"\S+")
_NO_WORD = re.compile(r"<[^<>]*>|\\[nrt]|\W")


@dataclass(frozen=True)
class Credit:
    """Which turns of an attempt are trained, from `[agent]`."""

    agents: Literal["all", "main"] = "all"
    """Every agent's, or those of the main lineage."""
    side_calls: Sequence[str] = ()
    """Regular expressions of instructions whose turns are not."""

    def is_side_call(self, turn: TurnNode) -> bool:
        """Return whether the instructions before a turn are those of a side call."""
        return any(re.search(one, turn.root().instructions) for one in self.side_calls)


@dataclass
class _Strand:
    """Turns of one lineage that share their treatment, as sequences of turns."""

    lineage: int
    excluded: str
    sequences: list[list[TurnNode]]

    def add(self, turn: TurnNode) -> None:
        """Append a turn behind its parent, where that is the last of a sequence."""
        for sequence in self.sequences:
            if not turn.begins and sequence[-1] is turn.parent:
                sequence.append(turn)
                return
        self.sequences.append([turn])


def exclusions(turns: Iterable[TurnNode], credit: Credit) -> dict[TurnNode, str]:
    """Return why each turn with tokens is not trained; "" where it is."""
    sampled = [turn for turn in turns if turn.token_ids]
    main = main_lineage(sampled, credit)
    answers: dict[str, list[TurnNode]] = {}
    for turn in sampled:
        answers.setdefault(turn.asked, []).append(turn)
    return {turn: _excluded(turn, answers[turn.asked], credit, main) for turn in sampled}


def _excluded(turn: TurnNode, answers: list[TurnNode], credit: Credit, main: int) -> str:
    if turn.constrained:
        return CONSTRAINED
    if not turn.delivered:
        return UNDELIVERED
    if credit.is_side_call(turn) or (credit.agents == "main" and turn.lineage != main):
        return SIDE_CALL
    if not turn.children:
        gone_on = any(other.children for other in answers)
        last = next(other for other in reversed(answers) if other.delivered)
        if gone_on or last is not turn:
            return BRANCH
    return ""


def main_lineage(turns: Iterable[TurnNode], credit: Credit) -> int:
    """Return the number of the agent's lineage: the first that begins with tools, since others do
    so for it; where none has tools, that with the most turns, the first of equals.

    Counted are turns that the agent had, answers to one history once. Turns that it had not count
    where it had none, and side calls where there is nothing else.
    """
    sampled = [turn for turn in turns if turn.token_ids]
    work = [turn for turn in sampled if not credit.is_side_call(turn)] or sampled
    had = [turn for turn in work if turn.delivered] or work
    with_tools = (turn.lineage for turn in had if turn.root().offered)
    if (first := next(with_tools, None)) is not None:
        return first
    asked = {(turn.lineage, turn.asked) for turn in had}
    counts = Counter(lineage for lineage, _ in asked)
    return min(counts, key=lambda lineage: (-counts[lineage], lineage), default=0)


def join_compacted(session: AgentSession, chat: ChatFormat) -> None:
    """Give a lineage in which the agent goes on with a summary the number of the one before it.

    An agent that is out of room begins anew with a summary of what it has done, which it asked for
    itself or in a side call without tools. Others quote answers too: who checks one, names it, or
    goes on with what a sub-agent found. So a lineage joins only that of the agent itself, when that
    has ended, and with the same instructions and tools. One without tools has answered before it
    sums up, unlike a step whose one answer another step goes on with.
    """
    lineages: dict[int, list[TurnNode]] = {}
    for turn in session.forest.turns:
        lineages.setdefault(turn.lineage, []).append(turn)
    begun = list(lineages.values())
    if not begun:
        return
    agent = next((turns for turns in begun if turns[-1].root().offered), begun[0])
    for turns in begun[begun.index(agent) + 1 :]:
        last, first = agent[-1], turns[0]
        if last.number > first.number or not _is_same_agent(last.root(), first):
            continue
        if not first.offered and last.parent is None:
            continue
        answers = [turn for turn in agent if turn.asked == last.asked]
        for side in begun:
            if not side[0].offered and last.number < side[0].number:
                answers += [turn for turn in side if turn.number < first.number]
        read = _plain(chat.decode(first.context()))
        if any(_summary(one) and _summary(one) in read for one in answers):
            for turn in turns:
                turn.lineage = last.lineage
            agent += turns


def _is_same_agent(one: TurnNode, other: TurnNode) -> bool:
    """Return whether two dialogues have the same tools, and instructions that begin alike and have
    most lines in common.

    Not all lines: a list of files, for one, changes as an agent works.
    """
    if one.offered != other.offered:
        return False
    lines, others = _lines(one), _lines(other)
    if lines[:1] != others[:1]:
        return False
    common = set(lines) & set(others)
    return 2 * len(common) > max(len(set(lines)), len(set(others)))


def _lines(turn: TurnNode) -> list[str]:
    """Return its instructions without words that have digits: clocks, counts and versions."""
    return _WORD.sub(_without_digits, turn.instructions).split("\n")


def _without_digits(word: re.Match[str]) -> str:
    return "0" if any(map(str.isdigit, word[0])) else word[0]


def _summary(turn: TurnNode) -> str:
    text = "" if turn.said is None else _plain(shown_text(turn.said.content))
    return text if len(text) >= TELLING_CHARS else ""


def _plain(text: str) -> str:
    """Return the words of a text, however it is quoted: without tags, indented, or as JSON."""
    return " ".join(_NO_WORD.sub(" ", text).split())


def last_main_turn(session: AgentSession, credit: Credit) -> TurnNode | None:
    """Return the last trained turn of the main lineage; None where none is trained."""
    main = main_lineage(session.forest.turns, credit)
    reasons = exclusions(session.forest.turns, credit)
    trained = [turn for turn, why in reasons.items() if turn.lineage == main and not why]
    return trained[-1] if trained else None


def session_trajectory(
    session: AgentSession,
    chat: ChatFormat,
    credit: Credit,
    ended: tuple[Status, str],
    *,
    answer: str | None,
    data: JsonValue,
    **facts: Any,
) -> Trajectory:
    """Return the trajectory of a session that has ended.

    Args:
        session: of the attempt.
        chat: the model's template.
        credit: which turns are trained.
        ended: status and reason.
        answer: what the agent answered; None: what its last turn says.
        data: for reward components, with the last turn of the main lineage.
        facts: fields of the trajectory that its turns do not give.
    """
    turns = session.forest.turns
    main = main_lineage(turns, credit)
    strands = _strands(exclusions(turns, credit), main)
    interaction = Interaction(session.rollout)
    interaction.ended = ended
    lineages: list[Lineage] = []
    kept: dict[int, int] = {}
    for number, strand in enumerate(strands):
        name = "main" if strand.lineage == main else f"agent-{strand.lineage}"
        lineages.append(
            Lineage(
                name=f"{name}:{strand.excluded}" if strand.excluded else name,
                first_segment=len(interaction.segment_starts) + (number > 0),
                parent=kept.get(strand.lineage, 0 if number else None),
                excluded=strand.excluded,
            )
        )
        if not strand.excluded:
            kept[strand.lineage] = number
        for sequence in strand.sequences:
            _write(interaction, session, chat, sequence)
        if number == 0 and interaction.turns:
            changes = {"data": data} if answer is None else {"data": data, "answer": answer}
            interaction.turns[-1] = interaction.turns[-1].model_copy(update=changes)
    is_plain = len(lineages) <= 1 and not any(lineage.excluded for lineage in lineages)
    return interaction.finish(lineages=[] if is_plain else lineages, **facts)


def _strands(reasons: dict[TurnNode, str], main: int) -> list[_Strand]:
    strands: dict[tuple[bool, int, str], _Strand] = {}
    for turn, why in reasons.items():
        key = (turn.lineage != main, turn.lineage, why)
        strands.setdefault(key, _Strand(turn.lineage, why, [])).add(turn)
    for strand in strands.values():  # the turn that comes last in time is the last of all
        strand.sequences.sort(key=lambda sequence: sequence[-1].number)
    return [strands[key] for key in sorted(strands)]


def _write(
    interaction: Interaction, session: AgentSession, chat: ChatFormat, sequence: list[TurnNode]
) -> None:
    """Append a sequence: what stands before its first turn, and its turns."""
    for i, turn in enumerate(sequence):
        if i:
            interaction.token_ids += turn.prompt
        elif interaction.turns:
            interaction.segment_starts.append(len(interaction.token_ids))
            interaction.token_ids += turn.context()
        else:
            interaction.token_ids += turn.context()
            interaction.prompt_length = len(interaction.token_ids)
        start = len(interaction.token_ids)
        read = turn.read or session.prompts.reader(turn).read(chat.decode_turn(turn.token_ids))
        interaction.add_sampled(
            Generation(
                turn.token_ids, turn.logprobs, turn.version_spans, turn.finish_reason or "length"
            ),
            read,
        )
        later = sequence[i + 1 : i + 2] or sorted(turn.children, key=lambda one: not one.delivered)
        replies = next((child.replies for child in later if child.replies), [])
        told = [j for j, call in enumerate(read.calls) if not call.error]
        numbers = {session.call_id(turn.number, i): j for i, j in enumerate(told)}
        results = {numbers[r.tool_call_id]: r for r in replies if r.tool_call_id in numbers}
        ends = chat.call_end_indexes(turn.token_ids, read.text, read.calls)
        calls = [
            ToolCallRecord(
                end_token_index=start + end,
                tool=call.name,
                arguments=call.arguments,
                status="malformed" if call.error else "ok",
                parts=_parts(results.get(j)),
                error=call.error,
            )
            for j, (call, end) in enumerate(zip(read.calls, ends, strict=True))
        ]
        answers = [one.record for one in session.tool_answers if one.turn == turn.number]
        last_token = max(start + len(turn.token_ids) - 1, start)
        interaction.set_calls(_with_answers(calls, answers, last_token))
        interaction.add_replies(
            [
                Reply(role=r.role, parts=_parts(r), call=numbers.get(r.tool_call_id))
                for r in replies
                if r.role in ("tool", "user")
            ]
        )


def _with_answers(
    calls: list[ToolCallRecord], answers: list[ToolCallRecord], last_token: int
) -> list[ToolCallRecord]:
    """Return the calls of a turn with what tools of the run answered; what the agent's program
    called by itself stands behind them, with what was answered."""
    merged = list(calls)
    open_calls = dict(enumerate(calls))
    for answer in answers:
        asked = answer.tool, answer.arguments
        found = (j for j, call in open_calls.items() if (call.tool, call.arguments) == asked)
        if (place := next(found, None)) is None:
            merged.append(answer.model_copy(update={"end_token_index": last_token}))
        else:
            call = open_calls.pop(place)
            kept = {"end_token_index": call.end_token_index, "parts": call.parts or answer.parts}
            merged[place] = answer.model_copy(update=kept)
    return merged


def _parts(message: ChatMessage | None) -> list[Any]:
    return [] if message is None else [TextPart(text=shown_text(message.content))]
