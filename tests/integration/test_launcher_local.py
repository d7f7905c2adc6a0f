"""`agent-r1 train` on one machine: real Redis and real processes, stand-ins for the services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import AuthenticationError

from agent_r1.config.run import Config, load_config
from agent_r1.config.sources import ConfigError
from agent_r1.launch import (
    local,
    local_client,
    local_redis,
    local_services,
    local_watch,
    subreaper,
)
from agent_r1.launch.local_services import LocalServices
from agent_r1.launch.local_view import at_hand, program
from agent_r1.launch.service import ServiceSpec
from agent_r1.launch.supervisor import ServiceError, Supervisor
from agent_r1.learner.checkpoints.ownership import FolderLock
from agent_r1.runtime.config import RedisConfig, split_password
from agent_r1.runtime.files.conditions import Condition, append_condition, read_conditions
from agent_r1.runtime.files.dead_letters import load_letters
from agent_r1.runtime.files.run_folder import live_redis_url, live_token_file, run_folder_problem
from agent_r1.runtime.http.token import find_token
from agent_r1_proto.failures import FailureBoard
from agent_r1_proto.registry import Registry, RolloutServer
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutTask
from tests.conftest import RedisServer
from tests.integration.test_launcher_supervisor import FAKE_SERVICE, WAIT_S, Scene, alive
from tests.support.config_scene import load_nothing, write_scene
from tests.support.learner_fakes import eventually

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

SERVICES = {"search", "reward", "learner", "rollout"}
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Stage(Scene):
    """A configuration, and what each service of it is replaced with."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = write_scene(folder / "example")
        self.run_folder = folder / "run"
        self.done = folder / "done"
        self.options: dict[str, list[str]] = {
            "learner": [
                *("--exit-when", str(self.done)),
                *("--summary", str(self.run_folder / "summary.json")),
            ]
        }

    def config(self, *options: str, **environ: str) -> Config:
        return load_config(self.file, [f"run.dir={self.run_folder}", *options], environ).config

    def command(self, services: LocalServices, service: str, name: str, *_: str) -> list[str]:
        announce_dir = services.announce_dir(name)
        command = [sys.executable, str(FAKE_SERVICE), name, str(self.journal)]
        return [*command, "--announce-dir", str(announce_dir), *self.options.get(name, [])]

    def environment(self, name: str) -> dict[str, str]:
        rows = [row for row in self.lines("env") if row[0] == name]
        others = {subreaper.PARENT_VARIABLE, CACHE_VARIABLE}
        return {row[1]: row[2] for row in rows if row[1] not in others}

    def when_up(self, action: Any) -> threading.Thread:
        """Do something once every service has started, the learner and rollout side by side."""

        def wait() -> None:
            deadline = time.monotonic() + WAIT_S
            while time.monotonic() < deadline:
                if {row[0] for row in self.lines("start")} == SERVICES:
                    action()
                    return
                time.sleep(0.02)

        thread = threading.Thread(target=wait)
        thread.start()
        return thread


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    load_nothing(monkeypatch)

    def command(
        services: LocalServices, service: str, name: str, *options: str, **_: object
    ) -> list[str]:
        return stage.command(services, service, name, *options)

    monkeypatch.setattr(LocalServices, "command", command)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield stage
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    assert not any(alive(pid) for pid in stage.pids())
    assert not any(
        "subreaper.py" in arguments_of(pid) for pid in subreaper.descendants(os.getpid())
    )


def test_a_run_goes_from_start_to_summary(
    stage: Stage,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    thread = stage.when_up(stage.done.touch)
    assert local.run_training(stage.config(), resume=False) == 0
    thread.join()
    started = [row[0] for row in stage.lines("start")]
    assert sorted(started) == sorted(SERVICES)
    assert started.index("rollout") > started.index("search")  # whose URL it needs
    # The folder for temporary files ends with the run; what is compiled must not.
    (cache,) = {row[2] for row in stage.lines("env") if row[1] == CACHE_VARIABLE}
    assert cache == str(tmp_path / "cache" / "agent-r1" / "torchinductor")
    text = capsys.readouterr().out
    assert text.index("stopping the services") < text.index("agent-r1 chat")
    assert (stage.run_folder / "config.json").is_file()
    assert (stage.run_folder / "logs" / "launcher.log").is_file()
    assert not (stage.run_folder / "launcher.json").exists()


def test_on_one_gpu_everything_starts_in_turn_and_has_its_share(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local_services, "usable_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    taken: dict[str, tuple[int, ...]] = {}
    real_start = Supervisor.start

    async def start(supervisor: Supervisor, spec: ServiceSpec) -> str:
        taken[spec.name] = tuple(spec.gpus)
        return await real_start(supervisor, spec)

    monkeypatch.setattr(Supervisor, "start", start)
    options = ["placement.rollout_replicas=2", "rollout.gpu_memory_utilization=0.3"]
    stage.done.touch()  # the learner ends at once, so it starts last
    assert local.run_training(stage.config(*options), resume=False) == 0
    # Whose GPU another has too waits for its turn, at a restart as well.
    on_gpu = {name: gpus for name, gpus in taken.items() if gpus}
    assert on_gpu == {"rollout-0": (0,), "rollout-1": (0,), "learner": (0,)}
    started = [row[0] for row in stage.lines("start")]
    assert started[-3:] == ["rollout-0", "rollout-1", "learner"]
    # 0.95 - 2 x 0.3
    assert stage.environment("learner")["AGENT_R1__ENGINE__GPU_MEMORY_SHARE"] == "0.35"


def test_services_learn_where_the_others_are_and_nothing_else(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGENT_R1__LEARNER__STEPS", "99")
    monkeypatch.delenv("AGENT_R1_TOKEN", raising=False)
    monkeypatch.delenv("AGENT_R1_REAL_DATA", raising=False)  # the suite's own
    tokens: list[tuple[str, int]] = []

    def look() -> None:
        file = live_token_file(stage.run_folder)
        assert file is not None
        tokens.append((str(file), stat.S_IMODE(file.stat().st_mode)))
        stage.done.touch()

    thread = stage.when_up(look)
    assert local.run_training(stage.config(), resume=False) == 0
    thread.join()
    rollout = stage.environment("rollout")
    # Tools announce themselves in Redis; the reward service is asked about branches.
    assert rollout.pop("AGENT_R1__ROLLOUT__SCORER_URL").startswith("http://127.0.0.1:")
    redis = {"AGENT_R1__REDIS__URL", "AGENT_R1__REDIS__PASSWORD_FILE"}
    assert set(rollout) == {*redis, "AGENT_R1__RUN__TOKEN_FILE"}
    assert split_password(rollout["AGENT_R1__REDIS__URL"])[1] is None
    assert tokens == [(rollout["AGENT_R1__RUN__TOKEN_FILE"], 0o600)]
    assert rollout["AGENT_R1__REDIS__URL"] == stage.environment("learner")["AGENT_R1__REDIS__URL"]
    # The user's variables are in config.json already; they must not beat its `--set` values.
    assert stage.environment("search") == rollout
    written = json.loads((stage.run_folder / "config.json").read_text())
    assert written["redis"]["url"] is None
    assert written["run"]["token_file"] is None
    assert not Path(tokens[0][0]).exists()
    assert written["learner"]["steps"] == 3


def test_a_token_of_the_user_s_reaches_the_services_as_a_file(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    token = "0123456789abcdef"
    monkeypatch.setenv("AGENT_R1_TOKEN", token)
    held: list[str] = []

    def look() -> None:
        file = live_token_file(stage.run_folder)
        held.append("" if file is None else file.read_text())
        stage.done.touch()

    thread = stage.when_up(look)
    assert local.run_training(stage.config(), resume=False) == 0
    thread.join()
    assert held == [f"{token}\n"]
    for name in sorted(SERVICES):
        assert "AGENT_R1_TOKEN" not in stage.environment(name)
    assert token not in stage.journal.read_text()
    kept = [file for file in stage.run_folder.rglob("*") if file.is_file()]
    assert kept
    assert [file for file in kept if token.encode() in file.read_bytes()] == []


def test_ctrl_c_stops_the_learner_first_and_names_resume(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    def interrupt() -> None:
        (stage.run_folder / "ledger.json").write_text('{"incarnation": 1}')  # the learner has begun
        os.kill(os.getpid(), signal.SIGINT)

    thread = stage.when_up(interrupt)
    assert local.run_training(stage.config(), resume=False) == 130
    thread.join()
    stopped = [row[0] for row in stage.lines("stop")]
    assert stopped[0] == "learner"
    assert stopped[-1] == "search"
    text = capsys.readouterr().out
    assert "stopping; the learner writes a checkpoint" in text
    assert "agent-r1 train --resume" in text


def test_ctrl_c_twice_does_not_wait_for_anyone(stage: Stage, capsys: pytest.CaptureFixture[str]):
    stage.options["learner"] += ["--stop-s", "600", "--child"]

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + WAIT_S
        while not stage.lines("sigterm") and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = stage.when_up(interrupt)
    assert local.run_training(stage.config(), resume=False) == 130
    thread.join()
    assert "killing every service" in capsys.readouterr().out


def test_a_reason_of_the_learner_is_shown_once_and_nothing_is_restarted(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    stage.options["learner"] = [
        *("--complaint", "noise\nagent-r1: error: 7 of the last 8 samples failed"),
        *("--exit-code", "2"),
    ]
    assert local.run_training(stage.config(), resume=False) == 1
    error = capsys.readouterr().err
    assert "learner did not start: exit status 2\n7 of the last 8 samples failed" in error
    assert "noise" not in error
    assert "learner.log" in error
    assert [row[0] for row in stage.lines("start")].count("learner") == 1


def test_a_learner_that_gives_up_later_ends_the_run(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    stage.options["learner"] = ["--exit-when", str(stage.done), "--exit-code", "2"]
    thread = stage.when_up(stage.done.touch)
    assert local.run_training(stage.config(), resume=False) == 1
    thread.join()
    assert "learner stopped: exit status 2" in capsys.readouterr().err
    assert [row[0] for row in stage.lines("start")].count("learner") == 1


def test_a_run_that_was_finished_already_ends_at_once(stage: Stage):
    stage.done.touch()
    assert local.run_training(stage.config(), resume=False) == 0


def test_a_resume_with_nothing_to_do_says_so_and_starts_nothing(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    stage.run_folder.mkdir()
    summary = {"status": "finished_with_losses", "steps": 3}
    (stage.run_folder / "summary.json").write_text(json.dumps(summary))
    (stage.run_folder / "ledger.json").write_text('{"incarnation": 1}')
    assert local.run_training(stage.config("learner.steps=3"), resume=True) == 3
    assert "nothing to do: the run has finished with losses" in capsys.readouterr().out
    assert stage.lines("start") == []


def test_a_ledger_that_is_missing_is_found_before_anything_starts(stage: Stage):
    stage.run_folder.mkdir()
    (stage.run_folder / "metrics.jsonl").write_text('{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"ledger\.json is missing"):
        local.run_training(stage.config(), resume=True)
    assert stage.lines("start") == []


def test_a_checkpoint_that_is_torn_is_not_announced_and_nothing_starts(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    checkpoint = stage.run_folder / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (stage.run_folder / "ledger.json").write_text('{"incarnation": 1}')
    (checkpoint / "learner.json").write_text('{"step": 2')
    with pytest.raises(ConfigError, match=r"step_000002/learner\.json is corrupted: it is cut off"):
        local.run_training(stage.config(), resume=True)
    assert "continuing" not in capsys.readouterr().out
    assert stage.lines("start") == []


def test_a_resume_says_before_services_start_what_is_trained_again(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    stage.run_folder.mkdir()
    (stage.run_folder / "metrics.jsonl").write_text('{"step": 2}\n')
    (stage.run_folder / "ledger.json").write_text('{"incarnation": 1}')
    stage.done.touch()
    assert local.run_training(stage.config(), resume=True) == 0
    shown = capsys.readouterr().out
    note = "training begins anew; steps 1 to 2 are trained again"
    assert 0 <= shown.index(note) < shown.index("starting ")


def test_a_service_that_cannot_start_ends_the_start_of_the_others(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    complaint = "agent-r1: error: the corpus has no passages"
    stage.options["search"] = ["--complaint", complaint, "--exit-code", "2"]
    assert local.run_training(stage.config(), resume=False) == 1
    shown = capsys.readouterr()
    assert "the corpus has no passages" in shown.err
    assert "services are up" not in shown.out
    assert "rollout" not in [row[0] for row in stage.lines("start")]


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_run_folder_is_its_owner_s_alone(stage: Stage):
    modes: dict[str, int] = {}
    state: list[Path] = []
    private = ("redis.url", "redis.conf", "redis-password")

    def look() -> None:
        for name in (".", "launcher.json"):
            modes[name] = mode(stage.run_folder / name)
        launcher = json.loads((stage.run_folder / "launcher.json").read_text())
        state.append(Path(launcher["state_dir"]))
        for path in (state[0], *(state[0] / name for name in private)):
            modes[path.name] = mode(path)
        stage.done.touch()

    before = os.umask(0)
    try:
        thread = stage.when_up(look)
        assert local.run_training(stage.config(), resume=False) == 0
        thread.join()
    finally:
        os.umask(before)
    assert modes == {
        ".": 0o700,
        "launcher.json": 0o600,
        state[0].name: 0o700,
        **dict.fromkeys(private, 0o600),
    }


def test_a_launcher_that_is_killed_leaves_no_secret_outside_of_its_run_folder(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    # What there is while it runs is what kill -9 would leave.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    outside: list[str] = []
    inside: list[str] = []

    def look() -> None:
        outside.extend(path.name for path in temporary.rglob("*") if path.is_file())
        inside.extend(path.name for path in (stage.run_folder / "live").iterdir())
        stage.done.touch()

    stage.run_folder.mkdir()
    left = stage.run_folder / "live" / "token"  # of a launcher that was killed before
    left.parent.mkdir()
    left.write_text("old")
    thread = stage.when_up(look)
    assert local.run_training(stage.config(), resume=False) == 0
    thread.join()
    assert {"token", "redis.url", "redis.conf"} <= set(inside)
    assert outside in ([], ["lock"])  # of the folder for sockets, where the run's path is long
    assert list(temporary.iterdir()) == []
    assert not left.parent.exists()


def test_the_folder_of_a_client_goes_with_it_however_it_ends(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def leave(ends_with: type[BaseException]) -> Path:
        with (
            contextlib.suppress(ends_with),
            local_client.work_folder(stage.config()) as (folder, _),
        ):
            for name in ("live/token", "logs/search.log"):
                (folder / name).parent.mkdir()
                (folder / name).touch()
            raise ends_with
        return folder

    interrupted = leave(KeyboardInterrupt)
    assert interrupted.is_relative_to(tmp_path / "cache")  # there is no run folder yet
    assert not interrupted.exists()
    stage.run_folder.mkdir()
    failed = leave(ValueError)
    assert failed.is_relative_to(stage.run_folder)
    assert [path.name for path in failed.rglob("*")] == ["logs", "search.log"]
    assert run_folder_problem(stage.run_folder, resume=False) is None  # a run may still begin there


def test_the_folder_of_a_resumed_run_is_closed_to_others(stage: Stage):
    stage.run_folder.mkdir()
    stage.run_folder.chmod(0o755)
    (stage.run_folder / "ledger.json").write_text('{"incarnation": 1}')
    stage.done.touch()
    assert local.run_training(stage.config(), resume=True) == 0
    assert mode(stage.run_folder) == 0o700


def test_a_resume_leaves_alone_what_a_learner_that_was_started_by_hand_trains(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "LEARNER_END_S", 0.2)
    stage.run_folder.mkdir()
    (stage.run_folder / "ledger.json").write_text('{"incarnation": 1}')
    (stage.run_folder / "config.json").write_text("its own")
    lock = FolderLock(stage.run_folder)
    lock.acquire()
    with pytest.raises(ConfigError, match=rf"a learner trains in .*\(process {os.getpid()} on"):
        local.run_training(stage.config(), resume=True)
    lock.release()
    assert (stage.run_folder / "config.json").read_text() == "its own"


def test_a_start_that_failed_does_not_block_the_folder(stage: Stage):
    stage.options["search"] = ["--complaint", "no", "--exit-code", "2"]
    assert local.run_training(stage.config(), resume=False) == 1
    del stage.options["search"]
    thread = stage.when_up(stage.done.touch)
    assert local.run_training(stage.config(), resume=False) == 0
    thread.join()


def test_a_learner_that_was_stopped_from_outside_has_not_finished(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    stage.options["learner"] = ["--exit-when", str(stage.done)]  # ends in order, without a summary
    thread = stage.when_up(stage.done.touch)
    assert local.run_training(stage.config(), resume=False) == 130
    thread.join()
    assert "Stopped before training began: start again" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("finished_with_losses", 3)])
def test_the_exit_status_says_how_a_run_ended(stage: Stage, status: str, code: int):
    stage.options["learner"] = ["--exit-when", str(stage.done)]

    def finish() -> None:
        (stage.run_folder / "summary.json").write_text(json.dumps({"status": status}))
        stage.done.touch()

    thread = stage.when_up(finish)
    assert local.run_training(stage.config(), resume=False) == code
    thread.join()


def test_dead_letters_outlive_the_redis_of_the_run(
    stage: Stage, capsys: pytest.CaptureFixture[str]
):
    from agent_r1.cli import main as cli

    async def leave_letter() -> None:
        url = live_redis_url(stage.run_folder)
        assert url is not None
        async with await Broker.connect(url, "demo") as broker:
            fields: Any = {
                "stream": broker.keys.tasks,
                "entry_id": "1-0",
                "reason": "does not parse",
                "failed_at": "12.5",
                "field:key": "demo/1/2/3/0",
            }
            await broker.redis.xadd(broker.keys.dead_letters, fields)
        stage.done.touch()

    thread = stage.when_up(lambda: asyncio.run(leave_letter()))
    assert local.run_training(stage.config(), resume=False) == 0
    thread.join()
    listing = f"{program('agent-r1')} status {at_hand(stage.run_folder)}"
    assert f"!! 1 dead letters: {listing}" in capsys.readouterr().out
    folder = str(stage.run_folder)
    assert cli.main(["status", folder]) == 0
    text = capsys.readouterr().out
    assert "tasks  demo/1/2/3/0" in text
    assert "does not parse" in text
    assert cli.main(["dead-letters", "retry", folder, "all"]) == 2
    assert "requests every unfinished sample again" in capsys.readouterr().err


# --- A Redis that others use ---------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[str]:
    """URL of a Redis with a password."""
    folder = tmp_path / "redis"
    folder.mkdir()
    spec, url = local_redis.local_redis(folder, maxmemory_mb=64)
    process = subprocess.Popen(spec.command)
    try:
        asyncio.run(local_redis.wait_for_redis(url, "run", lambda _: None))
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("given", ["nothing", "url", "variable"])
def test_no_service_has_the_password_of_redis_in_its_environment(
    given: str, stage: Stage, secured: str, monkeypatch: pytest.MonkeyPatch
):
    url, password = split_password(secured)
    assert password is not None
    config = stage.config()
    if given == "url":
        config = stage.config(AGENT_R1__REDIS__URL=secured)
    if given == "variable":
        monkeypatch.setenv("AGENT_R1_REDIS_PASSWORD", password)
        config = stage.config(f"redis.url={url}")
    environments: list[bytes] = []
    reached: list[tuple[str, str | None]] = []

    def look() -> None:
        live = live_redis_url(stage.run_folder) or ""
        shown = [Path("/proc", str(pid), "environ").read_bytes() for pid in stage.pids()]
        secret = (split_password(live)[1] or "").encode()
        environments.extend(text for text in shown if secret in text)
        variables = stage.environment("rollout")
        redis = RedisConfig(
            url=variables["AGENT_R1__REDIS__URL"],
            password_file=Path(variables["AGENT_R1__REDIS__PASSWORD_FILE"]),
        )
        reached.append((redis.connection_url({}), live))
        stage.done.touch()

    thread = stage.when_up(look)
    assert local.run_training(config, resume=False) == 0
    thread.join()
    ((by_service, by_launcher),) = reached
    assert by_service == by_launcher
    assert given == "nothing" or by_launcher == secured
    assert environments == []


def test_a_redis_that_is_away_is_named_without_its_password(stage: Stage):
    url = f"redis://me:secret@127.0.0.1:{local_redis.free_port()}/0"
    with pytest.raises(ValueError, match=r"does not answer: ") as caught:
        local.run_training(stage.config(AGENT_R1__REDIS__URL=url), resume=False)
    assert "redis://me:***@127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)


async def _announce(url: str, run_id: str) -> None:
    async with await Broker.connect(url, run_id) as broker:
        server = RolloutServer(
            server_id="other", url="", policy_version=0, pid=7, host="elsewhere", started_at=0.0
        )
        await Registry(broker).announce_rollout_server(server, expiry_s=60.0)


def test_a_run_id_in_use_is_refused(
    stage: Stage, redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "CLAIM_MARGIN_S", 0.0)
    asyncio.run(_announce(redis_url, run_id))
    config = stage.config(
        f"redis.url={redis_url}", f"run.id={run_id}", "rollout.announce_expiry_s=0.3"
    )
    with pytest.raises(ConfigError, match=r"is in use on this Redis.*process 7 on elsewhere"):
        local.run_training(config, resume=False)
    assert stage.lines("start") == []


def test_a_fresh_start_finds_nothing_of_an_earlier_one_and_nothing_of_others(
    stage: Stage, redis_url: str, run_id: str
):
    async def prepare() -> None:
        async with await Broker.connect(redis_url, run_id) as broker:
            await broker.redis.set(broker.keys.newest_version, "left behind")
            await broker.redis.set(f"{broker.keys.prefix[:-1]}-other:key", "kept")

    async def look() -> list[bytes]:
        async with await Broker.connect(redis_url, run_id) as broker:
            return sorted([key async for key in broker.redis.scan_iter(f"agent_r1:{run_id}*")])

    asyncio.run(prepare())
    thread = stage.when_up(stage.done.touch)
    config = stage.config(f"redis.url={redis_url}", f"run.id={run_id}")
    assert local.run_training(config, resume=False) == 0
    thread.join()
    assert asyncio.run(look()) == [f"agent_r1:{run_id}-other:key".encode()]


def test_a_run_leaves_nothing_in_a_shared_redis_and_its_dead_letters_in_its_folder(
    stage: Stage, redis_url: str, run_id: str
):
    async def fill() -> None:
        async with await Broker.connect(redis_url, run_id) as broker:
            await broker.redis.xadd(broker.keys.tasks, {b"nonsense": b"1"})
            consumer = broker.consumer(broker.keys.tasks, RolloutTask, group="g", consumer="c")
            async with consumer:
                assert await consumer.read(1, 0.0) == []  # dead-lettered
            await broker.redis.set(f"agent_r1:@{run_id}:tool_versions:search", "7")
        stage.done.touch()

    async def look() -> list[bytes]:
        async with await Broker.connect(redis_url, run_id) as broker:
            return [key async for key in broker.redis.scan_iter(f"agent_r1:*{run_id}*")]

    thread = stage.when_up(lambda: asyncio.run(fill()))
    config = stage.config(f"redis.url={redis_url}", f"run.id={run_id}")
    assert local.run_training(config, resume=False) == 0
    thread.join()
    assert asyncio.run(look()) == []
    (letter,) = load_letters(stage.run_folder)
    assert "no field 'schema'" in letter.reason


# --- The same services for a client --------------------------------------------------------------


def test_a_client_gets_services_of_its_own_and_the_weights_of_the_model(stage: Stage):
    folders: list[Path] = []

    async def client(config: Config) -> tuple[str, int | None]:
        assert config.redis.url is not None
        folders.append(config.run.folder())
        assert find_token(config.run) is not None
        async with await Broker.connect(config.redis.url, config.run.id) as broker:
            newest = await Registry(broker).newest_version()
        return config.run.id, None if newest is None else newest.policy_version

    reports: list[str] = []
    run_id, version = local_client.run_client(stage.config(), client, reports.append)
    assert run_id.startswith("demo-client-")
    assert version == 0
    assert sorted(row[0] for row in stage.lines("start")) == ["reward", "rollout", "search"]
    assert not stage.run_folder.exists()
    assert not any(line.startswith("!!") for line in reports)
    assert not folders[0].exists()


def test_a_client_sees_what_fails_at_once_and_the_logs_are_kept(stage: Stage):
    reports: list[str] = []
    log_dirs: list[Path] = []

    async def client(config: Config) -> None:
        assert config.redis.url is not None
        log_dirs.append(config.run.folder() / "logs")
        async with await Broker.connect(config.redis.url, config.run.id) as broker:
            board = FailureBoard(broker)
            for number in range(3):  # one kind: numbers do not tell failures apart
                await board.note("rollout", f"tool_timeout: search: {number} s", "demo/0/1/0/0")
            await eventually(lambda: any(line.startswith("!!") for line in reports))
            await board.note("reward", "reward_error: brief: ValueError: no text")

    local_client.run_client(stage.config(), client, reports.append)
    loud = [line for line in reports if line.startswith("!!")]
    assert len(loud) == 2
    assert "first failure of its kind in rollout: tool_timeout: search: 0 s" in loud[0]
    assert str(log_dirs[0] / "search.log") in loud[0]
    assert "brief: ValueError: no text" in loud[1]  # told of in the last moment
    assert (log_dirs[0] / "search.log").is_file()
    shutil.rmtree(log_dirs[0].parent)


def test_a_client_whose_services_die_ends_with_the_reason(stage: Stage):
    trigger = stage.folder / "die"
    stage.options["rollout"] = ["--exit-when", str(trigger), "--exit-code", "2"]

    async def client(_: Config) -> None:
        trigger.touch()
        await asyncio.sleep(WAIT_S)

    with pytest.raises(ValueError, match="rollout stopped: exit status 2"):
        local_client.run_client(stage.config(), client, lambda _: None)


# --- The run's own Redis -------------------------------------------------------------------------


def arguments_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_the_own_redis_is_private_and_refuses_writes_when_full(tmp_path: Path):
    supervisor = Supervisor(tmp_path / "logs")
    spec, url = local_redis.local_redis(tmp_path, 32)
    await supervisor.start(spec)
    try:
        async with await Broker.connect(url, "r") as broker:
            info = await broker.redis.info("memory")
            assert info["maxmemory"] == 32 * 1024 * 1024
            assert info["maxmemory_policy"] == "noeviction"
        password = url.split(":")[2].split("@")[0]
        for pid in supervisor.pids().values():
            assert password not in arguments_of(pid)
        stranger = local_redis.Redis.from_url(url.replace(password, "guess"))
        with pytest.raises(AuthenticationError):
            await stranger.ping()  # pyright: ignore[reportGeneralTypeIssues]
        await stranger.aclose()
    finally:
        await supervisor.stop()
    assert not await local_redis.answers(url)


def nothing_is_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Leave `folder` alone to look for programs in, and take the wheel with a Redis away."""
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)


def test_a_machine_without_redis_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    nothing_is_installed(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"apt-get install redis-server.*set redis\.url"):
        local_redis.find_redis_server()


def test_an_old_redis_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.7 sha=0'\n")
    old.chmod(0o755)
    nothing_is_installed(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r"too old or broken: .*redis-server \(\(5, 0\)\)"):
        local_redis.find_redis_server()


async def test_the_launcher_needs_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ServiceError, match=r"needs Linux, and this is darwin; use .docker compose"):
        await Supervisor(tmp_path).start(Scene(tmp_path).spec("one"))


def conditions_in(file: Path, kind: str) -> list[Condition]:
    return [one for one in read_conditions(file) if one.kind == kind]


def test_what_stands_still_is_said_while_it_lasts_when_it_is_over_and_in_the_end(
    stage: Stage,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(local_watch, "PATIENCE_S", 0.5)
    file = stage.run_folder / "conditions.jsonl"

    def lasts(kind: str) -> bool:
        return any(one.ended_at is None for one in conditions_in(file, kind))

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10.0
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)

    def act() -> None:
        (reward,) = (int(row[1]) for row in stage.lines("start") if row[0] == "reward")
        os.kill(reward, signal.SIGSTOP)
        wait_until(lambda: lasts("silent:reward"))
        os.kill(reward, signal.SIGCONT)
        wait_until(lambda: not lasts("silent:reward"))
        with redis.Redis.from_url(redis_server.url) as client:
            client.replicaof("127.0.0.1", 1)
            wait_until(lambda: lasts("redis:read_only"))
            client.replicaof("NO", "ONE")
            wait_until(lambda: not lasts("redis:read_only"))
        stage.done.touch()

    thread = stage.when_up(act)
    config = stage.config(f'redis.url="{redis_server.url}"')
    assert local.run_training(config, resume=False) == 0
    thread.join()
    shown = capsys.readouterr().out.splitlines()
    for kind, says in (
        ("silent:reward", "reward does not answer (process "),
        ("redis:read_only", f"Redis ({redis_server.url}) is read-only"),
    ):
        (condition,) = conditions_in(file, kind)
        assert condition.ended_at is not None
        # The process to continue, not the one above it.
        (pid,) = (row[1] for row in stage.lines("start") if row[0] == "reward")
        assert (f"(process {pid})" in condition.what) == (kind == "silent:reward")
        begun, over, told = [line for line in shown if says in line]
        assert begun.startswith("!! since ")
        assert over.startswith("over after ")
        assert told.startswith("hindered for ")


def test_a_condition_that_a_killed_launcher_left_open_does_not_last(stage: Stage):
    stage.run_folder.mkdir()
    left = Condition(
        source="launcher", kind="silent:reward", what="w", remedy="r", began_at=time.time() - 60
    )
    append_condition(stage.run_folder / "conditions.jsonl", left)
    stage.done.touch()
    assert local.run_training(stage.config(), resume=False) == 0
    (ended,) = conditions_in(stage.run_folder / "conditions.jsonl", "silent:reward")
    assert ended.lasted_s == pytest.approx(60, abs=5)
