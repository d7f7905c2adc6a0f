"""`agent_r1.train(config)`: what `agent-r1 train` does, from Python, with the same errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_r1.cli.training.run import load_resumed
from agent_r1.config.run import load_config
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_INTERRUPTED
from agent_r1.runtime.files.run_folder import LOGS_DIR, SUMMARY_FILE


class RunStoppedError(RuntimeError):
    """A run that stopped before its end; the reason has been printed. It may be resumed."""


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    options: Sequence[str] = (),
    resume: str | Path | None = None,
) -> dict[str, Any]:
    """Train with every service on this machine; return when the run has finished.

    Call it from the main thread of a script: it starts processes, prints what happens as the
    command does, and stops cleanly at Ctrl-C.

    Args:
        config: a configuration file, or its tables as a dict; then paths are relative to the
            current folder. None with `resume`.
        options: `KEY=VALUE` texts, as given to `--set`.
        resume: folder of a run to continue.

    Returns:
        The run's `summary.json`.

    Raises:
        ValueError: the configuration, a file or this machine will not do; the text is what the
            command prints with exit status 2.
        RunStoppedError: the run stopped, for a reason that was printed.
        KeyboardInterrupt: it was interrupted, and has written a checkpoint.
    """
    from agent_r1.launch import local

    if (config is None) == (resume is None):
        raise ValueError("give a configuration to start a run, or resume=DIR to continue one")
    if resume is not None:
        loaded = load_resumed(Path(resume), list(options))
    elif isinstance(config, Mapping):
        loaded = load_config(None, options, values=config)
    else:
        loaded = load_config(Path(str(config)), options)
    status = local.run_training(loaded.config, resume=resume is not None)
    folder = loaded.config.run.folder()
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if status == EXIT_FAILED:
        raise RunStoppedError(f"the run in {folder} stopped; its logs are in {folder / LOGS_DIR}")
    return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
