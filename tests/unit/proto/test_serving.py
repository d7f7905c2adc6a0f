"""Where a service listens, and what it tells others."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from agent_r1_proto.config import ListenTable
from agent_r1_proto.serving import advertised_url, bind, write_announcement


def test_port_0_takes_a_free_port():
    with bind("search", ListenTable(host="127.0.0.1", port=0)) as listener:
        assert listener.getsockname()[1] > 0


def test_a_port_in_use_is_named_with_the_remedy():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"search: .* port {port} .* in use; .* port = 0"):
            bind("search", ListenTable(host="127.0.0.1", port=port))


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_everywhere_needs_a_name_to_advertise(host: str):
    with pytest.raises(ValueError, match=r"rollout: .* set advertise_host"):
        advertised_url("rollout", ListenTable(host=host), 80)
    listen = ListenTable(host=host, advertise_host="gpu-3")
    assert advertised_url("rollout", listen, 80) == "http://gpu-3:80"


def test_an_ipv6_address_is_advertised_in_brackets():
    assert advertised_url("search", ListenTable(host="::1"), 8001) == "http://[::1]:8001"


def test_an_announcement_is_written_whole(tmp_path: Path):
    write_announcement(tmp_path / "new", "search", "http://127.0.0.1:8001")
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == "search.json"
    announced = json.loads(file.read_text())
    assert (announced["name"], announced["url"]) == ("search", "http://127.0.0.1:8001")
