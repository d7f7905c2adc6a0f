"""`code_tests`: runs the model's code against the hidden tests of its task and counts what passes.

The tests come with the task (`tool_context`, see `sandbox/checks.py`) and are never shown but for
the failing ones this tool answers with. Each test runs in a process of its own, and the code it
tests in another one of another sandbox; between them passes plain data, through this service.
`ToolResult.data` has the counts for the reward.
"""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, JsonValue

from agent_r1.sandbox.checks import Check, read_checks
from agent_r1.sandbox.outcome_text import describe_failure, shorten
from agent_r1.sandbox.pool import SandboxBusyError, SandboxPool
from agent_r1.sandbox.program_run import REPORT, Run, RunResult
from agent_r1.sandbox.settings import SandboxSettings
from agent_r1.sandbox.worker import SandboxEndedError, SandboxStartError, Worker
from agent_r1.tools.base import (
    Arguments,
    CallContext,
    ToolBusyError,
    ToolUnavailableError,
    text_result,
)
from agent_r1.tools.sandbox.tool import (
    ANSWER_MARGIN_S,
    RUN_ATTEMPTS,
    SandboxTool,
    explain_short_time,
    find_wait_s,
    read_code,
)
from agent_r1_proto.tools import TESTS_TOOL, TestedCode, ToolResult

_TESTER_CALLS = 10_000


class CodeTestsSettings(SandboxSettings):
    """Settings of `code_tests`."""

    total_s: Annotated[float, Field(gt=0, le=3600)] = 20.0
    """Time all tests of one call may take, in seconds; those not run by then have failed."""
    show_failing: Annotated[int, Field(ge=0)] = 3
    """Failing tests shown to the model; 0 tells it the counts only."""
    output_chars: Annotated[int, Field(ge=64)] = 2000
    """Longer answers are cut in the middle, in characters."""


class CodeTests(SandboxTool[CodeTestsSettings]):
    """Runs hidden tests."""

    name = TESTS_TOOL
    settings_class = CodeTestsSettings
    description = (
        "Runs your Python code against the tests of the task and returns how many pass and the "
        "errors of those that fail. Give the whole program."
    )

    def __init__(self, **settings: JsonValue) -> None:
        super().__init__(**settings)
        # Only tests run there, and nothing stays of one, so these sandboxes are kept.
        self._testers = SandboxPool(self.settings.model_copy(update={"reuse_calls": _TESTER_CALLS}))

    async def start(self) -> None:
        """Start the sandboxes of the code and those of the tests.

        Raises:
            ValueError: none can run here; the text says what to do.
        """
        await super().start()
        await self._testers.start()

    async def stop(self) -> None:
        """End the sandboxes."""
        await self._testers.stop()
        await super().stop()

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Test `code`.

        Raises:
            ToolBusyError: no sandbox was free in time.
            ToolUnavailableError: the task's tests are wrong, no sandbox starts, or the call's time
                is shorter than `total_s`.
        """
        deadline = time.monotonic() + context.timeout_s - ANSWER_MARGIN_S
        try:
            # In a thread: many tests take a while to parse, and others call meanwhile.
            task, checks = await asyncio.to_thread(read_checks, context.tool_context)
        except ValueError as exc:  # a fault of the data must not count against the model
            raise ToolUnavailableError(str(exc)) from exc
        code = task.prompt + read_code(arguments)
        run = _TestRun(code, checks, self.settings, context, deadline)
        try:
            async with self._pool.place(find_wait_s(context, self.settings.total_s)):
                await self._judge(run)
        except SandboxBusyError as exc:
            raise ToolBusyError(str(exc)) from exc
        except (SandboxStartError, _TestsEndedError) as exc:
            raise ToolUnavailableError(str(exc)) from exc
        failed = sum(failure is not None for failure in run.failures)
        counts = TestedCode(passed=len(checks) - failed, failed=failed, total=len(checks))
        answer = text_result(self._format(checks, run.failures))
        return answer.model_copy(update={"data": counts.model_dump()})

    async def _judge(self, run: _TestRun) -> None:
        """Run all tests, in as many sandboxes as that takes."""
        while not run.done:
            async with (
                self._pool.worker(run.deadline - time.monotonic()) as code,
                # A place for the code is one for its tests: there are as many of either.
                self._testers.worker(run.deadline - time.monotonic()) as tests,
            ):
                await run.use(code, tests)

    def _format(self, checks: Sequence[Check], failures: Sequence[str | None]) -> str:
        failed = [pair for pair in zip(checks, failures, strict=True) if pair[1] is not None]
        total = len(checks)
        if not failed:
            return f"All {total} tests passed."
        lines = [f"{total - len(failed)} of {total} tests passed."]
        if len({failure for _, failure in failed}) == 1 and len(failed) == total > 1:
            failed, rest = failed[:1], 0
        else:
            rest = len(failed) - self.settings.show_failing
        for check, failure in failed[: self.settings.show_failing]:
            lines.append(
                f"Failed: {check.text}\n{textwrap.indent(failure or '', '  ', lambda _: True)}"
            )
        if rest > 0 and self.settings.show_failing:
            lines.append(f"{rest} more failed.")
        return shorten("\n".join(lines), self.settings.output_chars)


class _TestsEndedError(Exception):
    """The sandbox of the tests ended, which no code under test can bring about."""


@dataclass
class _TestRun:
    """The tests of one call, run one after the other in as many sandboxes as that takes."""

    code: str
    checks: list[Check]
    settings: CodeTestsSettings
    context: CallContext
    deadline: float
    failures: list[str | None] = field(default_factory=list)
    """Failure of each test that was run; None where it passed."""
    _end: float | None = None
    """End of `total_s`; sandboxes that the code has used up are replaced in this time."""
    _tries: int = 0

    @property
    def done(self) -> bool:
        """Return whether every test has been judged."""
        return len(self.failures) == len(self.checks)

    async def use(self, code: Worker, tests: Worker) -> None:
        """Run tests until all are judged or one of the sandboxes is used up.

        Raises:
            ToolUnavailableError: the caller's deadline, not `total_s`, ended the tests.
        """
        if self._end is None:
            self._end = time.monotonic() + self.settings.total_s
        while code.usable and tests.usable and not self.done:
            left_s = min(self._end, self.deadline) - time.monotonic()
            wall_s = min(self.settings.wall_s, left_s)
            if wall_s <= 0:
                self._run_out_of_time()
                return
            try:
                result, passed = await self._run_test(code, tests, wall_s)
            except SandboxEndedError:
                self._tries += 1
                if self._tries < RUN_ATTEMPTS:
                    return
                result, passed = RunResult(why="killed"), False
            self._tries = 0
            if result.why == "wall" and wall_s < self.settings.wall_s:
                self._run_out_of_time()
                return
            self._note(result, passed=passed)

    async def _run_test(self, code: Worker, tests: Worker, wall_s: float) -> tuple[RunResult, bool]:
        """Run the next test.

        Returns:
            how the process that decided it ended, and whether the test has passed, which only
            the process of the test can say.
        """
        check = self.checks[len(self.failures)]
        async with (
            _tests_process(tests, wall_s) as test,
            code.run("solution", wall_s=wall_s) as solution,
        ):
            await test.send(check.request())
            await solution.send({"code": self.code})
            loaded = await solution.receive()
            broken = loaded is None or loaded.report() != {}
            verdict = None if broken else await _relay(test, solution)
            ended, judged = await asyncio.gather(
                _finish(code, solution, {} if loaded is None else loaded.report()),
                _finish(tests, test, verdict or {}),
                return_exceptions=True,
            )
        if isinstance(judged, SandboxEndedError):
            raise _TestsEndedError(str(judged)) from judged
        if isinstance(judged, BaseException):
            raise judged
        if judged.report.get("stage") == "data":
            problem = str(judged.report.get("error")).strip().splitlines()[-1]
            raise ToolUnavailableError(
                f"a test in tool_context cannot be compiled: {problem}; correct the data, or raise "
                "memory_mb if that is what it lacks"
            )
        if isinstance(ended, BaseException):
            raise ended
        if broken:
            return ended.model_copy(update={"report": ended.report | {"stage": "code"}}), False
        if verdict is None:
            return ended, False
        return judged, verdict.get("passed") is True

    def _note(self, result: RunResult, *, passed: bool) -> None:
        if passed:
            self.failures.append(None)
            return
        failure = describe_failure(result, self.settings, wall_s=self.settings.wall_s)
        failure = failure or "it did not come to its end"
        if result.report.get("stage") == "code":
            self._fail_rest(failure)  # code that does not load is not loaded for every test
            return
        self.failures.append(failure)

    def _run_out_of_time(self) -> None:
        assert self._end is not None
        if self.deadline < self._end:
            raise explain_short_time(self.context, "total_s", self.settings.total_s)
        self._fail_rest(f"no time left: all tests together may take {self.settings.total_s:g} s")

    def _fail_rest(self, failure: str) -> None:
        self.failures += [failure] * (len(self.checks) - len(self.failures))


@asynccontextmanager
async def _tests_process(tests: Worker, wall_s: float) -> AsyncIterator[Run]:
    try:
        async with tests.run("tester", wall_s=wall_s) as run:
            yield run
    except SandboxEndedError as exc:
        raise _TestsEndedError(str(exc)) from exc


async def _relay(test: Run, solution: Run) -> dict[str, Any] | None:
    """Carry what the test asks to the code, and its answers back, until the test is judged.

    Returns:
        what the process of the test says at its end; None where the code has ended before.
    """
    while True:
        question = await test.receive()
        if question is None or question.kind == REPORT:
            return {} if question is None else question.report()
        await solution.forward(question)
        answer = await solution.receive()
        if answer is None or answer.kind == REPORT:
            return None
        await test.forward(answer)


async def _finish(worker: Worker, run: Run, report: dict[str, Any]) -> RunResult:
    run.stop()
    return await worker.finish(run, report)
