"""The interpreter that runs sandboxed code: asks it where it keeps what it needs.

Read by `worker.py`, which shows exactly these folders to the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ASK_TIMEOUT_S = 60.0
_QUESTION = """
import json, os, sys
print(json.dumps({
    "version": sys.version_info[:2],
    "executable": os.path.realpath(getattr(sys, "_base_executable", sys.executable)),
    "prefixes": sorted({sys.base_prefix, sys.base_exec_prefix}),
    "environment": sys.prefix,
    "packages": [p for p in sys.path if p.endswith("-packages") and os.path.isdir(p)],
}))
"""
_OLDEST = (3, 10)


@dataclass(frozen=True)
class Interpreter:
    """Files of an interpreter that a sandbox must see."""

    executable: Path
    """The binary itself: of a virtual environment, the one it was made from."""
    prefixes: tuple[Path, ...]
    """Folders of the binary and its standard library."""
    packages: tuple[Path, ...]
    """Folders of the installed packages."""
    environment: Path
    """Folder of the virtual environment, or the prefix of the installation."""


async def ask_interpreter(python: str | None) -> Interpreter:
    """Describe `python`; None is the interpreter of this process.

    Raises:
        ValueError: it cannot be run, or it is too old.
    """
    path = python or sys.executable
    remedy = "set python to the path of a Python 3.10 or newer"
    try:
        asked = await asyncio.to_thread(
            subprocess.run,
            [path, "-I", "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_TIMEOUT_S,
        )
    except OSError as exc:
        raise ValueError(f"python ({path!r}) cannot be started: {exc}; {remedy}") from exc
    except subprocess.TimeoutExpired as exc:
        raise ValueError(
            f"python ({path!r}) did not answer within {ASK_TIMEOUT_S:g} s; {remedy}"
        ) from exc
    try:
        answer = json.loads(asked.stdout)
    except ValueError as exc:
        said = asked.stderr.decode(errors="replace")[-500:].strip()
        raise ValueError(
            f"python ({path!r}) is not a Python interpreter: it said {said!r}; {remedy}"
        ) from exc
    if tuple(answer["version"]) < _OLDEST:
        version = ".".join(map(str, answer["version"]))
        raise ValueError(f"python ({path!r}) is Python {version}; {remedy}")
    return Interpreter(
        executable=Path(answer["executable"]),
        prefixes=tuple(map(Path, answer["prefixes"])),
        packages=tuple(map(Path, answer["packages"])),
        environment=Path(answer["environment"]),
    )
