"""Learner ranks on hosts that share nothing: a warm start with one rank on each.

Each host has its own copy of model, demonstrations and configuration under /tmp; what the ranks
write is there too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent_r1.learner.engine.ranks.rank_env import RankPlace
from tests.support.hosts import Host, Hosts

END_TIMEOUT_S = 120.0
PORT = 29500
LOG = Path("/tmp/out.sft/log.jsonl")
CONFIG = """
[run]
seed = 3

[model]
path = "/tmp/model"
max_context = 512

[env]
max_tokens_per_turn = 64

[sft]
data = ["/tmp/demonstrations.jsonl"]
output = "/tmp/out"
batch_sequences = 6
steps = {steps}
epochs = {steps}

[sft.engine]
lr = 0.1
adam_eps = 1.0 # so large that a step is about lr * gradient, which rounding changes little
device = "cpu"
torch_threads = 1
rank_join_timeout_s = 60
"""


def write_demonstrations(path: Path) -> Path:
    """Write 24 short dialogues."""
    names = ["ABCDEFGH"[i % 8] * (i % 5 + 1) for i in range(24)]
    lines = [
        [{"role": "user", "content": f"Who is {name}?"}, {"role": "assistant", "content": name}]
        for name in names
    ]
    path.write_text("\n".join(json.dumps({"messages": messages}) for messages in lines))
    return path


def furnish(host: Host, model: Path, *, steps: int) -> None:
    """Give a host what its rank reads."""
    shutil.copytree(model, host.inside("/tmp/model"))
    write_demonstrations(host.inside("/tmp/demonstrations.jsonl"))
    host.inside("/tmp/run.toml").write_text(CONFIG.format(steps=steps))


def start_rank(
    hosts: Hosts,
    names: Sequence[str],
    rank: int,
    *options: str,
    log: str = "rank",
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the rank of one host.

    Args:
        hosts: furnished.
        names: of the hosts, in the order of their ranks.
        rank: which.
        options: values for `--set`.
        log: where its output goes.
        env: more variables.
    """
    size = len(names)
    place = RankPlace(rank, size, 0, names[0], PORT)
    command = [str(Path(sys.executable).with_name("agent-r1")), "sft", "/tmp/run.toml"]
    for option in (f"sft.engine.ranks={size}", *options):
        command += ["--set", option]
    variables = {} if size == 1 else place.environment()
    return hosts[names[rank]].start(
        command, log=log, env={"OMP_NUM_THREADS": "1", **variables, **(env or {})}, cwd=Path("/tmp")
    )


def start_ranks(
    hosts: Hosts, names: Sequence[str], *options: str, log: str = "rank"
) -> list[subprocess.Popen[bytes]]:
    """Start one rank on each of the hosts."""
    return [start_rank(hosts, names, rank, *options, log=log) for rank in range(len(names))]


def wait_for_steps(host: Host, count: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until rank 0 has taken so many optimizer steps."""
    file, deadline = host.inside(LOG), time.monotonic() + END_TIMEOUT_S
    while not file.exists() or len(file.read_text().splitlines()) < count:
        assert process.poll() is None, host.log("rank")
        assert time.monotonic() < deadline, host.log("rank")
        time.sleep(0.05)


def ends(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for processes; return their exit statuses."""
    deadline = time.monotonic() + END_TIMEOUT_S
    return [one.wait(timeout=max(1.0, deadline - time.monotonic())) for one in processes]


def complaint(host: Host, log: str = "rank") -> str:
    """Return the one line of error that a rank has ended with."""
    lines = [line for line in host.log(log).splitlines() if line.startswith("agent-r1: error: ")]
    assert len(lines) == 1, host.log(log)
    return lines[0].removeprefix("agent-r1: error: ")
