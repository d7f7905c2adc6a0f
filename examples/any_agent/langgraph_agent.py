"""An agent on LangGraph: a loop of model and tools, with LangChain's client."""

from __future__ import annotations

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import SecretStr

from agent_r1 import Agent, AgentTask, Model

MAX_STEPS = 11
"""Five turns of the model, and the tools between them."""


class GraphAgent(Agent):
    """Answers a question by searching."""

    async def run(self, task: AgentTask, model: Model) -> str:
        """Let the graph run to its end, and return its last message."""

        @tool
        async def search(query: str) -> str:
            """Search the corpus."""
            return await model.call_tool("search", query=query)

        chat = ChatOpenAI(
            model=model.name, base_url=model.base_url, api_key=SecretStr(model.api_key)
        )
        graph = create_react_agent(chat, [search])
        asked = {"messages": [("user", task.prompt[-1].text())]}
        result = await graph.ainvoke(asked, {"recursion_limit": MAX_STEPS})
        return str(result["messages"][-1].content)
