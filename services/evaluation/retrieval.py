"""The retrieval of `naive_rag`: one search with the question, shown as if the model had called it.

Asks the search tool's service over HTTP (`POST /call`), as rollout does, and appends to each task
an assistant message with the call and a tool message with the answer. What is left to the model is
one turn.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx
from pydantic import ValidationError

from agent_r1.evaluation.answer_file import Key, Retrieved, key_of, question_of
from agent_r1.evaluation.config import SEARCH_TOOL
from agent_r1.runtime.http import MAX_DETAIL_CHARS
from agent_r1.runtime.http.token import RunToken, token_headers
from agent_r1_proto.messages import Message
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.tools import CallReply, CallRequest, ToolCall, ToolSpec

QUERY = "query"
"""The argument of the search tool that the question goes into."""
MAX_BATCH = 16
"""Most questions in one request; the service must answer all of them within one timeout."""
MAX_REQUESTS = 4
RETRIES = 4
FIRST_DELAY_S = 0.5
CONNECT_MARGIN_S = 5.0
"""Given to a request beyond the time that the tool has, in seconds."""

M = TypeVar("M", bound=Message)


class RetrievalError(ValueError):
    """The search tool cannot be asked, or did not answer."""


async def retrieve(
    url: str,
    tasks: Sequence[Task],
    *,
    timeout_s: float,
    token: RunToken | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[Key, Retrieved]:
    """Ask the search tool every question once; one request takes at most `timeout_s` seconds.

    Returns:
        The tool's answer by set and id. An error of the tool's own (a query that is too long) is
        an answer: the model reads it, as in every other method.

    Raises:
        RetrievalError: the service is not a search tool, or did not answer.
    """
    found: dict[Key, Retrieved] = {}
    slots = asyncio.Semaphore(MAX_REQUESTS)
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=timeout_s + CONNECT_MARGIN_S,
        trust_env=False,
        headers=token_headers(token),
    ) as http:
        spec = await _ask(lambda: http.get("/spec"), ToolSpec, url)
        check_spec(spec, f"the service at {url}")
        size = min(spec.max_batch, MAX_BATCH)

        async def search(batch: Sequence[Task]) -> None:
            async with slots:
                found.update(await _search(http, url, batch, timeout_s))
            if on_progress is not None:
                on_progress(len(found), len(tasks))

        try:
            async with asyncio.TaskGroup() as group:
                for start in range(0, len(tasks), size):
                    group.create_task(search(tasks[start : start + size]))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
    return found


def check_spec(spec: ToolSpec, where: str) -> None:
    """Refuse a tool that cannot be searched with a question; `where` names its place.

    Raises:
        RetrievalError: it has another name or other arguments, or keeps sessions.
    """
    arguments = spec.parameters.get("properties", {})
    if spec.name != SEARCH_TOOL or QUERY not in arguments or spec.sessions:
        raise RetrievalError(
            f"{where} is the tool {spec.name!r} with the arguments "
            f"{sorted(arguments)}{' and sessions' if spec.sessions else ''}; naive_rag needs the "
            f"tool {SEARCH_TOOL!r} with the argument {QUERY!r} and without sessions: correct "
            f"tools.{SEARCH_TOOL}, or choose another --method"
        )


async def _search(
    http: httpx.AsyncClient, url: str, tasks: Sequence[Task], timeout_s: float
) -> dict[Key, Retrieved]:
    queries = [question_of(task) for task in tasks]
    calls = [
        ToolCall(
            name=SEARCH_TOOL,
            arguments={QUERY: query},
            rollout_id="/".join(("naive_rag", *map(str, key_of(task)))),
            turn=0,
            tool_context=task.tool_context,
            timeout_s=timeout_s,
        )
        for task, query in zip(tasks, queries, strict=True)
    ]
    body = CallRequest(calls=calls).model_dump_json()
    headers = {"content-type": "application/json"}
    reply = await _ask(lambda: http.post("/call", content=body, headers=headers), CallReply, url)
    if len(reply.results) != len(tasks):
        raise RetrievalError(f"{url} gave {len(reply.results)} results for {len(tasks)} calls")
    return {
        key_of(task): Retrieved(
            query=query, status=result.status, text=result.text(), version=reply.version
        )
        for task, query, result in zip(tasks, queries, reply.results, strict=True)
    }


async def _ask(send: Callable[[], Awaitable[httpx.Response]], model: type[M], url: str) -> M:
    """Send a request, again after an outage, and parse the reply."""
    problem = ""
    for attempt in range(RETRIES + 1):
        if attempt > 0:
            await asyncio.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
        try:
            response = await send()
        except httpx.TransportError as exc:
            problem = f"{type(exc).__name__}: {exc}"
            continue
        code = response.status_code
        if code < 500 and code != httpx.codes.TOO_MANY_REQUESTS:
            return _parse(response, model, url)
        problem = f"it answered {code}: {response.text[:MAX_DETAIL_CHARS]}"
    raise RetrievalError(
        f"the search tool at {url} did not answer in {RETRIES + 1} attempts: {problem}; see its log"
    )


def _parse(response: httpx.Response, model: type[M], url: str) -> M:
    if response.status_code != httpx.codes.OK:
        raise RetrievalError(
            f"the search tool at {url} answered {response.status_code}: "
            f"{response.text[:MAX_DETAIL_CHARS]}"
        )
    try:
        return model.model_validate_json(response.content)
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]["msg"]
        raise RetrievalError(
            f"the reply of the search tool at {url} does not parse: {first}"
        ) from exc


def with_passages(task: Task, retrieved: Retrieved) -> Task:
    """Return the task with the retrieval at its end, as a call of the model and its result."""
    call = {"name": SEARCH_TOOL, "arguments": {QUERY: retrieved.query}}
    said = f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    shown = [
        ChatMessage(role="assistant", content=said),
        ChatMessage(role="tool", content=retrieved.text),
    ]
    return task.model_copy(update={"prompt": [*task.messages(), *shown]})


def check_offered(tasks: Sequence[Task]) -> None:
    """Refuse tasks that are not offered the search tool.

    Raises:
        RetrievalError: there is one; it is named.
    """
    for task in tasks:
        if task.tools is not None and SEARCH_TOOL not in task.tools:
            raise RetrievalError(
                f"task {task.id!r} offers the tools {task.tools} and naive_rag needs "
                f"{SEARCH_TOOL!r}; add it to the task's tools, or choose another --method"
            )
