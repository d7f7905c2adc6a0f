"""Files and folders of a run: what they are called, and who is using a run folder.

The learner and the launcher write them; the command line and the launcher's views read them. The
launcher keeps `launcher.json` while a run runs, and every command finds that run's Redis by it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from agent_r1.runtime.files.state import read_object

CONFIG_FILE = "config.json"
"""The whole configuration, without secrets; a resume reads it."""
BUNDLE_FILE = "bundle.json"
"""What services that join on other hosts are given; the learner writes it at each start."""
LEDGER_FILE = "ledger.json"
"""The learner writes it before anything else; without it there is nothing to resume."""
LOCK_FILE = "learner.lock"
"""Locked by the learner that writes there, with its process id and host."""
STARTS_DIR = "starts"
"""A file for each start of the learner, created by that start alone."""
LAUNCHER_FILE = "launcher.json"
"""While a run runs: the launcher's process id and its private folder."""
CLIENTS_DIR = "clients"
"""While commands such as `evaluate` run services of their own: the folders of these."""
LIVE_DIR = "live"
"""While a run runs: its token, the way to its Redis, announcements, temporary files; for their
owner alone. What a launcher that was killed leaves here is removed by the next start."""

METRICS_FILE = "metrics.jsonl"
"""One line a step."""
EVALUATIONS_FILE = "evaluations.jsonl"
"""One line an evaluation."""
ANSWERS_FILE = "evaluation_after.jsonl"
"""One line a question of the last evaluation."""
FAILURES_FILE = "failures.jsonl"
"""The first failure of each kind."""
CONDITIONS_FILE = "conditions.jsonl"
"""What was wrong for a while: a line when it began, and one when it was over."""
DEAD_LETTERS_FILE = "dead_letters.jsonl"
"""Entries that no service could process, one line each, the newest 256; replaced as a whole."""
SUMMARY_FILE = "summary.json"
"""What the run came to, written at its end."""

LOGS_DIR = "logs"
TENSORBOARD_DIR = "tensorboard"
TRAJECTORIES_DIR = "trajectories"
CHECKPOINTS_DIR = "checkpoints"
STATE_FILE = "learner.json"
"""In the folder of a checkpoint: where the learner stood."""

REDIS_URL_FILE = "redis.url"
"""In the private folder: how to reach the Redis of a live run."""
REDIS_PASSWORD_FILE = "redis-password"
"""In the private folder: that Redis's password, for the services."""
TOKEN_FILE = "token"
"""In the private folder: the run's token."""
LEFT_BY_A_FAILED_START = {
    *(CONFIG_FILE, LOGS_DIR, TRAJECTORIES_DIR, LOCK_FILE, STARTS_DIR),
    CONDITIONS_FILE,
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
