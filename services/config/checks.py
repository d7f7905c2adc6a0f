"""Checks of what a configuration names outside itself: models, data, corpora, user code, machines.

Every command that starts something calls `check`, which lists every problem before anything starts;
`agent-r1 check` prints what `find` returns. `run.py` checks values and tables; this module files;
code.py loads code and tokenizer, machine.py looks at the machine.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from agent_r1.config.code import load_everything
from agent_r1.config.findings import Check, Findings
from agent_r1.config.machine import Purpose, check_machine
from agent_r1.config.packages import LEARNER, PEFT, WHOLE_RUN, missing_packages_problem
from agent_r1.config.run import SUPERVISED, Config
from agent_r1.config.sources import ConfigError, at_hand, quoted
from agent_r1.learner.redis_memory import redis_memory_problem
from agent_r1.reward.components import COMPARES_ANSWER
from agent_r1.reward.scoring import accepted_answers
from agent_r1.runtime.files.file_formats import foreign_format
from agent_r1.runtime.files.hub import HubError, model_folder
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import TaskFileError, numbered_tasks, refuse_images
from agent_r1.runtime.imports import MissingPackageError
from agent_r1.runtime.memory import MIB
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.tasks import Role, Task

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
NAME_A_MODEL = "name a Hugging Face model directory or a model on the hub (`owner/name`)"
TRAINING: tuple[Purpose, ...] = ("train", *SUPERVISED)
MODEL_FILES = ("*.safetensors", "*.bin")
MOST_KINDS = 64
Kinds = dict[tuple[tuple[Role, ...], bool], tuple[str, Task]]
"""Places and tasks, by roles of the messages and whether all tools are offered."""
EXAMPLE_SCRIPTS = {
    "generate.py": "--out {data} --no-sft",
    "convert.py": "repacked --data FOLDER --out {data}",
    "prepare.py": "KIND --source FILE --out {file}",
}
"""Scripts that make the folder `data` of an example, with their arguments."""


def check_model(path: str, key: str = "model.path") -> str | None:
    """Say why a model cannot be loaded; None when it looks complete or is a name on a hub."""
    folder = Path(path)
    if folder.is_dir():
        return _incomplete(folder, f"{key} ({path})")
    if in_hub_cache(path):
        return None
    near = _nearest_folder(folder)
    beside_others = folder.parent != Path() and folder.parent.is_dir()
    if near is not None or beside_others or not HUB_NAME.match(path):
        meant = "" if near is None else f" did you mean {near}? Otherwise"
        return f"{key} ({path}) is not a folder;{meant} {NAME_A_MODEL}"
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return (
            f"{key} ({path}) is not a folder here, and as a model on the hub it is not in "
            "the local cache while HF_HUB_OFFLINE=1 forbids fetching it; name a model "
            "directory or unset HF_HUB_OFFLINE"
        )
    return None


def _nearest_folder(path: Path) -> Path | None:
    """Return the folder that a misspelt path may mean."""
    if not path.parent.is_dir():
        return None
    beside = {other.name: other for other in path.parent.iterdir() if other.is_dir()}
    near = difflib.get_close_matches(path.name, beside, n=1, cutoff=0.75)
    return beside[near[0]] if near else None


def _incomplete(folder: Path, named: str) -> str | None:
    if not (folder / "config.json").is_file():
        return f"{named} has no config.json; name a Hugging Face model directory"
    if not any(next(folder.glob(pattern), None) for pattern in MODEL_FILES):
        return f"{named} has no weights (*.safetensors); copy them there"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return f"{named} has no tokenizer (tokenizer.json); copy it there"
    return None


def in_hub_cache(name: str) -> bool:
    """Say whether a model of the hub has been fetched before."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub")))
    return (cache / f"models--{name.replace('/', '--')}").is_dir()


def plugin_folders(config: Config) -> list[str]:
    """Return the folders of `run.plugins` that are put on the import path.

    Raises:
        ConfigError: an entry is neither a folder nor a requirement that what is installed meets.
    """
    folders = [entry for entry in config.run.plugins if Path(entry).is_dir()]
    for entry in config.run.plugins:
        if entry not in folders:
            _require_installed(entry)
    return folders


def _require_installed(entry: str) -> None:
    """Refuse a requirement (`my-tools>=1.2`) that nothing here meets; nothing is installed."""
    named = f"run.plugins names {entry!r}, which is"
    try:
        wanted = Requirement(entry)
        installed = importlib.metadata.version(wanted.name)
    except (InvalidRequirement, importlib.metadata.PackageNotFoundError, ValueError) as exc:
        raise ConfigError(
            f"{named} neither a folder nor an installed package; correct the folder or "
            f"`pip install {shlex.quote(entry)}`"
        ) from exc
    if not wanted.specifier.contains(installed, prereleases=True):
        raise ConfigError(
            f"{named} not what is installed here ({wanted.name} {installed}); "
            f"`pip install {shlex.quote(entry)}`"
        )


def use_plugins(config: Config) -> None:
    """Put the folders of `run.plugins` on the import path of this process and its children."""
    folders = plugin_folders(config)
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([inherited] if inherited else [])])


def _task_problems(config: Config, source: DataSource, kinds: Kinds) -> Iterator[str]:
    enabled = config.env.enable_tools
    offered = set(config.tools if enabled is None else enabled)
    comparing = [name for name in config.reward.measured() if name in COMPARES_ANSWER]
    for where, task in numbered_tasks(source):
        refuse_images(where, task)
        if len(kinds) < MOST_KINDS:
            roles: tuple[Role, ...] = tuple(message.role for message in task.messages())
            kinds.setdefault((roles, task.tools is None), (where, task))
        unknown = sorted(set(task.tools or []) - offered)
        if unknown:
            yield (
                f"{where}: task {task.id!r} asks for the tool {unknown[0]!r}; the model is offered "
                f"{sorted(offered)}: add [tools.{unknown[0]}] or correct the task"
            )
            return
        try:
            if comparing:
                accepted_answers(task.payload)
        except ValueError as exc:
            yield f"{where}: {comparing[0]} cannot score task {task.id!r}: {exc}"
            return


def _file_problems(config: Config, purpose: Purpose, kinds: Kinds) -> Iterator[str]:
    sources: list[tuple[str, DataSource]] = []
    if purpose == "train" and config.data is not None:
        sources += [("data.train", source) for source in config.data.train]
    if purpose in ("train", "evaluate"):
        sources += [(f"evaluation.sets.{n}", one) for n, one in config.evaluation.sets.items()]
    for key, source in sources:
        try:
            yield from _task_problems(config, source, kinds)
        except (TaskFileError, MissingPackageError) as exc:
            yield f"{key}: {exc}{_way_to_make(source.source)}"
    lines: list[tuple[str, Path, str]] = []
    for name, tool in config.started_tools().items():
        if isinstance(tool, SearchConfig) and tool.corpus and purpose not in SUPERVISED:
            lines.append((f"tools.{name}.corpus", tool.corpus, "passages"))
    if purpose == "sft" and config.sft is not None:
        lines += [("sft.data", path, "dialogues") for path in config.sft.data]
    for key, path, what in lines:
        if not path.exists():
            way = _way_to_make(path) or f"; name a JSON-lines file of {what}"
            yield f"{key} ({path}) is missing{way}"
        elif (foreign := foreign_format(path)) is not None:
            yield f"{key}: {foreign}"


def _length_problems(config: Config) -> Iterator[str]:
    """Say which prompt is too long, where the learner would refuse it."""
    if config.data is None or config.data.max_prompt_tokens is None:
        return
    try:
        config.prompt_order()
    except TaskFileError as exc:
        yield f"data.train: {exc}"
    except ValueError:
        return  # probe.py names a format of calls that there is not


def _way_to_make(path: Path) -> str:
    """Name the command that makes a missing data file of an example; "" for any other file."""
    file = at_hand(path)
    example = file.parent.parent
    for script, arguments in EXAMPLE_SCRIPTS.items():
        if not path.exists() and (example / script).is_file():
            where = {"file": quoted(file), "data": quoted(file.parent)}
            command = f"python {quoted(example / script)} {arguments.format(**where)}"
            return f"; make it with `{command}`, as {example / 'README.md'} explains"
    return ""


def _table_problems(config: Config, purpose: Purpose) -> Iterator[str]:
    if purpose == "train" and config.data is None:
        yield "table [data] is missing; training needs data.train, a list of task files"
    if purpose == "evaluate" and not config.evaluation.sets:
        yield "evaluation.sets is empty; name at least one file of questions"
    if purpose == "sft" and config.sft is None:
        yield "table [sft] is missing; the warm start needs sft.data and sft.output"
    if purpose == "train_reward" and config.train_reward is None:
        yield (
            "table [train_reward] is missing; it needs train_reward.trajectories and "
            "train_reward.output"
        )
    if purpose == "train_reward" and config.model.lora is not None:
        yield (
            "[model.lora] and [train_reward] cannot be combined: a reward model is served whole; "
            "remove the table model.lora"
        )
    if purpose == "train":
        for name in config.learner.loggers:
            if importlib.util.find_spec(name) is None:
                yield (
                    f'learner.loggers ("{name}") needs the package {name}, which is not installed; '
                    f"`pip install 'agent-r1[{'learner' if name == 'tensorboard' else name}]'`"
                )
    if purpose == "train" and config.redis.url is None:
        problem = redis_memory_problem(
            config.learner,
            config.evaluation,
            config.model.max_context,
            config.max_segments,
            limit_bytes=config.redis.maxmemory_mb * MIB,
            limit_name="redis.maxmemory_mb",
        )
        if problem is not None:
            yield problem


def problems(config: Config, purpose: Purpose, kinds: Kinds | None = None) -> list[str]:
    """Return what tables and files tell to be wrong, one line each; nothing is loaded.

    Args:
        config: the configuration.
        purpose: the command that will run.
        kinds: gets the first task of each kind of dialogue.
    """
    found = list(_table_problems(config, purpose))
    models = {"model.path": config.model.path}
    for name, table in config.reward.to_serve().items():
        models[f"reward.servers.{name}.path"] = str(table.path)
    found += [p for key, path in models.items() if (p := check_model(path, key)) is not None]
    try:
        use_plugins(config)
    except ConfigError as exc:
        found.append(str(exc))
    return found + list(_file_problems(config, purpose, {} if kinds is None else kinds))


def find(
    config: Config,
    purpose: Purpose,
    *,
    machine: bool = True,
    memory: bool = True,
    resume: bool = False,
) -> Findings:
    """Find everything that would keep a command from working; start nothing.

    Args:
        config: the configuration.
        purpose: the command that will run.
        machine: also check what depends on this machine.
        memory: of this, also check the memory; False where the caller sums it up.
        resume: the run folder may hold a run.
    """
    if machine:
        needed = LEARNER if purpose in SUPERVISED else WHOLE_RUN
        adapters = (PEFT,) if config.model.lora is not None and purpose in TRAINING else ()
        missing = missing_packages_problem((*needed, *adapters))
        if missing is not None:
            return Findings([Check("software", "", [missing])])
    kinds: Kinds = {}
    found = problems(config, purpose, kinds)
    if purpose == "train" and not found:
        found += _length_problems(config)
    findings = Findings([Check("configuration", f"for {purpose}", found, here=False)])
    model = check_model(config.model.path) is None
    if model and not Path(config.model.path).is_dir() and not in_hub_cache(config.model.path):
        findings.checks.append(_check_hub(config, machine=machine))
        model = machine and not findings.machine
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(
            load_everything,
            config,
            trains=purpose == "train",
            samples=purpose not in SUPERVISED,
            model=model,
            machine=machine,
            memory=memory,
            task=_some_task(config),
            prompts=dict(kinds.values()),
        )
        if machine:
            findings.checks += check_machine(config, purpose, resume=resume, specs=findings.specs)
        findings.add(loading.result())
    return findings


def _check_hub(config: Config, *, machine: bool) -> Check:
    """Look at a model that is a name on the hub."""
    path = config.model.path
    if not machine:
        note = f"model.path ({path}) was not checked: it is not a folder here"
        return Check("model", path, notes=[note])
    try:
        model_folder(path, config.model.revision, small=True)
    except HubError as exc:
        return Check("model", path, [str(exc)])
    return Check("model", path)


def _some_task(config: Config) -> Task | None:
    """Return the first task there is, to construct the environment with."""
    train = [] if config.data is None else config.data.train
    for source in (*train, *config.evaluation.sets.values()):
        try:
            return next(numbered_tasks(source))[1]
        except (TaskFileError, MissingPackageError):
            continue  # reported where the files are checked
    return None


def check(
    config: Config, purpose: Purpose, *, machine: bool = True, resume: bool = False
) -> Findings:
    """Refuse a configuration in which there is a problem.

    Raises:
        ConfigError: lists every problem found, one a line.
    """
    return refuse(find(config, purpose, machine=machine, resume=resume))


def refuse(findings: Findings) -> Findings:
    """Raise what was found, if anything was.

    Raises:
        ConfigError: lists every problem, one a line.
    """
    if findings.problems or findings.machine:
        raise ConfigError(findings.text())
    return findings
