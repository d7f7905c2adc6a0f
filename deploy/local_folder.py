"""The run folder from the launcher's side: who may use it, who is using it, what was left undone.

local.py claims a folder and keeps `launcher.json` in it while it runs; `agent-r1 dead-letters`
reads it to find the Redis of a live run. `dead_letters.jsonl` holds what a run with a Redis of its
own could not process, written before that Redis is stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent_r1.config.sources import ConfigError
from agent_r1.runtime.files.private import private_folder, write_private
from agent_r1.runtime.files.run_folder import (
    CLIENTS_DIR,
    CONDITIONS_FILE,
    CONFIG_FILE,
    LAUNCHER_FILE,
    LIVE_DIR,
    LOCK_FILE,
    LOGS_DIR,
    TRAJECTORIES_DIR,
)
from agent_r1.runtime.files.state import read_object

REDIS_URL_FILE = "redis.url"
"""In the private folder: how to reach the Redis of a live run."""
REDIS_PASSWORD_FILE = "redis-password"
"""In the private folder: that Redis's password, for the services."""
TOKEN_FILE = "token"
"""In the private folder: the run's token."""
LEFT_BY_A_FAILED_START = {
    *(CONFIG_FILE, LOGS_DIR, TRAJECTORIES_DIR, LOCK_FILE, CONDITIONS_FILE),
    *(LAUNCHER_FILE, LIVE_DIR, CLIENTS_DIR),
}


def running_launcher(folder: Path) -> dict[str, Any] | None:
    """Return what `launcher.json` says if the launcher it names is alive."""
    try:
        values = read_object(folder / LAUNCHER_FILE)
        command = Path(f"/proc/{int(values['pid'])}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return values if values.get("command") == command.decode(errors="replace") else None


def live_redis_url(folder: Path) -> str | None:
    """Return the URL of the Redis that the folder's running launcher started; None without one."""
    file = _state_file(folder, REDIS_URL_FILE)
    return None if file is None else file.read_text().strip()


def live_token_file(folder: Path) -> Path | None:
    """Return the file with the token of the run that runs in a folder; None where none does."""
    return _state_file(folder, TOKEN_FILE)


def _state_file(folder: Path, name: str) -> Path | None:
    launcher = running_launcher(folder)
    file = None if launcher is None else Path(launcher["state_dir"]) / name
    return file if file is not None and file.is_file() else None


def _holds_a_run(folder: Path) -> bool:
    """Say whether there is anything but what a start that failed early leaves behind."""
    return any(path.name not in LEFT_BY_A_FAILED_START for path in folder.iterdir())


def run_folder_problem(folder: Path, *, resume: bool) -> str | None:
    """Say why a run cannot use a folder; None when it can. With `resume`, it may hold a run."""
    live = running_launcher(folder)
    if live is not None:
        return (
            f"the run in {folder} is still running (process {live['pid']}); stop it first, or "
            "name another folder with --run-dir"
        )
    if resume:
        return None
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file; name a folder with --run-dir"
    if folder.is_dir() and _holds_a_run(folder):
        return (
            f"run folder {folder} is not empty; continue with "
            f"`agent-r1 train --resume {shlex.quote(str(folder))}`, or name another folder with "
            "--run-dir"
        )
    return None


def claim_run_folder(folder: Path, *, resume: bool) -> None:
    """Create the run folder, or make sure that it can be resumed.

    Raises:
        ConfigError: it is not empty, holds nothing to resume, or its run is still running.
    """
    problem = run_folder_problem(folder, resume=resume)
    if problem is not None:
        raise ConfigError(problem)
    try:
        private_folder(folder)
        (folder / LOGS_DIR).mkdir(exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot create the run folder {folder}: {exc.strerror}; name another with --run-dir"
        ) from exc


@contextlib.contextmanager
def launcher_state(folder: Path) -> Iterator[Path]:
    """Make a private folder for this start in the run folder, and say there where it is."""
    state_dir = folder.absolute() / LIVE_DIR
    shutil.rmtree(state_dir, ignore_errors=True)  # of a launcher that was killed
    private_folder(state_dir)
    values = {
        "pid": os.getpid(),
        "command": Path("/proc/self/cmdline").read_bytes().decode(errors="replace"),
        "state_dir": str(state_dir),
        "started_at": time.time(),
    }
    write_private(folder / LAUNCHER_FILE, json.dumps(values, indent=2) + "\n")
    try:
        yield state_dir
    finally:
        (folder / LAUNCHER_FILE).unlink(missing_ok=True)
        shutil.rmtree(state_dir, ignore_errors=True)
