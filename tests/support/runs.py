"""Starting real training runs in tests: the config, the command, and what is left when it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

START_TIMEOUT_S = 240.0
POLL_S = 0.1

RUN_TOML = """
[run]
id = "{run_id}"
seed = 3

[model]
path = "{base}"
max_context = 768

[data]
train = ["{world}/train.jsonl"]

[env]
max_turns = 4
max_tokens_per_turn = 96

[reward.components]
exact_match = 1.0
format = 0.1

[rollout]
max_concurrent = 32
kv_cache_gib = 0.5

[tools.search]
type = "search"
corpus = "{world}/corpus.jsonl"
top_k = 2
passage_template = " {{text}}"
separator = "\\n"

[learner]
steps = 4
groups_per_batch = 4
group_size = 4
checkpoint_every = 1

[engine]
lr = 5e-4
torch_threads = 1

[evaluation]
every = 2
max_questions = 8

[evaluation.sets]
hotpot_like = "{world}/eval_hotpot_like.jsonl"
wiki2_like = "{world}/eval_wiki2_like.jsonl"
"""


def write_config(folder: Path, *, run_id: str, base: Path, world: Path) -> Path:
    """Write a four-step run to `folder/run.toml` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(RUN_TOML.format(run_id=run_id, base=base, world=world))
    return path


def agent_r1(*arguments: object) -> list[str]:
    """Return the command line `agent-r1 ...` of this environment."""
    return [str(Path(sys.executable).with_name("agent-r1")), *map(str, arguments)]


def set_options(values: dict[str, object]) -> list[str]:
    """Return `--set KEY=VALUE` for each."""
    return [f"--set={key}={value}" for key, value in values.items()]


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run `agent-r1 ...` in the background; whatever is left of it is killed at the end."""
    process = subprocess.Popen(
        agent_r1(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def finished(*arguments: object, timeout_s: float = START_TIMEOUT_S) -> str:
    """Run `agent-r1 ...` to its end and return what it printed; a failure fails the test."""
    done = subprocess.run(
        agent_r1(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def wait_until(
    condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None
) -> None:
    """Poll until a condition holds; a process that ends before it fails the test."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended and not condition():
            assert process is not None
            raise AssertionError(f"ended before {what}:\n{process.communicate()[0]}")
        assert time.monotonic() < deadline, f"waited {START_TIMEOUT_S} s for {what}"
        time.sleep(POLL_S)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl; [] before the first step."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file that has one on each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl of a run that has ended, whole as they must be."""
    return json_lines(run_dir / "metrics.jsonl")


def summary(run_dir: Path) -> dict[str, Any]:
    """Return what a run has come to."""
    return json.loads((run_dir / "summary.json").read_text())


def descendants(process: subprocess.Popen[str]) -> dict[int, str]:
    """Return every process below one, by id: its title (vLLM's engine sets its own)."""
    found: dict[int, str] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[child.pid] = " ".join(child.cmdline())
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that still run."""
    living: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
    return living


def processes_naming(text: str) -> dict[int, str]:
    """Return the living processes whose command line or environment holds `text`."""
    found: dict[int, str] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            command = (folder / "cmdline").read_bytes()
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        if state != "Z" and (text.encode() in command or text.encode() in environment):
            found[int(folder.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found
