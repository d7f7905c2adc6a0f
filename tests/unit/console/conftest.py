"""A browser before the console over the folder `runs` of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from agent_r1.console.app import create_app
from agent_r1.console.runs import Runs
from tests.support.config_scene import write_scene

PAGE = {"accept": "text/html"}


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the runs; tests only read it."""
    return write_scene(tmp_path_factory.mktemp("console") / "scene")


@pytest.fixture(scope="session")
def only_app(tmp_path_factory: pytest.TempPathFactory) -> tuple[FastAPI, Runs]:
    """One console for all tests: it takes longer to build than a page."""
    runs = Runs(tmp_path_factory.mktemp("none"))
    return create_app(runs, None), runs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def app(root: Path, only_app: tuple[FastAPI, Runs], monkeypatch: pytest.MonkeyPatch) -> FastAPI:
    """The console over the runs of the test."""
    found, runs = only_app
    monkeypatch.setattr(runs, "root", root)
    return found


@pytest.fixture
async def browser(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://console.test", headers=PAGE
    ) as client:
        yield client


@pytest.fixture
async def patient_browser(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that gets the page of an unknown error, as from a real server."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://console.test", headers=PAGE
    ) as client:
        yield client
