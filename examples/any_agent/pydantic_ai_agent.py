"""An agent on pydantic-ai."""

from __future__ import annotations

from pydantic_ai import Agent as SdkAgent
from pydantic_ai import Tool
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from agent_r1 import Agent, AgentTask, Model


class PydanticAgent(Agent):
    """Answers a question by searching."""

    async def run(self, task: AgentTask, model: Model) -> str:
        """Let the SDK run its loop, and return its output."""

        async def search(query: str) -> str:
            """Search the corpus."""
            return await model.call_tool("search", query=query)

        provider = OpenAIProvider(base_url=model.base_url, api_key=model.api_key)
        agent = SdkAgent(OpenAIChatModel(model.name, provider=provider), tools=[Tool(search)])
        result = await agent.run(task.prompt[-1].text())
        return str(result.output)
