"""`agent_r1.train` and `agent_r1.evaluate`: the commands, from Python, with the same errors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from agent_r1.cli.parser import build_parser
from agent_r1.cli.training.train import load_resumed
from agent_r1.config.run import load_given
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

    if resume is not None and config is None:
        loaded = load_resumed(Path(resume), list(options))
    elif config is not None and resume is None:
        loaded = load_given(config, options)
    else:
        raise ValueError("give a configuration to start a run, or resume=DIR to continue one")
    status = local.run_training(loaded.config, resume=resume is not None)
    folder = loaded.config.run.folder()
    if status == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if status == EXIT_FAILED:
        raise RunStoppedError(f"the run in {folder} stopped; its logs are in {folder / LOGS_DIR}")
    return json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))


def evaluate(
    config: str | Path | Mapping[str, Any],
    *,
    out: str | Path,
    policy: str | Path | None = None,
    method: str = "agent",
    attempts: int = 1,
    options: Sequence[str] = (),
    overwrite: bool = False,
) -> dict[str, Any]:
    """Score a policy on the evaluation sets, with every service on this machine.

    As `train`, it is called from the main thread of a script. Another call with the same file asks
    only the questions that have no answer yet.

    Args:
        config: a configuration file, or its tables as a dict; then paths are relative to the
            current folder.
        out: file for the answers, one line of JSON each; the scores are in a file beside it.
        policy: model directory or run folder; None is the model of the configuration, for
            `method="base_tool_call"` only.
        method: "agent", "base_tool_call" or "naive_rag".
        attempts: answers that are sampled to each question.
        options: `KEY=VALUE` texts, as given to `--set`.
        overwrite: ask every question again.

    Returns:
        What the file with the scores holds: questions, means and intervals of each set.

    Raises:
        ValueError: as `train`.
        KeyboardInterrupt: it was interrupted; the answers so far are kept.
    """
    from agent_r1.cli.evaluation import evaluate as command
    from agent_r1.evaluation.answer_file import summary_file
    from agent_r1.evaluation.config import Method

    if method not in get_args(Method):
        raise ValueError(f"method ({method!r}) must be one of {', '.join(get_args(Method))}")
    if attempts < 1:
        raise ValueError(f"attempts ({attempts}) must be 1 or more")
    arguments = build_parser().parse_args(["evaluate", "CONFIG", "--out", str(out)])
    arguments.config = config if isinstance(config, Mapping) else Path(config)
    arguments.policy = None if policy is None else str(policy)
    arguments.method, arguments.attempts = method, attempts
    arguments.options, arguments.overwrite = list(options), overwrite
    if command.evaluate(arguments) == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    return json.loads(summary_file(Path(out).resolve()).read_text(encoding="utf-8"))
