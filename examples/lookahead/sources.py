"""The tools, which answer from three kinds of sources, and the environment, which counts calls.

`run.toml` names the classes; the generator and the tests call them directly.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from policies import NOTHING

from agent_r1 import Tool, ToolEnv
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn
from agent_r1.runtime.files.state import split_lines
from agent_r1.tools.base import Arguments, CallContext
from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.tasks import Task

FOLDER = Path(__file__).parent


class Said(StrictMessage):
    """One line of a tool's file."""

    key: str
    """The arguments of the call."""
    text: str
    """What is answered."""


def text_parameters(*names: str) -> dict[str, Any]:
    """Return the JSON Schema of arguments that are texts and all required."""
    return {
        "type": "object",
        "properties": {name: {"type": "string"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }


class _Source(Tool):
    """A tool that answers from a file.

    Args:
        data: folder of the world's files; a relative one is found beside this file.
    """

    file: ClassVar[str]

    def __init__(self, data: str = "data") -> None:
        self._path = FOLDER / data / self.file

    async def start(self) -> None:
        """Read the file."""
        await asyncio.to_thread(self.load)

    def load(self) -> None:
        """Read the file."""
        lines = split_lines(self._path.read_text(encoding="utf-8"))
        self._texts = {said.key: said.text for said in map(Said.model_validate_json, lines)}

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        """Return what the source says."""
        return self.look_up(arguments)

    def look_up(self, arguments: Arguments) -> str:
        """Return what the source says; the key of a text is the arguments in their order."""
        words = (str(arguments[name]).strip() for name in self.parameters["properties"])
        return self._texts.get(" ".join(words), NOTHING)


class Rumour(_Source):
    """Says what somebody claims."""

    name = "rumour"
    description = "Says what people claim about somebody."
    parameters = text_parameters("query")
    file = "rumours.jsonl"


class Register(_Source):
    """Says what a book knows, or on which page that stands."""

    name = "register"
    description = "Looks somebody up in a book: parish, guild, college or court."
    parameters = text_parameters("book", "query")
    file = "register.jsonl"


class Page(_Source):
    """Returns one page by its id."""

    name = "page"
    description = "Returns the page with an id."
    parameters = text_parameters("id")
    file = "pages.jsonl"


class AllowedCalls(ToolEnv):
    """Ends an interaction at the call that is one too many.

    Args:
        task: the question; its payload has `calls`, the number of calls that are allowed.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        payload: Any = task.payload
        self._left: int = payload["calls"]

    async def step(self, turn: ModelTurn, results: Sequence[CallResult]) -> EnvStep:
        """Count the calls."""
        self._left -= len(results)
        if self._left < 0:
            return EnvStep(done=True, reason="too_many_calls")
        return await super().step(turn, results)
