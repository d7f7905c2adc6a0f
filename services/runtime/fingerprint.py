"""Fingerprint of the code that runs here: a version and a checksum, compared between hosts."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement

CODE = ("agent_r1", "agent_r1_proto")
_SHOWN_DIGITS = 12


@functools.cache
def software_version() -> str:
    """Return version and checksum of the code of this project."""
    files: dict[str, Path] = {}
    for package in CODE:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or []:
            for path in Path(folder).rglob("*.py"):
                files[f"{package}/{path.relative_to(folder).as_posix()}"] = path
    version = importlib.metadata.version("agent-r1")
    return f"{version} (code {_digest(files)[:_SHOWN_DIGITS]})"


def package_hash(requirement: str) -> str:
    """Return the SHA-256 of the Python files of an installed package (`my-tools>=1.2`).

    Raises:
        PackageNotFoundError: it is not installed.
    """
    found = importlib.metadata.distribution(Requirement(requirement).name)
    code = [file for file in found.files or [] if file.suffix == ".py"]
    return _digest({str(file): Path(str(file.locate())) for file in code})


def _digest(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the names and contents of files."""
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
