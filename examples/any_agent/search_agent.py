"""An agent on openai-agents, as one writes it for any model: it knows nothing of training.

`run.toml` names `SearchAgent`, whose policy answers where OpenAI's API would; `search` is the tool
of the run, and could be any function.
"""

from __future__ import annotations

from agents import Agent as SdkAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from openai import AsyncOpenAI

from agent_r1 import Agent, AgentTask, Model

MAX_TURNS = 5


class SearchAgent(Agent):
    """Answers a question by searching."""

    wire = OpenAIChatCompletionsModel

    async def run(self, task: AgentTask, model: Model) -> str:
        """Let the SDK run its loop, and return its final output."""

        @function_tool
        async def search(query: str) -> str:
            """Searches the corpus."""
            return await model.call_tool("search", query=query)

        client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
        agent = SdkAgent(
            name="searcher",
            model=self.wire(model=model.name, openai_client=client),
            model_settings=ModelSettings(parallel_tool_calls=False),
            tools=[search],
        )
        result = await Runner.run(agent, task.prompt[-1].text(), max_turns=MAX_TURNS)
        return str(result.final_output)


class ResponsesAgent(SearchAgent):
    """The same over OpenAI's Responses."""

    wire = OpenAIResponsesModel
