"""A learner's run folder over HTTP: what is served, and what a mirror fetches of it."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import httpx
import pytest

from agent_r1.learner.server import serve_learner
from agent_r1.runs import remote
from agent_r1.runs.remote import Mirror, add_store_routes, list_files
from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.token import RunToken, token_headers

TOKEN = RunToken("0123456789abcdef")


@asynccontextmanager
async def serving(folder: Path, port: int = 0) -> AsyncIterator[str]:
    """Serve a run folder as the learner does; yields the URL."""
    async with serve_learner(ListenConfig(port=port), TOKEN) as server:
        add_store_routes(server.app, folder)
        yield server.url


async def look(mirror: Mirror) -> str:
    """Return what the mirror says after one look."""
    await asyncio.to_thread(mirror.refresh)
    return mirror.notice


@asynccontextmanager
async def mirror_of(url: str, folder: Path) -> AsyncIterator[Mirror]:
    """Mirror an address below a folder."""
    with closing(Mirror(url, TOKEN, folder / "cache")) as mirror:
        yield mirror


def answering(text: str, folder: Path) -> Mirror:
    """Return a mirror of an address that gives one answer."""
    mirror = Mirror("http://learner", TOKEN, folder / "cache")
    mirror.close()
    given = httpx.MockTransport(lambda request: httpx.Response(200, text=text))
    mirror._client = httpx.Client(transport=given, base_url="http://learner")
    return mirror


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a step, and files that are nobody's business."""
    folder = tmp_path / "run"
    for name in ("trajectories", "starts", "live", "weights"):
        (folder / name).mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    (folder / "trajectories" / "step_000001.parquet").write_bytes(b"one")
    (folder / "starts" / "1.json").write_text("{}")
    (folder / "live" / "token").write_text("secret")
    (folder / "learner.lock").write_text("secret")
    (folder / "trajectories" / ".step_000002.parquet.7.tmp").write_text("half")
    (folder / "trajectories" / "step_000003.parquet").symlink_to(folder / "live" / "token")
    return folder


SERVED = ["config.json", "metrics.jsonl", "starts/1.json", "trajectories/step_000001.parquet"]


def test_only_files_that_people_read_are_listed(run: Path):
    assert sorted(one.path for one in list_files(run).files) == SERVED


NOT_SERVED = [
    *("live/token", "learner.lock", "weights", "trajectories", "trajectories/.step_000002"),
    *("trajectories/step_000003.parquet", "trajectories/../live/token", "trajectories/%00"),
    *("..%2frun%2flive%2ftoken", "%2fetc%2fpasswd", "trajectories/%2e%2e/config.json"),
    *("trajectories/step_000009.parquet", "trajectories/a/b.parquet", "config.json/"),
]


async def test_no_other_file_is_served(run: Path):
    async with serving(run) as url, httpx.AsyncClient(headers=token_headers(TOKEN)) as client:
        assert (await client.get(f"{url}/run/store/config.json")).text == "{}"
        given = {path: await client.get(f"{url}/run/store/{path}") for path in NOT_SERVED}
        assert [path for path, answer in given.items() if answer.status_code != 404] == []
        refused = await client.put(f"{url}/run/store/config.json", content="x")
        assert refused.status_code == 405


async def test_nothing_is_served_without_the_token(run: Path, tmp_path: Path):
    async with serving(run) as url, httpx.AsyncClient() as client:
        for path in ("/run/store", "/run/store/config.json"):
            assert (await client.get(url + path)).status_code == 401
        with closing(Mirror(url, None, tmp_path / "cache")) as mirror:
            notice = await look(mirror)
    assert "it asks for the run's token; set run.token_file or the variable" in notice


async def test_a_mirror_fetches_what_is_new_and_no_more(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with serving(run) as url, mirror_of(url, tmp_path) as mirror:
        fetched: list[str] = []

        def note(request: httpx.Request) -> None:
            fetched.append(request.url.path + request.headers.get("range", ""))
            # Another console waits meanwhile.
            with (mirror.folder / ".lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

        mirror._client.event_hooks = {"request": [note]}
        assert await look(mirror) == ""
        own = mirror.folder / "run"
        assert list_files(own) == list_files(run)  # sizes and times too
        assert (own / "trajectories/step_000001.parquet").read_bytes() == b"one"
        # The second list tells the learner that all of it is here.
        assert sorted(fetched) == ["/run/store"] * 2 + [*(f"/run/store/{path}" for path in SERVED)]

        fetched.clear()
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("x" * 2000 + "\n")
        (run / "trajectories" / "step_000002.parquet").write_bytes(b"two")
        assert await look(mirror) == ""
        assert list_files(own) == list_files(run)
        grown = "/run/store/metrics.jsonlbytes=0-2012"  # 12 and 2,001 bytes
        assert sorted(fetched)[2:] == [grown, "/run/store/trajectories/step_000002.parquet"]
        with (run / "metrics.jsonl").open("a") as lines:
            lines.write("y\n")
        fetched.clear()
        await look(mirror)
        last = "/run/store/metrics.jsonlbytes=989-2014"  # 2013 - 1024
        assert fetched == ["/run/store", last, "/run/store"]
        assert (own / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()

        fetched.clear()
        await look(mirror)
        assert fetched == ["/run/store"]


async def test_a_learner_waits_until_its_mirrors_have_its_end(run: Path, tmp_path: Path):
    async with serve_learner(ListenConfig(), TOKEN) as server:
        followers = add_store_routes(server.app, run)
        await asyncio.wait_for(followers.have_all(), 1)  # nobody asks
        async with (
            mirror_of(server.url, tmp_path / "a") as one,
            mirror_of(server.url, tmp_path / "b") as other,
        ):
            await look(one)
            await look(other)
            (run / "summary.json").write_text("{}")
            waiting = asyncio.create_task(followers.have_all())
            await look(one)
            assert not waiting.done()
            await look(other)
            await asyncio.wait_for(waiting, 1)
            assert list_files(one.folder / "run") == list_files(run)
            assert list_files(other.folder / "run") == list_files(run)


async def test_a_learner_waits_for_a_while_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(remote, "LAST_LOOK_S", 0.1)
    async with serve_learner(ListenConfig(), TOKEN) as server:
        followers = add_store_routes(server.app, run)
        async with mirror_of(server.url, tmp_path) as mirror:
            await look(mirror)
        await asyncio.wait_for(followers.have_all(), 5)  # the console was closed just now
        assert "may lack its end" in caplog.text
        monkeypatch.setattr(remote, "FOLLOWED_S", 0.0)
        caplog.clear()
        await followers.have_all()  # long ago
        assert caplog.text == ""


async def test_a_mirror_with_much_to_fetch_hears_of_the_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "POLL_S", -1.0)  # nothing is fetched within a look
    async with serving(run) as url, mirror_of(url, tmp_path) as mirror:
        assert await look(mirror) == f"4 files of {url} are not here yet"
        monkeypatch.setattr(remote, "POLL_S", 2.0)
        left = mirror.folder / "run" / "trajectories" / ".step_000001.parquet.7.tmp"
        left.write_text("half")
        assert await look(mirror) == ""
        assert not left.exists()


async def test_what_a_resume_writes_anew_takes_the_place_of_what_was_there(
    run: Path, tmp_path: Path
):
    async with serving(run) as url, mirror_of(url, tmp_path) as mirror:
        await look(mirror)
        (run / "metrics.jsonl").write_text('{"step": 2}\n{"step": 3}\n')  # longer, and another one
        (run / "trajectories" / "step_000001.parquet").unlink()
        (run / "starts" / "1.json").write_text("[]")  # as long as before
        os.utime(run / "starts" / "1.json", (1.0, 1.0))
        assert await look(mirror) == ""
        (run / "trajectories" / "eval_a#b?%2f漢.parquet").write_bytes(b"odd")
        assert await look(mirror) == ""
        assert list_files(mirror.folder / "run") == list_files(run)
        assert (mirror.folder / "run" / "metrics.jsonl").read_text() == '{"step": 2}\n{"step": 3}\n'
        assert (mirror.folder / "run" / "starts" / "1.json").read_text() == "[]"


async def test_a_learner_that_is_gone_leaves_what_it_had(run: Path, tmp_path: Path):
    with closing(socket.socket()) as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    async with mirror_of(f"http://127.0.0.1:{port}", tmp_path) as mirror:
        assert (await look(mirror)).startswith(f"{mirror.url} has not answered yet (")
        async with serving(run, port):
            assert await look(mirror) == ""
            assert mirror.at_work("run") == f"the learner at {mirror.url}"
            assert mirror.at_work("another") is None
        notice = await look(mirror)
        assert notice.startswith(f"{mirror.url} has not answered since 2")
        assert "this is what it had then" in notice
        assert mirror.at_work("run") is None
        assert (mirror.folder / "run" / "config.json").read_text() == "{}"
        async with serving(run, port):
            assert await look(mirror) == ""


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ('{"name": "..", "files": []}', "which is none"),
        ('{"name": "a/b", "files": []}', "which is none"),
        ("[]", "RunFiles"),
    ],
)
async def test_an_answer_that_no_learner_gives_writes_nothing(
    answer: str, said: str, tmp_path: Path
):
    mirror = answering(answer, tmp_path)
    assert said in await look(mirror)
    assert [path.name for path in mirror.folder.iterdir()] == [".lock"]


async def test_a_listing_cannot_name_a_file_outside(tmp_path: Path):
    path = "trajectories/../../../x.parquet"
    one = f'{{"path": "{path}", "size_bytes": 1, "modified_ns": 1}}'
    mirror = answering(f'{{"name": "run", "files": [{one}]}}', tmp_path)
    assert await look(mirror) == ""
    assert sorted(path.name for path in (mirror.folder / "run").iterdir()) == [
        "starts",
        "trajectories",
    ]
