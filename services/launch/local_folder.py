"""The run folder from the launcher's side: local.py claims one, and says in it that it runs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from agent_r1.config.sources import ConfigError
from agent_r1.runtime.files.private import private_folder, write_private
from agent_r1.runtime.files.run_folder import (
    LAUNCHER_FILE,
    LIVE_DIR,
    LOGS_DIR,
    run_folder_problem,
)


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
