"""The hosts that tests of several machines run on are separate, joined and as slow as asked."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.hosts import REPOSITORY, Host, Hosts, Link, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

UP_TIMEOUT_S = 60.0
SERVER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    connection, address = server.accept()
    with connection, connection.makefile("rwb") as stream:
        size = int(stream.readline())
        stream.read(size)
        stream.write(address[0].encode() + b"\\n")
"""
CLIENT = """
import socket, sys, time
with socket.create_connection(("server", 7000)) as connection:
    stream = connection.makefile("rwb")
    started = time.monotonic()
    stream.write(b"%d\\n" % int(sys.argv[1]) + bytes(int(sys.argv[1])))
    stream.flush()
    print(stream.readline().decode().strip(), time.monotonic() - started)
"""


def start_server(hosts: Hosts) -> None:
    hosts["server"].start([sys.executable, "-u", "-c", SERVER], log="server")
    wait_for_output(hosts["server"], "server", "up")


def wait_for_output(host: Host, log: str, text: str) -> None:
    deadline = time.monotonic() + UP_TIMEOUT_S
    while text not in host.log(log):
        assert time.monotonic() < deadline, host.log(log)
        time.sleep(0.01)


def send(hosts: Hosts, size: int) -> tuple[str, float]:
    """Send so many bytes to the server; return the address it saw, and the seconds it took."""
    answer = hosts["client"].run([sys.executable, "-c", CLIENT, str(size)]).stdout.split()
    return answer[0], float(answer[1])


def test_hosts_reach_each_other_by_name_and_count_their_bytes(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", ["client", "server"]) as hosts:
        start_server(hosts)
        assert send(hosts, 1_000_000)[0] == hosts["client"].address
        sent, received = hosts["client"].bytes_on_the_wire()
    assert 1_000_000 < sent < 1_200_000
    assert received < 200_000


def test_a_slow_link_takes_its_time_and_loses_packets(tmp_path: Path) -> None:
    link = Link(mbit=20, loss=0.02, delay_s=0.02)
    with Hosts(tmp_path / "hosts", ["client", "server"], link) as hosts:
        start_server(hosts)
        # There and back: two delays of 20 ms.
        assert send(hosts, 1)[1] >= 0.04
        # 2 MB at 20 Mbit/s are 0.8 s; 25 KiB, the bucket's 10 ms, may go at once on both ends.
        assert send(hosts, 2_000_000)[1] > 0.7
        # 1,380 packets and more; none of them lost has a probability of 0.98^1380 = 8e-13.
        assert hosts["server"].lost_packets() > 0


def test_hosts_share_no_file_and_cannot_write_to_what_is_installed(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", ["one", "two"]) as hosts:
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run"):
            hosts["one"].run(["sh", "-c", f"echo mine >{folder}/file"])
            assert hosts["two"].run(["ls", folder], check=True).stdout.split() != ["file"]
            assert hosts["two"].run(["cat", f"{folder}/file"], check=False).returncode == 1
        refused = hosts["one"].run(["touch", str(REPOSITORY / "file")], check=False)
        assert "Read-only file system" in refused.stderr
        assert hosts["one"].run(["hostname"]).stdout == "one\n"
        assert hosts["one"].inside("/tmp/file").read_text() == "mine\n"


def test_a_host_may_join_later_and_everything_ends_with_the_hosts(tmp_path: Path) -> None:
    with Hosts(tmp_path / "hosts", ["client"]) as hosts:
        hosts.add("server")
        start_server(hosts)
        assert re.fullmatch(r"10\.77\.0\.\d+", send(hosts, 1)[0])
        script = "setsid sh -c 'echo $$; exec sleep 600' & wait"
        process = hosts["client"].start(["sh", "-c", script], log="detached")
        wait_for_output(hosts["client"], "detached", "\n")
        pids = hosts["client"].pids()
        assert len(pids) == 2
    assert process.poll() is not None
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
