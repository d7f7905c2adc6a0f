"""A program on openai-agents as one writes it: a shell, another agent to ask, and a session.

    python shell_agent.py chat|responses [compact]

Over Responses, `compact` lets the SDK compact the session when the task is done, and asks again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
)
from agents.memory import OpenAIResponsesCompactionSession
from openai import AsyncOpenAI

MAX_TURNS = 20
WIRES = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def bash(command: str) -> str:
    """Runs a command in a shell, and returns what it prints."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


async def main(wire: str, *how: str) -> None:
    """Work on the task of AGENT_R1_PROMPT, and print the answer."""
    client = AsyncOpenAI()
    model = WIRES[wire](model=os.environ["OPENAI_MODEL"], openai_client=client)
    looker = Agent(name="looker", instructions="You look things up.", model=model, tools=[bash])
    look = looker.as_tool(tool_name="look", tool_description="Asks an agent that looks things up.")
    mender = Agent(name="mender", instructions="You mend.", model=model, tools=[bash, look])
    questions = [os.environ["AGENT_R1_PROMPT"]]
    session = SQLiteSession("one")
    if how:
        questions.append("Is it mended?")
        left = iter(questions[1:])
        session = OpenAIResponsesCompactionSession(
            "one",
            session,
            client=client,
            should_trigger_compaction=lambda _: next(left, None) is not None,
        )
    answers = [
        await Runner.run(mender, question, session=session, max_turns=MAX_TURNS)
        for question in questions
    ]
    sys.stdout.write(str(answers[-1].final_output))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
