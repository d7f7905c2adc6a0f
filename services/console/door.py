"""ASGI middleware: lets a browser in, and refuses what another web page sends.

The guard of every service (runtime/http/guard.py) comes before it, and has checked host and origin.
With a token, a browser sends it once, in the form or as `?token=`, and gets a cookie; programs send
`Authorization: Bearer` as to any service. Every POST must come from a page of the console: its
origin, and a secret in its form.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agent_r1.runtime.http.guard import OPEN_PATHS
from agent_r1.runtime.http.token import RunToken

SESSION_S = 7 * 24 * 3600
LOGIN = "/login"
STATIC = "/static/"
TOKEN_FIELD = "token"
CSRF_FIELD = "csrf"
MAX_FIELDS = 200
_LOCAL = re.compile(r"/(?![/\\])[^\\\x00-\x1f]*")
"""A path of this service, and no address that a browser would take for another one's."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    # Not no-referrer, with which browsers send no origin with a form.
    "referrer-policy": "same-origin",
    "cache-control": "private, no-cache",
}


class Door:
    """ASGI middleware: session, CSRF, headers.

    Args:
        app: the application.
        token: the run token; None lets every caller in that the guard does.
        clock: Unix time, in seconds.
    """

    def __init__(
        self, app: ASGIApp, token: RunToken | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._app = app
        self._token = token
        self._clock = clock
        secret = secrets.token_bytes() if token is None else token.value.encode()
        # Of the token, so that a restart of the console asks nobody again.
        self._key = hashlib.sha256(b"agent-r1 console" + secret).digest()
        # Browsers send a cookie to every port of a host: consoles of two tokens differ in its name.
        self._cookie = f"agent_r1_console_{self._sign('cookie')[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        answer = await self._answer(request)
        await (answer or self._app)(scope, receive, with_headers)

    async def _answer(self, request: Request) -> Response | None:
        """Return what the door answers itself; None where the application is to answer."""
        path = request.url.path
        session = self._session(request)
        request.state.csrf = self._sign(f"csrf {session}")  # also of pages of errors
        if path.startswith(STATIC) or path in OPEN_PATHS:
            return None
        if request.method == "POST":
            problem = await _read_form(request) or self._forged(request)
            if problem is not None:
                return PlainTextResponse(problem, 403)
            if path == LOGIN:
                return self._log_in(request)
        sent = request.query_params.get(TOKEN_FIELD)
        asked = request.scope["raw_path"].decode("latin-1")
        if sent is not None and self._is_token(sent) and request.method == "GET":
            rest = [one for one in request.query_params.multi_items() if one[0] != TOKEN_FIELD]
            return self._let_in(f"{asked}?{urlencode(rest)}" if rest else asked)
        if path == LOGIN or session is not None:
            return None
        if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            query = "" if sent is not None else request.url.query
            wanted = f"{asked}?{query}" if query else asked
            return RedirectResponse(f"{LOGIN}?{urlencode({'next': wanted})}", 303)
        return JSONResponse(
            {"detail": "this console asks for the run's token: open it in a browser, or send "
             "`Authorization: Bearer TOKEN`"},
            401,
            {"www-authenticate": "Bearer"},
        )  # fmt: skip

    def _session(self, request: Request) -> str | None:
        """Return what names the caller's session; None where it has none, and needs one."""
        if self._token is None:
            return ""
        if self._token.admits(request.headers.get("authorization", "")):
            return "bearer"
        cookie = request.cookies.get(self._cookie, "")
        until, _, signature = cookie.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(f"session {until}").encode()):
            return None
        return cookie if until.isdecimal() and int(until) > self._clock() else None

    def _forged(self, request: Request) -> str | None:
        """Say why a POST may come from another web page; None for one of ours."""
        host = request.headers.get("host", "")
        if request.headers.get("origin") not in (f"http://{host}", f"https://{host}"):
            return "the form does not come from a page of this console; open the page here"
        sent = request.state.form.get(CSRF_FIELD, "")
        if not hmac.compare_digest(sent.encode(), request.state.csrf.encode()):
            return "the form is too old, or not of this console; load its page again"
        return None

    def _log_in(self, request: Request) -> Response | None:
        if not self._is_token(request.state.form.get(TOKEN_FIELD, "").strip()):
            return None  # the page says so
        return self._let_in(request.state.form.get("next", "/"))

    def _is_token(self, sent: str) -> bool:
        return self._token is not None and self._token.admits(f"Bearer {sent}")

    def _let_in(self, where: str) -> Response:
        until = str(int(self._clock()) + SESSION_S)
        answer = RedirectResponse(local_path(where), 303)
        value = f"{until}.{self._sign(f'session {until}')}"
        answer.set_cookie(self._cookie, value, max_age=SESSION_S, httponly=True, samesite="strict")
        return answer

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), "sha256").hexdigest()


def local_path(where: str) -> str:
    """Return a path of this service; the first page for anything else."""
    return where if _LOCAL.fullmatch(where) else "/"


async def _read_form(request: Request) -> str | None:
    """Read the fields of a form; say what is wrong with them, None where nothing is."""
    text = (await request.body()).decode(errors="replace")
    try:
        fields = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        return f"the form has more than {MAX_FIELDS} fields; send fewer"
    request.state.form = dict(fields)
    return None
