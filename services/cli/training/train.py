"""`agent-r1 train`: a new run, or one to continue, for the local launcher."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from agent_r1.cli.declare import add_config
from agent_r1.cli.policy import policy_options
from agent_r1.config.resume import refuse_changes
from agent_r1.config.run import ConfigError, LoadedConfig, load_config, read_written_config
from agent_r1.runtime.files.private import private_folder, write_private
from agent_r1.runtime.files.run_folder import CONFIG_FILE
from agent_r1.runtime.imports import quick_imports

STORE_RETRY_S = 30.0
"""Longest to wait for the run store that `train --resume URL` names."""


def train_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `train`."""
    add_config(parser, required=False)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="run folder (run.dir)")
    from_help = "start from this model, or from the last checkpoint of a run (model.path)"
    parser.add_argument("--from", dest="policy", metavar="MODEL_OR_RUN", help=from_help)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="take two steps in a separate folder, then print how long the run will take and how "
        "large its folder will be",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR_OR_URL",
        help="continue the run in this folder, or the one at this URL of an object store, in the "
        "folder --run-dir",
    )


def train(arguments: argparse.Namespace) -> int:
    """Start every service in its own process on this machine, and train.

    Ctrl-C stops the run cleanly; --resume continues it.
    """
    with quick_imports():
        from agent_r1.launch import local

    if (arguments.config is None) == (arguments.resume is None):
        raise ConfigError("name a CONFIG to start a run, or --resume DIR to continue one")
    options = list(arguments.options)
    if arguments.policy is not None:
        if arguments.resume is not None:
            raise ConfigError("--from and --resume cannot be combined; a run keeps its model")
        options += policy_options(arguments.policy)
    if arguments.resume is not None:
        loaded = _load_resumed_from(arguments.resume, arguments.run_dir, options)
    else:
        if arguments.run_dir is not None:
            options.append(f"run.dir={json.dumps(str(arguments.run_dir))}")
        loaded = load_config(arguments.config, options)
    if arguments.dry_run:
        from agent_r1.cli.training.dry_run import dry_run

        if arguments.resume is not None:
            raise ConfigError("--dry-run and --resume cannot be combined; name a CONFIG")
        return dry_run(loaded.config)
    return local.run_training(loaded.config, resume=arguments.resume is not None)


def _load_resumed_from(source: str, run_dir: Path | None, options: list[str]) -> LoadedConfig:
    """Load the configuration of a run in a folder, or of one at the URL of a run store."""
    if "://" in source:
        return _load_stored(source, run_dir, options)
    if run_dir is not None:
        raise ConfigError("--run-dir and --resume cannot be combined; --resume names the folder")
    return load_resumed(Path(source), options)


def _load_stored(url: str, run_dir: Path | None, options: list[str]) -> LoadedConfig:
    """Load the configuration that a run store holds, for a run folder on this machine.

    Raises:
        ConfigError: the store holds no run, or the folder does.
        StoreError: the store cannot be used.
    """
    from agent_r1.learner.checkpoints.run_store import RunStore
    from agent_r1.learner.config import store_url_problem

    problem = store_url_problem(url)
    if problem is not None:
        raise ConfigError(f"--resume {problem}")
    base, _, run_id = url.rstrip("/").rpartition("/")
    folder = run_dir or Path("runs") / run_id
    if (folder / CONFIG_FILE).exists():
        raise ConfigError(
            f"{folder} holds a run; continue it with "
            f"`agent-r1 train --resume {shlex.quote(str(folder))}`, or name another folder with "
            "--run-dir"
        )
    content = RunStore(url, folder, resume=True, retry_s=STORE_RETRY_S).config()
    if content is None:
        raise ConfigError(
            f"{url} holds no run to resume; name {{learner.checkpoint_url}}/{{run.id}}"
        )
    private_folder(folder)
    write_private(folder / CONFIG_FILE, content.decode())
    here = [f"run.id={json.dumps(run_id)}", f"learner.checkpoint_url={json.dumps(base)}"]
    return load_resumed(folder, [*here, *options])


def load_resumed(folder: Path, options: list[str]) -> LoadedConfig:
    """Load the configuration of a run folder.

    Raises:
        ConfigError: the folder holds no run, or a key was given that must not change.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} holds no run to resume ({CONFIG_FILE} is missing); start one with "
            "`agent-r1 train CONFIG`"
        )
    here = [*options, f"run.dir={json.dumps(str(folder))}"]
    loaded = load_config(folder / CONFIG_FILE, here)
    refuse_changes(read_written_config(folder / CONFIG_FILE), loaded)
    return loaded
