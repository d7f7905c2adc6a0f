"""`agent-r1 train|serve|sft`: the commands that run something.

Reads the configuration; `train` hands it to the local launcher, `serve` and `sft` to one service's
entry point in this process, with the tables that service needs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import logging.config
import os
import re
import shlex
import sys
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from agent_r1.cli.policy import policy_options
from agent_r1.config import checks as config_checks
from agent_r1.config.machine import check_port
from agent_r1.config.models import fetch_models, with_models
from agent_r1.config.resume import refuse_changes
from agent_r1.config.run import (
    Config,
    ConfigError,
    LoadedConfig,
    dump_config,
    load_config,
    read_written_config,
)
from agent_r1.config.sources import ENV_PREFIX, at_hand
from agent_r1.learner.engine.ranks.place import read_place
from agent_r1.runtime.config import ListenConfig, RunConfig
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOSSES
from agent_r1.runtime.files.private import private_folder, write_private
from agent_r1.runtime.files.run_folder import CONFIG_FILE, LEDGER_FILE, SUMMARY_FILE
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.logs import make_formatter
from agent_r1.runtime.tracing import start_tracing
from agent_r1.runtime.user_code import CODE_PATTERN

if TYPE_CHECKING:
    from agent_r1.rollout.main import RolloutSettings

logger = logging.getLogger(__name__)

STORE_RETRY_S = 30.0
"""Longest to wait for the run store that `train --resume URL` names."""
SERVICES = ("rollout", "reward", "learner", "tool")


def configure_logging(run: RunConfig, service: str) -> None:
    """Log to stderr as `runtime/logging.json` says, at `run.log_level`, in `run.log_format`."""
    text = resources.files("agent_r1.runtime").joinpath("logging.json").read_text()
    settings: dict[str, Any] = json.loads(text)
    settings["root"]["level"] = run.log_level
    logging.config.dictConfig(settings)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(make_formatter(run.log_format, run_id=run.id, service=service))


def train(arguments: argparse.Namespace) -> int:
    """Run a whole training run on this machine."""
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


def _redis(config: Config) -> None:
    if config.redis.url is None:
        raise ConfigError(
            "redis.url is not set; a service that you start yourself needs its address: set "
            f"{ENV_PREFIX}REDIS__URL=redis://HOST:6379/0 (`agent-r1 train` starts one by itself)"
        )


def _check_listen(config: Config, listen: ListenConfig, key: str) -> None:
    """Refuse where a service would listen, before it connects to anything.

    Raises:
        ValueError: other machines could call it without a token, or the port is taken.
    """
    from agent_r1.runtime.http.serving import require_token
    from agent_r1.runtime.http.token import find_token

    require_token(key, listen, find_token(config.run))
    check_port(listen, key)


def _tool_name(config: Config, service: str, name: str | None) -> str:
    if service != "tool":
        wanted = service
    elif name is not None:
        wanted = name
    elif len(config.started_tools()) == 1:
        wanted = next(iter(config.started_tools()))
    else:
        raise ConfigError(f"name the tool with --name; the tools are {sorted(config.tools)}")
    if wanted not in config.tools:
        raise ConfigError(
            f"there is no service {wanted!r}; the services are {', '.join(SERVICES)}, and the "
            f"configured tools are {sorted(config.tools)}"
        )
    return wanted


def _tool_class(name: str) -> tuple[str, list[str]]:
    """Return the name of a tool class of the current folder, and the options that serve it."""
    from agent_r1.tools.loading import import_tool_class

    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        tool = import_tool_class(name, "tool").name
    except (ValueError, AttributeError) as exc:
        raise ConfigError(str(exc)) from exc
    plugins = json.dumps([folder])
    return tool, [f"tools.{tool}.type={name}", f"run.plugins={plugins}", "model.path=none"]


def serve(arguments: argparse.Namespace) -> int:
    """Run one service in this process until it is told to stop."""
    if (arguments.config is None) == (arguments.join is None):
        raise ConfigError("name a CONFIG, or the run to join with --join RUN_ID")
    if arguments.redis is not None and arguments.join is None:
        raise ConfigError("--redis goes with --join; a CONFIG names it as redis.url")
    if arguments.join is not None:
        return _serve(arguments, _joined(arguments))
    if arguments.service == "tool" and re.match(CODE_PATTERN, str(arguments.config)):
        name, options = _tool_class(str(arguments.config))
        arguments.name = name
        loaded = load_config(None, [*options, *arguments.options])
    else:
        loaded = load_config(arguments.config, arguments.options)
    config = loaded.config
    if arguments.service != "learner" and arguments.config is not None:
        config = _beside_its_run(config, Path(arguments.config))
    return _serve(arguments, config)


def _joined(arguments: argparse.Namespace) -> Config:
    if arguments.service == "learner":
        raise ConfigError("--join is for rollout, reward and tools; a run has one learner")
    from agent_r1.cli.services.join import join

    return join(
        arguments.join, arguments.name or arguments.service, arguments.redis, arguments.options
    )


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    service = arguments.name or arguments.service
    configure_logging(config.run, service)
    start_tracing(config.run, service)
    config_checks.use_plugins(config)
    announce_dir: Path | None = arguments.announce_dir
    if arguments.service == "rollout":
        _serve_rollout(_with_folders(config), announce_dir)
    elif arguments.service == "reward":
        with quick_imports():
            from agent_r1.reward import main as reward

        _redis(config)
        _check_listen(config, config.reward, "reward")
        reward.serve(
            run=config.run,
            redis=config.redis,
            reward=config.reward,
            reader=config.turn_reader(),
            announce_dir=announce_dir,
        )
    elif arguments.service == "learner":
        resume = arguments.resume or (arguments.resume_if_begun and _has_begun(config))
        return _serve_learner(config, announce_dir, resume=resume, take_over=arguments.take_over)
    else:
        with quick_imports():
            from agent_r1.tools import main as tools

        name = _tool_name(config, arguments.service, arguments.name)
        _check_listen(config, config.tools[name], f"tools.{name}")
        tools.serve(
            name=name,
            run=config.run,
            redis=config.redis,
            tool=config.tools[name],
            announce_dir=announce_dir,
            # By the launcher it is logged; a person who started it sees it.
            say=partial(print, flush=True) if announce_dir is None else logger.info,
        )
    return 0


def _beside_its_run(config: Config, file: Path) -> Config:
    """Return the configuration of a run folder with Redis and token of the run that runs there."""
    if file.name != CONFIG_FILE:
        return config
    from agent_r1.runtime.files.run_folder import live_redis_url, live_token_file

    url = config.redis.url or live_redis_url(file.parent)
    if url is None:
        print(f"the run in {file.parent} is not running, so nothing here can join it", flush=True)
    token_file = config.run.token_file or live_token_file(file.parent)
    return config.model_copy(
        update={
            "redis": config.redis.model_copy(update={"url": url}),
            "run": config.run.model_copy(update={"token_file": token_file}),
        }
    )


def _serve_rollout(config: Config, announce_dir: Path | None) -> NoReturn:
    _redis(config)
    _check_listen(config, config.rollout, "rollout")
    with quick_imports():
        from agent_r1.rollout import main as rollout
    from agent_r1.rollout.policy import PolicyOutOfMemoryError, PolicySetupError
    from agent_r1.text.sampler import EngineDeadError

    try:
        rollout.serve(rollout_settings(config, announce_dir))
    except (PolicySetupError, PolicyOutOfMemoryError) as exc:
        # Not defects: the message is the whole story, and a restart would not help.
        raise ValueError(str(exc)) from exc
    except EngineDeadError as exc:
        # The message is the whole story here too, and a restart does help.
        print(f"{ERROR_PREFIX}{exc}", file=sys.stderr)
        _end_process(EXIT_FAILED)
    _end_process(0)


def rollout_settings(config: Config, announce_dir: Path | None = None) -> RolloutSettings:
    """Return the tables that a rollout server needs."""
    from agent_r1.rollout.main import RolloutSettings

    return RolloutSettings(
        run=config.run,
        model=config.model,
        redis=config.redis,
        env=config.env,
        rollout=config.rollout,
        tools={name: tool.url for name, tool in config.tools.items()},
        weights_dir=config.learner.weights_dir or config.run.folder(),
        transport=config.learner.transport,
        announce_dir=announce_dir,
    )


def _end_process(status: int) -> NoReturn:
    """End without the seconds that the interpreter takes to take vLLM's modules apart."""
    atexit._run_exitfuncs()  # what multiprocessing has left is removed here
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _has_begun(config: Config) -> bool:
    """Say whether the learner of a run has been started before, here or on another machine."""
    from agent_r1.learner.checkpoints.standing import has_trained

    folder = config.run.folder()
    if (folder / LEDGER_FILE).is_file() or has_trained(folder):
        return True
    from agent_r1.learner.checkpoints.run_store import open_run_store

    store = open_run_store(config.run, config.learner, resume=True)
    return store is not None and store.last_start() > 0


def _with_folders(config: Config) -> Config:
    """Return the configuration with the folders of its models, which are fetched if need be."""
    return with_models(config, fetch_models(config, logger.info))


def _serve_learner(
    named: Config, announce_dir: Path | None, *, resume: bool, take_over: bool
) -> int:
    config = _with_folders(named)
    place = read_place(os.environ, config.engine.ranks, "engine")
    if place.rank > 0:
        from agent_r1.learner import main as learner

        learner.follow(config.run, config.model, config.learner, config.engine, place)
    _redis(config)
    prompts = config.prompt_order()
    if config.learner.transport == "http":
        _check_listen(config, config.learner.server, "learner.server")
    with quick_imports():
        from agent_r1.learner import main as learner
    from agent_r1.learner import outcome
    from agent_r1.learner.checkpoints.standing import resume_notes
    from agent_r1.learner.engine.interface import EngineError
    from agent_r1.learner.run_spec import make_run_spec
    from agent_r1.learner.stop_rules import RunFailedError
    from agent_r1.learner.weights.canary import CanaryError

    try:
        spec = make_run_spec(
            run=config.run,
            model=config.model,
            redis=config.redis,
            prompts=prompts,
            learner=config.learner,
            engine=config.engine,
            evaluation=config.evaluation,
            resolved_config=dump_config(named)[0],
            resume=resume,
            max_segments=config.max_segments,
            take_over=take_over,
        )
        patience = config.evaluation.patience
        status = None
        if resume:
            status = outcome.finished_status(spec.folder.path, spec.total_steps, patience)
        if resume and spec.store is None:
            for note in resume_notes(spec.folder.path):
                logger.warning("%s", note)
        # Ranks that another launcher has started wait for this one.
        if status is not None and place.port == 0:
            folder = at_hand(spec.folder.path)
            print(f"the run has finished; its results are in {folder}: see {folder / SUMMARY_FILE}")
            return _exit_status(status)
        status = learner.train(spec, announce_dir, place=place)
        if status == outcome.INTERRUPTED and place.port != 0:
            return EXIT_INTERRUPTED  # a launcher of ranks would take 0 for the end of the work
    except (RunFailedError, CanaryError) as exc:
        # Not defects: the message is the whole story, and a restart would not help.
        raise ValueError(str(exc)) from exc
    except EngineError as exc:
        # The message is the whole story here too, and a restart may help. torch's threads may hang.
        logger.debug("the engine ended", exc_info=True)
        print(f"{ERROR_PREFIX}{exc}", file=sys.stderr)
        _end_process(EXIT_FAILED)
    return _exit_status(status)


def _exit_status(status: str) -> int:
    from agent_r1.learner import outcome

    return EXIT_LOSSES if status == outcome.FINISHED_WITH_LOSSES else 0


def sft(arguments: argparse.Namespace) -> int:
    """Run the supervised warm start in this process."""
    return _train_on_dialogues(arguments, "sft")


def train_reward(arguments: argparse.Namespace) -> int:
    """Train a reward model in this process."""
    return _train_on_dialogues(arguments, "train_reward")


def _train_on_dialogues(
    arguments: argparse.Namespace, purpose: Literal["sft", "train_reward"]
) -> int:
    config = load_config(arguments.config, arguments.options).config
    configure_logging(config.run, purpose)
    table = config.supervised(purpose)
    if table is None:
        config_checks.check(config, purpose)  # says what is missing
        raise ConfigError(f"table [{purpose}] is missing")
    place = read_place(os.environ, table.engine.ranks, f"{purpose}.engine")
    if place.rank == 0:
        config_checks.check(config, purpose)
    config = _with_folders(config)
    from agent_r1.learner.engine.interface import EngineError
    from agent_r1.learner.reward_model import train as reward_model
    from agent_r1.learner.sft import train as warm_start

    commands = {"sft": warm_start, "train_reward": reward_model}
    tables = {"run": config.run, "model": config.model, purpose: table, "place": place}
    try:
        if place.rank > 0:
            config_checks.use_plugins(config)
            commands[purpose].follow(**tables)
        form = {"tool_format": config.env.tool_format} if purpose == "sft" else {}
        finished = commands[purpose].run(**tables, **form)
    except EngineError as exc:
        raise ValueError(str(exc)) from exc
    return 0 if finished else EXIT_INTERRUPTED
