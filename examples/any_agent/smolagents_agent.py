"""An agent on smolagents, which calls tools as OpenAI's API does, and answers by a tool as well."""

from __future__ import annotations

import asyncio

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

from agent_r1 import Agent, AgentTask, Model

MAX_STEPS = 5


class SmolAgent(Agent):
    """Answers a question by searching."""

    async def run(self, task: AgentTask, model: Model) -> str:
        """Let the SDK run its loop in a thread, since it is not async, and return its answer."""

        @tool
        def search(query: str) -> str:
            """Search the corpus.

            Args:
                query: what to look for.
            """
            return asyncio.run(model.call_tool("search", query=query))

        # Its own choice, "required", forces calls, and what is forced cannot be trained.
        served = OpenAIServerModel(
            model.name, api_base=model.base_url, api_key=model.api_key, tool_choice="auto"
        )
        agent = ToolCallingAgent([search], served, max_steps=MAX_STEPS, verbosity_level=0)
        return str(await asyncio.to_thread(agent.run, task.prompt[-1].text()))
