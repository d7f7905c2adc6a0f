"""`agent-r1 sft|train-reward CONFIG`: training on dialogues, in this process."""

from __future__ import annotations

import argparse
import os
from typing import Literal

from agent_r1.cli.declare import add_config
from agent_r1.cli.services.serve import configure_logging, with_folders
from agent_r1.config import checks as config_checks
from agent_r1.config.run import ConfigError, load_config
from agent_r1.learner.engine.ranks.rank_env import read_place
from agent_r1.runtime.exit_status import EXIT_INTERRUPTED

sft_arguments = train_reward_arguments = add_config


def sft(arguments: argparse.Namespace) -> int:
    """Train a model on demonstrations, as the table [sft] of the configuration says."""
    return _train_on_dialogues(arguments, "sft")


def train_reward(arguments: argparse.Namespace) -> int:
    """Train a reward model on stored trajectories, as the table [train_reward] says.

    The component reward_model asks it.
    """
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
    config = with_folders(config)
    from agent_r1.learner.engine.interface import EngineError
    from agent_r1.learner.reward_model import train as reward_model
    from agent_r1.learner.sft import supervised
    from agent_r1.learner.sft import train as warm_start

    commands = {"sft": warm_start, "train_reward": reward_model}
    tables = {"run": config.run, "model": config.model, purpose: table, "place": place}
    try:
        if place.rank > 0:
            config_checks.use_plugins(config)
            supervised.follow(config.run, config.model, table, purpose, place)
        form = {"tool_format": config.env.tool_format} if purpose == "sft" else {}
        finished = commands[purpose].run(**tables, **form)
    except EngineError as exc:
        raise ValueError(str(exc)) from exc
    return 0 if finished else EXIT_INTERRUPTED
