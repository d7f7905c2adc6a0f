"""`python_exec`: runs the model's Python in a sandbox and returns what it printed.

For tool-integrated reasoning: a call is one program, like a cell of a notebook that starts empty.
Served by `app.py` like any tool; docs/sandbox.md says what is isolated and what is not.
"""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field

from agent_r1.sandbox.outcome_text import describe_failure, shorten
from agent_r1.sandbox.pool import SandboxBusyError
from agent_r1.sandbox.program_run import RunResult
from agent_r1.sandbox.settings import SandboxSettings
from agent_r1.sandbox.worker import SandboxEndedError, SandboxStartError
from agent_r1.tools.base import Arguments, CallContext, ToolBusyError, ToolUnavailableError
from agent_r1.tools.sandbox.tool import (
    ANSWER_MARGIN_S,
    RUN_ATTEMPTS,
    SandboxTool,
    explain_short_time,
    find_wait_s,
    read_code,
)
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tools import ToolResult


class PythonSettings(SandboxSettings):
    """Settings of `python_exec`."""

    output_chars: Annotated[int, Field(ge=64)] = 4000
    """Longer output is cut in the middle, in characters."""


class PythonExec(SandboxTool[PythonSettings]):
    """Runs Python."""

    name = "python_exec"
    settings_class = PythonSettings
    description = (
        "Runs Python code and returns what it printed; the value of a last expression is printed "
        "too. Every call starts anew. There is no network and no input."
    )

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Run `code`.

        Raises:
            ToolBusyError: no sandbox was free in time.
            ToolUnavailableError: no sandbox starts, or the call's time is shorter than `wall_s`.
        """
        deadline = time.monotonic() + context.timeout_s - ANSWER_MARGIN_S
        wait_s = find_wait_s(context, self.settings.wall_s)
        try:
            async with self._pool.place(wait_s):
                result, wall_s = await self._run(read_code(arguments), context, deadline)
        except SandboxBusyError as exc:
            raise ToolBusyError(str(exc)) from exc
        except SandboxStartError as exc:
            raise ToolUnavailableError(str(exc)) from exc
        failure = describe_failure(result, self.settings, wall_s=wall_s)
        return ToolResult(
            status="ok" if failure is None else "error",
            parts=[TextPart(text=self._format(result, failure))],
            data={"why": result.why, "cpu_s": result.cpu_s, "wall_s": result.wall_s},
        )

    async def _run(
        self, code: str, context: CallContext, deadline: float
    ) -> tuple[RunResult, float]:
        for attempt in range(RUN_ATTEMPTS):
            try:
                async with self._pool.worker(deadline - time.monotonic()) as worker:
                    wall_s = min(self.settings.wall_s, deadline - time.monotonic())
                    result = await worker.run_program(code, wall_s=wall_s)
            except SandboxEndedError:
                continue
            # What has ended its sandbox before has taken the time that it lacks now.
            if result.why == "wall" and wall_s < self.settings.wall_s and attempt == 0:
                raise explain_short_time(context, "wall_s", self.settings.wall_s)
            return result, wall_s
        return RunResult(why="killed"), self.settings.wall_s

    def _format(self, result: RunResult, failure: str | None) -> str:
        limit = self.settings.output_chars
        output = "\n".join(filter(None, (result.stdout.rstrip(), result.stderr.rstrip())))
        parts = [shorten(output, limit), shorten(failure or "", limit)]
        return "\n".join(filter(None, parts)) or "(the code printed nothing)"
