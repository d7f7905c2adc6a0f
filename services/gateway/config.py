"""`[agent]`: an agent that is trained as it is, in place of the loop of `[env]`.

`agent_r1.config.run` joins it with the other tables. The agent's service is a tool service (its
table is `agent.service`), the gateway listens at `agent.gateway`, and agents call `agent.wire`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, model_validator

from agent_r1.runtime.config import ListenConfig, StrictConfig
from agent_r1.runtime.user_code import CODE_PATTERN
from agent_r1_proto.agents import MAX_ARTEFACTS

Pattern = Annotated[str, Field(min_length=1)]


class AgentConfig(StrictConfig):
    """`[agent]`: what runs, what it may do, and what of it is trained."""

    type: Annotated[str, Field(pattern=CODE_PATTERN)] | None = None
    """`module:Name` of an Agent subclass found through `run.plugins`."""
    command: list[str] | None = None
    """Instead of `type`: a program and its arguments. It finds the model in OPENAI_BASE_URL,
    OPENAI_API_KEY and OPENAI_MODEL, and the task in AGENT_R1_TASK, a JSON file."""
    options: dict[str, JsonValue] = {}
    """Further settings of the service that runs agents: limits, `env`, `network`; docs/any-agent.md
    lists them."""
    answer: Literal["message", "output", "file"] = "message"
    """What the answer is: the last message of the policy, what the agent returns or prints, or
    what it leaves in `answer_file`."""
    answer_file: str | None = None
    """Path of that file in the agent's folder."""
    artefacts: Annotated[list[str], Field(max_length=MAX_ARTEFACTS)] = []
    """Paths in the agent's folder whose text goes to the reward."""
    timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Time one attempt may take, in seconds; then it is stopped and ends as TRUNCATED."""
    max_concurrent: Annotated[int, Field(ge=1)] = 128
    """Attempts that one gateway works on at a time."""
    max_requests: Annotated[int, Field(ge=1)] = 200
    """Most requests of one attempt."""
    max_in_flight: Annotated[int, Field(ge=1)] = 16
    """Most requests of one attempt at a time; further ones are answered 429."""
    max_session_tokens: Annotated[int, Field(ge=1)] = 1 << 18
    """Most tokens of one attempt, read and sampled ones together."""
    credit: Literal["all", "main"] = "all"
    """Whose turns are trained: every agent's of an attempt, or those of the main one."""
    thoughts: Literal["keep", "as_client"] = "keep"
    """`keep`: thoughts of earlier turns stay in the context. `as_client`: the policy sees only what
    the agent sends back, which begins a new segment after every thought."""
    volatile: list[Pattern] = []
    """Regular expressions of text that the agent changes in every request, such as a clock in its
    system prompt: it is shown as it was at first."""
    allow_constrained: bool = False
    """Serve requests that force what is written (a grammar, a tool choice), untrained."""
    gateway: ListenConfig = ListenConfig()
    """Where the gateway listens for the services of the run."""
    wire: ListenConfig = ListenConfig()
    """Where it listens for agents; nothing but sessions is served there."""
    service: ListenConfig = ListenConfig()
    """Where the service that runs agents listens."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type is None) == (self.command is None):
            raise ValueError(
                f"agent.type ({self.type!r}) and agent.command ({self.command!r}): set exactly one "
                "of them"
            )
        if (self.answer == "file") != (self.answer_file is not None):
            raise ValueError(
                f'agent.answer_file ({self.answer_file!r}) belongs to agent.answer = "file"; the '
                f"answer is {self.answer!r}"
            )
        return self

    def service_settings(self) -> dict[str, Any]:
        """Return the settings of the tool that runs agents."""
        own = {
            "type": self.type,
            "command": self.command,
            "answer": self.answer,
            "answer_file": self.answer_file,
            "artefacts": self.artefacts,
        }
        return {**self.options, **{name: value for name, value in own.items() if value is not None}}
