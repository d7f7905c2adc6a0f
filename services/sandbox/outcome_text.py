"""Says to the model how its code ended: limits and crashes in words, long output cut."""

from __future__ import annotations

import signal

from agent_r1.sandbox.program_run import RunResult
from agent_r1.sandbox.settings import FILES, OUTPUT_BYTES, SandboxSettings

_HINTS = {
    "MemoryError": "Memory is limited to {memory_mb} MB.",
    # What CPython makes of memory that runs out in the wrong place.
    "SystemError": "Memory is limited to {memory_mb} MB.",
    "BlockingIOError": "At most {processes} processes and threads may run at once.",
}


def describe_failure(result: RunResult, settings: SandboxSettings, *, wall_s: float) -> str | None:
    """Return what went wrong, for the model to read; None when nothing did."""
    match result.why:
        case "wall":
            return f"Error: the code ran longer than {wall_s:g} s and was stopped."
        case "output":
            return f"Error: the code wrote more than {OUTPUT_BYTES} bytes and was stopped."
        case "memory":
            return f"Error: the code used more than {settings.memory_mb} MB of memory."
        case "files":
            return f"Error: the code made more than {FILES} files."
        case "killed":
            return "Error: the code ended the sandbox it ran in."
        case "ended":
            return _describe_end(result, settings)


def shorten(text: str, limit: int) -> str:
    """Cut a text in the middle, so that its beginning and its end stay."""
    if len(text) <= limit:
        return text
    half = limit // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n… [{left_out} characters left out] …\n{text[-half:]}"


def _describe_end(result: RunResult, settings: SandboxSettings) -> str | None:
    error = result.report.get("error")
    if isinstance(error, str):
        kind = str(result.report.get("error_type"))
        hint = _HINTS.get(kind, "").format(**settings.model_dump())
        return "\n".join(filter(None, (error.strip(), hint)))
    took_all = result.cpu_s >= settings.cpu_s  # the kernel kills a process that ignores SIGXCPU
    if result.signal == signal.SIGXCPU or (result.signal == signal.SIGKILL and took_all):
        return f"Error: the code used more than {settings.cpu_s:g} s of CPU time and was stopped."
    if result.signal is not None:
        return f"Error: the code was ended by {_name_signal(result.signal)}."
    if result.exit_code:
        return f"Error: the code ended with exit code {result.exit_code}."
    return None


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
