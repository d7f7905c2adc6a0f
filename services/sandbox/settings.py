"""Settings of the tools that run code: what `[tools.<name>].settings` may hold.

Read by `PythonExec` and `CodeTests`, handed to the pool of sandboxes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

OPEN_FILES = 64
"""Most files one sandboxed process may hold open."""
FILES = 10_000
"""Most files and folders one sandbox may hold in /tmp."""
OUTPUT_BYTES = 1 << 20
"""A program that prints more than this is stopped."""
SHM_MB = 16
"""Size of a sandbox's /dev/shm, in MiB."""


class SandboxSettings(BaseModel):
    """Limits of one run of model-written code, and how many sandboxes there are."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sandbox: Literal["bubblewrap", "container"] = "bubblewrap"
    """`bubblewrap` isolates; `container` only limits, and belongs in a container of its own
    (docs/sandbox.md)."""
    cpu_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """CPU time of each process, in seconds."""
    wall_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Time one run may take, in seconds."""
    memory_mb: Annotated[int, Field(ge=64)] = 512
    """Memory: address space of each process, and resident memory of all together, in MiB."""
    processes: Annotated[int, Field(ge=1, le=4096)] = 16
    """Most processes and threads at once."""
    file_mb: Annotated[int, Field(ge=1)] = 16
    """Size of the private /tmp, and of the largest file, in MiB."""
    max_workers: Annotated[int, Field(ge=1, le=1024)] = 4
    """Sandboxes kept started: most runs at once."""
    reuse_calls: Annotated[int, Field(ge=1)] = 1
    """Calls one sandbox answers before it is replaced. Each runs in a fresh process; above 1 a
    call's processes and files are removed before the next, the namespaces stay."""
    preload: list[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]] = []
    """Modules imported before a run, such as `numpy`, so that importing them costs it nothing."""
    python: str | None = None
    """Interpreter that runs the code, with its installed packages; None is the service's."""
    bwrap: str | None = None
    """Path of bubblewrap's `bwrap`; None is the one on PATH or beside the interpreter."""
