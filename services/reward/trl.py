"""Reward functions written for TRL: `trl_reward` makes a component of one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from agent_r1.reward.components import READS_TOKENS, Component
from agent_r1.text.chat_template import template_message
from agent_r1_proto.rewards import ScoreRequest

logger = logging.getLogger(__name__)

TrlFunction = Callable[..., Any]
"""Returns one number per completion: a list, tuple, array or tensor; or is async."""
OF_THE_TRAINER = ("trainer_state", "environments", "args", "model", "processing_class")
"""Arguments that TRL's trainer has, and this system does not."""


def trl_reward(function: TrlFunction, *, messages: bool = True) -> Component:
    """Return a component that calls a reward function of TRL's `GRPOTrainer`.

    The function is called as TRL calls it, with lists of one: `prompts`, `completions`,
    `completion_ids` (the tokens that the model sampled), and the payload of the task as columns, by
    name. An `async` function is awaited. A None that it returns counts nothing, as in TRL. What it
    gives to `log_metric` and `log_extra` is in the log of the reward service, at level DEBUG.

    Args:
        function: `f(prompts, completions, **columns) -> list[float]`.
        messages: prompts and completions are lists of messages, as TRL has them for conversational
            data; False gives texts: the user's last message, and all that the model wrote.

    Raises:
        ValueError: when it is called: it asks for a column that the payload does not have, for what
            only TRL's trainer has, or for tokens where there is text alone; or it does not return
            one number per completion.
    """
    name = getattr(function, "__name__", repr(function))
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    names = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_KEYWORD}
    required = {one.name for one in parameters if one.default is inspect.Parameter.empty} & names

    def component(request: ScoreRequest) -> float | Awaitable[float]:
        columns = _columns(request, messages)
        missing = sorted(required - columns.keys() - LOGS.keys())
        if missing:
            raise ValueError(f"{name} {_why_missing(missing[0], request.payload)}")
        given = {k: v for k, v in (LOGS | columns).items() if k in names}
        values = function(**(columns | given if takes_all else given))
        return _awaited(name, values) if inspect.isawaitable(values) else _number(name, values)

    component.__name__ = name
    component.__doc__ = function.__doc__
    setattr(component, READS_TOKENS, takes_all or "completion_ids" in names)
    return component


def _columns(request: ScoreRequest, messages: bool) -> dict[str, Any]:
    """Return what TRL's trainer gives; tokens, where the interaction has them."""
    columns: dict[str, Any] = {
        **{column: [value] for column, value in request.payload.items()},
        "prompts": [_prompt(request, messages)],
        "completions": [_completion(request, messages)],
    }
    sampled = [token for turn in request.turns for token in turn.token_ids]
    return {**columns, "completion_ids": [sampled]} if sampled else columns


def _why_missing(name: str, payload: Mapping[str, Any]) -> str:
    if name == "completion_ids":
        return (
            "asks for completion_ids, and this interaction is text without tokens; score the "
            "trajectories of a run, or compute the reward from completions"
        )
    if name in OF_THE_TRAINER:
        return (
            f"asks for {name}, which is of TRL's trainer, not a column; give the parameter a "
            "default, or remove it"
        )
    return (
        f"asks for the column {name!r}, and the payload has "
        f"{', '.join(sorted(payload)) or 'nothing'}; add it to the payload of every task"
    )


async def _awaited(name: str, values: Awaitable[Any]) -> float:
    return _number(name, await values)


def _number(name: str, values: Any) -> float:
    """Return the number in a list, array or tensor of one."""
    listed: Any = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(listed, Sequence) and not isinstance(listed, str | bytes) and len(listed) == 1:
        with suppress(TypeError, ValueError):
            return 0.0 if listed[0] is None else float(listed[0])
    raise ValueError(
        f"{name} returned {values!r:.80}; a reward function of TRL returns a list of one number "
        "per completion"
    )


def _log_metric(name: str, value: float) -> None:
    logger.debug("metric of a reward function name=%s value=%s", name, value)


def _log_extra(column: str, values: Sequence[Any]) -> None:
    logger.debug("column of a reward function name=%s values=%r", column, values)


LOGS = {"log_metric": _log_metric, "log_extra": _log_extra}
"""Given to functions that name them."""


def _prompt(request: ScoreRequest, messages: bool) -> Any:
    if messages:
        return [template_message(m, str) for m in request.prompt]
    return next((m.text() for m in reversed(request.prompt) if m.role == "user"), "")


def _completion(request: ScoreRequest, messages: bool) -> Any:
    texts = [turn.text for turn in request.turns]
    return [{"role": "assistant", "content": t} for t in texts] if messages else "\n".join(texts)
