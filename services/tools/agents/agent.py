"""`Agent`: a user's agent as a class, which `[agent] type` names.

The service that runs agents (tool.py) gives it a task and a model, once for each attempt. This
module imports no web framework and no SDK, so user code can import it cheaply.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import JsonValue

from agent_r1_proto.agents import AgentTask


@dataclass(frozen=True)
class Model:
    """The model that an agent asks, as SDKs take it."""

    base_url: str
    """Of OpenAI's API, up to and with `/v1`."""
    api_key: str
    name: str
    context: int
    """Tokens that it reads and samples together, at most."""

    async def call_tool(self, tool: str, **arguments: JsonValue) -> str:
        """Let a tool of the run (`[tools.<name>]`) answer a call, and return its text.

        Raises:
            RuntimeError: there is no such tool, or its service failed.
        """
        import httpx  # agents that call none do without

        url = f"{self.base_url.removesuffix('/v1')}/tools/{tool}"
        headers = {"authorization": f"Bearer {self.api_key}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(url, json=arguments, headers=headers)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"tool {tool}: HTTP {answer.status_code}: {answer.text}")
        return str(answer.json()["text"])


class Agent(ABC):
    """One way to solve a task with a model.

    Its module is imported once, and every attempt runs in a fork of that process with an object of
    its own. The environment variables that SDKs read (`OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL`, ...) are set as well.

    Example:
        class Ask(Agent):
            async def run(self, task, model):
                client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
                answer = await client.chat.completions.create(
                    model=model.name,
                    messages=[message.model_dump() for message in task.prompt],
                )
                return answer.choices[0].message.content
    """

    version: str = "1"
    """Recorded with every attempt; change it when the agent works differently."""

    @abstractmethod
    async def run(self, task: AgentTask, model: Model) -> str | None:
        """Work on one task.

        Args:
            task: what is asked.
            model: whom to ask.

        Returns:
            The answer, which counts with `agent.answer = "output"`.

        Raises:
            Exception: whatever it is, the attempt has failed.
        """
