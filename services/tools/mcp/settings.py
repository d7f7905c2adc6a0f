"""`[tools.<name>.settings]` of `type = "mcp"`: which server, which of its tools, how isolated.

Read by `client.py`; `connection.py` opens connections from it.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agent_r1.runtime.config import StrictConfig

SECRET_HEADERS = frozenset({"authorization", "proxy-authorization", "cookie", "x-api-key"})
_VARIABLE = re.compile(r"\$\{(\w+)\}")


class McpSettings(StrictConfig):
    """One tool of one MCP server."""

    tool: Annotated[str, Field(min_length=1)]
    """The tool's name at the server; the model calls it by the name of the table."""
    command: list[str] | None = None
    """Program and arguments of a server that speaks over its standard input and output (stdio)."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP, such as "http://host:8000/mcp"."""
    env: list[str] = []
    """stdio: names of environment variables handed to the server, beside HOME, LOGNAME, PATH,
    SHELL, TERM and USER. Their values never stand in the configuration."""
    cwd: str | None = None
    """stdio: the server's working folder; None is the service's."""
    headers: dict[str, str] = {}
    """HTTP: headers of every request; `${NAME}` is replaced by the environment variable NAME."""
    isolation: Literal["shared", "rollout"] = "shared"
    """`shared`: one connection for all calls. `rollout`: one MCP session (with stdio, one process)
    per trajectory, for servers that keep state."""
    max_sessions: Annotated[int, Field(ge=1)] = 64
    """isolation = "rollout": most sessions open at once; further trajectories wait."""
    description: str | None = None
    """Description of the tool for the model; None takes the server's text."""
    idempotent: bool | None = None
    """Whether a call may be sent again when it is not known if it ran; None takes the server's
    annotations (readOnlyHint, idempotentHint), and false where it gives none."""
    outside_effects: bool | None = None
    """Whether a call changes something that stays, so that decoding must not discard branches; None
    takes the server's annotation (readOnlyHint says no), and true where it gives none."""
    connect_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Longest time to start or reach the server, and to wait for a free session, in seconds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError(
                "set exactly one of command (a server this service starts) and url (one that runs)"
            )
        if self.command is not None and not self.command:
            raise ValueError('command is empty; write the program and its arguments: ["npx", …]')
        if self.url is not None and not re.match(r"^https?://", self.url):
            raise ValueError(f"url ({self.url!r}) must start with http:// or https://")
        wrong = {"env": self.env, "cwd": self.cwd} if self.url else {"headers": self.headers}
        for key, value in wrong.items():
            if value:
                other = "command" if self.url else "url"
                raise ValueError(f"{key} belongs to servers with {other}; remove it")
        for name, value in self.headers.items():
            if name.lower() in SECRET_HEADERS and not _VARIABLE.search(value):
                raise ValueError(
                    f"headers.{name} holds a secret; put it into an environment variable and "
                    f'write headers = {{ {name} = "${{NAME}}" }}'
                )
        return self

    @property
    def address(self) -> str:
        """The server, for messages: its URL or its command line."""
        return self.url if self.url is not None else " ".join(self.command or ())

    def passed_environment(self) -> dict[str, str]:
        """Return the environment variables the server is handed.

        Raises:
            ValueError: one is not set.
        """
        return {name: _variable(name, "env") for name in self.env}

    def resolved_headers(self) -> dict[str, str]:
        """Return the headers with the environment's values in their places.

        Raises:
            ValueError: a variable is not set.
        """
        return {
            name: _VARIABLE.sub(lambda found: _variable(found[1], "headers"), value)
            for name, value in self.headers.items()
        }


def _variable(name: str, key: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ValueError(
            f"settings.{key} names the environment variable {name}, which is not set where this "
            f"tool service runs; export it or remove it from settings.{key}"
        )
    return value
