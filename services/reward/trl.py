"""Reward functions written for TRL: `trl_reward` makes a component of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from agent_r1_proto.rewards import ScoreRequest

TrlFunction = Callable[..., Sequence[float | None]]


def trl_reward(function: TrlFunction, *, messages: bool = True) -> Callable[[ScoreRequest], float]:
    """Return a component that calls a reward function of TRL's `GRPOTrainer`.

    The function is called as TRL calls it, with lists of one: `prompts`, `completions`, and the
    payload of the task as columns, by name. A None that it returns counts nothing, as in TRL.

    Args:
        function: `f(prompts, completions, **columns) -> list[float]`.
        messages: prompts and completions are lists of messages, as TRL has them for conversational
            data; False gives texts: the user's last message, and all that the model wrote.

    Raises:
        ValueError: when it is called: it asks for a column that the payload does not have, or it
            does not return one number per completion.
    """
    name = getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    required = {one.name for one in parameters if one.default is inspect.Parameter.empty} & names

    def component(request: ScoreRequest) -> float:
        columns = {
            **{column: [value] for column, value in request.payload.items()},
            "prompts": [_prompt(request, messages)],
            "completions": [_completion(request, messages)],
        }
        missing = sorted(required - columns.keys())
        if missing:
            raise ValueError(
                f"{name} asks for the column {missing[0]!r}, and the payload has "
                f"{', '.join(sorted(request.payload)) or 'nothing'}; add it to the payload of "
                "every task"
            )
        given = columns if takes_all else {k: v for k, v in columns.items() if k in names}
        values = function(**given)
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != 1:
            raise ValueError(
                f"{name} returned {values!r:.80}; a reward function of TRL returns a list of one "
                "number per completion"
            )
        return 0.0 if values[0] is None else float(values[0])

    component.__name__ = name
    component.__doc__ = function.__doc__
    return component


def _prompt(request: ScoreRequest, messages: bool) -> Any:
    if messages:
        return [{"role": m.role, "content": m.text()} for m in request.prompt]
    return next((m.text() for m in reversed(request.prompt) if m.role == "user"), "")


def _completion(request: ScoreRequest, messages: bool) -> Any:
    texts = [turn.text for turn in request.turns]
    return [{"role": "assistant", "content": t} for t in texts] if messages else "\n".join(texts)
