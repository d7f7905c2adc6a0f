"""The way into the console: token once, then a cookie; forms only from its own pages."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from agent_r1.console.app import create_app
from agent_r1.console.door import SESSION_S, Door
from agent_r1.console.runs import Runs
from agent_r1.runtime.http.token import RunToken

TOKEN = "0123456789abcdef0123456789abcdef"
ORIGIN = "http://console.test"
PAGE = {"accept": "text/html"}


class Clock:
    """Unix time that a test moves."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> FastAPI:
    """A console that asks for a token; it keeps nothing of those that came."""
    return create_app(Runs(tmp_path_factory.mktemp("runs")), RunToken(TOKEN), clock)


@pytest.fixture
async def browser(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN, headers=PAGE) as client:
        yield client


async def csrf_of(browser: httpx.AsyncClient, page: str = "/login") -> str:
    found = re.search(r'name="csrf" value="(\w+)"', (await browser.get(page)).text)
    assert found is not None
    return found[1]


async def log_in(browser: httpx.AsyncClient, token: str = TOKEN, **more: str) -> httpx.Response:
    form = {"csrf": await csrf_of(browser), "token": token, **more}
    return await browser.post("/login", data=form, headers={"origin": ORIGIN})


async def test_a_browser_sends_the_token_once_and_has_a_cookie_then(browser: httpx.AsyncClient):
    first = await browser.get("/?start=0")
    assert (first.status_code, first.headers["location"]) == (303, "/login?next=%2F%3Fstart%3D0")
    wrong = await log_in(browser, "f" * 32)
    assert wrong.status_code == 403
    assert "This is not the token" in wrong.text
    assert (await browser.get("/")).status_code == 303
    right = await log_in(browser, next="/curves?x=time")
    assert (right.status_code, right.headers["location"]) == (303, "/curves?x=time")
    cookie = right.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in cookie
    assert (await browser.get("/")).status_code == 200


async def test_a_token_in_the_address_leaves_it_at_once(browser: httpx.AsyncClient):
    answer = await browser.get(f"/curves?x=time&token={TOKEN}&smooth=0.5")
    assert (answer.status_code, answer.headers["location"]) == (303, "/curves?x=time&smooth=0.5")
    assert (await browser.get("/")).status_code == 200
    again = await browser.get(f"/?token={TOKEN}")
    assert (again.status_code, again.headers["location"]) == (303, "/")
    browser.cookies.clear()
    wrong = await browser.get(f"/?token={'f' * 32}")
    assert (wrong.status_code, wrong.headers["location"]) == (303, "/login?next=%2F")


async def test_a_session_ends_and_cannot_be_lengthened(browser: httpx.AsyncClient, clock: Clock):
    await log_in(browser)
    (name, value), *_ = browser.cookies.items()
    clock.now += SESSION_S + 1
    assert (await browser.get("/")).status_code == 303
    until, _, signature = value.partition(".")
    browser.cookies.clear()
    browser.cookies.set(name, f"{int(until) + SESSION_S}.{signature}")
    assert (await browser.get("/")).status_code == 303


@pytest.mark.parametrize(
    "wanted",
    ["//elsewhere.test/", "https://elsewhere.test/", "/\\elsewhere.test", "javascript:alert(1)"],
)
async def test_nobody_is_sent_to_another_site(browser: httpx.AsyncClient, wanted: str):
    page = await browser.get("/login", params={"next": wanted})
    assert "elsewhere" not in page.text
    assert "javascript" not in page.text
    assert (await log_in(browser, next=wanted)).headers["location"] == "/"


async def test_programs_send_the_token_as_to_any_service(browser: httpx.AsyncClient):
    refused = await browser.get("/api/series", headers={"accept": "application/json"})
    assert refused.status_code == 401
    assert "Authorization: Bearer" in refused.json()["detail"]
    headers = {"authorization": f"Bearer {TOKEN}"}
    assert (await browser.get("/api/series", headers=headers)).json()["metrics"] == {}


@pytest.mark.parametrize("origin", [None, "null", "http://elsewhere.test", "http://localhost:99"])
async def test_a_form_of_another_page_is_refused(browser: httpx.AsyncClient, origin: str | None):
    form = {"csrf": await csrf_of(browser), "token": TOKEN}
    headers = {} if origin is None else {"origin": origin}
    answer = await browser.post("/login", data=form, headers=headers)
    assert (answer.status_code, "set-cookie" in answer.headers) == (403, False)
    assert "does not come from a page of this console" in answer.text


async def test_a_form_without_the_secret_of_its_session_is_refused(browser: httpx.AsyncClient):
    headers = {"origin": ORIGIN}
    assert (await browser.post("/login", data={"token": TOKEN}, headers=headers)).status_code == 403
    before = await csrf_of(browser)
    await log_in(browser)
    answer = await browser.post("/login", data={"csrf": before, "token": TOKEN}, headers=headers)
    assert (answer.status_code, "load its page again" in answer.text) == (403, True)


async def test_a_form_of_too_many_fields_is_refused(browser: httpx.AsyncClient):
    answer = await browser.post("/login", content="a=1&" * 300, headers={"origin": ORIGIN})
    assert (answer.status_code, "more than 200 fields" in answer.text) == (403, True)


async def test_every_answer_forbids_frames_and_scripts_from_elsewhere(browser: httpx.AsyncClient):
    for path in ("/", "/login", "/static/console.css", "/nothing"):
        headers = (await browser.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"


async def test_without_a_token_only_the_secret_of_forms_is_asked_for(tmp_path: Path):
    transport = httpx.ASGITransport(app=create_app(Runs(tmp_path), None))
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN, headers=PAGE) as browser:
        assert (await browser.get("/")).status_code == 200
        answer = await browser.post("/runs/a/services/stop", headers={"origin": ORIGIN})
        assert (answer.status_code, "too old" in answer.text) == (403, True)


def test_consoles_of_two_tokens_on_one_host_have_two_cookies():
    async def nothing(*_: object) -> None:
        """Answer nothing."""

    names = {Door(nothing, RunToken(letter * 20))._cookie for letter in "aab"}
    assert len(names) == 2


@pytest.mark.parametrize("path", ["/static/nope.js", "/readyz", "/login/nope"])
async def test_what_is_not_there_is_a_page_without_a_token_too(
    browser: httpx.AsyncClient, path: str
):
    answer = await browser.get(path, follow_redirects=True)
    assert answer.status_code == (200 if path.startswith("/login") else 404)
    assert "<h1>" in answer.text
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
