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
"""Configuration of the run, whole, without secrets; a resume reads it."""
BUNDLE_FILE = "bundle.json"
"""Files for services that join on other hosts; the learner writes them at each start."""
LEDGER_FILE = "ledger.json"
"""Numbers that are never used twice; the learner writes them before anything else, and without them
there is nothing to resume."""
LOCK_FILE = "learner.lock"
"""Lock of the learner that writes there, with its process id and host."""
STARTS_DIR = "starts"
"""Claims of the starts of the learner: a file for each, created by that start alone."""
LAUNCHER_FILE = "launcher.json"
"""Process id and private folder of the launcher, while a run runs."""
CLIENTS_DIR = "clients"
"""Folders of the services that commands such as `evaluate` run for themselves, while they do."""
LIVE_DIR = "live"
"""Token of a run, way to its Redis, announcements and temporary files, while it runs; for their
owner alone. What a launcher that was killed leaves here is removed by the next start."""

METRICS_FILE = "metrics.jsonl"
"""Numbers of every step, one line each."""
EVALUATIONS_FILE = "evaluations.jsonl"
"""Evaluations, one line each."""
ANSWERS_FILE = "evaluation_after.jsonl"
"""Answers of the last evaluation, one line a question."""
FAILURES_FILE = "failures.jsonl"
"""First failure of each kind."""
CONDITIONS_FILE = "conditions.jsonl"
"""Conditions that hindered the run: a line when one began, and one when it was over."""
DEAD_LETTERS_FILE = "dead_letters.jsonl"
"""Entries that no service could process, one line each, the newest 256; replaced as a whole."""
SUMMARY_FILE = "summary.json"
"""Result of the run, written at its end."""

LOGS_DIR = "logs"
TENSORBOARD_DIR = "tensorboard"
TRAJECTORIES_DIR = "trajectories"
CHECKPOINTS_DIR = "checkpoints"
STATE_FILE = "learner.json"
"""State of the learner, in the folder of a checkpoint."""

REDIS_URL_FILE = "redis.url"
"""URL of the Redis of a live run, in the private folder."""
REDIS_PASSWORD_FILE = "redis-password"
"""Password of that Redis for the services, in the private folder."""
TOKEN_FILE = "token"
"""Token of the run, in the private folder."""
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
