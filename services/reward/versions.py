"""Versions of the language models that components ask, and which of them scores what.

A run's Redis says which versions there are (`agent-r1 reward swap` adds one). What is scored by
itself is scored by the newest; the samples of one group are scored by one version, the newest when
the first of them came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from agent_r1.reward.components import Scored
from agent_r1.reward.config import ModelServerConfig
from agent_r1.reward.model_server import ModelServer
from agent_r1_proto.rewards import ScoreRequest
from agent_r1_proto.scoring_models import ScoringModel, ScoringModels
from agent_r1_proto.tasks import RolloutTask

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""A swap is followed within this time."""

C = TypeVar("C", bound=ModelServerConfig)


class AskingComponent(Protocol):
    """A component that asks a model."""

    @property
    def server(self) -> ModelServer:
        """The model's server."""
        ...

    async def score(self, request: ScoreRequest) -> Scored:
        """Return the score of an interaction."""
        ...


class Versions(Generic[C]):
    """The versions of the model that one component asks, each asked through a component of its own.

    Args:
        config: the component's table; it names the first version.
        make: makes the component of a version, whose `url` and `model` its argument has.

    Raises:
        ValueError: `make` does.
    """

    def __init__(self, config: C, make: Callable[[C], AskingComponent]) -> None:
        self._config, self._make = config, make
        first = make(config)
        self.configured = ScoringModel(version=config.model, url=config.url or "")
        self._models = [self.configured]
        self._made = {(self.configured.version, self.configured.url): first}

    @property
    def newest(self) -> str:
        """The version that scores what no other one has to."""
        return self._models[-1].version

    @property
    def servers(self) -> list[ModelServer]:
        """Those that have been asked."""
        return [component.server for component in self._made.values()]

    def knows(self, version: str) -> bool:
        """Return whether a version can be asked."""
        return any(model.version == version for model in self._models)

    def know(self, models: Sequence[ScoringModel]) -> None:
        """Take over what the run knows, the newest last; a Redis that was emptied knows nothing."""
        if models and list(models) != self._models:
            self._models = list(models)
            logger.info(
                "scores with model=%s url=%s known=%s",
                self.newest,
                self._models[-1].url,
                ",".join(model.version for model in models),
            )

    def of(self, version: str | None = None) -> AskingComponent:
        """Return the component that asks a version; None is the newest.

        Raises:
            ValueError: the run does not know it.
        """
        wanted = self.newest if version is None else version
        model = next((one for one in self._models if one.version == wanted), None)
        if model is None:
            known = ", ".join(one.version for one in self._models)
            raise ValueError(
                f"version {wanted!r} of a scoring model is not known to this run (known: {known}); "
                "name it with agent-r1 reward swap"
            )
        key = (model.version, model.url)
        if key not in self._made:
            update = {"url": model.url, "model": model.version}
            self._made[key] = self._make(self._config.model_copy(update=update))
        return self._made[key]


class GroupVersions:
    """Gives all samples of a group one version, and follows what the run knows.

    Args:
        models: of the run.
        asking: by component.
    """

    def __init__(
        self, models: ScoringModels, asking: Mapping[str, Versions[ModelServerConfig]]
    ) -> None:
        self._models, self._asking = models, asking
        self._used: set[tuple[str, str]] = set()
        self._look_at = 0.0

    async def start(self) -> None:
        """Tell the run what this service is configured with, and read what it knows."""
        for component, versions in self._asking.items():
            await self._models.configure(component, versions.configured)
        await self._look()

    async def follow(self) -> None:
        """Read again, and say which versions are used, unless that was done a moment ago."""
        if time.monotonic() >= self._look_at:
            await self._look()

    async def of(self, task: RolloutTask) -> dict[str, str]:
        """Return the version that scores a sample, by component."""
        found: dict[str, str] = {}
        for component, versions in self._asking.items():
            version = versions.newest
            if task.group_size > 1:
                group = f"{task.reply_stream or ''}:{task.key.incarnation}:{task.key.group_id}"
                version = await self._models.pin(component, group, version)
                if not versions.knows(version):  # another service has followed a swap before
                    await self._look()
            self._used.add((component, version))
            found[component] = version
        return found

    async def _look(self) -> None:
        self._look_at = time.monotonic() + LOOK_S
        for component, versions in self._asking.items():
            versions.know(await self._models.read(component))
        used, self._used = self._used, set()
        await self._models.note_uses(used)
