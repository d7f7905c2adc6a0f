"""`agent-r1 serve SERVICE`: one service in this process.

Reads the configuration, or takes it from the learner of a run (join.py), and calls the service's
entry point with the tables that it needs.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import logging.config
import os
import re
import sys
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from agent_r1.cli.declare import add_config
from agent_r1.config import checks as config_checks
from agent_r1.config.models import fetch_models, with_models
from agent_r1.config.run import Config, ConfigError, dump_config, load_config
from agent_r1.config.sources import ENV_PREFIX, at_hand
from agent_r1.learner.engine.ranks.rank_env import read_place
from agent_r1.runtime.config import ListenConfig, RunConfig
from agent_r1.runtime.exit_status import ERROR_PREFIX, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_LOSSES
from agent_r1.runtime.files.run_folder import (
    CONFIG_FILE,
    LEDGER_FILE,
    SUMMARY_FILE,
    live_redis_url,
    live_token_file,
)
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.logs import make_formatter
from agent_r1.runtime.tracing import start_tracing
from agent_r1.runtime.user_code import CODE_PATTERN
from agent_r1_proto.agents import AGENTS

if TYPE_CHECKING:
    from agent_r1.rollout.main import RolloutSettings

logger = logging.getLogger(__name__)

SERVICES = ("rollout", "reward", "learner", "gateway", "agents", "tool")


def configure_logging(run: RunConfig, service: str) -> None:
    """Log to stderr as `runtime/logging.json` says, at `run.log_level`, in `run.log_format`."""
    text = resources.files("agent_r1.runtime").joinpath("logging.json").read_text()
    settings: dict[str, Any] = json.loads(text)
    settings["root"]["level"] = run.log_level
    logging.config.dictConfig(settings)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(make_formatter(run.log_format, run_id=run.id, service=service))


def serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    parser.add_argument("service", metavar="SERVICE", help=f"{', '.join(SERVICES[:-1])}, or a tool")
    add_config(parser, required=False)
    parser.add_argument(
        "--join",
        metavar="RUN_ID",
        help="instead of CONFIG: take configuration, model, plugins and corpus from the learner of "
        "this run, which may be on another host (docs/scale-out.md)",
    )
    parser.add_argument("--redis", metavar="URL", help="with --join: Redis of the run")
    parser.add_argument("--name", metavar="TOOL", help="which tool, with `serve tool`")
    parser.add_argument("--resume", action="store_true", help="learner: continue the run")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="learner: end another learner that trains this run, and go on in its place",
    )
    parser.add_argument("--announce-dir", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--resume-if-begun", action="store_true", help=argparse.SUPPRESS)


def serve(arguments: argparse.Namespace) -> int:
    """Run one service in the foreground until it is told to stop.

    SERVICE is rollout, reward, learner, or the name of a tool in the configuration; with [agent]
    also gateway and agents. `serve tool
    --name NAME` is the same; if there is only one tool, you may leave out --name. `serve tool
    my_module:MyTool` serves a class from the current folder without a configuration. With --join,
    everything comes from the learner of a run, which may be on another machine. Set redis.url or
    AGENT_R1__REDIS__URL to the Redis to use. Services find tools through it, or by
    tools.<name>.url. If CONFIG is the config.json of a run that is running, the service uses the
    Redis of that run.
    """
    if (arguments.config is None) == (arguments.join is None):
        raise ConfigError("name a CONFIG, or the run to join with --join RUN_ID")
    if arguments.redis is not None and arguments.join is None:
        raise ConfigError("--redis goes with --join; a CONFIG names it as redis.url")
    config = _configured(arguments) if arguments.join is None else _joined(arguments)
    service = arguments.name or arguments.service
    configure_logging(config.run, service)
    start_tracing(config.run, service)
    config_checks.use_plugins(config)
    served = {
        "rollout": _serve_rollout,
        "reward": _serve_reward,
        "learner": _serve_learner,
        "gateway": _serve_gateway,
    }
    return served.get(arguments.service, _serve_tool)(config, arguments)


def _configured(arguments: argparse.Namespace) -> Config:
    if arguments.service == "tool" and re.match(CODE_PATTERN, str(arguments.config)):
        arguments.name, options = _tool_class(str(arguments.config))
        return load_config(None, [*options, *arguments.options]).config
    config = load_config(arguments.config, arguments.options).config
    if arguments.service == "learner" or arguments.config.name != CONFIG_FILE:
        return config
    return beside_its_run(config, arguments.config.parent)


def _joined(arguments: argparse.Namespace) -> Config:
    if arguments.service == "learner":
        raise ConfigError("--join is for every other service; a run has one learner")
    from agent_r1.cli.services.join import join

    return join(
        arguments.join, arguments.name or arguments.service, arguments.redis, arguments.options
    )


def beside_its_run(config: Config, folder: Path) -> Config:
    """Return the configuration of a run folder with Redis and token of the run that runs there."""
    url = config.redis.url or live_redis_url(folder)
    if url is None:
        print(f"the run in {folder} is not running, so nothing here can join it", flush=True)
    token_file = config.run.token_file or live_token_file(folder)
    return config.model_copy(
        update={
            "redis": config.redis.model_copy(update={"url": url}),
            "run": config.run.model_copy(update={"token_file": token_file}),
        }
    )


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
    from agent_r1.runtime.http.serving import bind
    from agent_r1.runtime.http.token import find_token

    bind(key, listen, find_token(config.run)).close()


def _serve_reward(config: Config, arguments: argparse.Namespace) -> int:
    _redis(config)
    _check_listen(config, config.reward, "reward")
    with quick_imports():
        from agent_r1.reward import main as reward

    reward.serve(
        run=config.run,
        redis=config.redis,
        reward=config.reward,
        reader=config.turn_reader(),
        announce_dir=arguments.announce_dir,
    )
    return 0


def _serve_tool(config: Config, arguments: argparse.Namespace) -> int:
    with quick_imports():
        from agent_r1.runtime.http.serving import bind
        from agent_r1.runtime.http.token import find_token
        from agent_r1.tools import main as tools

    name = _tool_name(config, arguments.service, arguments.name)
    tool = config.served_tools()[name]
    token = config.agents_token() if name == AGENTS else find_token(config.run)
    bind("agent.service" if name == AGENTS else f"tools.{name}", tool, token).close()
    tools.serve(
        name=name,
        run=config.run,
        redis=config.redis,
        tool=tool,
        token=token,
        announce_dir=arguments.announce_dir,
        # By the launcher it is logged; a person who started it sees it.
        say=partial(print, flush=True) if arguments.announce_dir is None else logger.info,
    )
    return 0


def _tool_name(config: Config, service: str, name: str | None) -> str:
    if service != "tool":
        wanted = service
    elif name is not None:
        wanted = name
    elif len(config.started_tools()) == 1:
        wanted = next(iter(config.started_tools()))
    else:
        raise ConfigError(f"name the tool with --name; the tools are {sorted(config.tools)}")
    if wanted in ("gateway", AGENTS) and config.agent is None:
        raise ConfigError(f"{wanted} serves agents, and the configuration has no table [agent]")
    if wanted not in config.served_tools():
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


def _serve_gateway(named: Config, arguments: argparse.Namespace) -> int:
    config = with_models(named, fetch_models(named, logger.info, small=True))
    _redis(config)
    if config.agent is None:
        raise ConfigError("gateway serves agents, and the configuration has no table [agent]")
    _check_listen(config, config.agent.gateway, "agent.gateway")
    from agent_r1.gateway import main as gateway

    gateway.serve(
        gateway.GatewaySettings(
            run=config.run,
            model=config.model,
            redis=config.redis,
            agent=config.agent,
            tool_format=config.env.tool_format,
            template_kwargs=config.env.chat_template_kwargs,
            answer_pattern=config.env.answer_pattern,
            max_tokens_per_turn=config.env.max_tokens_per_turn,
            tools={name: tool.url for name, tool in config.tools.items()},
            tool_timeout_s=config.env.tool_timeout_s,
            tool_start_timeout_s=config.rollout.tool_start_timeout_s,
            announce_dir=arguments.announce_dir,
        )
    )
    return 0


def _serve_rollout(named: Config, arguments: argparse.Namespace) -> NoReturn:
    config = with_folders(named)
    _redis(config)
    _check_listen(config, config.rollout, "rollout")
    with quick_imports():
        from agent_r1.rollout import main as rollout
    from agent_r1.rollout.policy import PolicyOutOfMemoryError, PolicySetupError
    from agent_r1.text.tokens import EngineDeadError

    try:
        rollout.serve(rollout_settings(config, arguments.announce_dir))
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
        tools={} if config.agent else {name: tool.url for name, tool in config.tools.items()},
        takes_samples=config.agent is None,
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


def with_folders(config: Config) -> Config:
    """Return the configuration with the folders of its models, which are fetched if need be."""
    return with_models(config, fetch_models(config, logger.info))


def _serve_learner(named: Config, arguments: argparse.Namespace) -> int:
    resume = arguments.resume or (arguments.resume_if_begun and _has_begun(named))
    config = with_folders(named)
    place = read_place(os.environ, config.engine.ranks, "engine")
    if place.rank > 0:
        from agent_r1.learner import main as learner

        learner.follow(config.run, config.model, config.learner, config.engine, place)
    _redis(config)
    prompts = config.prompt_order()
    if config.learner.transport != "file":
        _check_listen(config, config.learner.server, "learner.server")
    with quick_imports():
        from agent_r1.learner import main as learner
    from agent_r1.learner import outcome
    from agent_r1.learner.checkpoints.standing import resume_notes
    from agent_r1.learner.engine.interface import EngineError
    from agent_r1.learner.run_spec import RunSpec
    from agent_r1.learner.stop_rules import RunFailedError
    from agent_r1.learner.weights.canary import CanaryError

    try:
        spec = RunSpec(
            run=config.run,
            model=config.model,
            redis=config.redis,
            prompts=prompts,
            learner=config.learner,
            engine=config.engine,
            evaluation=config.evaluation,
            resolved_config=dump_config(named)[0],
            resume=resume,
            system_prompt=config.system_prompt,
            max_segments=config.max_segments,
            take_over=arguments.take_over,
        ).prepare()
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
        status = learner.train(spec, arguments.announce_dir, place=place)
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
