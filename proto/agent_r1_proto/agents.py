"""Attempts of agents: what the gateway asks of the agents' service, and how one ended.

That service is called like a tool: gateway --POST /call, `tool_context` is an `AgentAttempt`-->
agents; the result has an `AgentEnd` as its data. Neither payload nor run token is in it: an agent
is the model's side.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue

from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.tasks import ChatMessage

AGENTS = "agents"
"""Name under which the service announces itself in the pool of tools."""
AgentExit = Literal["ok", "failed", "timeout", "not_started", "lost"]
"""End of an agent: by itself, with an error of its own, at the time limit; or it never began, or
was lost by no fault of its own."""
MAX_OUTPUT_CHARS = 64 << 10
"""Most characters of an agent's answer, of its output, and of one artefact."""
MAX_ARTEFACTS = 16


class AgentTask(StrictMessage):
    """Part of a task that an agent sees."""

    id: str
    prompt: Annotated[list[ChatMessage], Field(min_length=1)]
    """The dialogue of the task; its last message is what is asked."""
    metadata: dict[str, JsonValue] = {}


class AgentAttempt(StrictMessage):
    """One attempt that an agent is to make."""

    task: AgentTask
    url: Annotated[str, Field(pattern=r"^https?://")]
    """Base URL of the session's model at the gateway, up to and with `/v1`."""
    key: Annotated[str, Field(min_length=16)]
    """Credential of the session; it ends with the session."""
    model: str
    """Name of the model there."""
    context: Annotated[int, Field(ge=1)]
    """Tokens that the model reads and samples together, at most."""
    timeout_s: Annotated[float, Field(gt=0)]
    """Time from its start after which the agent is stopped, in seconds."""


class AgentEnd(StrictMessage):
    """End of an attempt, as the agent's side saw it."""

    exit: AgentExit
    answer: str | None = None
    """Answer of the agent, where `agent.answer` says that it gives one itself; None: it gave
    none."""
    output: str = ""
    """The end of what it printed, for rewards and logs."""
    error: str = ""
    """Why it failed or did not start, in one line."""
    artefacts: dict[str, str] = {}
    """Files that it left and `agent.artefacts` names: the text of each by its path."""
    reward: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """What a program that is started elsewhere gives its work, for the component `reported`."""
    latency_s: Annotated[float, Field(ge=0)] = 0.0
    """Time from the agent's start to its end, in seconds."""


class AttemptWanted(StrictMessage):
    """Question for an attempt: body of `POST /attempts`, by a program that is started elsewhere."""

    wait_s: Annotated[float, Field(ge=0, le=60)] = 30.0
    """Time to wait for one, in seconds."""


class OpenAttempt(StrictMessage):
    """One attempt that such a program is to make, or makes."""

    id: str
    attempt: AgentAttempt
    """With the address of the gateway that has its session now; it may change."""


class AttemptReport(StrictMessage):
    """What such a program came to: body of `POST /attempts/{id}/end`."""

    exit: Literal["ok", "failed", "given_back"] = "ok"
    """`failed` is the agent's fault and is scored; an attempt that is given back is made again."""
    answer: Annotated[str, Field(max_length=MAX_OUTPUT_CHARS)] | None = None
    reward: Annotated[float, Field(allow_inf_nan=False, strict=True)] | None = None
    """What its own tests gave; read by the reward component `reported`."""
    output: Annotated[str, Field(max_length=MAX_OUTPUT_CHARS)] = ""
    error: Annotated[str, Field(max_length=1000)] = ""
    artefacts: Annotated[dict[str, str], Field(max_length=MAX_ARTEFACTS)] = {}
