"""One trajectory as its page shows it: texts that fit, the tree of its segments, coloured tokens.

store.py --StoredTrajectory--> here --> trajectory.html. Texts are those of models and tools:
control characters are spelled out, and a page holds so much of them; the rest is in the JSON.

Dimension key: T = tokens in one trajectory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

from agent_r1.runs.store import Tokens
from agent_r1.runtime.unicode import escaped, escaped_line, repair_text

TEXT_BYTES = 90_000
"""Bytes of texts on a page, as HTML."""
OPEN_CHARACTERS = 2_000
"""Characters of a text that are shown before somebody opens the rest."""
EACH_BYTES = 300
"""Bytes of HTML around a text, counted with it."""
TOKENS = 500
"""Tokens on a page."""
TOKEN_CHARACTERS = 40
"""Most characters of a token that are shown."""
COLOURS = 8
"""Colours of versions, which then begin again."""
Colour = Literal["mask", "logprob", "entropy", "advantage", "version", "ratio"]


class Texts:
    """The texts of a page: shows each, until they fill the page.

    Args:
        left: bytes of the page for them.
    """

    def __init__(self, left: int = TEXT_BYTES) -> None:
        self._left = left

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another text."""
        return self._left <= 0

    def __call__(self, value: Any) -> Markup:
        """Render a text, or another JSON value."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
        text = escaped(repair_text(text))
        size = len(escape(text).encode())
        kept = text if size <= self._left else text[: max(0, self._left) // 5]  # &quot; has 5
        self._left -= min(size, 5 * len(kept)) + EACH_BYTES
        html = Markup('<pre dir="auto">{}</pre>').format(kept[:OPEN_CHARACTERS])
        if rest := kept[OPEN_CHARACTERS:]:
            html += Markup(
                '<details><summary>{:,} more characters</summary><pre dir="auto">{}</pre></details>'
            ).format(len(rest), rest)
        if cut := len(text) - len(kept):
            html += Markup('<p class="hint">{:,} more characters are in the JSON.</p>').format(cut)
        return html


TURN = {
    **dict.fromkeys(("start", "end", "process_reward", "well_formed", "thought", "said")),
    "finish_reason": "",
}
"""Values of what turns of older versions lack."""
CALL = {"version": "", "instance": "", "attempt": 0, "latency_ms": 0.0, "text": "", "error": ""}
"""Values of what calls of older versions lack."""


def filled(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record of any version with what the page asks for, and its replies in two kinds.

    A reply that is the result of its call, as the call has it, is left out. Turns have `agent`, the
    name of who wrote them, where there are several agents; "" where there is one.
    """
    turns: list[dict[str, Any]] = []
    agents = [one["name"] for one in record.get("lineages") or ()]
    for turn in record["turns"]:
        agent = agents[turn.get("lineage", 0)] if len(agents) > 1 else ""
        calls = [{"process_reward": None, **CALL, **call} for call in turn["calls"]]
        results = dict(enumerate(call["text"] for call in calls))
        replies = [
            one for one in turn.get("replies") or () if one["content"] != results.get(one["call"])
        ]
        turns.append({**TURN, **turn, "agent": agent, "calls": calls, "replies": replies})
    return {"reward": None, "payload": {}, "version_spans": [], **record, "turns": turns}


@dataclass(frozen=True)
class Segment:
    """Tokens [start, end) that the model saw as one sequence, and the turns in it."""

    number: int
    start: int
    end: int
    turns: list[int]


@dataclass(frozen=True)
class Agent:
    """One lineage: its segments, and the agents that it began."""

    name: str
    excluded: str
    """Reason why it is not trained; "" where it is."""
    segments: list[Segment]
    children: list[Agent]


def agents_of(record: Mapping[str, Any]) -> list[Agent]:
    """Return the agents that no other one began; one agent where the record names none."""
    starts = [0, *record.get("segment_starts", [])]
    end = record.get("num_tokens", 0)
    segments = [
        Segment(
            number,
            a,
            b,
            [n for n, t in enumerate(record["turns"]) if a <= (t.get("start") or 0) < b],
        )
        for number, (a, b) in enumerate(pairwise([*starts, end]))
    ]
    lineages = record.get("lineages") or [{"name": "main", "first_segment": 0}]
    firsts = [lineage["first_segment"] for lineage in lineages]
    agents = [
        Agent(one["name"], one.get("excluded", ""), segments[first:last], [])
        for one, (first, last) in zip(lineages, pairwise([*firsts, len(segments)]), strict=True)
    ]
    roots: list[Agent] = []
    for agent, lineage in zip(agents, lineages, strict=True):
        parent = lineage.get("parent")
        (roots if parent is None else agents[parent].children).append(agent)
    return roots


@dataclass(frozen=True)
class Shade:
    """A token: its text, its class in the style sheet, its value."""

    text: str
    style: str
    value: str


def shades(
    tokens: Tokens, texts: Sequence[str], spans: Iterable[Sequence[int]], colour: Colour, start: int
) -> list[Shade]:
    """Colour tokens.

    Args:
        tokens: of a trajectory.
        texts: of the tokens from `start` on, as many as are shown.
        spans: version, first token and end of each span of one version.
        colour: what the colours tell.
        start: first token that is shown.
    """
    styles, values = _coloured(tokens, spans, colour)
    learner = tokens.learner_logprobs if colour in ("ratio", "entropy") else None
    if learner is not None:
        for place in np.flatnonzero((learner == 0.0) & (tokens.rollout_logprobs != 0.0)):
            styles[place], values[place] = "read", "the learner was not asked"
    return [
        Shade(
            _spelled(text),
            styles[place] if tokens.action_mask[place] else "read",
            values[place] if tokens.action_mask[place] else "not sampled",
        )
        for place, text in enumerate(texts, start)
    ]


def _spelled(text: str) -> str:
    line = escaped_line(repair_text(text))[:TOKEN_CHARACTERS]
    return f"{line}\n" if text.endswith("\n") else line


def _coloured(
    tokens: Tokens, spans: Iterable[Sequence[int]], colour: Colour
) -> tuple[list[str], list[str]]:
    """Return class and value of every token."""
    count = len(tokens.token_ids)
    if colour == "mask":
        return ["high1"] * count, ["sampled"] * count
    if colour == "version":
        versions = np.zeros(count, int)
        for version, start, end in spans:
            versions[start:end] = version
        ranks = np.unique(versions[tokens.action_mask]).tolist()
        styles = [f"v{ranks.index(v) % COLOURS}" if v in ranks else "" for v in versions.tolist()]
        return styles, [f"version {v}" for v in versions.tolist()]
    if colour == "logprob":
        values = tokens.rollout_logprobs
        names = ["low3", "low2", "low1", "mid", "high1"]
        places = np.digitize(np.exp(values), [0.01, 0.1, 0.5, 0.9])
        return _pick(names, places), [f"{v:.3f}, p = {np.exp(v):.3g}" for v in values.tolist()]
    names = ["low3", "low2", "low1", "mid", "high1", "high2", "high3"]
    if colour == "entropy":
        values = _required(tokens.entropies, "entropies; the learner was not asked for them")
        places = np.digitize(values, [0.1, 0.5, 1.0, 2.0])
        return _pick(names[3:] + names[2:3], places), [f"entropy {v:.3f}" for v in values.tolist()]
    if colour == "advantage":
        values = _required(tokens.advantages, "advantages; it was not trained")
        largest = float(np.abs(values).max(initial=0.0)) or 1.0
        places = np.digitize(values / largest, [-2 / 3, -1 / 3, -1e-9, 1e-9, 1 / 3, 2 / 3])
        return _pick(names, places), [f"advantage {v:.4g}" for v in values.tolist()]
    learner = _required(tokens.learner_logprobs, "log-probabilities of the learner")
    ratios = np.exp(learner - tokens.rollout_logprobs)
    places = np.digitize(ratios, [0.5, 0.8, 0.95, 1.05, 1.25, 2.0])
    return _pick(names, places), [f"ratio {ratio:.4g}" for ratio in ratios.tolist()]


def _pick(names: Sequence[str], places: npt.NDArray[np.int_]) -> list[str]:
    return np.array(names)[places].tolist()


def _required(values: npt.NDArray[np.float32] | None, what: str) -> npt.NDArray[np.float32]:
    if values is None:
        raise ValueError(f"this trajectory has no {what}; choose another colour")
    return values


LEGENDS: dict[Colour, list[tuple[str, str]]] = {
    "mask": [("high1", "sampled"), ("read", "prompt and results")],
    "logprob": [
        *(("low3", "p below 0.01"), ("low2", "to 0.1"), ("low1", "to 0.5"), ("mid", "to 0.9")),
        ("high1", "above"),
    ],
    "entropy": [
        *(("mid", "below 0.1 nats"), ("high1", "to 0.5"), ("high2", "to 1"), ("high3", "to 2")),
        ("low1", "above"),
    ],
    "advantage": [("low3", "lowest"), ("mid", "0"), ("high3", "highest")],
    "version": [],
    "ratio": [
        *(("low3", "below 0.5"), ("low2", "to 0.8"), ("low1", "to 0.95"), ("mid", "to 1.05")),
        *(("high1", "to 1.25"), ("high2", "to 2"), ("high3", "above")),
    ],
}
"""Classes and their meanings, by colour."""
