"""The models that a configuration names, brought to this machine before anything starts.

The launcher fetches them once; its services are told the folders by environment variables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from agent_r1.config.run import Config
from agent_r1.config.sources import Key, dotted, variable_of
from agent_r1.runtime.files.hub import model_folder

MODEL_KEY: Key = ("model", "path")
CRITIC_KEY: Key = ("learner", "critic_path")


def fetch_models(
    config: Config, report: Callable[[str], None], *, small: bool = False
) -> dict[Key, Path]:
    """Return the folders of the models that are names on a hub, by key; the others need nothing.

    Args:
        config: names them.
        report: is told how far a download is.
        small: the weights, and what only the learner reads, are not needed.

    Raises:
        HubError: the hub does not provide one, or the disk is too small for it.
    """
    named = {MODEL_KEY: (config.model.path, config.model.revision)}
    if config.learner.critic_path is not None and not small:
        named[CRITIC_KEY] = (config.learner.critic_path, None)
    return {
        key: model_folder(path, revision, key=dotted(key), small=small, report=report)
        for key, (path, revision) in named.items()
        if not Path(path).is_dir()
    }


def with_models(config: Config, folders: Mapping[Key, Path]) -> Config:
    """Return the configuration with folders in place of names."""
    updated = config
    for (table, name), folder in folders.items():
        changed = getattr(updated, table).model_copy(update={name: str(folder)})
        updated = updated.model_copy(update={table: changed})
    return updated


def model_variables(folders: Mapping[Key, Path]) -> dict[str, str]:
    """Return the environment variables that tell services the folders."""
    return {variable_of(key): str(folder) for key, folder in folders.items()}
