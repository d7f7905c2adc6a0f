"""`agent-r1 ray up|down|train|apps`: a run on a Ray cluster; deploy/ray does it.

Only the functions here import that package, and with it ray, which is installed on demand.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from agent_r1.cli.declare import add_config
from agent_r1.cli.services.serve import configure_logging
from agent_r1.config.run import Config, ConfigError, load_config

EXTRA = "agent-r1[ray]"


def _ray_module(name: str) -> Any:
    """Import a module of deploy/ray.

    Raises:
        ConfigError: ray is not installed.
    """
    try:
        return importlib.import_module(f"agent_r1_deploy.ray.{name}")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "ray":
            raise
        raise ConfigError(f"this command needs Ray; `pip install '{EXTRA}'`") from exc


def _load(arguments: argparse.Namespace) -> Config:
    config = load_config(arguments.config, arguments.options).config
    configure_logging(config.run, "ray")
    return config


def up_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `ray up`."""
    add_config(parser)
    detach_help = "return when everything is submitted"
    parser.add_argument("--detach", action="store_true", help=detach_help)


down_arguments = train_arguments = apps_arguments = add_config


def up(arguments: argparse.Namespace) -> int:
    """Submit the learner's job, deploy the services, and print the job's log until it ends.

    Without RAY_ADDRESS, a cluster is started on this machine for as long as the command runs.
    Ctrl-C stops the run cleanly. The same command continues a run that was stopped, and follows
    one that runs; services whose configuration has changed are replaced. Needs the extra
    agent-r1[ray].
    """
    module = _ray_module("up")
    return module.up(_load(arguments), arguments.config, arguments.options, detach=arguments.detach)


def down(arguments: argparse.Namespace) -> int:
    """Stop a run on a cluster cleanly."""
    return _ray_module("up").down(_load(arguments))


def train(arguments: argparse.Namespace) -> int:
    """Run the learner's job, for `ray job submit -- agent-r1 ray train CONFIG`."""
    module = _ray_module("learner")
    return module.train(_load(arguments), str(arguments.config), arguments.options)


def apps(arguments: argparse.Namespace) -> int:
    """Print the Serve configuration, for `serve deploy`."""
    import yaml

    applications = _ray_module("applications").serve_config(_load(arguments))
    yaml.safe_dump(applications, sys.stdout, sort_keys=False)
    return 0
