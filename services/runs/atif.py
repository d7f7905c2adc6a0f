"""Trajectories in the Agent Trajectory Interchange Format, ATIF 1.8: a stored one --> a document.

Other programs' viewers and data sets read it. docs/run-folder.md says what it loses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from agent_r1.runs.record import prompt_messages
from agent_r1.runs.store import StoredTrajectory, Tokens
from agent_r1_proto.parts import Content, StoredImage, shown_text
from agent_r1_proto.tasks import ChatMessage

SCHEMA_VERSION = "ATIF-v1.8"
_FACTS = (
    *("task_id", "step", "group_id", "sample_index", "attempt", "purpose", "status", "reason"),
    *("trained", "process_reward", "advantage", "policy_versions", "staleness", "temperature"),
    *("seed", "segment_starts", "metadata"),
)
"""Fields of a record that stand in `extra`, where they say anything."""
_OF_CALL = ("status", "version", "instance", "attempt", "latency_ms", "process_reward", "error")


def atif_document(stored: StoredTrajectory, *, version: str, model: str | None) -> dict[str, Any]:
    """Return a trajectory as an ATIF document.

    Args:
        stored: with tokens, where the run has them.
        version: of this software.
        model: name of the model that was trained.
    """
    record = stored.record
    agents: list[dict[str, Any]] = record.get("lineages") or [{"name": "main", "parent": None}]
    turns: list[list[dict[str, Any]]] = [[] for _ in agents]
    for turn in record["turns"]:
        turns[turn.get("lineage", 0)].append(turn)
    written = [_steps(of_agent, stored.tokens) for of_agent in turns]
    documents = [
        {
            "schema_version": SCHEMA_VERSION,
            "session_id": record["rollout_id"],
            "trajectory_id": f"{record['rollout_id']}/{number}",
            "agent": {"name": agent["name"], "version": version, "model_name": model},
            "steps": _numbered(
                [*(_prompt(prompt_messages(record)) if number == 0 else ()), *steps]
            ),
            "extra": {
                name: agent[name] for name in ("parent", "excluded", "policy") if agent.get(name)
            },
        }
        for number, (agent, steps) in enumerate(zip(agents, written, strict=True))
    ]
    main, *others = documents
    started = record.get("started_at")
    main["extra"] |= {name: record[name] for name in _FACTS if record.get(name) is not None}
    main["extra"]["reward"] = record["reward"]
    main["final_metrics"] = {
        "total_completion_tokens": sum(
            end - start for start, end in record.get("mask_spans") or []
        ),
        "total_steps": len(main["steps"]),
        "extra": {"latency_ms": record["latency_ms"], "num_tokens": record["num_tokens"]},
    }
    if started and main["steps"]:
        main["steps"][0]["timestamp"] = datetime.fromtimestamp(started, UTC).isoformat()
    if others:
        main["subagent_trajectories"] = others
    return main


def _numbered(steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]


def _prompt(messages: Sequence[ChatMessage]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a prompt; a tool's message is an observation of the step before it."""
    steps: list[dict[str, Any]] = []
    for number, message in enumerate(messages):
        content = _content(message.content)
        calls = [
            {
                "tool_call_id": call.id or f"prompt-{number}-{i}",
                "function_name": call.name,
                "arguments": call.arguments,
            }
            for i, call in enumerate(message.tool_calls)
        ]
        if message.role == "tool" and steps and steps[-1]["source"] == "agent":
            step = steps[-1]
            results = step.setdefault("observation", {"results": []})["results"]
            ids = [call["tool_call_id"] for call in step.get("tool_calls", ())]
            named = message.tool_call_id or (ids[len(results)] if len(results) < len(ids) else "")
            results.append(
                {"content": content} | ({"source_call_id": named} if named in ids else {})
            )
            continue
        source = {"system": "system", "assistant": "agent"}.get(message.role, "user")
        step = {"source": source, "message": content}
        if source == "agent":  # it was not sampled in this attempt
            step |= {"is_copied_context": True} | ({"tool_calls": calls} if calls else {})
        steps.append(step)
    yield from steps


def _steps(turns: Sequence[Mapping[str, Any]], tokens: Tokens | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of one agent: its turns, and what users said between them."""
    for number, turn in enumerate(turns):
        ids = [f"{turn['start']}-{i}" for i in range(len(turn["calls"]))]
        said = turn.get("said")
        step: dict[str, Any] = {
            "source": "agent",
            "message": turn["text"] if said is None else said,
            "metrics": _metrics(turn, tokens),
            "llm_call_count": 1,
            "extra": {
                name: turn[name] for name in ("process_reward", "state_key") if turn.get(name)
            },
        }
        if turn.get("thought") is not None:
            step["reasoning_content"] = turn["thought"]
        if ids:
            step["tool_calls"] = [
                {
                    "tool_call_id": key,
                    "function_name": call["tool"],
                    "arguments": call["arguments"],
                    "extra": {name: call[name] for name in _OF_CALL if call.get(name)},
                }
                for key, call in zip(ids, turn["calls"], strict=True)
            ]
        replies = turn.get("replies")
        if replies is None:
            replies = [
                {"role": "tool", "content": call["text"], "call": i}
                for i, call in enumerate(turn["calls"])
                if call["status"] != "failed"
            ]
        results = [
            {"content": reply["content"]}
            | ({} if reply["call"] is None else {"source_call_id": ids[reply["call"]]})
            for reply in replies
            if reply["role"] == "tool"
        ]
        if results:
            step["observation"] = {"results": results}
        yield step
        for reply in replies:
            # What follows the last turn was never read.
            if reply["role"] == "user" and number + 1 < len(turns):
                yield {"source": "user", "message": reply["content"]}


def _metrics(turn: Mapping[str, Any], tokens: Tokens | None) -> dict[str, Any]:
    start, end = turn["start"], turn["end"]
    metrics: dict[str, Any] = {"completion_tokens": end - start}
    if tokens is None:
        return metrics
    metrics["completion_token_ids"] = tokens.token_ids[start:end].tolist()
    logprobs = tokens.rollout_logprobs[start:end]
    if np.isfinite(logprobs).all():  # the format has numbers alone, and JSON no others
        metrics["logprobs"] = logprobs.tolist()
    return metrics


def _content(content: Content) -> str | list[dict[str, Any]]:
    """Return a message's content; an image by its hash, because its bytes are not in the run."""
    if isinstance(content, str):
        return content
    if not any(isinstance(part, StoredImage) for part in content):
        return shown_text(content)
    return [
        {
            "type": "image",
            "source": {"media_type": part.media_type, "path": f"sha256:{part.sha256}"},
        }
        if isinstance(part, StoredImage)
        else {"type": "text", "text": part.text}
        for part in content
    ]
