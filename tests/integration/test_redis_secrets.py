"""A Redis with a password behind TLS: services reach it, and nothing they write has the password.

The bundled Redis server is built without TLS, so a relay ends the TLS in front of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError

from agent_r1.config.machine import check_machine
from agent_r1.config.run import load_config, write_config
from agent_r1.launch.local_redis import answers, local_redis
from agent_r1.runtime.config import RedisConfig
from agent_r1_proto.connection import RedisConnection
from agent_r1_proto.registry import ToolRegistry
from tests.support.certificates import write_certificate

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]

COMMAND = Path(sys.executable).with_name("agent-r1")
TOOL = """
from agent_r1 import Tool


class Echo(Tool):
    name = "echo"
    description = "Says it."
    parameters = {"type": "object"}

    async def call(self, arguments, context):
        return "it"
"""


async def _relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def tls_in_front_of(port: int, certificate: Path) -> AsyncIterator[int]:
    """Answer TLS on another port of 127.0.0.1; what comes goes to `port`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def serve() -> None:
            behind, to_behind = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_relay(reader, to_behind), _relay(behind, writer))

        task = asyncio.create_task(serve())
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


@pytest.fixture
async def secured(tmp_path: Path) -> AsyncIterator[tuple[RedisConfig, str]]:
    """How a configuration names a Redis with password and TLS, and the password."""
    spec, url = local_redis(tmp_path, maxmemory_mb=64)
    process = await asyncio.create_subprocess_exec(*spec.command)
    parts = urlsplit(url)
    assert parts.port is not None
    assert parts.password is not None
    (tmp_path / "password").write_text(f"{parts.password}\n")
    certificate = write_certificate(tmp_path / "server.pem")
    try:
        async with asyncio.timeout(60), tls_in_front_of(parts.port, certificate) as port:
            while not await answers(url):  # noqa: ASYNC110 - another process has no event here
                await asyncio.sleep(0.05)
            config = RedisConfig(
                url=f"rediss://127.0.0.1:{port}/0",
                password_file=tmp_path / "password",
                ca_file=certificate,
            )
            yield config, parts.password
    finally:
        process.kill()
        await process.wait()


async def test_a_redis_lets_in_whoever_has_password_and_certificates(
    secured: tuple[RedisConfig, str], tmp_path: Path
):
    config, _ = secured
    async with await RedisConnection.connect(config.connection_url({}), "r") as connection:
        assert await connection.redis.ping()
    no_password = config.model_copy(update={"password_file": None})
    async with Redis.from_url(no_password.connection_url({})) as client:
        with pytest.raises(AuthenticationError):
            await client.get("x")
    for update in ({"ca_file": None}, {"ca_file": write_certificate(tmp_path / "other.pem")}):
        distrusting = config.model_copy(update=update)
        async with Redis.from_url(distrusting.connection_url({})) as client:
            with pytest.raises(RedisError, match="CERTIFICATE_VERIFY_FAILED"):
                await client.ping()


async def test_the_check_before_a_start_reaches_it(
    secured: tuple[RedisConfig, str], tmp_path: Path
):
    redis, password = secured
    settings = ["model.path=none", *(f"redis.{k}={v}" for k, v in redis if v is not None)]
    config = load_config(None, settings, {}).config
    assert await asyncio.to_thread(problems, config) == []
    (tmp_path / "password").write_text("wrong\n")
    (problem,) = await asyncio.to_thread(problems, config)
    assert "does not answer" in problem
    assert "wrong" not in problem
    assert password not in problem


async def test_a_command_that_names_it_by_an_option_takes_its_secrets_from_the_environment(
    secured: tuple[RedisConfig, str],
):
    redis, _ = secured

    async def servers(**variables: object) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(COMMAND, "status", "--redis", str(redis.url), "--id", "x"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **{f"AGENT_R1__REDIS__{k}": str(v) for k, v in variables.items()}},
        )
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    status, text = await servers(CA_FILE=redis.ca_file)
    assert status == 2, text  # no password
    status, text = await servers(CA_FILE=redis.ca_file, PASSWORD_FILE=redis.password_file)
    assert status == 0, text
    assert "no rollout server is announced" in text


def problems(config) -> list[str]:
    looks = check_machine(config, "serve", resume=False, specs={})
    return [problem for look in looks for problem in look.problems]


def process_file(pid: int, name: str) -> Path:
    return Path("/proc", str(pid), name)


async def test_a_service_that_uses_it_shows_the_password_nowhere(
    secured: tuple[RedisConfig, str], tmp_path: Path
):
    redis, password = secured
    (tmp_path / "my_tool.py").write_text(TOOL)
    settings = ["model.path=none", f'run.plugins=["{tmp_path}"]', "tools.echo.type=my_tool:Echo"]
    settings += [f"redis.{k}={v}" for k, v in redis if v is not None]
    config = load_config(None, settings, {}).config
    folder = tmp_path / "run"
    folder.mkdir()
    assert write_config(config, folder / "config.json") == {}  # there is no secret to hand over
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(COMMAND, "serve", "tool", folder / "config.json", "--set", "run.log_level=DEBUG"),
            stdout=output,
            stderr=output,
        )
    try:
        async with (
            asyncio.timeout(60),
            await RedisConnection.connect(redis.connection_url({}), "run") as connection,
        ):
            while "echo" not in await ToolRegistry(connection, "run").read():
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        files = [log, folder / "config.json", process_file(process.pid, "cmdline")]
        files.append(process_file(process.pid, "environ"))
        shown = [file.read_bytes() for file in files]
    finally:
        process.terminate()
        await process.wait()
    assert [text for text in (*shown, log.read_bytes()) if password.encode() in text] == []
    written = json.loads(shown[1])["redis"]
    assert written["password_file"] == str(tmp_path / "password")
    assert written["ca_file"] == str(tmp_path / "server.pem")
