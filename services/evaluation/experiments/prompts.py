"""Prompts of a matrix: a question of a data set, in the words of a method --> `Task`.

All methods of a family ask for the same form of answer, so that one scorer reads them all. How
services must be set up for a method is said here too, because prompt and set-up belong together.
"""

from __future__ import annotations

import json

from agent_r1.evaluation.experiments.config import Method
from agent_r1.evaluation.experiments.data_sets import CODE, Family
from agent_r1.evaluation.experiments.questions import Question
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import ToolSpec

NATIVE, REACT, CODE_BLOCK = "native", "react", "code_block"
"""Ways to write calls: as the chat template has it, as ReAct's lines, as a fenced block."""
TEXT_FORMATS = {
    REACT: "agent_r1.text.tool_formats.react:ReactFormat",
    CODE_BLOCK: "agent_r1.text.tool_formats.code_block:CodeBlockFormat",
}
"""`env.tool_format` of the ways that no chat template knows."""
TEXT_ENV = "agent_r1.rollout.envs.text_env:TextEnv"

ANSWER = "the final answer in <answer> and </answer>"
PROGRAM = "the program in a block that begins with ```python and ends with ```"
INSTRUCTIONS: dict[Method, str] = {
    "direct": f"Give nothing but {ANSWER}.",
    "chain_of_thought": f"Think step by step. Then give {ANSWER}.",
    "react": f"When you know enough, give {ANSWER}.",
    "tools_single_turn": f"You may call tools in one turn. In the next one, give {ANSWER}.",
    "tools_multi_turn": f"You may call tools in several turns. Then give {ANSWER}.",
}
CODE_INSTRUCTIONS: dict[Method, str] = {
    "direct": f"Give nothing but {PROGRAM}.",
    "chain_of_thought": f"Think step by step. Then give {PROGRAM}.",
    "react": "Test the program, and mend it until all tests pass. Then answer in a sentence.",
    "tools_single_turn": "Hand in the program by one call of the tool code_tests.",
    "tools_multi_turn": (
        "Test the program with the tool code_tests, and mend it until all tests pass. Then answer "
        "in a sentence."
    ),
}
REACT_FORM = """\
Work in turns. Begin each turn with a line `Thought:` and what you think. To use a tool, end the \
turn with these two lines:

Action: NAME
Action Input: ARGUMENTS AS A JSON OBJECT

The next message is what the tool says, after `Observation:`. The tools are:

{tools}"""


def call_style(method: Method, family: Family) -> str:
    """Return how a model writes calls under a method."""
    if method == "react":
        return REACT
    # A program is scored by its tests, so that even one that is only written must be run.
    return CODE_BLOCK if family is CODE and method in ("direct", "chain_of_thought") else NATIVE


def needs_tool(method: Method, family: Family) -> bool:
    """Say whether a method calls the tool of the family."""
    return family is CODE or method not in ("direct", "chain_of_thought")


def max_turns(method: Method, family: Family) -> int | None:
    """Return the most turns of a method; None leaves `env.max_turns`."""
    if method in ("direct", "chain_of_thought"):
        return 1
    if method == "tools_single_turn":
        return 1 if family is CODE else 2  # a program is handed in by the call itself
    return None


def make_task(
    question: Question, set_name: str, method: Method, family: Family, spec: ToolSpec | None
) -> Task:
    """Put a question in the words of a method.

    Args:
        question: of the data set.
        set_name: of the data set.
        method: how the model is asked.
        family: of the data set.
        spec: of the family's tool, which only `react` tells the model about here.
    """
    own = CODE_INSTRUCTIONS if family is CODE else INSTRUCTIONS
    parts = [own[method], question.text]
    if method == "react":
        assert spec is not None  # the plan has none of these cells without the tool
        parts.insert(0, REACT_FORM.format(tools=_described(spec)))
    return Task(
        id=question.id,
        prompt="\n\n".join(parts),
        payload=question.payload,
        tools=[family.tool] if needs_tool(method, family) else [],
        tool_context=question.tool_context,
        metadata={"set": set_name, **({} if question.type is None else {"type": question.type})},
    )


def _described(spec: ToolSpec) -> str:
    parameters = json.dumps(spec.parameters, ensure_ascii=False)
    return f"{spec.name}: {spec.description}\nIts arguments: {parameters}"
