"""Brings the parts of a run's bundle to this host: pulled from the learner, or found here.

join.py says which parts a service needs, and where they end up in its configuration.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
from pydantic import ValidationError

from agent_r1.config.sources import ConfigError, dotted
from agent_r1.runtime.files.writing import hash_file
from agent_r1.runtime.fingerprint import package_hash
from agent_r1.runtime.http.token import TOKEN_SOURCES
from agent_r1.weights.download import Download, PartialFile
from agent_r1_proto.run_bundle import FILE_PATH, BundleFile, JoinOffer, RunBundle

PARALLEL_FILES = 4
ROOM_REMEDY = "set the variable TMPDIR to a folder with room"


@dataclass(frozen=True)
class BundlePart:
    """A part of a bundle, and where the configuration names it."""

    name: str
    place: tuple[str | int, ...]
    """Key, and index in a list of values."""
    package: str = ""
    """An entry of `run.plugins`, which may be an installed package."""
    left_out: tuple[str, ...] = ()
    """Ends of the names of files that are not needed."""

    @property
    def key(self) -> str:
        """The key, as messages name it."""
        return dotted(tuple(step for step in self.place if isinstance(step, str)))

    def value_in(self, config: Any) -> Any:
        """Return what a configuration says; None where it says nothing."""
        for step in self.place:
            try:
                config = config[step]
            except (KeyError, IndexError, TypeError):
                return None
        return config

    def put(self, config: Any, path: Path) -> None:
        """Write into a configuration where the part is."""
        *above, last = self.place
        for step in above:
            config = config[step]
        config[last] = str(path)


async def read_bundle(
    client: httpx.AsyncClient, url: str, offer: JoinOffer, run_id: str
) -> RunBundle:
    """Read the bundle that an offer names.

    Raises:
        ConfigError: the token is wrong, or the bundle is not the one of the offer.
        HTTPError: the learner cannot be reached, or does not have it any more.
    """
    response = await client.get(url + FILE_PATH.format(sha256=offer.bundle_sha256))
    if response.status_code == httpx.codes.UNAUTHORIZED:
        raise ConfigError(
            f"the learner at {url} does not accept this host's token; set {TOKEN_SOURCES} "
            "to the token of the run"
        )
    response.raise_for_status()
    if hashlib.sha256(response.content).hexdigest() != offer.bundle_sha256:
        raise ConfigError(f"{url} sent another bundle than the learner has announced in Redis")
    try:
        bundle = RunBundle.model_validate_json(response.content)
    except ValidationError as exc:
        raise ConfigError(f"the bundle of the learner at {url} does not parse: {exc}") from exc
    if bundle.run_id != run_id:
        raise ConfigError(f"{url} serves the run {bundle.run_id!r}, and not {run_id!r}")
    return bundle


@dataclass(frozen=True)
class BundlePuller:
    """Brings parts of one bundle to a folder."""

    client: httpx.AsyncClient
    """Client with the run's token."""
    url: str
    """Base URL of the learner's server."""
    bundle: RunBundle
    """Bundle that the learner offers."""
    own: Mapping[str, Any]
    """This host's own settings; what they name is compared with the run's and not pulled."""
    folder: Path
    """Gets the files."""

    async def bring(self, part: BundlePart, config: dict[str, Any]) -> None:
        """Bring one part to this host, and write into a configuration where it is.

        Raises:
            ConfigError: what is here differs from the run's, or the learner cannot give the part.
            TransferError: it does not arrive, or there is no room for it.
        """
        bundle = self.bundle
        files = [
            one
            for one in bundle.files
            if one.part == part.name and not one.path.endswith(part.left_out)
        ]
        here = part.value_in(self.own)
        if here is not None:
            await asyncio.to_thread(_compare, part, str(here), files)
        elif part.package in bundle.packages:
            _compare_package(part.package, bundle.packages[part.package])
        elif part.name in bundle.missing:
            raise ConfigError(
                f"the learner's host cannot give {part.key}: {bundle.missing[part.name]}; "
                "correct that there, or start the service with a configuration file"
            )
        else:
            base = self.folder / part.name
            base.mkdir(parents=True)
            places = asyncio.Semaphore(PARALLEL_FILES)
            await asyncio.gather(*(self._pull(one, base, places) for one in files))
            part.put(config, base if part.place[0] != "tools" else base / files[0].path)

    async def _pull(self, one: BundleFile, base: Path, places: asyncio.Semaphore) -> None:
        path = PurePosixPath(one.path)
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(f"the bundle names a file outside of its folder: {one.path}")
        target = base / path
        async with places:
            target.parent.mkdir(parents=True, exist_ok=True)
            file = await asyncio.to_thread(
                PartialFile, target, one.size_bytes, one.chunks, ROOM_REMEDY
            )
            url = self.url + FILE_PATH.format(sha256=one.sha256)
            await Download(self.client, file, url, peers={}, own_name="").run()


def _compare(part: BundlePart, value: str, files: Sequence[BundleFile]) -> None:
    here = Path(value).expanduser()
    for one in files:
        path = here / one.path if here.is_dir() else here
        if not path.is_file() or hash_file(path) != one.sha256:
            raise ConfigError(
                f"{part.key} ({here}) of this host differs from the run's in {one.path}; "
                "remove the setting, and the learner sends its own"
            )


def _compare_package(name: str, sha256: str) -> None:
    try:
        same = package_hash(name) == sha256
    except PackageNotFoundError as exc:
        raise ConfigError(
            f"run.plugins names the package {name!r}, which is not installed on this host; "
            f"`pip install {name}`"
        ) from exc
    if not same:
        raise ConfigError(
            f"run.plugins names the package {name!r}, and this host has another build of it than "
            "the learner's; install the same on both"
        )
