"""The supervisor and the subreaper, with real processes that start children, die and hang."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import agent_r1.launch.supervisor
from agent_r1.launch import service, subreaper
from agent_r1.launch.service import ServiceSpec, describe_exit
from agent_r1.launch.supervisor import RESTART_DELAY_S, ServiceError, Supervisor

FAKE_SERVICE = Path(__file__).resolve().parents[1] / "support" / "fake_service.py"
WAIT_S = 20.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher needs Linux")


class Scene:
    """A folder for one test's services and what they wrote down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal"
        self.journal.touch()
        self.reports: list[str] = []

    def supervisor(self, **options: Any) -> Supervisor:
        return Supervisor(self.folder / "logs", report=self.reports.append, **options)

    def spec(self, name: str, *options: str, **changes: object) -> ServiceSpec:
        announce_dir = self.folder / "announce" / name
        command = [sys.executable, str(FAKE_SERVICE), name, str(self.journal)]
        values: dict[str, object] = {
            "name": name,
            "command": [*command, "--announce-dir", str(announce_dir), *options],
            "announce_dir": announce_dir,
            "port_variable": "FAKE_PORT",
            "start_timeout_s": WAIT_S,
            "stop_timeout_s": 5.0,
        }
        return ServiceSpec(**{**values, **changes})  # pyright: ignore[reportArgumentType]

    def lines(self, event: str) -> list[list[str]]:
        rows = [line.split() for line in self.journal.read_text().splitlines()]
        return [row[1:] for row in rows if row[0] == event]

    def pids(self) -> list[int]:
        return [int(row[1]) for row in self.lines("start") + self.lines("child")]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_a_service_and_what_it_starts_run_on_its_cores(scene: Scene):
    core = min(os.sched_getaffinity(0))
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("one", "--child", cores=(core,)))
    assert len(scene.pids()) == 2
    assert [os.sched_getaffinity(pid) for pid in scene.pids()] == [{core}] * 2
    await supervisor.stop()


async def test_services_on_one_gpu_start_one_after_the_other_and_others_side_by_side(
    scene: Scene,
):
    first_is_up = asyncio.Event()

    async def probe(url: str) -> bool:
        return first_is_up.is_set()

    supervisor = scene.supervisor()
    first = asyncio.create_task(supervisor.start(scene.spec("one", gpus=(0,), probe=probe)))
    await until(lambda: scene.lines("start"))
    second = asyncio.create_task(supervisor.start(scene.spec("two", gpus=(0, 1))))
    await supervisor.start(scene.spec("elsewhere", gpus=(2,)))
    assert [row[0] for row in scene.lines("start")] == ["one", "elsewhere"]
    first_is_up.set()
    await first
    await second
    assert [row[0] for row in scene.lines("start")] == ["one", "elsewhere", "two"]
    await supervisor.stop()


async def test_a_server_that_restarts_waits_for_one_that_is_starting_on_its_gpu(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(agent_r1.launch.supervisor, "RESTART_DELAY_S", 0.0)
    other_is_up = asyncio.Event()

    async def probe(url: str) -> bool:
        return other_is_up.is_set()

    supervisor = scene.supervisor(max_restarts=3)
    await supervisor.start(scene.spec("one", gpus=(0,)))
    starting = asyncio.create_task(supervisor.start(scene.spec("two", gpus=(0,), probe=probe)))
    await until(lambda: len(scene.lines("start")) == 2)
    os.kill(int(scene.lines("start")[0][1]), signal.SIGKILL)
    await until(lambda: any("one died" in line for line in scene.reports))
    await supervisor.start(scene.spec("elsewhere", gpus=(1,)))  # asked for later, and up first
    assert [row[0] for row in scene.lines("start")] == ["one", "two", "elsewhere"]
    other_is_up.set()
    await starting
    await until(lambda: any("one is up again" in line for line in scene.reports))
    await supervisor.stop()


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.02)


async def test_a_started_service_answers_at_the_announced_url(scene: Scene):
    supervisor = scene.supervisor()
    url = await supervisor.start(scene.spec("one"))
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{url}/healthz")).status_code == 200
    await supervisor.stop()
    assert scene.lines("stop") == [["one"]]
    assert not any(alive(pid) for pid in scene.pids())


async def test_a_service_that_is_still_to_come_counts_as_starting(scene: Scene):
    supervisor = scene.supervisor()
    supervisor.expect("one", "two")
    assert supervisor.starting() == ["one", "two"]
    await supervisor.start(scene.spec("one"))
    assert supervisor.starting() == ["two"]
    await supervisor.start(scene.spec("two"))
    assert supervisor.starting() == []
    await supervisor.stop()


async def test_services_stop_rank_by_rank_and_take_their_children_along(scene: Scene):
    supervisor = scene.supervisor()
    for name, rank in (("last", 9), ("middle", 1), ("first", 0)):
        slow = ("--stop-s", "0.3") if name != "last" else ()
        await supervisor.start(scene.spec(name, "--child", *slow, stop_rank=rank))
    await until(lambda: len(scene.lines("child")) == 3)
    await supervisor.stop()
    assert scene.lines("stop") == [["first"], ["middle"], ["last"]]
    assert [alive(pid) for pid in scene.pids()] == [False] * 6


async def test_a_service_that_ignores_sigterm_is_killed_when_its_time_is_up(scene: Scene):
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("deaf", "--stubborn", "--child", stop_timeout_s=0.3))
    await supervisor.stop()
    assert scene.lines("sigterm") == [["deaf"]]
    assert scene.lines("stop") == []
    assert any("did not stop within 0.3 s" in line for line in scene.reports)
    assert not any(alive(pid) for pid in scene.pids())


async def test_kill_ends_a_slow_stop_at_once(scene: Scene):
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("slow", "--stop-s", "60", "--child", stop_timeout_s=60.0))
    stopping = asyncio.create_task(supervisor.stop())
    await until(lambda: scene.lines("sigterm"))
    supervisor.kill()
    await asyncio.wait_for(stopping, 10.0)
    assert not any(alive(pid) for pid in scene.pids())


async def test_a_killed_service_restarts_on_its_port_without_its_old_children(scene: Scene):
    supervisor = scene.supervisor()
    url = await supervisor.start(scene.spec("tool", "--child"))
    await until(lambda: scene.lines("child"))
    old = scene.pids()
    os.kill(int(scene.lines("start")[0][1]), signal.SIGKILL)
    await until(lambda: "tool is up again" in scene.reports)
    assert not any(alive(pid) for pid in old)
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{url}/healthz")).status_code == 200
    assert any(
        line.startswith("!! tool died (killed by SIGKILL") and "1 of 6" in line
        for line in scene.reports
    )
    await supervisor.stop()


async def test_a_killed_subreaper_does_not_leave_the_service_behind(scene: Scene):
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("tool"))
    old = scene.pids()
    os.kill(supervisor.pids()["tool"], signal.SIGKILL)
    await until(lambda: "tool is up again" in scene.reports)
    assert not any(alive(pid) for pid in old)
    await supervisor.stop()


async def test_a_service_that_dies_too_often_ends_the_run(scene: Scene):
    supervisor = scene.supervisor(max_restarts=1)
    trigger = scene.folder / "die"
    spec = scene.spec("fragile", "--exit-when", str(trigger), "--exit-code", "7")
    await supervisor.start(spec)
    trigger.touch()
    with pytest.raises(ServiceError, match=r"fragile stopped: exit status 7 \(2 times\)"):
        await asyncio.wait_for(supervisor.wait(), WAIT_S)
    assert len(scene.lines("start")) >= 2
    await supervisor.stop()


async def test_a_service_that_dies_on_a_full_disk_is_not_restarted(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
):
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("a"))
    monkeypatch.setattr("agent_r1.launch.supervisor.LEAST_FREE_BYTES", 2**60)
    os.kill(scene.pids()[0], signal.SIGKILL)
    try:
        with pytest.raises(ServiceError, match=r"a stopped .*: the disk is full: .* MiB are free"):
            await asyncio.wait_for(supervisor.wait(), WAIT_S)
    finally:
        await supervisor.stop()
    assert len(scene.lines("start")) == 1


async def test_a_service_that_says_why_it_died_is_restarted_with_its_reason(scene: Scene):
    supervisor = scene.supervisor(max_restarts=1)
    gone = scene.folder / "gone"
    complaint = ("--exit-when", str(gone), "--last-words", "agent-r1: error: the engine hung")
    await supervisor.start(scene.spec("rollout", *complaint, "--exit-code", "1"))
    gone.touch()
    await until(lambda: scene.reports)
    assert scene.reports[0].startswith("!! rollout died (the engine hung); restarting it, 1 of 1")
    await supervisor.stop()


async def test_deaths_outside_the_window_are_forgotten(scene: Scene):
    # The window is shorter than the pause before a restart, so each death is the first one.
    supervisor = scene.supervisor(max_restarts=1, restart_window_s=RESTART_DELAY_S / 2)
    await supervisor.start(scene.spec("tool"))
    for _ in range(2):
        num_reports = len(scene.reports)
        os.kill(int(scene.lines("start")[-1][1]), signal.SIGKILL)
        await until(lambda seen=num_reports: "tool is up again" in scene.reports[seen:])
    await supervisor.stop()


async def test_deaths_that_a_dead_letter_explains_are_forgotten(scene: Scene):
    letters = [0]

    async def explained() -> int:
        return letters[-1]

    supervisor = scene.supervisor(explained=explained, max_restarts=1)
    await supervisor.start(scene.spec("reward"))
    for number in (0, 1, 2):  # each death but the first comes after another letter
        letters.append(number)
        num_reports = len(scene.reports)
        os.kill(int(scene.lines("start")[-1][1]), signal.SIGKILL)
        await until(lambda seen=num_reports: "reward is up again" in scene.reports[seen:])
    os.kill(int(scene.lines("start")[-1][1]), signal.SIGKILL)
    with pytest.raises(ServiceError, match=r"reward stopped: killed by SIGKILL.* \(2 times\)"):
        await asyncio.wait_for(supervisor.wait(), WAIT_S)
    await supervisor.stop()


async def test_a_service_that_says_why_it_stops_is_not_restarted(scene: Scene):
    supervisor = scene.supervisor()
    trigger = scene.folder / "stop"
    await supervisor.start(scene.spec("tool", "--exit-when", str(trigger), "--exit-code", "2"))
    trigger.touch()
    with pytest.raises(ServiceError, match="tool stopped: exit status 2"):
        await asyncio.wait_for(supervisor.wait(), WAIT_S)
    assert len(scene.lines("start")) == 1
    await supervisor.stop()


async def test_a_service_that_takes_its_announcement_back_has_left_for_good(scene: Scene):
    supervisor = scene.supervisor()
    spec = scene.spec("one")
    await supervisor.start(spec)
    await supervisor.start(scene.spec("two"))
    for name in ("two", "one"):  # "two" dies the same way and has not said that it leaves
        ((_, pid),) = [row for row in scene.lines("start") if row[0] == name]
        if name == "one":
            assert spec.announce_dir is not None
            (spec.announce_dir / "one.json").unlink()
        os.kill(int(pid), signal.SIGTERM)
    await until(lambda: "two is up again" in scene.reports)
    await until(lambda: "one has stopped after it was drained" in scene.reports)
    assert [row[0] for row in scene.lines("start")].count("one") == 1
    await supervisor.stop()


async def test_a_failed_start_shows_the_message_and_not_the_whole_log(scene: Scene):
    supervisor = scene.supervisor()
    complaint = (
        "Traceback: noise\nagent-r1: error: port 80 cannot be taken;\nchoose another\n"
        "Exception ignored in: <function Engine.__del__>\nTraceback: noise\n"
        "/usr/lib/resource_tracker.py:254: UserWarning: noise\n  warnings.warn('noise')"
    )
    spec = scene.spec("tool", "--complaint", complaint, "--exit-code", "2")
    with pytest.raises(ServiceError) as caught:
        await supervisor.start(spec)
    message = str(caught.value)
    assert "port 80 cannot be taken;\nchoose another\n" in message
    assert "noise" not in message
    assert "tool.log" in message
    await supervisor.stop()


async def test_a_failed_start_without_a_message_shows_the_end_of_the_log(scene: Scene):
    supervisor = scene.supervisor()
    complaint = "\n".join(f"line {i}" for i in range(100))
    with pytest.raises(ServiceError) as caught:
        await supervisor.start(scene.spec("tool", "--complaint", complaint, "--exit-code", "1"))
    assert "line 99" in str(caught.value)
    assert "line 50" not in str(caught.value)
    await supervisor.stop()


async def test_a_service_that_never_announces_itself_fails_in_time(scene: Scene):
    supervisor = scene.supervisor()
    spec = scene.spec("mute", announce_dir=scene.folder / "elsewhere", start_timeout_s=0.5)
    with pytest.raises(ServiceError, match=r"was not up after 0\.5 s"):
        await supervisor.start(spec)
    assert not any(alive(pid) for pid in scene.pids())
    await supervisor.stop()


async def test_a_missing_program_is_named(scene: Scene):
    supervisor = scene.supervisor()
    spec = scene.spec("tool", command=["/nonexistent/program"])
    with pytest.raises(ServiceError, match="cannot start '/nonexistent/program'"):
        await supervisor.start(spec)
    await supervisor.stop()


async def test_the_run_is_over_when_the_service_that_ends_it_is_done(scene: Scene):
    supervisor = scene.supervisor()
    trigger = scene.folder / "done"
    await supervisor.start(scene.spec("tool"))
    await supervisor.start(scene.spec("learner", "--exit-when", str(trigger), ends_run=True))
    over = asyncio.create_task(supervisor.wait())
    await asyncio.sleep(0)
    assert not over.done()
    trigger.touch()
    await asyncio.wait_for(over, WAIT_S)
    await supervisor.stop()


async def test_one_job_after_another_runs_beside_services_that_stay(scene: Scene):
    supervisor = scene.supervisor()
    trigger = scene.folder / "done"
    trigger.touch()
    await supervisor.start(scene.spec("tool"))
    over = asyncio.create_task(supervisor.wait())
    for name in ("first", "second"):
        log_dir = scene.folder / name
        spec = scene.spec("job", "--exit-when", str(trigger), is_job=True, log_dir=log_dir)
        await supervisor.start(spec)
        await asyncio.wait_for(supervisor.finished("job"), WAIT_S)
        assert (log_dir / "job.log").is_file()
    assert [row[0] for row in scene.lines("start")] == ["tool", "job", "job"]
    assert not over.done()
    over.cancel()
    await supervisor.stop()


async def test_a_job_that_dies_is_started_again(scene: Scene):
    supervisor = scene.supervisor()
    trigger = scene.folder / "done"
    await supervisor.start(scene.spec("job", "--exit-when", str(trigger), is_job=True))
    os.kill(int(scene.lines("start")[0][1]), signal.SIGKILL)
    trigger.touch()
    await asyncio.wait_for(supervisor.finished("job"), WAIT_S)
    assert len(scene.lines("start")) == 2
    await supervisor.stop()


async def test_a_restart_of_redis_restarts_the_learner_with_its_restart_command(scene: Scene):
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("redis"))
    learner = scene.spec("learner", restarts_with=("redis",), ends_run=True)
    again = [part if part != "learner" else "resumed" for part in learner.command]
    await supervisor.start(dataclasses.replace(learner, restart_command=again))
    for num_restarts in (1, 2):  # the second shows that the first left the new learner alone
        redis = [row for row in scene.lines("start") if row[0] == "redis"]
        os.kill(int(redis[-1][1]), signal.SIGKILL)
        await until(lambda n=num_restarts: scene.reports.count("learner is up again") == n)
    assert not supervisor.starting()
    await supervisor.stop()
    assert [row[0] for row in scene.lines("start")] == [
        *("redis", "learner"),
        *("redis", "resumed"),
        *("redis", "resumed"),
    ]
    assert not any(line.startswith("!! learner") for line in scene.reports)


LAUNCHER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from agent_r1.launch import supervisor
from test_launcher_supervisor import Scene

supervisor.ORPHAN_GRACE_S = 1.0

async def main():
    scene = Scene(Path({folder!r}))
    supervisor = scene.supervisor()
    await supervisor.start(scene.spec("one", "--child"))
    await supervisor.start(scene.spec("two", "--child", "--stubborn"))
    print("up", flush=True)
    await supervisor.wait()

asyncio.run(main())
"""


async def test_no_process_survives_a_launcher_that_was_killed(scene: Scene):
    source = LAUNCHER.format(tests=str(Path(__file__).parent), folder=str(scene.folder))
    launcher = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE
    )
    assert launcher.stdout is not None
    assert await asyncio.wait_for(launcher.stdout.readline(), WAIT_S) == b"up\n"
    await until(lambda: len(scene.lines("child")) == 2)
    processes = [*scene.pids(), *subreaper.descendants(launcher.pid)]
    assert len(processes) >= 4
    launcher.kill()
    await launcher.wait()
    await until(lambda: not any(alive(pid) for pid in processes))
    assert scene.lines("stop") == [["one"]]  # told to stop in order; the other would not


def test_an_exit_status_is_put_into_words():
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(128 + 15) == "killed by SIGTERM"
    assert describe_exit(-11) == "killed by SIGSEGV"
    assert "lower rollout.kv_cache_gib" in describe_exit(128 + 9)


async def test_what_a_service_says_to_the_terminal_is_reported_while_it_goes_on(scene: Scene):
    code = "import time; print('agent-r1: notice: tools.x is slow', flush=True); time.sleep(60)"
    spec = scene.spec("talker", command=[sys.executable, "-c", code], announce_dir=None, probe=None)
    supervisor = scene.supervisor()
    await supervisor.start(spec)
    try:
        await until(lambda: "!! tools.x is slow" in scene.reports)
        assert supervisor.states()[0].up
    finally:
        await supervisor.stop()
    assert scene.reports.count("!! tools.x is slow") == 1


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (3, 3, "; memory did not run out, so code of its own, a user or another program ended it"),
        (3, 4, "; memory ran out: lower rollout.kv_cache_gib"),
        (None, 4, "; if memory ran out, lower rollout.kv_cache_gib"),
        (3, None, "; if memory ran out, lower rollout.kv_cache_gib"),
    ],
)
def test_a_kill_is_blamed_on_memory_only_where_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch, before: int | None, now: int | None, says: str
):
    monkeypatch.setattr(service, "oom_kills", lambda: now)
    assert says in describe_exit(128 + 9, before)
