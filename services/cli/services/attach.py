"""`agent-r1 agents attach`: a command works on attempts of a run, beside the run's services.

Asks the service of `agent.attached` for attempts (tools/agents/attached.py), starts the command for
each, and reports what it left. The command reaches the session's model through a port of this
process, so it does not notice where another gateway takes the session over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx
from pydantic import JsonValue, ValidationError

from agent_r1.cli.declare import integer
from agent_r1.cli.live_run import ask
from agent_r1.cli.services.serve import beside_its_run, configure_logging
from agent_r1.config.live_run import run_config
from agent_r1.config.sources import ConfigError
from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.http.serving import stop_signals
from agent_r1.runtime.http.token import RunToken, read_token
from agent_r1.tools.agents.relay import Relay
from agent_r1.tools.agents.sandbox import absolute, is_file
from agent_r1.tools.agents.variables import agent_variables
from agent_r1_proto.agents import (
    AGENTS,
    MAX_OUTPUT_CHARS,
    AgentAttempt,
    AttemptReport,
    OpenAttempt,
)
from agent_r1_proto.registry import ToolRegistry

logger = logging.getLogger(__name__)

ASK_S = 30.0
LOOK_S = 2.0
"""How often it is asked whether an attempt goes on, and where."""
RETRY_S = 1.0
REPORT_S = 60.0
"""Longest time in which what came of an attempt is sent again."""
REQUEST_TIMEOUT_S = 10.0
END_S = 10.0
"""Time that a command has between SIGTERM and SIGKILL."""
REPORT_FILE = "report.json"
MAX_REPORT_BYTES = 8 << 20
REPORTED = ("answer", "reward", "artefacts")
"""What a command may write to it."""


def attach_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `agents attach`."""
    parser.add_argument(
        "service",
        metavar="RUN_OR_URL",
        help="run folder on this machine, or URL of the service, as it says at its start",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="token of the service: that of agent.token_file, or the run's (default: of RUN)",
    )
    parser.add_argument(
        "--concurrent",
        type=integer(1),
        default=1,
        metavar="N",
        help="attempts worked on at a time (default: 1)",
    )
    parser.add_argument(
        "program",
        nargs="+",
        metavar="COMMAND",
        help="program and arguments, after `--`",
    )


def attach(arguments: argparse.Namespace) -> int:
    """Let a COMMAND of yours work on the attempts of a run with `agent.attached`.

    It is started for each attempt in a new folder, with the task on its standard input, as
    AGENT_R1_PROMPT and in the file AGENT_R1_TASK, and with the variables that SDKs read
    (OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, and the same of ANTHROPIC). What it writes to
    the file AGENT_R1_REPORT is reported: {"answer": "text", "reward": 1.0}, both optional; without
    it, its output is the answer. Exit status 0 completes the attempt, another one is the agent's
    failure, and scored. The command runs as you, without a sandbox. Stop with Ctrl-C: attempts
    under way are given back.

    Example: agent-r1 agents attach runs/demo --concurrent 4 -- python harness.py
    """
    url, token = _find_service(arguments.service)
    if arguments.token_file is not None:
        token = read_token(arguments.token_file, "--token-file")
    program = _find_program(arguments.program)
    configure_logging(RunConfig(id="attached"), "agents")
    return asyncio.run(_attach(url, token, program, arguments.concurrent))


def _find_program(words: Sequence[str]) -> list[str]:
    """Return a command that means the same in the new folders in which it is started.

    Raises:
        ConfigError: no program of its name is there.
    """
    found = [str(absolute(word)) if is_file(word) else word for word in words]
    if shutil.which(found[0]) is None:
        raise ConfigError(
            f"COMMAND ({words[0]}) is no program that can be started; give its path, and make the "
            "file executable (chmod +x)"
        )
    return found


def _find_service(name: str) -> tuple[str, RunToken | None]:
    """Return the URL of the service that hands attempts out, and its token where it is known.

    Raises:
        ConfigError: there is none.
    """
    if name.startswith(("http://", "https://")):
        with contextlib.suppress(ValueError):  # of the host, or of the port
            if urlsplit(name).hostname and urlsplit(name).port != 0:
                return name, None
        raise ConfigError(f"{name:.200} is no address of a service; give http://HOST:PORT")
    folder = Path(name)
    config = beside_its_run(run_config(folder), folder)
    if config.agent is None or not config.agent.attached:
        raise ConfigError(f"the run in {name} starts its agents itself; set agent.attached = true")
    token = config.agents_token()
    if config.agent.url is not None:
        return config.agent.url, token
    if config.redis.url is None:
        raise ConfigError(f"{name} is not running; start it with `agent-r1 train`")
    pool = config.run.tool_pool or config.run.id
    read = ask(config.redis.url, "agents", lambda broker: ToolRegistry(broker, pool).read())
    if AGENTS not in read or not read[AGENTS].instances:
        raise ConfigError(
            f"no agents' service of {name} is announced; see `agent-r1 status {name}`"
        )
    return read[AGENTS].instances[0].url, token


async def _attach(url: str, token: RunToken | None, program: Sequence[str], concurrent: int) -> int:
    async with httpx.AsyncClient(
        base_url=url,
        headers={} if token is None else {"authorization": f"Bearer {token.value}"},
        timeout=httpx.Timeout(REQUEST_TIMEOUT_S, read=ASK_S + REQUEST_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    ) as client:
        attacher = Attacher(client, program)
        with stop_signals() as (stop, _):
            stopping = asyncio.create_task(stop.wait())
            working = [asyncio.create_task(attacher.run()) for _ in range(concurrent)]
            done, _ = await asyncio.wait([stopping, *working], return_when=asyncio.FIRST_COMPLETED)
            for task in (stopping, *working):
                task.cancel()
            await asyncio.gather(stopping, *working, return_exceptions=True)
        for task in done - {stopping}:
            task.result()
        print(f"{attacher.done} attempts done, {attacher.given_back} given back")
    return 0


@dataclass
class Attacher:
    """Works on attempts, one after the other."""

    client: httpx.AsyncClient
    program: Sequence[str]
    done: int = 0
    given_back: int = 0
    _away: str = field(default="", init=False)
    """Why the service does not answer, as it was said."""

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            ConfigError: the service refuses to be asked.
        """
        while True:
            given = await self._ask()
            if given is not None:
                await self._work(given)

    async def _ask(self) -> OpenAttempt | None:
        try:
            answer = await self.client.post("/attempts", json={"wait_s": ASK_S})
        except httpx.TransportError as exc:
            self._say_away(f"{type(exc).__name__}: {exc}")
            await asyncio.sleep(RETRY_S)
            return None
        if _is_away(answer):
            self._say_away(f"HTTP {answer.status_code}")
            await asyncio.sleep(RETRY_S)
            return None
        self._away = ""
        if answer.status_code == httpx.codes.NO_CONTENT:
            return None
        if answer.status_code != httpx.codes.OK:
            raise ConfigError(
                f"{self.client.base_url} answers HTTP {answer.status_code}: {answer.text:.300}; it "
                "must be the service of a run with agent.attached = true, and the token its own"
            )
        return OpenAttempt.model_validate_json(answer.content)

    def _say_away(self, why: str) -> None:
        if not self._away:
            logger.warning("the service does not answer; asking again why=%s", why)
        self._away = why

    async def _work(self, given: OpenAttempt) -> None:
        report = AttemptReport(exit="given_back", error="the program that had it was stopped")
        try:
            report = await self._start(given)
        finally:
            sending = asyncio.ensure_future(self._report(given.id, report))
            try:
                await asyncio.shield(sending)
            except asyncio.CancelledError:
                await sending
                raise

    async def _report(self, name: str, report: AttemptReport) -> None:
        self.done += report.exit != "given_back"
        self.given_back += report.exit == "given_back"
        body = report.model_dump_json(exclude_defaults=True).encode()
        deadline = time.monotonic() + (0 if report.exit == "given_back" else REPORT_S)
        while True:
            try:
                answer = await self.client.post(f"/attempts/{name}/end", content=body)
                if not _is_away(answer):
                    break
                why = f"HTTP {answer.status_code}"
            except httpx.TransportError as exc:
                why = repr(exc)
            if time.monotonic() > deadline:
                logger.warning("what came of an attempt is lost attempt=%s error=%s", name, why)
                return
            await asyncio.sleep(RETRY_S)
        if answer.status_code in (413, 422) and report.exit != "failed":
            why = f"its report was refused: HTTP {answer.status_code} {answer.text:.300}"
            await self._report(name, AttemptReport(exit="failed", error=why))
        level = logging.INFO if answer.is_success else logging.WARNING
        logger.log(
            level,
            "attempt ended attempt=%s exit=%s reward=%s status=%d",
            name,
            report.exit,
            report.reward,
            answer.status_code,
        )

    async def _start(self, given: OpenAttempt) -> AttemptReport:
        """Let the command work on an attempt to its end."""
        attempt = given.attempt
        with (
            tempfile.TemporaryDirectory(
                prefix="agent-r1-attempt-",
                ignore_cleanup_errors=True,  # what the command has left may still write there
            ) as name,
            socket.create_server(("127.0.0.1", 0)) as listener,
        ):
            folder = Path(name)
            port = listener.getsockname()[1]
            async with Relay(listener, attempt.url) as relay:
                environment = self._environment(folder, attempt, port)
                with (
                    (folder / "prompt").open("rb") as prompt,
                    (folder / "output").open("wb") as out,
                ):
                    try:
                        process = await asyncio.create_subprocess_exec(
                            *self.program,
                            cwd=folder,
                            env=environment,
                            stdin=prompt,
                            stdout=out,
                            start_new_session=True,
                        )
                    except OSError as exc:
                        raise ConfigError(
                            f"COMMAND ({self.program[0]}) cannot be started: {exc}; a script needs "
                            "an interpreter in its first line (#!/bin/sh)"
                        ) from exc
                following = asyncio.create_task(self._follow(given.id, relay))
                waiting = asyncio.create_task(process.wait())
                try:
                    ended, _ = await asyncio.wait(
                        [following, waiting], return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    following.cancel()
                    await _end(process)
            return self._read(folder, process.returncode, was_over=waiting not in ended)

    def _environment(self, folder: Path, attempt: AgentAttempt, port: int) -> dict[str, str]:
        url = f"http://127.0.0.1:{port}{urlsplit(attempt.url).path}"
        prompt, task = attempt.task.prompt[-1].shown(), folder / "task.json"
        (folder / "prompt").write_text(prompt, encoding="utf-8")
        task.write_text(attempt.task.model_dump_json(), encoding="utf-8")
        return {
            **os.environ,
            **agent_variables(url, attempt.key, attempt.model, attempt.context, str(task), prompt),
            "AGENT_R1_REPORT": str(folder / REPORT_FILE),
        }

    async def _follow(self, name: str, relay: Relay) -> None:
        """Return once an attempt is over; let its connections go where its session is."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await self.client.get(f"/attempts/{name}")
                if answer.status_code == httpx.codes.GONE:
                    return
                if answer.status_code == httpx.codes.OK:
                    relay.move(OpenAttempt.model_validate_json(answer.content).attempt.url)
            await asyncio.sleep(LOOK_S)

    def _read(self, folder: Path, code: int | None, *, was_over: bool) -> AttemptReport:
        """Return what a command came to."""
        output = ""
        try:
            with (folder / "output").open("rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 4 * MAX_OUTPUT_CHARS, 0))
                output = file.read().decode("utf-8", "replace")
            return self._result(folder, output[-MAX_OUTPUT_CHARS:], code, was_over=was_over)
        except OSError as exc:  # the command may do what it likes with its folder
            error = f"AGENT_R1_REPORT and the output cannot be read: {exc}"
            return AttemptReport(exit="failed", output=output[-MAX_OUTPUT_CHARS:], error=error)

    def _result(
        self, folder: Path, output: str, code: int | None, *, was_over: bool
    ) -> AttemptReport:
        if was_over:
            return AttemptReport(exit="failed", output=output, error="the attempt was over")
        if code != 0:
            error = f"{shlex.join(self.program):.300}: exit status {code}"
            return AttemptReport(exit="failed", output=output, error=error)
        try:
            text = _read_file(folder / REPORT_FILE)
        except FileNotFoundError:
            return AttemptReport(answer=output.strip(), output=output)
        try:
            report = _read_report(text)
        except (ValueError, RecursionError) as exc:
            return AttemptReport(exit="failed", output=output, error=f"AGENT_R1_REPORT: {exc}")
        return report.model_copy(update={"output": output})


def _is_away(answer: httpx.Response) -> bool:
    """Return whether the service may answer otherwise when it is asked again."""
    return answer.status_code >= 500 or answer.status_code in (408, 429)


def _read_report(text: str) -> AttemptReport:
    """Return what a command has written of its work; how it ended, its exit status says.

    Raises:
        ValueError: the text is no report.
    """
    told = json.loads(text)
    if isinstance(told, dict):
        given = cast("dict[str, JsonValue]", told)
        if extra := sorted(given.keys() - REPORTED):
            raise ValueError(f"{extra[0]!r:.50} is not told there; {', '.join(REPORTED)} are")
        if isinstance(answer := given.get("answer"), str):
            given["answer"] = answer[:MAX_OUTPUT_CHARS]
        if isinstance(files := given.get("artefacts"), dict):
            given["artefacts"] = {k: str(v)[:MAX_OUTPUT_CHARS] for k, v in files.items()}
    try:
        report = AttemptReport.model_validate(told)
    except ValidationError as exc:
        problem = "; ".join(f"{e['loc']}: {e['msg']}" for e in exc.errors()[:3])
        raise ValueError(problem[:900]) from exc
    report.model_dump_json()  # half a surrogate pair is no text
    return report


def _read_file(path: Path) -> str:
    """Return the text of a file, which may be whatever a program makes of it.

    Raises:
        OSError: it is none, or cannot be read.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path.name} is no ordinary file")
        data = file.read(MAX_REPORT_BYTES + 1)
    if len(data) > MAX_REPORT_BYTES:
        raise OSError(f"{path.name} has more than {MAX_REPORT_BYTES} bytes")
    return data.decode("utf-8", "replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a command and what it has started."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
