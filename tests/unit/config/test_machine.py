"""What a configuration needs of the machine: GPUs, run folder, servers, ports."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from agent_r1.config import gpu_checks
from agent_r1.config import machine as config_machine
from agent_r1.config import packages as config_packages
from agent_r1.config.findings import Check
from agent_r1.config.run import Config, load_config
from agent_r1.learner.checkpoints.ledger import LedgerNumbers
from agent_r1.learner.checkpoints.run_checkpoint import Checkpoints, LearnerState
from agent_r1.learner.checkpoints.run_store import open_run_store
from agent_r1.runtime.gpus import Device
from agent_r1_proto.tools import ToolSpec
from tests.support.config_scene import write_scene
from tests.support.learner_fakes import FakeEngine


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_scene(tmp_path / "example").parent


def load(folder: Path, *options: str) -> Config:
    return load_config(folder / "run.toml", [f"run.dir={folder}/run", *options], {}).config


def problems(folder: Path, *options: str, resume: bool = False) -> str:
    config = load(folder, *options)
    looks = config_machine.check_machine(config, "train", resume=resume, specs={})
    return "\n".join(problem for look in looks for problem in look.problems)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_machine_that_has_everything_has_no_problems_and_keeps_no_trace(folder: Path):
    before = sorted(folder.parent.rglob("*"))
    assert problems(folder) == ""
    assert sorted(folder.parent.rglob("*")) == before


def test_a_store_that_cannot_be_used_is_a_problem_of_the_machine(folder: Path):
    (folder / "file").write_text("")
    found = problems(folder, f"learner.checkpoint_url=file://{folder}/file/store")
    assert found.startswith(f"learner.checkpoint_url: file://{folder}/file/store/demo cannot be")
    assert "\n" not in found


def test_a_store_must_hold_no_run_but_the_resumed_one(folder: Path):
    url = f"learner.checkpoint_url=file://{folder}/store"
    assert problems(folder, url) == ""
    config = load(folder, url)
    store = open_run_store(config.run, config.learner, resume=False)
    assert store is not None
    store.claim(LedgerNumbers())
    assert f"file://{folder}/store/demo holds a run already" in problems(folder, url)
    assert problems(folder, url, resume=True) == ""


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (0, ["engine.device=cuda"], 'engine.device ("cuda") needs a GPU, and CUDA finds none'),
        (1, ["engine.device=cuda", "engine.ranks=2"], "engine.ranks (2) must be at most 1"),
        (1, ["rollout.tensor_parallel_size=2"], "tensor_parallel_size (2) must be at most 1"),
        (0, ["engine.device=auto"], ""),
        (0, ["learner.transport=collective"], ""),
        (
            0,
            ["learner.transport=collective", "learner.collective_backend=nccl"],
            'learner.collective_backend ("nccl") needs GPUs for learner and rollout servers',
        ),
    ],
)
def test_gpus_are_counted(
    folder: Path, gpus: int, options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config_machine, "count_gpus", lambda: gpus)
    found = problems(folder, *options)
    assert expected in found
    assert bool(expected) == bool(found)


@pytest.fixture
def cpu_packages(monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with two GPUs and packages for CPUs; what is said of it everywhere."""
    h100 = Device(0, "H100", (9, 0), False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpu_checks, "read_devices", lambda: [h100, h100])
    for module in (gpu_checks, config_machine):
        monkeypatch.setattr(module, "installed_version", lambda name: "2.13.0+cpu")
    return "the packages are for CPUs and this machine has 2 GPUs: run `make setup-gpu`"


@pytest.mark.parametrize("gpus", [0, 2])  # with and without a CUDA that starts
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("engine.device", '"cuda"'),
        ("rollout.tensor_parallel_size", "2"),
        ("rollout.model_runner", '"v2"'),
    ],
)
def test_packages_for_cpus_are_why_gpus_cannot_be_had(
    folder: Path,
    cpu_packages: str,
    gpus: int,
    option: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(config_machine, "count_gpus", lambda: gpus)
    assert problems(folder) == ""  # a note
    found = problems(folder, f"{option}={value}")
    assert found.startswith(f"{option} ({value}) ")
    assert cpu_packages in found
    assert "nvidia-smi" not in found
    assert "\n" not in found


def test_gpus_are_counted_where_packages_for_cpus_leave_them_unused(
    cpu_packages: str, monkeypatch: pytest.MonkeyPatch
):
    assert config_machine.describe_gpus() == "2, unused: the packages are for CPUs"
    monkeypatch.setattr(gpu_checks, "installed_version", lambda name: "2.13.0")
    monkeypatch.setattr(config_machine, "count_gpus", lambda: 0)
    assert config_machine.describe_gpus() == "2, and CUDA shows none of them"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert config_machine.describe_gpus() == "none: everything runs on the CPU"


@pytest.mark.parametrize(
    ("gpus", "options", "expected"),
    [
        (0, [], "vLLM's v1, on the CPU"),
        (1, [], "vLLM's v2, on GPUs"),
        (1, ["rollout.model_runner=v1"], "vLLM's v1, on GPUs"),
    ],
)
def test_the_model_runner_is_shown(
    folder: Path, gpus: int, options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(config_machine, "usable_gpus", lambda: gpus)
    look = config_machine.check_model_runner(load(folder, *options))
    assert (look.found, *look.problems) == (expected,)


def test_the_model_runner_of_gpus_is_a_problem_on_the_cpu(folder: Path):
    found = problems(folder, "rollout.model_runner=v2")
    assert 'rollout.model_runner ("v2") runs on GPUs only' in found


def test_flash_attention_needs_a_package_that_no_lock_has(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    option = "model.attention=flash_attention_2"
    assert "needs the package flash-attn" in problems(folder, option)
    assert 'set model.attention = "sdpa"' in problems(folder, option)
    monkeypatch.setattr(config_packages, "FLASH_ATTENTION", ("json",))  # one that is there
    assert problems(folder, option) == ""


def test_what_the_gpus_lack_is_a_problem_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    look = Check("driver", "", ["535.1 is older than 580; install it"])
    monkeypatch.setattr(config_machine, "check_gpus", lambda: iter([look]))
    assert problems(folder) == "535.1 is older than 580; install it"
    config = load(folder, 'sft.data=["dialogues.jsonl"]', "sft.output=out", "sft.engine.device=cpu")
    looks = config_machine.check_machine(config, "sft", resume=False, specs={})
    assert [one.name for one in looks] == ["GPUs"]


def test_bfloat16_is_asked_about_where_gpus_are_used(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(config_machine, "dtype_problem", lambda dtype: f"no {dtype}")
    assert problems(folder) == ""
    monkeypatch.setattr(config_machine, "usable_gpus", lambda: 1)
    assert problems(folder, "model.dtype=bfloat16") == "no bfloat16"


def test_gpus_are_counted_without_torch():
    assert config_machine.count_gpus() >= 0


def test_a_run_folder_that_cannot_be_written_is_named(folder: Path):
    # Not even root can make a file there.
    assert "run.dir (/proc/run) cannot be written: /proc: " in problems(folder, "run.dir=/proc/run")


def test_a_run_folder_with_something_in_it_can_only_be_gone_on_with(folder: Path):
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("")
    assert "is not empty; continue with `agent-r1 train --resume" in problems(folder)
    assert problems(folder, resume=True) == ""


def save_checkpoint(folder: Path, step: int) -> Path:
    config = load(folder)
    prompts = config.prompt_order()
    checkpoints = Checkpoints(config.run.folder(), keep_last=2, keep_best=0)
    state = LearnerState(step=step, prompt_fingerprint=prompts.fingerprint())
    return checkpoints.save(FakeEngine(), state)


def test_a_checkpoint_can_be_continued_with_the_same_prompts_and_engine(folder: Path):
    save_checkpoint(folder, 3)
    assert problems(folder, resume=True) == ""
    assert "the training data, its order or its seed changed since the checkpoint of step 3" in (
        problems(folder, "run.seed=7", resume=True)
    )
    assert "written with engine.zero_stage = 0 and this run has engine.zero_stage = 2" in (
        problems(folder, "engine.zero_stage=2", resume=True)
    )


def test_a_checkpoint_is_looked_at_without_torch(folder: Path, monkeypatch: pytest.MonkeyPatch):
    save_checkpoint(folder, 3)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    assert problems(folder, resume=True) == ""


@pytest.mark.parametrize("name", ["learner.json", "engine/state.json", "model/config.json"])
def test_a_changed_checkpoint_is_found_before_anything_starts(folder: Path, name: str):
    save_checkpoint(folder, 2)
    path = save_checkpoint(folder, 3)
    text = (path / name).read_text()
    (path / name).write_text(text.rstrip()[:-1] + " " * (len(text) - len(text.rstrip()) + 1))
    found = problems(folder, resume=True)
    assert found.startswith(f"checkpoint {path} cannot be restored: {path / name} is corrupted")
    assert "; to continue from step 2 instead, delete that folder" in found


def test_checkpoints_that_no_disk_can_hold_are_refused(folder: Path):
    # The model's files have 2.8 MB: 0.7 million weights of 16 bytes, a billion times.
    found = problems(folder, "learner.keep_last=1000000000")
    assert "of free disk, and checkpoints take at least" in found
    assert "lower learner.keep_last (1000000000)" in found


def test_a_redis_that_does_not_answer_is_named_without_its_password(folder: Path):
    (folder / "password").write_text("secret")
    url = f"redis://127.0.0.1:{closed_port()}/0"
    found = problems(folder, f"redis.url={url}", f"redis.password_file={folder / 'password'}")
    assert found.startswith("redis.url (redis://127.0.0.1:")
    assert "does not answer: " in found
    assert "secret" not in found


@pytest.fixture
def tool_url() -> Iterator[str]:
    """The service of a tool called `other`."""
    spec = ToolSpec(name="other", version="1", description="x", parameters={"type": "object"})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            body = spec.model_dump_json() if self.path == "/spec" else json.dumps({})
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_tools_that_run_elsewhere_are_asked_what_they_are(folder: Path, tool_url: str):
    named = f"tools.search.url ({tool_url}) is the service of the tool 'other'; call the table"
    assert named in problems(folder, f"tools.search.url={tool_url}")
    nothing = problems(folder, f"tools.search.url={tool_url}/nothing")
    assert "is not a tool service: GET /spec does not describe a tool" in nothing
    away = problems(folder, f"tools.search.url=http://127.0.0.1:{closed_port()}")
    assert "does not answer: " in away
    specs: dict[str, ToolSpec] = {}
    config = load(folder, f"tools.other.url={tool_url}")
    looks = list(config_machine.check_machine(config, "serve", resume=False, specs=specs))
    assert "tools" in [look.name for look in looks]
    assert [problem for look in looks for problem in look.problems] == []
    assert specs["other"].description == "x"


def ports(folder: Path, *options: str) -> Check:
    """What is said of the ports of a run."""
    looks = config_machine.check_machine(load(folder, *options), "train", resume=False, specs={})
    return next(look for look in looks if look.name == "ports")


def test_a_port_in_use_is_named_with_the_remedy(folder: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = ports(folder, f"rollout.port={port}")
    assert found.found == f"rollout {port}"
    [problem] = found.problems
    assert problem.startswith(f"rollout: host '127.0.0.1' port {port} cannot be bound: Address")
    assert "set port = 0" in problem


def test_a_host_of_another_machine_is_refused_with_a_port_of_its_own(folder: Path):
    elsewhere = "reward.host=192.0.2.1"
    [problem] = ports(folder, elsewhere, "reward.port=1234").problems
    assert problem.startswith("reward: host '192.0.2.1' port 1234 cannot be bound")
    assert ports(folder, elsewhere).problems == []  # a free port is found where it starts


def test_listeners_are_what_this_run_starts(folder: Path):
    keys = [key for key, _ in config_machine.listeners(load(folder), trains=True)]
    assert keys[:3] == ["tools.search", "reward", "rollout"]
    assert keys[3:] == ["learner.server", "placement.metrics_server"]
    remote = load(folder, "tools.search.url=http://h:1")
    keys = [key for key, _ in config_machine.listeners(remote, trains=False)]
    assert keys == ["reward", "rollout"]


def test_little_free_disk_is_not_shown_as_none(folder: Path, monkeypatch: pytest.MonkeyPatch):
    # The model's weights have 0.7 million values; 3 of its checkpoints take more than 4 MB.
    monkeypatch.setattr(config_machine, "free_bytes", lambda _: 4_000_000)
    assert "has 4.00 MB of free disk, and checkpoints take at least" in problems(folder)
