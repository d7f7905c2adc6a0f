"""Tool processes come, go and change while a client calls them: the real command, a real Redis.

The tools are classes in a folder of their own, as a user has them.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from agent_r1.attempts.tool_client import ToolClient, ToolOutageError, ToolReply
from agent_r1.cli.main import main
from agent_r1.launch.local import launcher_state
from agent_r1.runtime.files.run_folder import REDIS_URL_FILE, TOKEN_FILE
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry
from agent_r1_proto.tool_pool import ToolUse
from tests.conftest import RedisServer
from tests.support.forked import AGENT_R1, Forked

pytestmark = pytest.mark.redis

COUNTER = """
from agent_r1 import Tool


class Counter(Tool):
    name = "counter"
    description = "Counts the calls of one trajectory."
    parameters = {"type": "object", "properties": {}}
    sessions = True
    version = "VERSION"

    def __init__(self):
        self.counts = {}

    async def open(self, rollout_id, tool_context):
        self.counts[rollout_id] = tool_context["start"]

    async def call(self, arguments, context):
        self.counts[context.rollout_id] += 1
        return str(self.counts[context.rollout_id])

    async def close(self, rollout_id):
        del self.counts[rollout_id]
"""
ECHO = """
from agent_r1 import Tool


class Echo(Tool):
    name = "echo"
    description = "Says which version answers."
    parameters = {"type": "object", "properties": {}}
    version = "VERSION"

    async def call(self, arguments, context):
        return self.version
"""
WAITER = """
import asyncio
from agent_r1 import Tool


class Waiter(Tool):
    name = "waiter"
    description = "Answers at once, or never."
    parameters = {"type": "object", "properties": {"wait": {"type": "boolean"}}}
    version = "VERSION"

    async def call(self, arguments, context):
        if arguments["wait"]:
            await asyncio.Event().wait()
        return "done"
"""


class Pool:
    """Starts and ends tool processes of one pool."""

    def __init__(self, folder: Path, redis_url: str, name: str) -> None:
        self.name = name
        self._folder = folder
        self._redis_url = redis_url
        self.processes: list[Forked] = []

    def log(self, number: int) -> str:
        """Return what the process of this number has printed."""
        return (self._folder / f"tool{number}" / "log").read_text()

    def start(self, source: str, class_name: str, version: str, *options: str) -> Forked:
        """Start `agent-r1 serve tool my_tool:Class` in a folder with the class in one file."""
        folder = self._folder / f"tool{len(self.processes)}"
        folder.mkdir()
        (folder / "my_tool.py").write_text(source.replace("VERSION", version))
        tool = class_name.lower()
        command = ["serve", "tool", f"my_tool:{class_name}"]
        command += ["--set", f"run.tool_pool={self.name}"]
        command += ["--set", f"tools.{tool}.announce_expiry_s=1", *options]
        return self.run(command, folder, {"AGENT_R1__REDIS__URL": self._redis_url})

    def run(self, command: list[str], folder: Path, variables: Mapping[str, str]) -> Forked:
        """Run a command in a folder, with its output in the file `log` there."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("AGENT_R1__")}
        env, log = {**clean, **variables}, folder / "log"
        process = Forked(AGENT_R1, *command, env=env, log=log, cwd=folder)
        self.processes.append(process)
        return process


@pytest.fixture
def pool(tmp_path: Path, redis_url: str, run_id: str) -> Iterator[Pool]:
    made = Pool(tmp_path, redis_url, run_id)
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@contextlib.asynccontextmanager
async def client_of(
    redis_url: str, run_id: str, *tools: str, timeout_s: float = 15.0
) -> AsyncIterator[ToolClient]:
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        registry = ToolRegistry(connection, run_id)
        client = ToolClient({}, registry=registry, announced=tools, timeout_s=timeout_s)
        try:
            await client.start(wait_s=120)
            yield client
        finally:
            await client.stop()


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - other processes have no event here
            await asyncio.sleep(0.02)


def instances(client: ToolClient, tool: str) -> dict[str, str | None]:
    """Name and version of the instances the client knows."""
    endpoints = client.directory.endpoints(tool)
    return {name: endpoint.version for name, endpoint in endpoints.items()}


def use(client: ToolClient, tool: str) -> ToolUse:
    """What the client reports of a tool's versions."""
    return client.directory.report([tool]).tools[0]


async def count(client: ToolClient, rollout_id: str, version: str | None = None) -> str:
    reply = await client.call("counter", {}, rollout_id=rollout_id, turn=0, version=version)
    return reply.result.text()


async def holder_of(client: ToolClient, rollout_id: str) -> str:
    """Count once more; return the name of the instance that did."""
    return (await client.call("counter", {}, rollout_id=rollout_id, turn=0)).instance


async def test_sessions_stay_at_the_instance_that_holds_their_state(
    pool: Pool, redis_url: str, run_id: str
):
    for _ in range(2):
        pool.start(COUNTER, "Counter", "1")
    async with client_of(redis_url, run_id, "counter") as client:
        await until(lambda: len(instances(client, "counter")) == 2)
        names = [f"r/0/{i}/0/0" for i in range(12)]
        for number, name in enumerate(names):
            await client.open_session("counter", name, {"start": 100 * number})
        for expected in (1, 2, 3):
            answers = await asyncio.gather(*(count(client, name) for name in names))
            assert answers == [str(100 * i + expected) for i in range(12)]
        used = {await holder_of(client, name) for name in names}
        assert len(used) == 2  # both instances hold some
        for name in names:
            await client.close_session("counter", name)
        with pytest.raises(ToolOutageError) as caught:
            await count(client, names[0])
        assert caught.value.reason.startswith("tool_session_lost: counter: ")


async def test_a_session_whose_instance_dies_is_lost_and_others_go_on(
    pool: Pool, redis_url: str, run_id: str
):
    first = pool.start(COUNTER, "Counter", "1")
    async with client_of(redis_url, run_id, "counter") as client:
        await client.open_session("counter", "a", {"start": 0})
        pool.start(COUNTER, "Counter", "1")
        await until(lambda: len(instances(client, "counter")) == 2)
        first.kill()
        await until(lambda: len(instances(client, "counter")) == 1)
        with pytest.raises(ToolOutageError) as caught:
            await count(client, "a")
        assert caught.value.reason.startswith("tool_session_lost: counter: ")
        await client.close_session("counter", "a")
        await client.open_session("counter", "b", {"start": 7})
        assert await count(client, "b") == "8"


async def test_new_versions_are_seen_pins_are_kept_and_a_leaving_instance_waits_for_them(
    pool: Pool, redis_url: str, run_id: str, tmp_path: Path
):
    async def echo(version: str | None = None) -> str:
        reply = await client.call("echo", {}, rollout_id="r", turn=0, version=version)
        assert reply.version == reply.result.text()
        return reply.version

    folder = tmp_path / "announce"
    old = pool.start(ECHO, "Echo", "1", "--announce-dir", str(folder))
    async with client_of(redis_url, run_id, "echo") as client:
        pins = client.directory.pin(["echo"])
        assert pins == {"echo": "1"}
        pool.start(ECHO, "Echo", "2")
        await until(lambda: len(instances(client, "echo")) == 2)
        assert await echo() == "2"
        assert await echo(pins["echo"]) == "1"
        old.send_signal(signal.SIGTERM)
        # The pin is reported in Redis, so the old instance keeps answering its trajectory.
        await until(lambda: use(client, "echo").shares == {"2": 1.0})
        for _ in range(10):
            assert await echo("1") == "1"
            assert await echo() == "2"
            await asyncio.sleep(0.25)
        assert old.poll() is None
        client.directory.unpin(pins)
        assert await asyncio.to_thread(old.wait, 15) == 0
        assert (folder / "echo.json").is_file()  # nobody drained it: a launcher restarts it
        await until(lambda: len(instances(client, "echo")) == 1)
        with pytest.raises(ToolOutageError) as caught:
            await echo("1")
        assert caught.value.reason.startswith("tool_version_gone: echo: ")
        assert await echo() == "2"


async def test_an_instance_outlives_its_redis_and_still_stops(
    tmp_path: Path, redis_server: RedisServer, run_id: str
):
    pool = Pool(tmp_path, redis_server.url, run_id)
    tool = pool.start(ECHO, "Echo", "1", "--set", "tools.echo.drain_timeout_s=600")
    try:
        async with client_of(redis_server.url, run_id, "echo"):
            redis_server.kill()
            tool.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(tool.wait, 60) == 0
    finally:
        tool.kill()
        tool.wait()


async def test_a_rollout_server_that_stops_keeps_no_version_any_longer(
    pool: Pool, redis_url: str, run_id: str
):
    pool.start(ECHO, "Echo", "1")
    async with await RedisConnection.connect(redis_url, run_id) as connection:
        registry = ToolRegistry(connection, run_id)
        async with client_of(redis_url, run_id, "echo") as client:
            client.directory.pin(["echo"])
            async with asyncio.timeout(60):
                while await registry.pinned("echo", "1") != 1:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        assert await registry.pinned("echo", "1") == 0
        assert await registry.reports() == {}


async def test_a_killed_instance_is_called_around_at_once(pool: Pool, redis_url: str, run_id: str):
    doomed = pool.start(ECHO, "Echo", "1")
    pool.start(ECHO, "Echo", "1")
    async with client_of(redis_url, run_id, "echo") as client:
        await until(lambda: len(instances(client, "echo")) == 2)
        doomed.kill()
        calls = (client.call("echo", {}, rollout_id=f"r{i}", turn=0) for i in range(40))
        replies = await asyncio.gather(*calls)
        assert {reply.version for reply in replies} == {"1"}
        assert len({reply.instance for reply in replies}) == 1


async def test_one_version_with_two_schemas_is_refused_where_it_can_be_mended(
    pool: Pool, redis_url: str, run_id: str
):
    pool.start(ECHO, "Echo", "1")
    async with client_of(redis_url, run_id, "echo") as client:
        wrong = pool.start(ECHO.replace("Says which", "Tells which"), "Echo", "1")
        assert await asyncio.to_thread(wrong.wait, 120) != 0
        log = pool.log(1)
        assert "tool 'echo' version '1' is served by echo-" in log
        assert "give this one a version of its own" in log
        assert len(instances(client, "echo")) == 1


async def command(redis_url: str, run_id: str, *words: str) -> tuple[int, str]:
    """Run `agent-r1 status`, or `agent-r1 tools ...`; return its status and what it printed."""
    printed = io.StringIO()
    verb = ["tools", *words, "--pool"] if words else ["status", "--id"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = await asyncio.to_thread(main, [*verb, run_id, "--redis", redis_url])
    return code, printed.getvalue()


async def test_an_instance_with_an_open_session_is_not_drained(
    pool: Pool, redis_url: str, run_id: str
):
    pool.start(COUNTER, "Counter", "1")
    async with client_of(redis_url, run_id, "counter") as client:
        await client.open_session("counter", "a", {"start": 0})
        holder = await holder_of(client, "a")
        pool.start(COUNTER, "Counter", "1")  # others may go there; this session cannot
        await until(lambda: len(instances(client, "counter")) == 2)
        drain = ("drain", "counter", "--instance", holder)
        code, text = await command(redis_url, run_id, *drain, "--timeout-s", "2")
        assert (code, f"still needed after 2 s: {holder}" in text) == (1, True)
        assert await count(client, "a") == "2"
        await client.close_session("counter", "a")
        code, text = await command(redis_url, run_id, *drain)
        assert (code, "drained" in text) == (0, True)


async def test_the_command_drains_weighs_and_rolls_back(pool: Pool, redis_url: str, run_id: str):
    async def tools(*words: str) -> tuple[int, str]:
        return await command(redis_url, run_id, *words)

    first = pool.start(ECHO, "Echo", "1")
    async with client_of(redis_url, run_id, "echo") as client:
        pool.start(ECHO, "Echo", "2")
        await until(lambda: len(instances(client, "echo")) == 2)
        assert (await tools("weight", "echo", "1=3", "2=1"))[0] == 0
        await until(lambda: use(client, "echo").shares == {"1": 0.75, "2": 0.25})
        code, text = await tools("weight", "echo", "1=1", "9=1")
        assert (code, "no instance of version 9 has ever been announced" in text) == (0, True)
        await until(lambda: use(client, "echo").shares == {"1": 1.0})
        assert (await tools("weight", "echo", "--newest"))[0] == 0
        await until(lambda: use(client, "echo").shares == {"2": 1.0})
        code, text = await tools("rollback", "echo")
        assert (code, "back at version 1" in text) == (0, True)
        await until(lambda: use(client, "echo").shares == {"1": 1.0})
        code, text = await tools()
        assert code == 0
        assert "takes calls" in text
        (name,) = [n for n, version in instances(client, "echo").items() if version == "1"]
        code, text = await tools("drain", "echo", "--instance", name)
        assert (code, "drained" in text) == (0, True)
        await until(lambda: use(client, "echo").shares == {"2": 1.0})
        assert first.poll() is None  # it stays up, and nobody sends it new work
        code, text = await tools("rollback", "echo")
        assert (code, "back at version 1" in text) == (0, True)
        await until(lambda: use(client, "echo").shares == {"1": 1.0})
        await tools("drain", "echo", "--version", "1")
        await until(lambda: use(client, "echo").shares == {"2": 1.0})
        code, text = await tools("undrain", "echo", "--version", "1")
        assert (code, "new trajectories of echo: 1 100%" in text) == (0, True)
        await until(lambda: use(client, "echo").shares == {"1": 1.0})
        code, text = await tools("drain", "ecko", "--instance", name)
        assert code != 0
        assert "there are echo" in text


async def test_a_new_version_may_start_with_nothing_or_with_a_share(
    pool: Pool, redis_url: str, run_id: str
):
    pool.start(ECHO, "Echo", "1")
    async with client_of(redis_url, run_id, "echo") as client:
        pool.start(ECHO, "Echo", "2", "--set", "tools.echo.new_version=none")
        await until(lambda: len(instances(client, "echo")) == 2)
        assert use(client, "echo").shares == {"1": 1.0}
        pool.start(ECHO, "Echo", "3", "--set", "tools.echo.new_version=0.25")
        await until(lambda: len(instances(client, "echo")) == 3)
        assert use(client, "echo").shares == {"1": 0.75, "3": 0.25}
        await until(lambda: "version 3 gets 25% of new trajectories" in pool.log(2))
    line = next(line for line in pool.log(2).splitlines() if line.startswith("tool echo serves at"))
    address = redis_url.removeprefix("redis://").partition("/")[0]
    assert f"in the pool {run_id!r}; version 3 gets 25%" in line
    assert line.endswith(f"(Redis at {address})")


async def test_the_list_shows_a_version_that_rollout_servers_refuse(
    pool: Pool, redis_url: str, run_id: str
):
    pool.start(ECHO, "Echo", "1")
    async with client_of(redis_url, run_id, "echo") as client:
        pool.start(ECHO.replace("Says which", "Tells which"), "Echo", "2")
        await until(lambda: "2" in use(client, "echo").refused)
        async with asyncio.timeout(15):
            text = ""
            while "is refused by" not in text:
                _, text = await command(redis_url, run_id)
    assert "echo 2 is refused by rollout: the schema of version 2 would change the prompt" in text
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    found = {row[2]: (row[3], row[4]) for row in rows if row[1] == "echo"}
    assert found == {"1": ("0%", "100%"), "2": ("100%", "refused")}


async def test_an_instance_stopped_after_a_drain_takes_its_announcement_to_the_launcher_back(
    pool: Pool, redis_url: str, run_id: str, tmp_path: Path
):
    folder = tmp_path / "announce"
    first = pool.start(ECHO, "Echo", "1", "--announce-dir", str(folder))
    async with client_of(redis_url, run_id, "echo") as client:
        pool.start(ECHO, "Echo", "2")
        await until(lambda: len(instances(client, "echo")) == 2)
        assert (folder / "echo.json").is_file()
        await command(redis_url, run_id, "drain", "echo", "--version", "1")
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, 20) == 0
    assert not (folder / "echo.json").exists()


async def test_a_session_that_cannot_be_opened_fails_the_call_with_what_the_tool_raised(
    pool: Pool, redis_url: str, run_id: str
):
    wrong = COUNTER.replace('self.counts[rollout_id] = tool_context["start"]', "self.count[0] = 1")
    pool.start(wrong, "Counter", "1")
    async with client_of(redis_url, run_id, "counter") as client:
        with pytest.raises(ToolOutageError) as caught:
            await client.open_session("counter", "a", {"start": 0})
    said = "Counter.open raised AttributeError: 'Counter' object has no attribute 'count'"
    assert caught.value.reason.startswith(f"tool_broken: counter: {said}")
    assert caught.value.attempts == 1
    assert "session open raised tool=counter rollout_id=a" in pool.log(0)
    assert "Traceback" in pool.log(0)


async def test_a_tool_served_from_a_run_folder_joins_the_run_that_runs_there(
    pool: Pool, redis_url: str, run_id: str, tmp_path: Path
):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "my_tool.py").write_text(ECHO.replace("VERSION", "2"))
    config = {
        "run": {"id": run_id, "plugins": [str(tmp_path)]},
        "model": {"path": "none"},
        "tools": {"echo": {"type": "my_tool:Echo", "new_version": "none"}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    command = ["serve", "echo", str(folder / "config.json")]
    with launcher_state(folder) as state_dir:  # this process is the launcher
        (state_dir / REDIS_URL_FILE).write_text(redis_url)
        (state_dir / TOKEN_FILE).write_text("0123456789abcdef\n")
        pool.start(ECHO, "Echo", "1")
        async with client_of(redis_url, run_id, "echo") as client:
            pool.run(command, tmp_path, {})
            await until(lambda: len(instances(client, "echo")) == 2)
            assert use(client, "echo").shares == {"1": 1.0}
            said = f"in the pool {run_id!r}; version 2 gets 0% of new trajectories (Redis at "
            await until(lambda: said in (tmp_path / "log").read_text())
            urls = [one.url for one in client.directory.endpoints("echo").values()]
    async with httpx.AsyncClient(trust_env=False) as http:
        asked = [(await http.get(f"{url}/spec")).status_code for url in urls]
    assert sorted(asked) == [200, 401]  # it takes the run's token over as well
    pool.run(command, tmp_path, {})
    said = f"the run in {folder} is not running"
    await until(lambda: said in (tmp_path / "log").read_text())


async def test_a_call_that_hangs_holds_up_no_other_of_the_same_moment(
    pool: Pool, redis_url: str, run_id: str
):
    pool.start(WAITER, "Waiter", "1")
    async with client_of(redis_url, run_id, "waiter") as client:

        def call(*, wait: bool) -> asyncio.Task[ToolReply]:
            asked = client.call("waiter", {"wait": wait}, rollout_id="r", turn=0)
            return asyncio.create_task(asked)

        hanging, quick = call(wait=True), call(wait=False)
        reply = await asyncio.wait_for(quick, 5)
        assert reply.result.text() == "done"
        assert not hanging.done()
        hanging.cancel()
