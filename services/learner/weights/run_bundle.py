"""The bundle of a run, for services that join on other hosts: `config.json` --> `RunBundle`.

The transport serves the bundle and its files; `agent-r1 serve SERVICE --join RUN_ID` pulls them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent_r1.learner.run_spec import RunSpec
from agent_r1.runtime.files.hub import model_folder
from agent_r1.runtime.files.private import write_private
from agent_r1.runtime.files.run_folder import BUNDLE_FILE
from agent_r1.runtime.files.writing import hash_file
from agent_r1.runtime.fingerprint import package_hash, software_version
from agent_r1.runtime.memory import MIB
from agent_r1.weights.chunks import hash_chunks
from agent_r1.weights.manifest import Transport
from agent_r1_proto.registry import Registry
from agent_r1_proto.run_bundle import (
    TOOL_FILES,
    BundleFile,
    JoinOffer,
    RunBundle,
    adapter_part,
    model_part,
    plugin_part,
    tool_part,
)

logger = logging.getLogger(__name__)

MAX_PLUGIN_FILES = 2000
MAX_PLUGIN_BYTES = 64 * MIB
"""Most bytes of one folder of `run.plugins`: more is data, or somebody's home."""
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".h5", ".msgpack")
"""Weights that nothing reads where there are safetensors files."""
NO_TRANSPORT = (
    'the run has learner.transport = "file", which needs a folder that all hosts see; set it to '
    '"http", or start the service with a configuration file'
)


class RunOffer:
    """Tells services on other hosts how to join the run.

    Args:
        spec: of the run.
        registry: gets the offer.
        transport: serves the files.
    """

    def __init__(self, spec: RunSpec, registry: Registry, transport: Transport) -> None:
        self._folder = spec.folder.path
        self._config = spec.resolved_config
        self._registry = registry
        self._transport = transport
        self._offer: JoinOffer | None = None

    async def prepare(self) -> None:
        """Serve the bundle and announce it; reads every file once for its checksums."""
        self._offer = await asyncio.to_thread(self._make)
        await self.announce()

    async def announce(self) -> None:
        """Say in Redis how to join, once that is known."""
        if self._offer is not None:
            await self._registry.set_join_offer(self._offer)

    def _make(self) -> JoinOffer:
        url = self._transport.serve({})
        if url is None:
            return JoinOffer(software=software_version(), refusal=NO_TRANSPORT)
        bundle, paths = make_bundle(self._config)
        file = self._folder / BUNDLE_FILE
        write_private(file, bundle.model_dump_json())
        sha256 = hash_file(file)
        self._transport.serve({**paths, sha256: file})
        for part, reason in bundle.missing.items():
            logger.warning("services that need it cannot join part=%s reason=%s", part, reason)
        logger.info(
            "services may join url=%s files=%d bytes=%d",
            url,
            len(bundle.files),
            sum(one.size_bytes for one in bundle.files),
        )
        return JoinOffer(software=software_version(), url=url, bundle_sha256=sha256)


def make_bundle(config: Mapping[str, Any]) -> tuple[RunBundle, dict[str, Path]]:
    """Describe what a configuration names.

    Args:
        config: as in `config.json`.

    Returns:
        The bundle, and where its files are, by their SHA-256.
    """
    files: list[BundleFile] = []
    paths: dict[str, Path] = {}
    packages: dict[str, str] = {}
    missing: dict[str, str] = {}
    for part, named in _parts(config):
        try:
            for folder, path in named:
                one = _describe(part, folder, path)
                files.append(one)
                paths[one.sha256] = path
        except (OSError, ValueError) as exc:
            missing[part] = str(exc)
    for entry in config["run"]["plugins"]:
        if not Path(entry).is_dir():
            packages[entry] = package_hash(entry)
    bundle = RunBundle(
        run_id=config["run"]["id"],
        config=dict(config),
        packages=packages,
        files=files,
        missing=missing,
    )
    return bundle, paths


def _describe(part: str, folder: Path, path: Path) -> BundleFile:
    return BundleFile(
        part=part,
        path=path.relative_to(folder).as_posix(),
        sha256=hash_file(path),
        size_bytes=path.stat().st_size,
        chunks=hash_chunks(path),
    )


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Iterator[tuple[Path, Path]]]]:
    """Yield every part with its files, each as (the part's folder, path).

    To list the files may raise OSError or ValueError.
    """
    yield model_part(), _model_files(config["model"]["path"], config["model"].get("revision"))
    adapter = (config["model"].get("lora") or {}).get("path")
    if adapter is not None:
        yield adapter_part(), _model_files(adapter, None)
    run_dir = Path(config["run"]["dir"])
    for index, entry in enumerate(config["run"]["plugins"]):
        if Path(entry).is_dir():
            yield plugin_part(index), _plugin_files(Path(entry), run_dir)
    for name, tool in config["tools"].items():
        for key in TOOL_FILES:
            if tool.get(key) is not None and tool.get("url") is None:
                yield tool_part(name, key), iter([(Path(tool[key]).parent, Path(tool[key]))])


def _model_files(name: str, revision: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a model's folder, with its weights once."""
    folder = model_folder(name, revision)  # the engine has loaded it
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    is_safe = any(path.suffix == ".safetensors" for path in files)
    for path in files:
        if path.name.startswith(".") or (is_safe and path.suffix in OTHER_WEIGHTS):
            continue
        yield folder, path


def _plugin_files(folder: Path, run_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a folder of user code: none that is hidden, or of the run itself.

    Raises:
        ValueError: there is more than code there.
    """
    count, size = 0, 0
    for at, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if _is_code(one) and Path(at, one) != run_dir]
        for path in (Path(at, name) for name in names if _is_code(name)):
            if not path.is_file():
                continue
            count, size = count + 1, size + path.stat().st_size
            if count > MAX_PLUGIN_FILES or size > MAX_PLUGIN_BYTES:
                raise ValueError(
                    f"run.plugins names {folder}, which has more than {MAX_PLUGIN_FILES} files or "
                    f"{MAX_PLUGIN_BYTES // MIB} MiB; put the code in a folder of its own"
                )
            yield folder, path


def _is_code(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__" and not name.endswith(".pyc")
