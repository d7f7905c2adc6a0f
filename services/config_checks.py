"""What a configuration names outside itself: models, data, corpora, user code, memory.

`agent-r1 config check` and every command that starts something calls `check` before it starts
anything. `config.py` checks values and tables; this module reads files, but no model and no index.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from agent_r1.config import RunConfig
from agent_r1.config_sources import ConfigError, dotted
from agent_r1.learner.training_evaluation import MAX_IN_FLIGHT
from agent_r1_proto.config import ListenTable
from agent_r1_proto.streams import worst_case_bytes
from agent_r1_proto.task_files import TaskFileError, read_task_file
from agent_r1_proto.tasks import Task

Purpose = Literal["train", "evaluate", "sft", "serve"]

MIB = 1024 * 1024
CLASS_NAME = re.compile(r"^([A-Za-z_][\w.]*):[A-Za-z_]\w*$")
MODEL_FILES = ("*.safetensors", "*.bin")


def worst_case_redis_bytes(config: RunConfig) -> int:
    """Return the most memory, in bytes, that a training run's messages can take in Redis."""
    learner = config.learner
    training = (learner.max_staleness + 1) * learner.groups_per_batch * learner.slots_per_group
    evaluating = MAX_IN_FLIGHT if config.evaluation.sets else 0
    return worst_case_bytes(training + evaluating, config.model.max_context)


def memory_problem(config: RunConfig, limit_bytes: int, limit_name: str) -> str | None:
    """Say why a memory limit of Redis is too low for the run; None when it is not."""
    need = worst_case_redis_bytes(config)
    if need <= limit_bytes:
        return None
    learner = config.learner
    return (
        f"{limit_name} ({limit_bytes / MIB:.0f} MiB) must hold the worst case in flight, "
        f"{need / MIB:.0f} MiB: (learner.max_staleness {learner.max_staleness} + 1) x "
        f"learner.groups_per_batch {learner.groups_per_batch} x learner.group_size "
        f"{learner.group_size} trajectories of model.max_context {config.model.max_context} "
        f"tokens, and up to {MAX_IN_FLIGHT} of evaluation; raise it or lower one of these"
    )


def check_model(path: str) -> str | None:
    """Say why a model cannot be loaded; None when it looks complete or is a name on a hub."""
    folder = Path(path)
    if not folder.is_dir():
        parts = path.split("/")
        if folder.is_absolute() or len(parts) > 2 or path.startswith("."):
            return (
                f"model.path ({path}) is no folder; name a Hugging Face model directory or a "
                "model on the hub (`owner/name`)"
            )
        if os.environ.get("HF_HUB_OFFLINE") == "1" and not _in_hub_cache(path):
            return (
                f"model.path ({path}) is no folder here, and as a model on the hub it is not in "
                "the local cache while HF_HUB_OFFLINE=1 forbids fetching it; name a model "
                "directory or unset HF_HUB_OFFLINE"
            )
        return None
    if not (folder / "config.json").is_file():
        return f"model.path ({path}) has no config.json; name a Hugging Face model directory"
    if not any(next(folder.glob(pattern), None) for pattern in MODEL_FILES):
        return f"model.path ({path}) has no weights (*.safetensors); copy them there"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return f"model.path ({path}) has no tokenizer (tokenizer.json); copy it there"
    return None


def _in_hub_cache(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub")))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def _context_problem(config: RunConfig) -> str | None:
    try:
        values = json.loads((Path(config.model.path) / "config.json").read_text())
        longest = int(values["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not said there, or not a local model
    if config.model.max_context <= longest:
        return None
    return (
        f"model.max_context ({config.model.max_context}) must be <= {longest}, the positions that "
        f"the model in {config.model.path} has (max_position_embeddings); lower it"
    )


def plugin_folders(config: RunConfig) -> list[str]:
    """Return the folders of `run.plugins` that go on the import path.

    Raises:
        ConfigError: an entry is neither a folder nor an installed package.
    """
    folders = []
    for entry in config.run.plugins:
        if Path(entry).is_dir():
            folders.append(entry)
            continue
        name = re.split(r"[\s<>=!~\[;@]", entry, maxsplit=1)[0]
        try:
            importlib.metadata.distribution(name)
        except (importlib.metadata.PackageNotFoundError, ValueError) as exc:
            raise ConfigError(
                f"run.plugins names {entry!r}, which is neither a folder nor an installed "
                f"package; correct the folder or `pip install {entry}`"
            ) from exc
    return folders


def use_plugins(config: RunConfig) -> None:
    """Put the folders of `run.plugins` on the import path of this process and its children."""
    folders = plugin_folders(config)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([inherited] if inherited else [])])


def _user_code(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "env.type", config.env.type
    for name, tool in config.started_tools().items():
        yield f"tools.{name}.type", tool.type
    for name in config.reward.components:
        yield "reward.components", name
    yield "learner.advantage", config.learner.advantage


def _missing_code(config: RunConfig) -> Iterator[str]:
    """Look for the modules of user code, without importing them."""
    for key, value in _user_code(config):
        match = CLASS_NAME.match(value)
        if match is None:
            continue
        try:
            found = importlib.util.find_spec(match[1])
        except ImportError:
            found = None
        if found is None:
            yield (
                f"{key} ({value!r}): no module {match[1]!r} on the import path; put its folder "
                f"into run.plugins (now {config.run.plugins})"
            )


def _task_problems(config: RunConfig, tasks: Iterable[Task], file: Path) -> Iterator[str]:
    enabled = config.env.enable_tools
    offered = set(config.tools if enabled is None else enabled)
    for task in tasks:
        unknown = sorted(set(task.tools or []) - offered)
        if unknown:
            yield (
                f"{file}: task {task.id!r} asks for the tool {unknown[0]!r}; offered are "
                f"{sorted(offered)}: add [tools.{unknown[0]}] or correct the task"
            )
            return


def _file_problems(config: RunConfig, purpose: Purpose) -> Iterator[str]:
    files: list[tuple[str, Path]] = []
    if purpose == "train" and config.data is not None:
        files += [("data.train", path) for path in config.data.train]
    if purpose in ("train", "evaluate"):
        files += [(f"evaluation.sets.{n}", path) for n, path in config.evaluation.sets.items()]
    for key, path in files:
        try:
            yield from _task_problems(config, read_task_file(path), path)
        except TaskFileError as exc:
            yield f"{key}: {exc}"
    for name, tool in config.started_tools().items():
        if tool.corpus is not None and not tool.corpus.is_file():
            yield (
                f"tools.{name}.corpus ({tool.corpus}) is missing; name a JSON-lines file of "
                "passages"
            )
    if purpose == "sft" and config.sft is not None:
        for path in config.sft.data:
            if not path.is_file():
                yield f"sft.data ({path}) is missing; name a JSON-lines file of dialogues"


def _table_problems(config: RunConfig, purpose: Purpose) -> Iterator[str]:
    if purpose == "train" and config.data is None:
        yield "table [data] is missing; training needs data.train, a list of task files"
    if purpose == "evaluate" and not config.evaluation.sets:
        yield "evaluation.sets is empty; name at least one file of questions"
    if purpose == "sft" and config.sft is None:
        yield "table [sft] is missing; the warm start needs sft.data and sft.output"
    if purpose == "train" and config.redis.url is None:
        problem = memory_problem(config, config.redis.maxmemory_mb * MIB, "redis.maxmemory_mb")
        if problem is not None:
            yield problem


def problems(config: RunConfig, purpose: Purpose) -> list[str]:
    """Return everything that would keep a command from working, one line each."""
    found = list(_table_problems(config, purpose))
    model_problem = check_model(config.model.path)
    context_problem = _context_problem(config)
    found += [problem for problem in (model_problem, context_problem) if problem is not None]
    try:
        use_plugins(config)
        found += list(_missing_code(config))
    except ConfigError as exc:
        found.append(str(exc))
    return found + list(_file_problems(config, purpose))


def check(config: RunConfig, purpose: Purpose) -> None:
    """Refuse a configuration that cannot work.

    Raises:
        ConfigError: lists every problem found.
    """
    found = problems(config, purpose)
    if found:
        raise ConfigError("\n".join(found))


def check_port(listen: ListenTable, key: str) -> None:
    """Refuse a port that is taken.

    Args:
        listen: where the service will listen.
        key: name of the table, for the message.

    Raises:
        ConfigError: the port is in use, or the host is not an address of this machine.
    """
    if listen.port == 0:
        return
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen.host, listen.port))
        except OSError as exc:
            raise ConfigError(
                f"{key}.port ({listen.port}) on {key}.host ({listen.host}) cannot be taken: "
                f"{exc.strerror or exc}; stop what listens there (`ss -ltnp`), choose another "
                f"port, or set {dotted((key, 'port'))} = 0 for a free one"
            ) from exc


def listeners(config: RunConfig) -> Iterator[tuple[str, ListenTable]]:
    """Yield every table that a service of this run listens by, with its key."""
    for name, tool in config.started_tools().items():
        yield f"tools.{name}", tool
    yield "reward", config.reward
    yield "rollout", config.rollout
