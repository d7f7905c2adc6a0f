"""Programs that people use as agents, unmodified, in the sandbox, with a scripted policy that calls
their own tools. `make test-agents` installs them; what they come to is docs/results/agents.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pydantic import JsonValue

from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.session import SessionRules
from agent_r1.text.chat_format import ChatFormat
from agent_r1.tools.agents import relay
from agent_r1_proto.parts import TextPart
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import ToolCall, ToolResult
from agent_r1_proto.trajectory import Trajectory
from tests.support.agent_scene import agent_scene, scene_chat
from tests.support.builders import rollout_task
from tests.support.fakes import FakePolicy, FakeToolServer, call_text

pytestmark = [pytest.mark.redis, pytest.mark.slow]
REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = REPOSITORY / "build" / "npm" / "node_modules"
MINI = REPOSITORY / "build" / "mini"
SHELL_AGENT = REPOSITORY / "examples" / "any_agent" / "shell_agent.py"
REPORT = os.environ.get("AGENTS_REPORT")
MAX_CONTEXT = 500_000
"""A token is a letter here, and the instructions of some programs are long."""
RULES = SessionRules(
    run_seed=5, max_context=MAX_CONTEXT, max_tokens_per_turn=4000, max_session_tokens=1 << 24
)
COMMANDS = (
    "printf 'def add(a, b): return a - b' > add.py",
    "cat add.py",
    "python3 -B -c 'import add; print(add.add(1, 2))'",
    "sed -i 's/a - b/a + b/' add.py",
    "python3 -B -c 'import add; print(add.add(1, 2))'",
)
PROMPT = "Write add.py with a function add(a, b), and test it."
DELEGATED = "Say which function add.py wants"
SUMMARY = "SUMMARY of what was done: add.py is written, and by now it is mended."
SUMS_UP = f"<summary>{SUMMARY}</summary>"
CODE = {"type": "object", "properties": {"code": {"type": "string"}}}
LONG = "python3 -c \"print('a line of text ' * 700)\""


@dataclass(frozen=True)
class Program:
    """A program as the test knows it."""

    folder: str
    """Of its executable, in that of the packages."""
    shell: str
    """Name of its tool that runs a command."""
    argument: str = "command"
    more: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further arguments that the tool wants."""
    side_calls: int = 0
    """Requests beside the work, such as for a title."""
    delegate: tuple[str, Mapping[str, JsonValue]] | None = None
    """Its tool that starts another agent, and the arguments; None where it has none."""
    packages: Path = PACKAGES
    last: str = "It is mended."
    """Turn with which it ends."""
    room: int = MAX_CONTEXT
    """Context in which it compacts before it ends."""
    calls: int = 1000
    """After so many it answers, where no lack of room ends its work."""
    wire: str = ""
    """Of a program of this test on openai-agents; "": it is one of `agent.known`."""
    compact: tuple[str, ...] = ()
    """Arguments with which that compacts."""
    compacted: float = 1.2
    """Ratio of its rows to its histories with a compaction, at most."""

    def call(self, command: str) -> str:
        return call_text(self.shell, **{self.argument: command, **self.more})


LOOK = ("look", {"input": DELEGATED})
PROGRAMS = {
    "openai-agents, Chat": Program("", "bash", delegate=LOOK, calls=3, wire="chat"),
    "openai-agents, Responses": Program(
        "", "bash", delegate=LOOK, calls=3, wire="responses", compact=("compact",)
    ),
    "mini": Program(
        "bin",
        "bash",
        packages=MINI,
        last=call_text("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "pi": Program(".bin", "bash", room=60_000),
    "claude": Program(
        "@anthropic-ai/claude-code-linux-x64",
        "Bash",
        more={"description": "x"},
        delegate=(
            "Agent",
            {"description": "look", "prompt": DELEGATED, "run_in_background": False},
        ),
        room=120_000,
        compacted=1.6,  # it leaves out its last call when it asks for the summary
    ),
    "codex": Program(
        "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin",
        "exec_command",
        "cmd",
        delegate=("multi_agent_v1__spawn_agent", {"message": DELEGATED}),
        room=75_000,
    ),
    "opencode": Program(
        "opencode-linux-x64/bin",
        "bash",
        more={"description": "x"},
        side_calls=1,
        delegate=(
            "task",
            {"description": "look", "prompt": DELEGATED, "subagent_type": "general"},
        ),
        room=60_000,
    ),
}


@pytest.fixture
async def broker(redis_url: str, run_id: str) -> AsyncIterator[Broker]:
    async with await Broker.connect(redis_url, run_id) as connection:
        yield connection


@pytest.fixture(scope="module")
def rows() -> Iterator[list[Sequence[object]]]:
    """Rows of the report, which replace those of the same name where AGENTS_REPORT names a file."""
    found: list[Sequence[object]] = []
    yield found
    if REPORT is not None:
        path = Path(REPORT)
        text, head, table = path.read_text(encoding="utf-8").partition("| program |")
        names, rule, *old = (head + table).splitlines()
        lines = {line.split(" | ")[0]: line for line in old}
        lines |= {f"| {row[0]}": "| " + " | ".join(map(str, row)) + " |" for row in found}
        rest = "\n".join([names, rule, *(lines[name] for name in sorted(lines))])
        path.write_text(f"{text}{rest}\n", encoding="utf-8")


@dataclass
class Histories:
    """Tokens of every dialogue of a program, as it stood at its end or when it was compacted."""

    longest: dict[str, int] = field(default_factory=dict[str, int])
    """By what it was for."""

    def note(self, kind: str, token_ids: Sequence[int], turn: Sequence[int]) -> None:
        """Note a dialogue with the turn that answers it."""
        size = len(token_ids) + len(turn)
        self.longest[kind] = max(size, self.longest.get(kind, 0))

    def tokens(self) -> int:
        return sum(self.longest.values())


def report_of(
    name: str, trajectory: Trajectory, histories: Histories, at_most: float = 1.2
) -> Sequence[object]:
    """Tokens are captured, trained, or excluded; the ratios are those of all tokens of the rows, as
    they lie and where they share beginnings, to those of the histories."""
    excluded: Counter[str] = Counter()
    lineages = trajectory.lineages or [None]
    for one, (start, end) in zip(lineages, trajectory.lineage_bounds(), strict=True):
        if one is not None and one.excluded:
            excluded[one.excluded] += int(trajectory.action_mask[start:end].sum())
    captured = int(trajectory.action_mask.sum())
    trained = int((trajectory.trained_mask() & trajectory.action_mask).sum())
    assert captured == trained + sum(excluded.values())
    why = ", ".join(f"{name} {count}" for name, count in excluded.items()) or "none"
    segments = sorted(trajectory.token_ids[a:b].tolist() for a, b in trajectory.segment_bounds())
    shared = sum(_common(one, other) for one, other in itertools.pairwise(segments))
    ratios = [(len(trajectory.token_ids) - less) / histories.tokens() for less in (0, shared)]
    assert ratios[0] <= at_most
    assert ratios[1] <= 1.2
    counts = (len(trajectory.turns), len(segments), captured, trained, why)
    return (name, *counts, *(f"{ratio:.2f}" for ratio in ratios))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two rows begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def config_of(name: str, *arguments: str) -> AgentConfig:
    """Return the table of a program; without it the test fails where the report is written, and is
    skipped elsewhere."""
    program = PROGRAMS[name]
    table: dict[str, object] = {"known": name}
    if program.wire:
        missing = importlib.util.find_spec("agents") is None
        folders: list[Path] = []
        table = {"command": [sys.executable, str(SHELL_AGENT), program.wire, *arguments]}
    else:
        folders = [program.packages, program.packages / program.folder]
        missing = not (folders[-1] / name).exists()
    if missing:
        report = pytest.fail if REPORT else pytest.skip
        report(f"{name} is not installed; `make test-agents` installs it, where npm is")
    return AgentConfig.model_validate(
        {
            **table,
            "show": list(map(str, folders)),
            "answer": "output",
            "artefacts": ["add.py"],
            "memory_mb": 16384,
            "processes": 256,
            "file_mb": 512,
            "timeout_s": 150.0,
        }
    )


@dataclass
class Watched:
    """Counts what travels between a program and its session, and may break it once."""

    cut_at: int = 0
    """Which answer is broken in its middle; 0: none."""
    requests: int = 0
    answers: int = 0
    streamed: int = 0
    waits: list[float] = field(default_factory=list[float])
    """Seconds from a request to the first bytes of its answer."""
    _asked: dict[object, float] = field(default_factory=dict[object, float])

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if data.startswith((b"POST", b"GET", b"HEAD")):
                self.requests += 1
                self._asked[reader._transport] = time.monotonic()  # pyright: ignore[reportAttributeAccessIssue]
            if data.startswith(b"HTTP/1.1 200"):
                self.answers += 1
                self.streamed += b"text/event-stream" in data
                self.waits.append(time.monotonic() - self._asked[writer.transport])
                if self.answers == self.cut_at:
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    writer.transport.abort()
                    raise ConnectionResetError("cut by the test")
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    def with_figures(self, row: Sequence[object]) -> Sequence[object]:
        """Return a row of the report with what was counted."""
        streams = "yes" if self.streamed else "no"
        return (
            row[0],
            self.requests,
            *row[1:],
            streams,
            f"{1000 * statistics.median(self.waits):.0f}",
        )


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_program_works_with_its_own_tools(
    name: str,
    is_cut: bool,
    broker: Broker,
    run_id: str,
    rows: list[Sequence[object]],
    monkeypatch: pytest.MonkeyPatch,
):
    watched = Watched(cut_at=3 if is_cut else 0)
    monkeypatch.setattr(relay, "_pump", watched.pump)
    program = PROGRAMS[name]
    chat = scene_chat()
    end_id = min(chat._end_of_turn_ids)
    script = [*map(program.call, COMMANDS), program.last]
    histories = Histories()

    def write(token_ids: list[int], number: int) -> list[int]:
        read = chat.decode(token_ids)
        is_side = program.shell not in read or "<tools>" not in read
        turn = "A title" if is_side else script[read.count("</tool_response>")]
        begun = read.rpartition("<|im_start|>assistant\n")[2]  # before its connection was cut
        said = [*chat.encode(turn.removeprefix(begun)), end_id]
        histories.note("side" if is_side else "main", token_ids, said)
        return said

    policy = FakePolicy(write, eos_token_ids=[end_id], max_context=MAX_CONTEXT)
    config = config_of(name)
    async with agent_scene(broker, chat, policy, config, rules=RULES) as attempts:
        trajectory = await attempts.run(rollout_task(run_id, task=Task(id="q", prompt=PROMPT)))
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer"), trajectory.turns
    main = [turn for turn in trajectory.turns if turn.text in script]
    assert [turn.text for turn in main] == script
    results = [turn.calls[0].text() for turn in main[:-1]]
    assert ("-1" in results[2], "3" in results[4]) == (True, True), results
    data = next(turn.data for turn in reversed(trajectory.turns) if turn.data is not None)
    assert isinstance(data, dict)
    assert data["artefacts"] == {"add.py": "def add(a, b): return a + b"}
    assert len(trajectory.turns) == len(script) + program.side_calls
    row = report_of(name, trajectory, histories)
    if is_cut:
        assert watched.answers > watched.cut_at
    else:
        rows.append(watched.with_figures(row))


@dataclass
class Delegating:
    """A policy that lets another agent look, works until there is no room, and sums up."""

    program: Program
    chat: ChatFormat
    end_id: int
    histories: Histories = field(default_factory=Histories)
    summaries: int = 0
    _begun: str = field(default="", init=False)
    """What the first request of the work said."""

    def write(self, token_ids: list[int], number: int) -> list[int]:
        read = self.chat.decode(token_ids)
        kind, text = self._decide(read)
        if kind == "main":
            self._begun = self._begun or read
        elif kind == "summary":  # which may be asked for at the end of the work itself, or anew
            self.summaries += 1
            kind = "main" if read.startswith(self._begun) else f"summary {self.summaries}"
        said = [*self.chat.encode(text), self.end_id]
        self.histories.note(kind, token_ids, said)
        return said

    def _decide(self, read: str) -> tuple[str, str]:
        calls = read.count("</tool_response>")
        begun, _, asked = read.rpartition("</tool_response>")
        if DELEGATED in read and PROMPT not in read and SUMMARY not in read:
            return "other agent", "The function add"
        if "<tools>" not in read and "title" in read[:3000].lower():
            return "title", "A title"
        if SUMMARY in read:
            return "after", "It is mended."
        if "<tools>" not in read or (begun and re.search("summar|handoff", asked.lower())):
            return "summary", SUMS_UP
        if calls == 0 and self.program.delegate is not None:
            tool, arguments = self.program.delegate
            return "main", call_text(tool, **arguments)
        if calls >= self.program.calls:
            return "main", "So far, so good." if self.program.compact else "It is mended."
        if calls == 1 and (agent := re.search(r"agent_id\W+([0-9a-f-]{36})", read)):
            wait = {"targets": [agent[1]], "timeout_ms": 20_000}
            return "main", call_text("multi_agent_v1__wait_agent", **wait)
        return "main", self.program.call(LONG)


@pytest.mark.parametrize(
    "name", [name for name, one in PROGRAMS.items() if one.delegate or one.room < MAX_CONTEXT]
)
async def test_a_program_delegates_and_runs_out_of_room(
    name: str,
    broker: Broker,
    run_id: str,
    rows: list[Sequence[object]],
    monkeypatch: pytest.MonkeyPatch,
):
    watched = Watched()
    monkeypatch.setattr(relay, "_pump", watched.pump)
    program, chat = PROGRAMS[name], scene_chat()
    config = config_of(name, *program.compact)
    end_id = min(chat._end_of_turn_ids)
    delegating = Delegating(program, chat, end_id)
    policy = FakePolicy(delegating.write, eos_token_ids=[end_id], max_context=program.room)
    rules = replace(RULES, max_context=program.room)
    async with agent_scene(broker, chat, policy, config, rules=rules) as attempts:
        trajectory = await attempts.run(rollout_task(run_id, task=Task(id="q", prompt=PROMPT)))
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer"), trajectory.turns[-1]
    said = Counter(turn.text for turn in trajectory.turns)
    asks = program.delegate is not None
    assert (said["The function add"], said["It is mended."]) == (asks, 1)
    compacts = not program.wire or bool(program.compact)
    assert said[SUMS_UP] == compacts
    end = trajectory.lineage_bounds()[0][1]
    own = [turn for turn in trajectory.turns if turn.start < end]
    assert own[0].calls[0].tool == (program.delegate or (program.shell,))[0]
    assert own[-1].text == "It is mended."
    what = "with " + " and ".join(["a sub-agent"] * asks + ["a compaction"] * compacts)
    at_most = program.compacted if compacts else 1.2
    row = report_of(f"{name}, {what}", trajectory, delegating.histories, at_most)
    rows.append(watched.with_figures(row))


async def test_mini_ends_where_it_has_no_room(
    broker: Broker, run_id: str, rows: list[Sequence[object]], monkeypatch: pytest.MonkeyPatch
):
    """It has no compaction, and knows the error of a full context: it does not ask for ever."""
    watched, histories = Watched(), Histories()
    monkeypatch.setattr(relay, "_pump", watched.pump)
    program, chat, room = PROGRAMS["mini"], scene_chat(), 40_000
    said = [*chat.encode(program.call(LONG)), min(chat._end_of_turn_ids)]

    def write(token_ids: list[int], number: int) -> list[int]:
        histories.note("main", token_ids, said)
        return said

    policy = FakePolicy(write, eos_token_ids=said[-1:], max_context=room)
    rules = replace(RULES, max_context=room)
    async with agent_scene(broker, chat, policy, config_of("mini"), rules=rules) as attempts:
        trajectory = await attempts.run(rollout_task(run_id, task=Task(id="q", prompt=PROMPT)))
    assert trajectory.status == "TRUNCATED"
    assert trajectory.reason.startswith("agent_failed")
    assert len(trajectory.turns) > 1
    name = "mini, at a full context"
    rows.append(watched.with_figures(report_of(name, trajectory, histories)))


async def test_pi_checks_a_program_as_the_example_has_it(broker: Broker, run_id: str):
    example = REPOSITORY / "examples" / "tiny_code" / "pi"
    config, chat = config_of("pi"), scene_chat()
    config = config.model_copy(update={"show": [*config.show, example]})
    end_id = min(chat._end_of_turn_ids)
    command = "cat >f.py <<E\ndef f(x):\n return x\nE\ncheck f.py"

    def write(token_ids: list[int], number: int) -> list[int]:
        is_done = "</tool_response>" in chat.decode(token_ids)
        text = "<answer>done</answer>" if is_done else PROGRAMS["pi"].call(command)
        return [*chat.encode(text), end_id]

    def tested(call: ToolCall) -> ToolResult:
        return ToolResult(parts=[TextPart(text="ok")], data={"passed": 6, "failed": 0, "total": 6})

    tool = FakeToolServer(name="python_exec", answer=tested, parameters=CODE)
    policy = FakePolicy(write, eos_token_ids=[end_id], max_context=MAX_CONTEXT)
    async with tool, agent_scene(broker, chat, policy, config, tool, rules=RULES) as attempts:
        task = Task(id="q", prompt=" Write f(x): keep even.")
        trajectory = await attempts.run(rollout_task(run_id, task=task))
    (called,) = tool.calls
    assert called.arguments == {"code": "def f(x):\n return x"}
    made, checked = trajectory.turns[0].calls
    assert (made.tool, made.text(), checked.tool) == ("bash", "ok", "python_exec")
    assert checked.data == {"passed": 6, "failed": 0, "total": 6}
