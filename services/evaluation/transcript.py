"""A stored trajectory as a person reads it: who wrote what, which calls, which reward.

`agent-r1 show`, `agent-r1 chat` and the end of `agent-r1 train` print records of runs/record.py.
Text the model sampled and text tools returned have different colours, and different marks where
there are no colours.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.text import Text

from agent_r1.runs.record import prompt_messages
from agent_r1.runtime.unicode import escaped_line
from agent_r1_proto.parts import Content, shown_text

_CONTENT: TypeAdapter[Content] = TypeAdapter(Content)
SAMPLED_STYLE = "green"
TOOL_STYLE = "cyan"
PROMPT_STYLE = "dim"
NOTE_STYLE = "dim"
BAD_STYLE = "bold red"
MARKS = {SAMPLED_STYLE: "model> ", TOOL_STYLE: "tool<  ", PROMPT_STYLE: "       "}


def _line(console: Console, text: str, style: str) -> None:
    # The terminal wraps: breaking lines here would break what is copied from them.
    console.print(Text(escaped_line(text), style=style), soft_wrap=True)


def _block(console: Console, text: str, style: str) -> None:
    mark = MARKS[style]
    for i, line in enumerate(text.rstrip("\n").split("\n")):
        _line(console, (mark if i == 0 else " " * len(mark)) + line, style)


def _call_note(call: dict[str, Any]) -> str:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    parts = [f"{call['tool'] or '(not parsed)'} {arguments}", call["status"]]
    if call.get("version"):
        parts.append(f"version {call['version']}")
    parts.append(f"{call['latency_ms']:.0f} ms")
    if call.get("process_reward") is not None:
        parts.append(f"process reward {call['process_reward']:g}")
    if call.get("error"):
        parts.append(call["error"])
    return ", ".join(parts)


def _versions(record: dict[str, Any]) -> str:
    versions = record.get("policy_versions") or []
    return ", ".join(f"v{version}" for version in versions) or "none"


def heading(record: dict[str, Any]) -> str:
    """Return one line that names a trajectory."""
    where = f"step {record['step']}  group {record['group_id']}  sample {record['sample_index']}"
    return f"{where}  {record['task_id']}  {record['status']}"


def outcome(record: dict[str, Any]) -> str:
    """Return one line on reward, policy and length.

    A record without a total reward (a question in a chat, which nothing rewards) shows components;
    one with `policy` shows that instead of the versions of its tokens.
    """
    reward = record.get("reward")
    parts = []
    if reward is None:
        parts.append("no reward")
    else:
        components = ", ".join(f"{k} {v:g}" for k, v in (reward.get("components") or {}).items())
        if reward["total"] is None:
            parts.append(components)
        else:
            parts.append(f"reward {reward['total']:g}" + (f" ({components})" if components else ""))
    if record.get("advantage") is not None:
        parts.append(f"advantage {record['advantage']:+.3f}")
    parts.append(record.get("policy") or f"policy {_versions(record)}")
    tokens = f"{record['num_tokens']} tokens"
    if spans := record.get("mask_spans"):
        sampled = sum(end - start for start, end in spans)
        tokens += f" ({sampled / record['num_tokens']:.0%} sampled)"
    if starts := record.get("segment_starts"):
        tokens += f" in {len(starts) + 1} segments"
    parts.append(f"{tokens}, {len(record['turns'])} turns")
    parts.append(f"{record['latency_ms'] / 1000:.2f} s")
    return "; ".join(parts)


def _seen(replies: Sequence[dict[str, Any]], call: int) -> list[str]:
    """Return what the model read of a call's result."""
    return [_text(reply["content"]) for reply in replies if reply["call"] == call]


def _text(content: str | list[dict[str, Any]]) -> str:
    return shown_text(_CONTENT.validate_python(content))


def _agent(agents: Sequence[dict[str, Any]], number: int) -> str:
    """Say which of several agents wrote what follows."""
    agent = agents[number]
    parent, excluded = agent["parent"], agent["excluded"]
    begun = "" if parent is None else f", begun by {agents[parent]['name']}"
    return f"agent {agent['name']}{begun}" + (f", not trained: {excluded}" if excluded else "")


def _spelled_out(console: Console, text: str, control: re.Pattern[str] | None) -> None:
    """Say which control tokens stand in a text from outside, and were none for the model."""
    found = Counter(control.findall(text)) if control is not None else {}
    if found:
        tokens = ", ".join(f"{token} x {count}" for token, count in sorted(found.items()))
        _line(console, f"       [spelled out in ordinary tokens: {tokens}]", NOTE_STYLE)


def print_transcript(
    record: dict[str, Any], console: Console, control: re.Pattern[str] | None = None
) -> None:
    """Print one trajectory.

    Args:
        record: as runs/record.py makes it.
        console: prints.
        control: matches the control tokens of the model; None where they are not known.
    """
    for message in prompt_messages(record):
        calls = [json.dumps(call.model_dump()) for call in message.tool_calls]
        text = "\n".join([shown_text(message.content), *calls])
        _block(console, f"{message.role}: {text}", PROMPT_STYLE)
        _spelled_out(console, text, control)
    answers = (record.get("payload") or {}).get("answers")
    if answers:
        _line(console, f"       expected: {answers}", NOTE_STYLE)
    agents, writing = record.get("lineages") or [], None
    for turn in record["turns"]:
        if len(agents) > 1 and writing != (writing := turn.get("lineage", 0)):
            _line(console, f"       [{_agent(agents, writing)}]", NOTE_STYLE)
        _block(console, turn["text"], SAMPLED_STYLE)
        replies = turn.get("replies")
        for i, call in enumerate(turn["calls"]):
            _line(console, f"       [{_call_note(call)}]", NOTE_STYLE)
            seen = [call["text"]] if replies is None else _seen(replies, i)
            for text in filter(None, seen):
                _block(console, text, TOOL_STYLE)
                _spelled_out(console, text, control)
        for reply in replies or ():
            if reply["call"] is None:
                text = _text(reply["content"])
                _block(console, f"{reply['role']}: {text}", TOOL_STYLE)
                _spelled_out(console, text, control)
        if turn.get("process_reward") is not None:
            _line(
                console, f"       process reward of the turn {turn['process_reward']:g}", NOTE_STYLE
            )
    if record["status"] != "COMPLETED":
        _line(console, f"       {record['status']}: {record['reason']}", BAD_STYLE)
    for name, why in ((record.get("reward") or {}).get("reasons") or {}).items():
        _line(console, f"       {name}: {why}", NOTE_STYLE)
    _line(console, f"       {outcome(record)}", NOTE_STYLE)
