"""How an attempt of an agent ended: the keeper's report and what was printed --> `AgentEnd`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass
from typing import Any, Literal

from agent_r1.tools.agents.settings import AgentSettings
from agent_r1_proto.agents import MAX_OUTPUT_CHARS, AgentEnd, AgentExit

Json = dict[str, Any]
Limit = Literal["timeout", "memory"]
"""Limits that end an attempt from outside."""
MAX_ERROR_CHARS = 1000


@dataclass(frozen=True)
class Printed:
    """The end of what an agent printed."""

    output: str
    errors: str

    def both(self) -> str:
        """Return the end of both."""
        parts = filter(None, (self.output.rstrip(), self.errors.rstrip()))
        return "\n".join(parts)[-MAX_OUTPUT_CHARS:]

    def last_line(self) -> str:
        """Return the last line of the errors: of a Python program, what it raised."""
        lines = self.errors.rstrip().rsplit("\n", 1)
        return lines[-1].strip()


def describe_end(
    settings: AgentSettings, report: Json | None, limit: Limit | None, printed: Printed
) -> AgentEnd:
    """Return how an attempt ended.

    Args:
        settings: of the agent.
        report: the keeper's; None where it did not answer.
        limit: what the attempt exceeded.
        printed: by the agent.
    """
    report = report or {}
    result = _read_result(report.get("result"))
    exit_, error = _judge(settings, report, result, limit, printed)
    files: dict[str, str] = report.get("files", {})
    answer = None
    if settings.answer == "output":
        answer = result.get("answer") if settings.type else printed.output.strip()
    elif settings.answer_file is not None:
        answer = files.get(settings.answer_file)
    return AgentEnd(
        exit=exit_,
        answer=answer,
        output=printed.both(),
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


def _judge(
    settings: AgentSettings,
    report: Json,
    result: dict[str, str],
    limit: Limit | None,
    printed: Printed,
) -> tuple[AgentExit, str]:
    if "problem" in report:
        return "not_started", f"the sandbox refused the attempt: {report['problem']}"
    if "not_started" in result:
        remedy = (
            "correct the class"
            if settings.type
            else "install the program, or name its files in agent.show"
        )
        return "not_started", f"{result['not_started']}; {remedy}"
    if limit == "timeout":
        return "timeout", "the agent ran longer than it may, and was stopped"
    if limit == "memory":
        return "failed", (
            f"the agent used more than {settings.memory_mb} MB of memory, and was stopped; raise "
            "agent.memory_mb"
        )
    code = os.waitstatus_to_exitcode(report["status"])
    if code == 0:
        return "ok", ""
    if code == -signal.SIGXCPU:
        return "failed", (
            f"a process of the agent used more than {settings.cpu_s:g} s of CPU time; raise "
            "agent.cpu_s"
        )
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    return "failed", result.get("error") or printed.last_line() or how
