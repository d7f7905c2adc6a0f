"""Outcomes of a tool call that went wrong: one table.

Two kinds of things go wrong. What the model or the tool itself did is answered to the model as
text, and the trajectory continues (runner.py, `status` of the call record). What a service or the
network did is an outage: no token of it is trained on, and the attempt ends as FAILED.

| what happened | call status | becomes |
|---|---|---|
| the call does not parse, or its arguments break the schema | malformed | text for the model |
| a tool that is not offered | unknown_tool | text for the model |
| more calls in a turn than `env.max_calls_per_turn` | over_limit | text for the model |
| the tool's own error answer, an exception in the user's `call` | error | text for the model |
| an outage, by its kind: see OUTAGES | failed | the attempt is FAILED and tried again |
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outage:
    """How one kind of outage is treated."""

    means: str
    resend: bool
    """Send the call again, within its deadline."""
    may_have_run: bool = True
    """The tool may have carried the call out: a tool that is not idempotent is not asked again."""
    free_attempt: bool = False
    """The next attempt does not count against `max_attempts`: nothing is wrong with the sample."""


OUTAGES: dict[str, Outage] = {
    "tool_refused": Outage("no connection could be made", resend=True, may_have_run=False),
    "tool_unreachable": Outage("the connection was lost under way", resend=True),
    "tool_full": Outage("429: no free place to run in", resend=True, may_have_run=False),
    "tool_busy": Outage("503: overloaded, draining or down", resend=True, may_have_run=False),
    "tool_broken": Outage(
        "501: the tool's own code is wrong (`call` returned no result, or `open` raised)",
        resend=False,
    ),
    "tool_http_5xx": Outage("another 5xx answer", resend=True),
    "tool_http_4xx": Outage("the service does not take the request", resend=False),
    "tool_absent": Outage("no instance is announced", resend=True, may_have_run=False),
    "tool_moved": Outage("another version answered at this address", resend=True),
    "tool_bad_reply": Outage("an answer that does not parse", resend=False),
    "tool_too_large": Outage("an answer over the size limit", resend=False),
    "tool_timeout": Outage("no answer within env.tool_timeout_s", resend=False),
    "tool_version_gone": Outage(
        "the last instance of the pinned version is gone", resend=False, free_attempt=True
    ),
    "tool_session_lost": Outage(
        "the instance that holds the session is gone, or has closed it",
        resend=False,
        free_attempt=True,
    ),
}
"""Every kind of outage; a trajectory's `reason` begins with one."""


class RequestError(Exception):
    """A request that gave no usable answer, or could not be made; `kind` is a key of OUTAGES."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.outage = OUTAGES[kind]


MAX_FREE_ATTEMPTS = 20
"""Attempts of one sample that do not count, at most: instances that die all the time do count."""


def is_free(reason: str) -> bool:
    """Whether an attempt that FAILED for this reason does not count against `max_attempts`."""
    outage = OUTAGES.get(reason.partition(":")[0])
    return outage is not None and outage.free_attempt
