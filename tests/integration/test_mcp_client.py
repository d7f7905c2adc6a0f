"""`type = "mcp"` against a real MCP server process, over stdio and over streamable HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.base import CallContext, ToolUnavailableError
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.loading import load_tool
from agent_r1.tools.mcp.client import McpTool
from agent_r1_proto.parts import ImagePart, TextPart
from agent_r1_proto.tools import CallReply, CallRequest, ToolCall, ToolResult, ToolSpec

SERVER = Path(__file__).resolve().parents[1] / "support" / "mcp_notes_server.py"
ODD_SERVER = SERVER.with_name("mcp_odd_server.py")
WAIT_S = 60.0
POLL_S = 0.02


class HttpServer:
    """The notes server over HTTP, on a port of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self._options = options
        self._log = folder / "server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> None:
        """Start the process and wait until it listens."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), "http", str(self.port), *self._options],
                stdout=log,
                stderr=log,
                env=os.environ | environment,
            )
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(POLL_S)

    def kill(self) -> None:
        """End the process at once."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(WAIT_S)


@pytest.fixture
def http_server(tmp_path: Path) -> Iterator[HttpServer]:
    server = HttpServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """A server for every test that does not end it."""
    server = HttpServer(tmp_path_factory.mktemp("lasting"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Process ids of the stdio servers started so far."""
    file = tmp_path / "starts"
    monkeypatch.setenv("NOTES_STARTS", str(file))
    return lambda: [int(line) for line in file.read_text().split()] if file.exists() else []


def stdio(tool: str, **settings: Any) -> dict[str, Any]:
    command = [sys.executable, str(SERVER), "stdio"]
    env = ["NOTES_STARTS"] if "NOTES_STARTS" in os.environ else []
    return {"command": command, "tool": tool, "env": env, "connect_timeout_s": WAIT_S} | settings


@contextlib.asynccontextmanager
async def running(settings: dict[str, Any]) -> AsyncIterator[McpTool]:
    tool = McpTool(**settings)
    await tool.start()
    try:
        yield tool
    finally:
        await tool.stop()


async def call(tool: McpTool, rollout_id: str = "r", timeout_s: float = 60.0, **arguments: Any):
    return await tool.call(arguments, CallContext(rollout_id, 0, None, timeout_s))


def a_call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, rollout_id="r", turn=0, timeout_s=60.0)


async def call_at_next_try(tool: McpTool, **arguments: Any):
    """Call a tool whose server was down a moment ago, once the tool asks the server again."""
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await call(tool, **arguments)
            except ToolUnavailableError as error:
                if "the next try is in" not in str(error):
                    raise
            await asyncio.sleep(POLL_S)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(POLL_S)


# -- what the model sees of a tool -----------------------------------------------------------------


def test_name_text_schema_and_version_come_from_the_server(starts: Callable[[], list[int]]):
    table = ToolConfig(type="mcp", settings=stdio("echo"))
    spec = load_tool("repeat", table).spec()
    assert (spec.name, spec.description) == ("repeat", "Repeats a text.")
    assert spec.parameters["required"] == ["text"]
    assert spec.parameters["properties"]["text"]["type"] == "string"
    server, _, fingerprint = spec.version.partition("+")
    assert server == "notes-1.0"
    assert len(fingerprint) == 8
    assert spec.idempotent  # readOnlyHint
    assert not spec.outside_effects
    assert not spec.sessions
    # The connection that asked has ended, and its process with it.
    assert [is_running(pid) for pid in starts()] == [False]


def test_a_tool_without_annotations_is_taken_for_one_that_changes_something(
    lasting_server: HttpServer,
):
    plain = McpTool(url=lasting_server.url, tool="note").spec()
    assert (plain.idempotent, plain.outside_effects) == (False, True)
    told = McpTool(
        url=lasting_server.url, tool="note", idempotent=True, outside_effects=False
    ).spec()
    assert (told.idempotent, told.outside_effects) == (True, False)


@pytest.mark.parametrize("name", ["no_schema", "dangling", "answers"])
async def test_an_odd_schema_keeps_no_tool_of_the_server_from_being_called(
    name: str, caplog: pytest.LogCaptureFixture
):
    settings = {"command": [sys.executable, str(ODD_SERVER)], "tool": name}
    tool = await asyncio.to_thread(load_tool, name, ToolConfig(type="mcp", settings=settings))
    service = ToolService(tool)
    message = a_call(name, q="x")
    async with service.running():
        reply = await service.call(CallRequest(calls=[message]))
    assert reply.results[0].text() == '{"q": "x"}'
    warned = [record.getMessage() for record in caplog.records if "left to its" in record.msg]
    assert len(warned) == (name != "no_schema")  # a missing schema leaves nothing to check
    assert all("the reference '#/$defs/Gone' leads nowhere" in text for text in warned)


def test_description_can_be_overridden_and_does_not_change_the_version(lasting_server: HttpServer):
    where = {"url": lasting_server.url, "tool": "echo"}
    plain, own = McpTool(**where), McpTool(**where, description="Says it again.")
    assert own.spec().description == "Says it again."
    assert own.version == plain.version


async def test_the_service_loads_it_while_its_event_loop_runs():
    table = ToolConfig(type="mcp", settings=stdio("echo"))
    assert load_tool("echo", table).spec().name == "echo"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tool": "ecko"}, r"does not offer settings\.tool \('ecko'\); it offers .*echo"),
        ({"command": ["no-such-program-x"]}, r"program is not on PATH or may not be run.*by hand"),
        ({"command": [__file__]}, r"program is not on PATH or may not be run.*by hand"),
        ({"command": [sys.executable, "-c", "import no_such_module_x"]}, "No module named"),
        (
            {
                "command": [sys.executable, "-c", "import time; time.sleep(60)"],
                "connect_timeout_s": 0.5,
            },
            r"no answer within 0\.5 s \(settings\.connect_timeout_s\)",
        ),
        ({"env": ["NOT_SET_ANYWHERE"]}, "NOT_SET_ANYWHERE, which is not set.*export it"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_with_the_remedy(
    changes: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        McpTool(**(stdio("echo") | {"env": []} | changes))


@pytest.mark.parametrize(
    ("path", "message"),
    [("", "HTTP 404 Not Found.*correct settings.url"), ("/mcp", None)],
)
def test_a_wrong_address_is_refused_with_the_remedy(
    lasting_server: HttpServer, path: str, message: str | None
):
    url = lasting_server.url.removesuffix("/mcp") + path
    if message is None:
        assert McpTool(url=url, tool="echo").spec().name == "echo"
    else:
        with pytest.raises(ValueError, match=message):
            McpTool(url=url, tool="echo")


def test_nothing_listens_at_the_address(http_server: HttpServer):
    http_server.kill()
    with pytest.raises(
        ValueError, match=r"does not answer: ConnectError.*see that the server runs"
    ):
        McpTool(url=http_server.url, tool="echo")


# -- results ---------------------------------------------------------------------------------------


@pytest.fixture(params=["stdio", "http"])
def settings_of(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Settings of a tool of the notes server, over either transport."""
    if request.param == "stdio":
        return lambda tool, **more: stdio(tool, env=[], **more)
    server: HttpServer = request.getfixturevalue("lasting_server")
    return lambda tool, **more: {"url": server.url, "tool": tool} | more


async def test_a_text_arrives_in_its_own_letters(settings_of: Callable[..., dict[str, Any]]):
    async with running(settings_of("echo")) as tool:
        assert await call(tool, text="né") == ToolResult(
            parts=[TextPart(text="you said: né")], data={"result": "you said: né"}
        )


# What becomes of a result does not depend on its transport, and each stdio server takes a start.


async def test_structured_content_and_errors(lasting_server: HttpServer):
    def settings_of(name: str) -> dict[str, Any]:
        return {"url": lasting_server.url, "tool": name}

    async with running(settings_of("look_up")) as tool:
        found = await call(tool, title="Rome")
        assert found.data == {"title": "Rome", "hits": 3}
    async with running(settings_of("table")) as tool:
        shown = await call(tool)
        assert (shown.text(), shown.data) == ('{"rows": [1, 2]}', {"rows": [1, 2]})
    async with running(settings_of("fail")) as tool:
        failed = await call(tool, how="error")
        assert failed.status == "error"
        assert "no such note" in failed.text()
        refused = await call(tool, how="refuse")
        assert (refused.status, refused.text()) == ("error", "Error: how must not be refuse")
        with pytest.raises(ToolUnavailableError, match=r"error -32050: the disk is full"):
            await call(tool, how="protocol")
        assert (await call(tool, how="no")).text() == "did not fail"


async def test_images_links_and_pages(lasting_server: HttpServer):
    async with running({"url": lasting_server.url, "tool": "blocks"}) as tool:
        picture = await call(tool, kind="png")
        assert isinstance(picture.parts[1], ImagePart)
        assert picture.parts[1].media_type == "image/png"
        assert (await call(tool, kind="link")).text() == "see:\nreport: file:///r.txt"
        assert (await call(tool, kind="page")).text() == "see:\na page"
        for kind, words in (("gif", "image/gif"), ("audio", "audio/wav"), ("broken", "base64")):
            refused = await call(tool, kind=kind)
            assert refused.status == "error"
            assert words in refused.text()


async def test_a_large_answer_arrives_and_one_over_the_limit_is_text_for_the_model(
    settings_of: Callable[..., dict[str, Any]],
):
    async with running(settings_of("big")) as tool:
        assert len((await call(tool, characters=1_500_000)).text()) == 1_500_000
        refused = await call(tool, characters=5_000_000)
        assert refused.status == "error"
        assert "the limit is 4194304" in refused.text()
        assert (await call(tool, characters=3)).text() == "xxx"


async def test_a_call_that_takes_too_long_is_an_outage_and_others_go_on(
    settings_of: Callable[..., dict[str, Any]],
):
    async with running(settings_of("slow")) as tool:
        late, soon = await asyncio.gather(
            call(tool, timeout_s=0.5, seconds=30), call(tool, seconds=0.1), return_exceptions=True
        )
        assert isinstance(late, ToolUnavailableError)
        assert "did not answer within 0.5 s" in str(late)
        assert isinstance(soon, ToolResult)
        assert soon.text() == "done at last"


# -- servers that die ------------------------------------------------------------------------------


async def test_a_stdio_server_killed_amid_calls_is_started_again(
    starts: Callable[[], list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = tmp_path / "calls"
    monkeypatch.setenv("NOTES_CALLS", str(calls))
    async with running(stdio("slow", env=["NOTES_STARTS", "NOTES_CALLS"])) as tool:
        assert (await call(tool, seconds=0)).text() == "done at last"
        waiting = [asyncio.create_task(call(tool, seconds=60)) for _ in range(5)]
        await until(lambda: len(calls.read_text().splitlines()) == 6)
        os.kill(starts()[-1], signal.SIGKILL)
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, ToolUnavailableError)
            assert "broke the connection" in str(outcome)
        before = len(starts())
        answers = await asyncio.gather(*(call(tool, seconds=0) for _ in range(8)))
        assert [answer.text() for answer in answers] == ["done at last"] * 8
        assert len(starts()) == before + 1  # one new process for all
    assert not any(is_running(pid) for pid in starts())


async def test_a_tool_that_takes_its_server_down_fails_only_its_call(
    starts: Callable[[], list[int]],
):
    async with running(stdio("fail")) as tool:
        for _ in range(2):
            with pytest.raises(ToolUnavailableError, match="broke the connection"):
                await call(tool, how="die")
            assert (await call(tool, how="no")).text() == "did not fail"


async def test_an_http_server_that_restarts_loses_no_later_call(
    http_server: HttpServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.tools.mcp.client.FIRST_DELAY_S", 5.0)
    async with running({"url": http_server.url, "tool": "echo"}) as tool:
        assert (await call(tool, text="a")).text() == "you said: a"
        http_server.kill()
        # Sent over the connection that was, then over a new one: neither reaches anybody.
        with pytest.raises(ToolUnavailableError, match="ConnectError"):
            await call(tool, text="b")
        # Refused at once, with the time of the next try, instead of a connection per call.
        with pytest.raises(
            ToolUnavailableError, match=r"does not answer.*the next try is in \d\.\d s"
        ):
            await call(tool, text="b")
        http_server.start()
        answer = await call_at_next_try(tool, text="c")
        assert answer.text() == "you said: c"


async def test_a_server_of_the_handshake_era_that_forgot_the_session_takes_the_call(
    http_server: HttpServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.tools.mcp.connection.SHARED_MODE", "legacy")
    async with running({"url": http_server.url, "tool": "echo"}) as tool:
        assert (await call(tool, text="a")).text() == "you said: a"
        http_server.kill()
        http_server.start()  # the connection's session is unknown to it
        assert (await call(tool, text="b")).text() == "you said: b"


async def test_a_server_that_hangs_is_given_up_after_a_late_call(
    starts: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agent_r1.tools.mcp.client.PROBE_TIMEOUT_S", 0.5)
    async with running(stdio("hang")) as tool:
        first = starts()[-1]
        with pytest.raises(ToolUnavailableError, match="did not answer within"):
            await call(tool, timeout_s=0.5, seconds=60)
        await until(lambda: not is_running(first))
        assert (await call(tool, seconds=0)).text() == "never mind"


async def test_a_server_that_comes_back_changed_is_refused(
    http_server: HttpServer,
):
    async with running({"url": http_server.url, "tool": "echo"}) as tool:
        http_server.kill()
        with pytest.raises(ToolUnavailableError):
            await call(tool, text="x")
        http_server.start(NOTES_VERSION="2.0")
        with pytest.raises(
            ToolUnavailableError, match=r"is now notes-2\.0.*announced notes-1\.0.*restart the tool"
        ):
            await call_at_next_try(tool, text="x")


# -- state -----------------------------------------------------------------------------------------


async def test_every_rollout_has_its_own_state(settings_of: Callable[..., dict[str, Any]]):
    async with running(settings_of("note", isolation="rollout")) as tool:
        assert tool.spec().sessions
        await asyncio.gather(*(tool.open(f"r{i}", None) for i in range(3)))
        for word in ("a", "b"):
            await asyncio.gather(*(call(tool, f"r{i}", text=f"{word}{i}") for i in range(3)))
        kept = await asyncio.gather(*(call(tool, f"r{i}", text="c") for i in range(3)))
        assert [answer.text() for answer in kept] == ["a0, b0, c", "a1, b1, c", "a2, b2, c"]
        await tool.close("r0")
        await tool.open("r0", None)
        assert (await call(tool, "r0", text="new")).text() == "new"
        await asyncio.gather(*(tool.close(f"r{i}") for i in range(3)))


async def test_a_rollouts_process_ends_with_its_session_however_the_service_stops(
    starts: Callable[[], list[int]],
):
    app = create_app(ToolService(McpTool(**stdio("note", isolation="rollout"))))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tool") as client:
        async with app.router.lifespan_context(app):
            before = len(starts())
            for rollout in ("a", "b"):
                assert (await client.post("/open", json={"rollout_id": rollout})).is_success
            own = starts()[before:]
            assert len(own) == 2
            assert all(map(is_running, own))
            assert (await client.post("/close", json={"rollout_id": "a"})).is_success
            await until(lambda: [is_running(pid) for pid in own] == [False, True])
        # "b" was never closed: the service's stop does it.
        await until(lambda: not any(map(is_running, own)))


async def test_a_session_whose_server_died_fails_instead_of_starting_empty(
    starts: Callable[[], list[int]],
):
    async with running(stdio("note", isolation="rollout")) as tool:
        await tool.open("r", None)
        assert (await call(tool, text="a")).text() == "a"
        os.kill(starts()[-1], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(ToolUnavailableError, match="the trajectory's session is lost"):
                await call(tool, text="b")
        await tool.close("r")
        await tool.open("r2", None)
        assert (await call(tool, "r2", text="c")).text() == "c"


async def test_sessions_are_bounded_and_a_freed_one_is_taken():
    settings = stdio("note", isolation="rollout", max_sessions=1, env=[])
    async with running(settings) as tool:
        await tool.open("a", None)
        waiting = asyncio.create_task(tool.open("b", None))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await tool.close("a")
        await waiting
        tool.settings = tool.settings.model_copy(update={"connect_timeout_s": 0.2})
        with pytest.raises(ToolUnavailableError, match=r"1 sessions are open .*max_sessions"):
            await tool.open("c", None)
        tool.settings = tool.settings.model_copy(update={"connect_timeout_s": WAIT_S})
        await tool.close("b")
        await tool.open("c", None)


async def test_a_server_without_sessions_cannot_be_isolated(tmp_path: Path):
    server = HttpServer(tmp_path, "stateless")
    server.start()
    try:
        with pytest.raises(ValueError, match=r'opens no sessions.*isolation = "shared"'):
            McpTool(url=server.url, tool="note", isolation="rollout")
        assert McpTool(url=server.url, tool="echo").spec().name == "echo"
    finally:
        server.kill()


# -- secrets ---------------------------------------------------------------------------------------


async def test_only_named_variables_reach_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NOTES_SECRET", "s3cret")
    monkeypatch.setenv("NOTES_OTHER", "hidden")
    async with running(stdio("who", env=["NOTES_SECRET"])) as tool:
        assert "secret=s3cret other=-" in (await call(tool)).text()


async def test_headers_take_their_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    seen: list[str | None] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        seen.extend(line for line in head.splitlines() if line.startswith("authorization"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    monkeypatch.setenv("WIKI_TOKEN", "t0ken")
    async with server:
        with pytest.raises(ValueError, match="HTTP 401 Unauthorized"):
            await asyncio.to_thread(
                McpTool, url=url, tool="a", headers={"Authorization": "Bearer ${WIKI_TOKEN}"}
            )
    assert set(seen) == {"authorization: bearer t0ken"}


# -- behind the service ----------------------------------------------------------------------------


async def test_through_the_service_a_dead_server_is_503_and_a_slow_one_504():
    app = create_app(ToolService(McpTool(**stdio("fail", env=[]))))
    transport = httpx.ASGITransport(app)

    def body(**arguments: Any) -> dict[str, Any]:
        call = {"name": "fail", "arguments": arguments, "rollout_id": "r", "turn": 0}
        return {"calls": [call | {"timeout_s": 20.0}]}

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://tool", timeout=WAIT_S) as client,
    ):
        spec = ToolSpec.model_validate_json((await client.get("/spec")).content)
        assert spec.name == "fail"
        died = await client.post("/call", json=body(how="die"))
        assert died.status_code == 503
        assert "broke the connection" in died.json()["detail"]
        wrong = await client.post("/call", json=body(why="die"))
        reply = CallReply.model_validate_json(wrong.content)
        assert "the arguments are not valid" in reply.results[0].text()
        well = await client.post("/call", json=body(how="no"))
        assert CallReply.model_validate_json(well.content).results[0].text() == "did not fail"
