"""`[agent]`: an agent that is trained as it is, in place of the loop of `[env]`.

`agent_r1.config.run` joins it with the other tables. The agent's service is a tool service (its
table is `agent.service`), the gateway listens at `agent.gateway`, and agents call `agent.wire`.
"""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from agent_r1.runtime.agent_settings import AgentSettings
from agent_r1.runtime.config import ListenConfig

KNOWN = "agent_r1.tools.agents", "known"
"""Package and folder of a file for each program that people use: keys of `[agent]`."""


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ValueError(f"{pattern!r:.100} is no regular expression: {exc}") from exc
    return pattern


Pattern = Annotated[str, Field(min_length=1), AfterValidator(_check_pattern)]


class AgentConfig(AgentSettings):
    """`[agent]`: what runs, what it may do, and what of it is trained."""

    known: str | None = None
    """Name of a program that people use, such as "pi": gives `command`, and what else the program
    wants, for keys that are not set here."""

    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Time one attempt may take, in seconds; then it is stopped and ends as TRUNCATED."""
    max_concurrent: Annotated[int, Field(ge=1)] = 128
    """Attempts that one gateway works on at a time."""
    max_requests: Annotated[int, Field(ge=1)] = 200
    """Most answers of the policy and calls of tools in one attempt."""
    max_in_flight: Annotated[int, Field(ge=1)] = 16
    """Most answers of one attempt at a time; further requests are told 429."""
    max_session_tokens: Annotated[int, Field(ge=1)] = 1 << 18
    """Most tokens of one attempt, read and sampled ones together."""
    credit: Literal["all", "main"] = "all"
    """Whose turns are trained: every agent's of an attempt, or those of the main one."""
    side_calls: list[Pattern] = []
    """Regular expressions of instructions: turns after them are not trained, and rewards are not
    about them. Such as what asks for a title."""
    thoughts: Literal["keep", "as_client"] = "keep"
    """`keep`: thoughts of earlier turns stay in the context. `as_client`: the policy sees only what
    the agent sends back, which begins a new segment after every thought."""
    volatile: list[Pattern] = []
    """Regular expressions of text that the agent changes in every request, such as a clock in its
    system prompt: it is shown as it was at first."""
    allow_constrained: bool = False
    """Answer requests that ask to force what is written (a grammar, a tool choice) instead of
    refusing them. Nothing is forced, and the answer is not trained."""
    gateway: ListenConfig = ListenConfig()
    """Where the gateway listens for the services of the run."""
    wire: ListenConfig = ListenConfig()
    """Where it listens for agents; nothing but sessions is served there."""
    service: ListenConfig = ListenConfig()
    """Where the service that runs agents listens."""
    url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Base URL of that service on a machine that knows neither Redis nor the run token; None: it
    announces itself, and the local launcher starts one."""
    token_file: Path | None = None
    """File with that service's own token, on its machine and on the gateway's; None is the run's
    token."""

    @model_validator(mode="before")
    @classmethod
    def _read_known(cls, given: Any) -> Any:
        name = given.get("known") if isinstance(given, dict) else None
        if name is None:
            return given
        package, folder = KNOWN
        files = {file.name: file for file in resources.files(package).joinpath(folder).iterdir()}
        file = files.get(f"{name}.toml")
        if file is None:
            names = ", ".join(sorted(one.removesuffix(".toml") for one in files if ".toml" in one))
            raise ValueError(f"known ({name!r:.80}) is none of {names}; set command instead")
        known = tomllib.loads(file.read_text(encoding="utf-8"))
        own = given.get("env") or {}
        if isinstance(own, dict):
            own = {**known.get("env", {}), **own}
        return {**known, **given, "env": own}

    def service_settings(self) -> dict[str, Any]:
        """Return the settings of the tool that runs agents."""
        return self.model_dump(
            mode="json", include=set(AgentSettings.model_fields), exclude_defaults=True
        )
