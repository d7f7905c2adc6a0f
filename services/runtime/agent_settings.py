"""Settings of an agent: its start, what it may touch, its limits; the first keys of `[agent]`.

gateway/config.py adds those of the gateway; tools/agents runs agents by them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.runtime.config import StrictConfig
from agent_r1.runtime.user_code import CODE_PATTERN
from agent_r1_proto.agents import MAX_ARTEFACTS

OPEN_FILES = 1024
"""Most files that one process of an agent may hold open."""
FILES = 100_000
"""Most files and folders in an attempt's folders."""
RelativePath = Annotated[str, Field(min_length=1, pattern=r"^[^/\x00\n][^\x00\n]*$")]


class AgentSettings(StrictConfig):
    """One kind of agent, and its walls."""

    type: Annotated[str, Field(pattern=CODE_PATTERN)] | None = None
    """`module:Name` of an `Agent` subclass found through `run.plugins`."""
    command: list[str] | None = None
    """Program and arguments that are an agent, in place of `type`. A path of a file here is shown
    to it."""
    attached: bool = False
    """Programs that are started elsewhere ask for attempts, in place of `type` and `command`:
    `agent-r1 agents attach`."""
    version: Annotated[str, Field(min_length=1)] | None = None
    """Recorded with every attempt; None is the class's, or "1" of a command."""
    answer: Literal["message", "output", "file"] = "message"
    """The agent's answer: its last message, what it returns, prints or reports, or
    `answer_file`."""
    answer_file: RelativePath | None = None
    """File in the agent's working folder that holds its answer."""
    artefacts: Annotated[list[RelativePath], Field(max_length=MAX_ARTEFACTS)] = []
    """Files in the agent's working folder that rewards get, if they are there."""
    show: list[Path] = []
    """Files and folders that agents may read, besides the system's programs, the packages that
    are installed here, and the code beside `type`. The programs in these folders are on PATH."""
    network: bool = False
    """True gives agents the machine's network; otherwise they reach the gateway only."""
    env: dict[str, str] = {}
    """Further environment variables."""
    memory_mb: Annotated[int, Field(ge=64)] = 1024
    """Memory: data of each process, and resident memory of all together, in MiB."""
    processes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Most processes and threads of an attempt at once."""
    file_mb: Annotated[int, Field(ge=1)] = 64
    """Size of an attempt's folders, and of the largest file, in MiB."""
    cpu_s: Annotated[float, Field(gt=0, le=3600)] = 600.0
    """CPU time of each process, in seconds."""
    sandbox: Literal["bubblewrap", "container"] = "bubblewrap"
    """`bubblewrap` isolates; `container` only limits, and belongs in a container of its own
    (docs/sandbox.md)."""
    runner: Literal["process", "container", "kubernetes"] = "process"
    """Starts an attempt as a process in the sandbox, as a container of its own, or as a Job of the
    cluster that the service is in."""
    image: Annotated[str, Field(min_length=1)] | None = None
    """Image of such containers. It has the program, `sh` and `base64`."""
    engine: Annotated[str, Field(pattern=r"^(unix:///|https?://)")] | None = None
    """Address of what runs them; None is Docker's socket, or the API of the cluster."""
    cpus: Annotated[float, Field(gt=0)] = 1.0
    """Processor cores of each container."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if (self.type is not None) + bool(self.command) + self.attached != 1:
            raise ValueError(
                f"type ({self.type!r}), command ({self.command!r}) and attached "
                f"({str(self.attached).lower()}): set exactly one of them, a class, a program, or "
                "programs that are started elsewhere"
            )
        if self.attached and self.answer == "file":
            raise ValueError(
                'answer = "file" is for agents that run here; an attached program reports its '
                'answer: set answer = "output", or "message" for the policy\'s last one'
            )
        if (self.answer == "file") != (self.answer_file is not None):
            raise ValueError(
                f"answer ({self.answer!r}) and answer_file ({self.answer_file!r}) go together: set "
                'answer = "file" with a path, or leave answer_file out'
            )
        if self.sandbox == "container" and not self.network:
            raise ValueError(
                'sandbox = "container" has no wall around the network: set network = true, and let '
                "the container reach the gateway only"
            )
        self._check_runner()
        if missing := [path for path in self.show if not os.path.exists(path)]:
            raise ValueError(f"show ({str(missing[0])!r}) is not there; correct or remove the path")
        return self

    def _check_runner(self) -> None:
        if self.runner == "process":
            if self.image or self.engine:
                raise ValueError(
                    f"image ({self.image!r}) and engine ({self.engine!r}) are for containers: set "
                    'runner = "container" or "kubernetes", or leave them out'
                )
        elif not self.image or not self.command or self.show or self.sandbox != "bubblewrap":
            raise ValueError(
                f"runner ({self.runner!r}) starts a command in an image: set image "
                f"({self.image!r}) and command ({self.command!r}), and leave out type, attached, "
                "show and sandbox"
            )

    @property
    def program(self) -> str:
        """Return the name of the command's program: of `sh -c SCRIPT NAME` the one that the script
        starts, by that name, as "$0"."""
        words = self.command or [""]
        return words[3] if words[:2] == ["sh", "-c"] and len(words) == 4 else words[0]

    @property
    def label(self) -> str:
        """Return the class, or the program with its arguments."""
        return self.type or " ".join(self.command or ["attached programs"])

    @property
    def files(self) -> list[str]:
        """Return the files that come back with an attempt's end."""
        return [*self.artefacts, *([self.answer_file] if self.answer_file else [])]
