"""Running a program on arguments, and the tool and the reward that are made of it.

`PythonTrial` is the built-in `python_exec` for programs that define `f`: it calls `f` in the
sandbox with the arguments of the task's examples and hidden tests, and compares what comes back
outside of it. The model reads how the examples went; the hidden tests are only counted.
"""

import json
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, JsonValue

from agent_r1.tools.base import Arguments, CallContext, ToolUnavailableError, text_result
from agent_r1.tools.sandbox.python_exec import PythonExec, PythonSettings
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.tools import TestedCode, ToolResult

PASSED, FAILED = "ok", "wrong"
HARNESS = """
def outcome(argument):
 try:
  return repr(f(argument)), ""
 except Exception as error:
  return "", f"{type(error).__name__}: {error}"
print(json.dumps([outcome(argument) for argument in json.loads(ARGUMENTS)]))
"""
"""Comes after the program, and prints what `f` returns for each argument, or the error."""

Outcome = tuple[str, str]
"""What a call returned, as `repr` shows it, and the error; one of the two is empty."""


class Case(BaseModel):
    """A call of `f` and what it should return."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    argument: JsonValue
    expected: JsonValue

    def problem(self, outcome: Outcome) -> str:
        """Say what is wrong with an outcome; "" where nothing is."""
        returned, error = outcome
        if error or returned == repr(self.expected):
            return error
        return f"f({self.argument!r}) is {returned}, not {self.expected!r}"


class Trial(BaseModel):
    """`tool_context` of a task."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    examples: list[Case]
    """The model reads about the first of these that fails."""
    tests: list[Case]
    """Only the reward counts these."""

    def source(self, code: str) -> str:
        """Return the program that is run for `code`."""
        arguments = json.dumps([case.argument for case in (*self.examples, *self.tests)])
        return f"{code}\nimport json\nARGUMENTS = {arguments!r}{HARNESS}"

    def judge(self, outcomes: Sequence[Outcome]) -> tuple[str, TestedCode]:
        """Return what the model reads about the examples, and the counts of the hidden tests."""
        cases = (*self.examples, *self.tests)
        problems = [case.problem(outcome) for case, outcome in zip(cases, outcomes, strict=True)]
        shown = next(filter(None, problems[: len(self.examples)]), PASSED)
        failed = sum(map(bool, problems[len(self.examples) :]))
        total = len(self.tests)
        return shown, TestedCode(passed=total - failed, failed=failed, total=total)


class PythonTrialSettings(PythonSettings):
    """Settings of `PythonTrial`."""

    show_errors: bool = True
    """False: the model reads that a program is wrong, and not what is wrong with it."""


class PythonTrial(PythonExec):
    """Runs the model's program on the examples and the hidden tests of its task."""

    settings_class = PythonTrialSettings
    settings: PythonTrialSettings
    description = "Runs a Python program that defines f(x) on examples and says what went wrong."

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Run `code`.

        Raises:
            ToolUnavailableError: the task's `tool_context` is no `Trial`, or there is no sandbox.
        """
        try:
            trial = Trial.model_validate(context.tool_context)
        except ValueError as exc:  # a fault of the data must not count against the model
            raise ToolUnavailableError(f"tool_context is no Trial: {exc}") from exc
        ran = await super().call({"code": trial.source(str(arguments["code"]))}, context)
        outcomes = _read_outcomes(ran, len(trial.examples) + len(trial.tests))
        shown, counts = trial.judge(outcomes)
        if shown != PASSED and not self.settings.show_errors:
            shown = FAILED
        return text_result(shown).model_copy(update={"data": counts.model_dump()})


def _read_outcomes(ran: ToolResult, count: int) -> list[Outcome]:
    """Return the outcome of each call; a program that did not come so far failed them all."""
    *_, last = ran.text().splitlines()
    if ran.status == "ok":
        try:
            outcomes = json.loads(last)
            if len(outcomes) == count:
                return [(str(returned), str(error)) for returned, error in outcomes]
        except (ValueError, TypeError):
            last = "the program printed something else"
    return [("", last)] * count


def tests_passed(request: ScoreRequest) -> float:
    """Return the share of the hidden tests that the last program that was run passed, or 0.0."""
    ran = [call.data for turn in request.turns for call in turn.calls if call.data is not None]
    return TestedCode.model_validate(ran[-1]).share if ran else 0.0


def all_tests_passed(request: ScoreRequest) -> float:
    """Return 1.0 when the last program that was run passed every hidden test, else 0.0."""
    return float(tests_passed(request) == 1.0)
