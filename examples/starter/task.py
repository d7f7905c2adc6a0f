"""The task: one tool, what its answers mean, and what an answer is worth.

`run.toml` names the three classes and functions below; `data/` has the questions and the facts.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

from agent_r1 import Tool, ToolEnv

FACTS = Path(__file__).with_name("data") / "facts.jsonl"


class Lookup(Tool):
    """What the model can do: look up facts in a file.

    It is called "search" because the small model of this folder has learned that name. A larger
    model reads name, description and parameters in its prompt, so call yours what it does.
    """

    name = "search"
    description = "Looks up people, cities, novels and companies. Returns the two best passages."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "a name and what is asked"}},
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, top_k=2):
        self.top_k = top_k  # run.toml sets it: [tools.search] settings
        with FACTS.open(encoding="utf-8") as file:
            self.facts = [json.loads(line) for line in file]

    async def call(self, arguments, context):
        wanted = words(arguments["query"])

        def score(fact):
            return 2 * len(wanted & words(fact["title"])) + len(wanted & words(fact["text"]))

        best = sorted(self.facts, key=score, reverse=True)
        return "\n".join(f" {fact['text']}" for fact in best[: self.top_k])


class AskOnce(ToolEnv):
    """What a turn leads to: the tool's answer, but a repeated question gets a hint instead.

    A turn without a call is the answer and ends the interaction. One instance lives as long as one
    interaction, so it may keep what it needs in attributes.
    """

    def __init__(self, task):
        super().__init__(task)
        self.asked = set()

    async def step(self, turn, results):
        step = await super().step(turn, results)
        seen = []
        for result, text in zip(results, step.observations, strict=False):
            question = str(result.arguments)
            seen.append("You have asked that before." if question in self.asked else text)
            self.asked.add(question)
        return replace(step, observations=seen)


def correct(request):
    """What the whole interaction is worth: 1.0 for the right answer, else 0.0."""
    return float(request.turns[-1].answer == request.payload["answer"])


def words(text):
    """Return the words of a text."""
    return set(re.findall(r"\w+", text.lower()))
