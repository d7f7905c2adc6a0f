"""End of an agent's attempt: what its keeper reports --> `AgentEnd`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import Any

from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1_proto.agents import MAX_OUTPUT_CHARS, AgentEnd, AgentExit

Json = dict[str, Any]
MAX_ERROR_CHARS = 1000


def describe_end(settings: AgentSettings, report: Json) -> AgentEnd:
    """Return how an attempt ended.

    Args:
        settings: of the agent.
        report: the keeper's, or what is known without it.
    """
    result = _read_result(report.get("result"))
    exit_, error = _judge(settings, report, result)
    printed = [report.get(name, "").rstrip() for name in ("output", "errors")]
    files: dict[str, str] = report.get("files", {})
    answer = None
    if settings.answer == "output":
        answer = result.get("answer") if settings.type else printed[0].strip()
    elif settings.answer_file is not None:
        answer = files.get(settings.answer_file)
    return AgentEnd(
        exit=exit_,
        answer=answer,
        output="\n".join(filter(None, printed))[-MAX_OUTPUT_CHARS:],
        error=" ".join(error.split())[:MAX_ERROR_CHARS],
        artefacts={name: files[name] for name in settings.artefacts if name in files},
    )


def _read_result(text: object) -> dict[str, str]:
    """Return what the agent's process left; it may be anything."""
    result: object = None
    with contextlib.suppress(ValueError, RecursionError):
        result = json.loads(text) if isinstance(text, str) else None
    if not isinstance(result, dict):
        return {}
    return {name: value for name, value in result.items() if isinstance(value, str)}


def _judge(settings: AgentSettings, report: Json, result: dict[str, str]) -> tuple[AgentExit, str]:
    if "lost" in report:
        return "lost", report["lost"]
    if "problem" in report:
        return "not_started", f"the sandbox refused the attempt: {report['problem']}"
    if "not_started" in result:
        remedy = "install the program, or name its files in agent.show"
        remedy = "add it to agent.image" if settings.image else remedy
        remedy = "correct the class" if settings.type else remedy
        return "not_started", f"{result['not_started']}; {remedy}"
    if report["why"] == "timeout":
        return "timeout", "the agent ran longer than it may, and was stopped"
    if report["why"] == "memory":
        return "failed", (
            f"the agent used more than {settings.memory_mb} MB of memory, and was stopped; raise "
            "agent.memory_mb"
        )
    code = os.waitstatus_to_exitcode(report["status"])
    if code == 0:
        return "ok", ""
    if code == -signal.SIGXCPU:
        return "failed", f"the agent used more than {settings.cpu_s:g} s of CPU; raise agent.cpu_s"
    how = f"exit status {code}"
    if code < 0:  # Linux has numbers of signals that have no name
        named = -code in set(signal.Signals)
        how = f"ended by {signal.Signals(-code).name if named else f'signal {-code}'}"
    last_line = report["errors"].rstrip().rpartition("\n")[2].strip()
    return "failed", result.get("error") or last_line or how
