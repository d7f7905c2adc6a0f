"""Programs that people use as agents, unmodified, in the sandbox, with a scripted policy that calls
their own tools. `make test-agents` installs them; what they come to is docs/results/agents.md.
"""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from pydantic import JsonValue

from agent_r1.gateway.config import AgentConfig
from agent_r1.gateway.session import SessionRules
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
    room: int = 0
    """Context in which it compacts before it ends; 0 where it cannot in one go."""

    def call(self, command: str) -> str:
        return call_text(self.shell, **{self.argument: command, **self.more})


PROGRAMS = {
    "mini": Program(
        "bin",
        "bash",
        packages=MINI,
        last=call_text("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "pi": Program(".bin", "bash"),
    "claude": Program(
        "@anthropic-ai/claude-code-linux-x64",
        "Bash",
        more={"description": "x"},
        delegate=(
            "Agent",
            {"description": "look", "prompt": DELEGATED, "run_in_background": False},
        ),
        room=120_000,
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
    """Rows of the report, which is written at the end where AGENTS_REPORT names a file."""
    found: list[Sequence[object]] = []
    yield found
    if REPORT is not None:
        head = ("program", "requests", "turns", "rows", "captured", "trained", "excluded", "ratio")
        head += ("streamed", "ms")
        lines = [head, ["---"] * len(head), *sorted(found, key=str)]
        table = "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
        path = Path(REPORT)
        before, _, _ = path.read_text(encoding="utf-8").partition("| program |")
        path.write_text(f"{before}{table}\n", encoding="utf-8")


def report_of(name: str, trajectory: Trajectory) -> Sequence[object]:
    """Tokens are captured, trained, or excluded; the ratio is that of all tokens of the rows to
    those of every lineage's longest history."""
    excluded: Counter[str] = Counter()
    longest = 0
    segments = trajectory.segment_bounds()
    lineages = trajectory.lineages or [None]
    for one, (start, end) in zip(lineages, trajectory.lineage_bounds(), strict=True):
        if one is not None and one.excluded:
            excluded[one.excluded] += int(trajectory.action_mask[start:end].sum())
        longest += max(b - a for a, b in segments if start <= a < end)
    captured = int(trajectory.action_mask.sum())
    trained = int((trajectory.trained_mask() & trajectory.action_mask).sum())
    assert captured == trained + sum(excluded.values())
    why = ", ".join(f"{name} {count}" for name, count in excluded.items()) or "none"
    ratio = f"{len(trajectory.token_ids) / longest:.2f}"
    return (name, len(trajectory.turns), len(segments), captured, trained, why, ratio)


def config_of(name: str) -> AgentConfig:
    """Return the table of a program; skips where it is not installed."""
    packages = PROGRAMS[name].packages
    folder = packages / PROGRAMS[name].folder
    if not (folder / name).exists():
        pytest.skip(f"{name} is not installed; `make test-agents` installs it, where npm is")
    return AgentConfig.model_validate(
        {
            "known": name,
            "show": [str(packages), str(folder)],
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

    def write(token_ids: list[int], number: int) -> list[int]:
        read = chat.decode(token_ids)
        is_side = program.shell not in read or "<tools>" not in read
        turn = "A title" if is_side else script[read.count("</tool_response>")]
        begun = read.rpartition("<|im_start|>assistant\n")[2]  # before its connection was cut
        return [*chat.encode(turn.removeprefix(begun)), end_id]

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
    row = report_of(name, trajectory)
    if is_cut:
        assert watched.answers > watched.cut_at
    else:
        streams = "yes" if watched.streamed else "no"
        wait = f"{1000 * statistics.median(watched.waits):.0f}"
        rows.append((name, watched.requests, *row[1:], streams, wait))
    assert float(str(row[-1])) <= 1.2


@dataclass
class Delegating:
    """A policy that lets another agent look, works until there is no room, and sums up."""

    program: Program
    decode: Callable[[list[int]], str]
    histories: dict[str, int] = field(default_factory=dict[str, int])
    """Longest history in tokens by what it was for; every summary and title is one of its own."""

    def turn(self, token_ids: list[int]) -> str:
        read = self.decode(token_ids)
        kind, text = self._decide(read)
        if kind in ("title", "summary"):
            kind += str(len(self.histories))
        size = len(token_ids) + len(text) + 1
        self.histories[kind] = max(size, self.histories.get(kind, 0))
        return text

    def _decide(self, read: str) -> tuple[str, str]:
        assert self.program.delegate is not None
        calls = read.count("</tool_response>")
        begun, _, asked = read.rpartition("</tool_response>")
        if DELEGATED in read and PROMPT not in read and SUMMARY not in read:
            return "other agent", "The function add"
        if "<tools>" not in read and "title" in read[:3000].lower():
            return "title", "A title"
        if SUMMARY in read:
            return "after", "It is mended."
        if "<tools>" not in read or (begun and re.search("summar|handoff", asked.lower())):
            return "summary", SUMMARY
        if calls == 0:
            tool, arguments = self.program.delegate
            return "main", call_text(tool, **arguments)
        if calls == 1 and (agent := re.search(r"agent_id\W+([0-9a-f-]{36})", read)):
            wait = {"targets": [agent[1]], "timeout_ms": 20_000}
            return "main", call_text("multi_agent_v1__wait_agent", **wait)
        return "main", self.program.call(LONG)


@pytest.mark.parametrize("name", [name for name, one in PROGRAMS.items() if one.delegate])
async def test_a_program_delegates_and_runs_out_of_room(name: str, broker: Broker, run_id: str):
    program, config, chat = PROGRAMS[name], config_of(name), scene_chat()
    end_id = min(chat._end_of_turn_ids)
    delegating = Delegating(program, chat.decode)

    def write(token_ids: list[int], number: int) -> list[int]:
        return [*chat.encode(delegating.turn(token_ids)), end_id]

    policy = FakePolicy(write, eos_token_ids=[end_id], max_context=program.room)
    rules = replace(RULES, max_context=program.room)
    async with agent_scene(broker, chat, policy, config, rules=rules) as attempts:
        trajectory = await attempts.run(rollout_task(run_id, task=Task(id="q", prompt=PROMPT)))
    assert (trajectory.status, trajectory.reason) == ("COMPLETED", "answer"), trajectory.turns[-1]
    said = Counter(turn.text for turn in trajectory.turns)
    assert (said["The function add"], said["It is mended."]) == (1, 1)
    assert said[SUMMARY] >= 1
    captured = int(trajectory.action_mask.sum())
    assert captured == int((trajectory.trained_mask() & trajectory.action_mask).sum())
    assert len(trajectory.token_ids) <= 1.2 * sum(delegating.histories.values())


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
