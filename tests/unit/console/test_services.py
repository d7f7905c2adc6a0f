"""The page of a run's services, where the run is elsewhere or has ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import httpx
import pytest

from agent_r1.console.app import create_app
from agent_r1.console.runs import Runs
from agent_r1.runs.remote import Mirror
from tests.support.config_scene import write_scene
from tests.support.console_scene import write_run

STOP = "Stop the run"


async def services_of(root: Path, mirror: Mirror | None = None) -> str:
    """Return the page of the services of the run `run`."""
    app = create_app(Runs(root, mirror), None)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://console"
    ) as client:
        answer = await client.get("/runs/run/services", headers={"accept": "text/html"})
        return answer.raise_for_status().text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return write_run(write_scene(tmp_path / "scene"), tmp_path / "runs" / "run")


async def test_a_run_that_is_followed_says_where_its_services_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with closing(Mirror("http://learner:8001", None, tmp_path / "cache")) as mirror:
        monkeypatch.setattr(mirror, "at_work", lambda name: "the learner at http://learner:8001")
        shown = await services_of(folder.parent, mirror)
    assert "running (the learner at http://learner:8001)" in shown
    assert "known only where the run was started; `agent-r1 ui` there shows" in shown
    assert "has stopped" not in shown
    assert STOP not in shown


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ('{"status": "finished"}', "the run is not running, and its Redis has stopped with it"),
        (None, "no launcher on this machine runs it, so its Redis has stopped with it or is else"),
    ],
)
async def test_a_run_that_is_not_here_says_so(folder: Path, summary: str | None, said: str):
    if summary is not None:
        (folder / "summary.json").write_text(summary)
    shown = await services_of(folder.parent)
    assert said in shown
    assert STOP not in shown
