"""The look at a run's sockets finds what other machines could use."""

from __future__ import annotations

import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from starlette.applications import Starlette

from agent_r1.runtime.config import ListenConfig
from agent_r1.runtime.http.serving import Server, bind, http_config
from agent_r1.runtime.http.token import RunToken
from tests.support.sockets import is_exposed, listening


class Open(BaseHTTPRequestHandler):
    """Answers everybody."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Stay quiet."""


def test_a_service_that_answers_everybody_is_exposed():
    with ThreadingHTTPServer(("0.0.0.0", 0), Open) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        assert ("0.0.0.0", port, os.getpid()) in listening([os.getpid()])
        assert is_exposed("0.0.0.0", port)
        assert not is_exposed("127.0.0.1", port)
        assert not is_exposed("10.0.0.7", port, group="10.0.0.7")
        assert is_exposed("0.0.0.0", port, group="10.0.0.7")
        server.shutdown()
        thread.join()


def test_a_port_that_speaks_no_http_is_exposed():
    with socket.create_server(("0.0.0.0", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert is_exposed("0.0.0.0", server.getsockname()[1])
        thread.join()


async def test_a_service_that_asks_for_the_token_is_not_exposed():
    listen = ListenConfig(host="0.0.0.0", advertise_host="127.0.0.1")
    token = RunToken("0123456789abcdef")
    listener = bind("test", listen, token)
    up = threading.Event()
    config = http_config(Starlette(), listen, token)
    server = Server(config, on_up=up.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert up.wait(60)
        assert not is_exposed("0.0.0.0", listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(60)
