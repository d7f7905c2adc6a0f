"""The programs of deploy/docker: secrets, owners, and several rollout servers in one container."""

from __future__ import annotations

import hashlib
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from agent_r1.launch.local_redis import free_port
from agent_r1.runtime.config import RunConfig
from agent_r1.runtime.gpu_needs import LEAST_DRIVER
from agent_r1.runtime.http.token import find_token
from tests.support.containers import DOCKER, programs, run_init

WAIT_S = 60.0


def test_secrets_are_made_once_and_are_for_the_services_alone(tmp_path: Path):
    first = {name: file.read_text() for name, file in run_init(tmp_path).items()}
    assert first == {name: file.read_text() for name, file in run_init(tmp_path).items()}
    made = [first[name].strip() for name in ("token", "redis-password", "elasticsearch-password")]
    assert len(set(made)) == 3
    assert all(len(text) == 64 for text in made)
    assert find_token(RunConfig(token_file=tmp_path / "secrets" / "token"), {}) is not None
    modes = {f.name: oct(stat.S_IMODE(f.stat().st_mode)) for f in (tmp_path / "secrets").iterdir()}
    # For the group of the services; Elasticsearch refuses a file that its group may read.
    assert {mode for name, mode in modes.items() if "elastic" not in name} == {"0o440"}
    assert {mode for name, mode in modes.items() if "elastic" in name} == {"0o400"}


def test_services_that_run_programs_have_no_secrets_but_their_own(tmp_path: Path):
    secrets = run_init(tmp_path, REDIS_PASSWORD="one")
    secrets = run_init(tmp_path, REDIS_PASSWORD="another")
    own = {file.name: file for file in (tmp_path / "sandbox-secrets").iterdir()}
    assert own.keys() == {"token", "redis-password"}
    for name, file in own.items():
        assert file.read_text() == secrets[name].read_text()
        assert oct(stat.S_IMODE(file.stat().st_mode)) == "0o440"


def test_a_secret_that_is_given_replaces_the_one_that_is_there(tmp_path: Path):
    before = {name: file.read_text() for name, file in run_init(tmp_path).items()}
    secrets = run_init(tmp_path, REDIS_PASSWORD="correct horse", HF_TOKEN="hf_0123456789")
    assert secrets["redis-password"].read_text() == "correct horse\n"
    assert secrets["hf-token"].read_text() == "hf_0123456789\n"
    assert secrets["token"].read_text() == before["token"]
    digest = hashlib.sha256(b"correct horse").hexdigest()
    assert secrets["redis.acl"].read_text() == f"user default on #{digest} ~* &* +@all\n"


def test_folders_get_the_owner_who_is_to_write_there(tmp_path: Path):
    run_init(tmp_path)
    changes = [line.split() for line in (tmp_path / "chown.log").read_text().splitlines()]
    owners = {folder: owner for owner, folder in changes}
    checkout = (tmp_path / "checkout" / "pyproject.toml").stat()
    assert owners[str(tmp_path / "cache")] == f"{checkout.st_uid}:{checkout.st_gid}"
    assert owners[str(tmp_path / "redis")] == "999:1000"
    # A folder that exists is left alone, unless Docker has just made it for root.
    assert (str(tmp_path / "runs") in owners) == (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (f"{LEAST_DRIVER}.65.06", ""),
        (f"{LEAST_DRIVER - 1}.1", f"is older than {LEAST_DRIVER}, which CUDA 13 needs"),
        ("Failed to initialize NVML", "does not tell the driver's version: Failed to"),
    ],
)
def test_an_old_driver_ends_the_start_at_once(tmp_path: Path, driver: str, expected: str):
    programs(tmp_path / "bin", nvidia_smi=f"echo '{driver}'")
    if not expected:
        assert "token" in run_init(tmp_path)
        return
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_init(tmp_path)
    assert expected in caught.value.stderr
    assert not any((tmp_path / "secrets").iterdir())


def test_a_command_becomes_the_owner_of_a_folder(tmp_path: Path):
    path = programs(tmp_path / "bin", setpriv='echo "$@"')
    program = [str(DOCKER / "as-owner-of"), str(tmp_path), "agent-r1", "serve", "a b"]
    done = subprocess.run(program, capture_output=True, text=True, check=True, env={"PATH": path})
    owner = tmp_path.stat()
    assert done.stdout.startswith(f"--reuid {owner.st_uid} --regid {owner.st_gid} --groups 1000 ")
    assert done.stdout.endswith("-- agent-r1 serve a b\n")


def servers(
    tmp_path: Path, gpus: str, width: int, agent_r1: str, *, port: int = 8001
) -> subprocess.Popen[str]:
    environment = {
        "PATH": programs(tmp_path / "bin", agent_r1=agent_r1),
        "ROLLOUT_GPUS": gpus,
        "AGENT_R1__ROLLOUT__PORT": str(port),
        "AGENT_R1__ROLLOUT__TENSOR_PARALLEL_SIZE": str(width),
    }
    command = [str(DOCKER / "rollout-servers"), "serve", "rollout", "run.toml"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


SERVE = """
trap 'echo ended >> "$0.log"; exit 0' TERM
echo "$AGENT_R1__ROLLOUT__PORT gpus $CUDA_VISIBLE_DEVICES $*" >> "$0.log"
while :; do sleep 0.1; done
"""


def lines_of(tmp_path: Path, count: int) -> list[str]:
    file = tmp_path / "bin" / "agent-r1.log"
    deadline = time.monotonic() + WAIT_S
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return sorted(file.read_text().splitlines())


def test_one_server_is_started_for_each_gpu_and_all_stop_together(tmp_path: Path):
    with servers(tmp_path, "2,5,7", 1, SERVE) as process:
        assert lines_of(tmp_path, 3) == [
            "8001 gpus 2 serve rollout run.toml",
            "8002 gpus 5 serve rollout run.toml",
            "8003 gpus 7 serve rollout run.toml",
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert lines_of(tmp_path, 6).count("ended") == 3


def test_a_server_takes_as_many_gpus_as_its_tensors_are_divided_into(tmp_path: Path):
    with servers(tmp_path, "0,1,2,3", 2, SERVE) as process:
        assert lines_of(tmp_path, 2) == [
            "8001 gpus 0,1 serve rollout run.toml",
            "8002 gpus 2,3 serve rollout run.toml",
        ]
        process.terminate()
        assert process.wait(WAIT_S) == 0


ANSWER = """
while [ ! -e "$0.go" ]; do sleep 0.1; done
exec python3 -c '
import http.server as h, os
class Handler(h.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
h.HTTPServer(("127.0.0.1", int(os.environ["AGENT_R1__ROLLOUT__PORT"])), Handler).serve_forever()'
"""
"""What a server does when it is up, which it is once a file is there."""


def test_servers_on_one_gpu_start_one_after_the_other(tmp_path: Path):
    log = 'echo "$AGENT_R1__ROLLOUT__PORT gpus $CUDA_VISIBLE_DEVICES" >> "$0.log"'
    port = free_port()
    with servers(tmp_path, "MIG-a,MIG-b,MIG-a", 1, log + ANSWER, port=port) as process:
        first = [f"{port} gpus MIG-a", f"{port + 1} gpus MIG-b"]
        assert lines_of(tmp_path, 2) == first
        (tmp_path / "bin" / "agent-r1.go").touch()
        assert lines_of(tmp_path, 3) == [*first, f"{port + 2} gpus MIG-a"]
        process.terminate()
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("ends", ["server", "all"])
def test_no_server_waits_for_one_that_will_never_be_up(tmp_path: Path, ends: str):
    log = 'echo "$AGENT_R1__ROLLOUT__PORT" >> "$0.log"\n'
    server = f'{log}while [ ! -e "$0.go" ]; do sleep 0.1; done; exit 2'
    port = free_port()
    with servers(tmp_path, "0,0", 1, server, port=port) as process:
        assert lines_of(tmp_path, 1) == [str(port)]
        if ends == "server":
            (tmp_path / "bin" / "agent-r1.go").touch()
        else:
            process.terminate()
        assert process.wait(WAIT_S) == (2 if ends == "server" else 0)
    assert lines_of(tmp_path, 1) == [str(port)]


def test_the_end_of_one_server_ends_all_with_its_status(tmp_path: Path):
    fails = f'[ "$AGENT_R1__ROLLOUT__PORT" = 8001 ] || {{ sleep 0.5; exit 2; }}\n{SERVE}'
    with servers(tmp_path, "0,1", 1, fails) as process:
        assert process.wait(WAIT_S) == 2
    assert "ended" in lines_of(tmp_path, 2)


def test_gpus_that_do_not_divide_are_refused(tmp_path: Path):
    with servers(tmp_path, "0,1,2", 2, SERVE) as process:
        _, error = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert error == "ROLLOUT_GPUS (0,1,2) must be a multiple of ROLLOUT_TENSOR_PARALLEL (2) GPUs\n"
