"""One service of a run: how it is run, its process of the moment, what it said and how it ended."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from agent_r1.runtime.exit_status import ERROR_PREFIX, NOTICE_PREFIX
from agent_r1.runtime.memory import oom_kills

AFTER_THE_ERROR = re.compile(r"^(Exception ignored in|\S+:\d+: \w*Warning: )", re.MULTILINE)
"""Lines that Python prints of its own, while it ends, after the error message."""
HEALTH_TIMEOUT_S = 2.0
TAIL_LINES = 15


async def is_healthy(url: str) -> bool:
    """Ask a service over HTTP whether it is up: `GET /healthz` answers 200."""
    return await answers(f"{url}/healthz")


async def answers(url: str) -> bool:
    """Say whether a server answers 200 at a URL."""
    try:
        async with httpx.AsyncClient(timeout=HEALTH_TIMEOUT_S, trust_env=False) as client:
            return (await client.get(url)).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


async def is_silent(url: str, client: httpx.AsyncClient) -> bool:
    """Say whether the process behind a URL stands still: it takes a request and answers nothing.

    One that is ending refuses connections, which is an answer.
    """
    try:
        await client.get(f"{url}/healthz", timeout=HEALTH_TIMEOUT_S)
    except httpx.TimeoutException:
        return True
    except httpx.HTTPError:
        return False
    return False


@dataclass(frozen=True)
class ServiceSpec:
    """Command of one service, and how to run it."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set on top of the supervisor's environment."""
    cores: Sequence[int] = ()
    """Cores it may run on; empty: all."""
    gpus: Sequence[int] = ()
    """GPUs it takes memory of. Services with one in common start one after the other: an engine
    counts what others take while it measures its own memory."""
    announce_dir: Path | None = None
    """Folder where the service writes `{name}.json` once it is bound; None: it announces nothing
    and counts as up when `probe` says so."""
    probe: Callable[[str], Awaitable[bool]] | None = is_healthy
    """Test whether the service at a URL ("" without announcement) is up; None asks nothing."""
    restart_command: Sequence[str] | None = None
    """Command of a restart; None is `command`."""
    port_variable: str | None = None
    """Environment variable that makes a restart take the port of the first start."""
    restarts_with: Sequence[str] = ()
    """Services whose restart restarts this one as well: it lost what they kept."""
    ends_run: bool = False
    """The run is over when this service is done."""
    is_job: bool = False
    """The others continue when this service is done; see `finished`."""
    done_codes: Sequence[int] = (0,)
    """Exit statuses that say that the service is done."""
    log_dir: Path | None = None
    """Folder of its log file; None is the supervisor's."""
    stop_rank: int = 1
    """Services of the lowest rank stop first."""
    start_timeout_s: float = 300.0
    stop_timeout_s: float = 30.0


@dataclass
class ServiceProcess:
    """One service and its process of the moment, below a subreaper."""

    spec: ServiceSpec
    log_file: Path
    process: asyncio.subprocess.Process | None = None
    log_offset: int = 0
    url: str = ""
    port: int | None = None
    deaths: deque[float] = field(default_factory=deque)
    """Times of its deaths: within the window, and since the last death that is explained."""
    explained: int = 0
    """Deaths of services that were explained when it died last."""
    restart_asked: bool = False
    oom_kills: int | None = None
    """Number of the machine's out-of-memory kills when the process of the moment was started."""
    num_starts: int = 0
    up: bool = False
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    noticed: int = 0
    """Bytes of the log that `notices` has read."""

    @property
    def running(self) -> bool:
        """Return whether there is a process that has not ended."""
        return self.process is not None and self.process.returncode is None

    def describe_exit(self, code: int) -> str:
        """Say in words how the process of the moment ended."""
        return describe_exit(code, self.oom_kills)

    def has_withdrawn(self) -> bool:
        """Return whether the service took its announcement back: it left on purpose."""
        folder = self.spec.announce_dir
        return folder is not None and not any(folder.glob("*.json"))

    def send(self, sig: signal.Signals) -> None:
        """Send a signal to the subreaper, if it is there."""
        if self.process is not None and self.running:
            self.process.send_signal(sig)

    def complaint(self) -> str:
        """Return the error message that the process ended with; "" without one."""
        _, found, message = self._log().rpartition(ERROR_PREFIX)
        return AFTER_THE_ERROR.split(message)[0].strip() if found else ""

    def notices(self) -> list[str]:
        """Return what the service has said to the terminal since the last look."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(self.noticed)
                added = file.read()
        except OSError:
            return []
        complete = added[: added.rfind(b"\n") + 1]
        self.noticed += len(complete)
        lines = complete.decode(errors="replace").splitlines()
        return [one.removeprefix(NOTICE_PREFIX) for one in lines if one.startswith(NOTICE_PREFIX)]

    def log_tail(self) -> str:
        """Return what the process said last: its error message, or the last lines."""
        lines = self._log().strip().splitlines()[-TAIL_LINES:]
        return self.complaint() or "\n".join(lines) or "(it printed nothing)"

    def _log(self) -> str:
        """Return what the process of the moment has printed."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(self.log_offset)
                return file.read().decode(errors="replace")
        except OSError:
            return "(no log)"


def describe_exit(code: int, oom_kills_before: int | None = None) -> str:
    """Say in words how a process ended.

    Args:
        code: its exit status.
        oom_kills_before: `oom_kills` when it was started; None where it was not asked.
    """
    number = -code if code < 0 else code - 128
    if number not in {int(sig) for sig in signal.Signals}:
        return f"exit status {code}"
    text = f"killed by {signal.Signals(number).name}"
    return text + _advice_on_kill(oom_kills_before) if number == signal.SIGKILL else text


def _advice_on_kill(oom_kills_before: int | None) -> str:
    now = oom_kills()
    known = now is not None and oom_kills_before is not None
    if known and now == oom_kills_before:
        return "; memory did not run out, so code of its own, a user or another program ended it"
    return (
        ("; memory ran out: " if known else "; if memory ran out, ")
        + "lower rollout.kv_cache_gib, rollout.max_concurrent, "
        "engine.max_tokens_per_microbatch, model.max_context, in this order"
    )
