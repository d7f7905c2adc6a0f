"""Result files: one JSON line a question, written as answers come, in any order.

`main.py` appends to one; `summary.py` and `comparison.py` read it. Beside `scores.jsonl` lies
`scores.jsonl.meta.json`, which says what was asked of whom, so that an interrupted evaluation goes
on only with its own file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field, JsonValue, ValidationError, computed_field

from agent_r1.evaluation.config import Method
from agent_r1.runtime.evaluation_client import ATTEMPT, EvalResult
from agent_r1.runtime.files.writing import write_atomically
from agent_r1_proto.messages import Message
from agent_r1_proto.parts import shown_text
from agent_r1_proto.rewards import ScoreTurn, measured_components, score_turns
from agent_r1_proto.tasks import ChatMessage, Task
from agent_r1_proto.trajectory import ANSWERED, Probe, Status, Trajectory

Key = tuple[str, str, int]
"""Key of an answer: set and id of the question, and the number of the attempt at it."""
Facts = Mapping[str, JsonValue]
"""Facts of an evaluation, by dotted name: `method`, `policy`, `sets.hotpotqa`, `env.max_turns`."""
COMPONENTS = "reward.components"

MAX_SHOWN_CHARS = 80


class CallLine(Message):
    """One tool call the model made."""

    tool: str
    arguments: dict[str, JsonValue] = {}
    status: str


class TurnLine(Message):
    """One turn of the model."""

    text: str
    calls: list[CallLine] = []


class Retrieved(Message):
    """The one retrieval of `naive_rag`, made with the question by the evaluation itself."""

    query: str
    status: str
    """`ok`, or `error`: what the tool itself refused, which the model reads as well."""
    text: str
    """The tool's whole answer; the model sees it within the limits of `[env]`."""
    version: str
    """Version of the tool that answered."""


class Candidate(Message):
    """One turn that might have been taken, and what came of it."""

    turn: ScoreTurn
    """Text of the turn; its calls are not run."""
    calls: bool
    """Whether it calls a tool."""
    sample: int | None
    """Number of the candidate that wrote it first; None where only the greedy turn is it."""
    greedy: bool
    """Whether it is the greedy turn."""
    logprob: float
    """Natural-log probability of all its tokens, at the sampling temperature."""
    value: float | None = None
    """Value that the scorer gives it; None where nothing is scored."""
    outcomes: Annotated[list[float], Field(min_length=1)]
    """Reward of each continuation; one value where the turn calls nothing."""

    @property
    def mean(self) -> float:
        """Mean reward."""
        return fmean(self.outcomes)


class Place(Message):
    """A state that an interaction came to, and what may follow."""

    turns: list[ScoreTurn]
    """Turns that lead there."""
    greedy_logprob: float | None = None
    """Natural-log probability of the greedy turn at temperature 1; None in older files."""
    candidates: list[Candidate]
    """Candidates that differ, at least two."""


class Answer(Message):
    """One line of a result file: a question, what came of it, and its scores."""

    method: Method
    set: str
    id: str
    attempt: int = 0
    """Number of the answer to the question, from 0."""
    type: str | None = None
    """`metadata.type` of the task; None without one."""
    hops: str | None = None
    """`metadata.hops` of the task; None without one."""
    question: str
    """The last message of the user."""
    prompt: list[ChatMessage]
    """The whole dialogue of the task, without system prompt, tools and retrieved passages."""
    payload: dict[str, JsonValue] = {}
    answers: list[JsonValue] | None = None
    """Gold answers: `payload.answers`; None without them."""
    failed: bool
    """Whether an outage left it without a scored answer; such a question counts in no mean."""
    status: Status | None = None
    """COMPLETED or TRUNCATED; None when nothing came back."""
    reason: str = ""
    """Reason of its end."""
    prediction: str | None = None
    """The answer that was scored; None when the last turn gives none."""
    em: float | None = None
    """The component `exact_match`; None where it was not measured, as are the next two."""
    f1: float | None = None
    substring_match: float | None = None
    reward: float | None = None
    """Outcome reward, by the configured rule and weights."""
    components: dict[str, float] = {}
    """Reward components that were measured, by name, unweighted."""
    component_tokens: dict[str, int] = {}
    """Tokens that language models read and wrote for reward components, by the component."""
    num_turns: int = 0
    num_calls: int = 0
    """Tool calls of the model, malformed ones included."""
    sampled_tokens: int | None = None
    """Tokens sampled for the answer, those of discarded branches included; None in files of older
    versions, as is the next one."""
    seconds: float | None = None
    """Time from the first turn to the end, tool calls included, beside the other questions in
    flight."""
    scorer_tokens: int | None = None
    """Tokens that the scorer's model read and wrote, with `--decode`."""
    scores: int | None = None
    """Branches about which the scorer was asked, with `--decode`."""
    places: int | None = None
    """States in which a search turn by turn had at least two different candidates; None in files of
    older versions."""
    discarded_calls: int | None = None
    """Calls that tools answered to branches that were not chosen, with `--decode`."""
    replayed_calls: int | None = None
    """Calls made once more to give a branch the state of a tool, with `--decode`."""
    place: Place | None = None
    """State in which the interaction was continued after each candidate, with
    `--decode-continuations`."""
    policy_versions: list[int] = []
    seed: int | None = None
    """Seed of the first turn's sampler."""
    retrieval: Retrieved | None = None
    """Retrieval of `naive_rag`; counts neither in `num_calls` nor in `calls`."""
    turns: list[TurnLine] = []

    @computed_field
    @property
    def calls(self) -> dict[str, int]:
        """Calls that a tool answered, by the tool's name."""
        calls = (call for turn in self.turns for call in turn.calls)
        return dict(Counter(call.tool for call in calls if call.status in ANSWERED))

    @property
    def searched(self) -> float | None:
        """1.0 where a search had a choice, 0.0 where it had none; None where nobody counted."""
        return None if self.places is None else float(self.places > 0)

    @property
    def key(self) -> Key:
        """Set, id and attempt."""
        return self.set, self.id, self.attempt


def key_of(task: Task) -> Key:
    """Return set, id and attempt of a task; one that names no set counts under `all`."""
    return str(task.metadata.get("set", "all")), task.id, int(str(task.metadata.get(ATTEMPT, 0)))


def question_of(task: Task) -> str:
    """Return the last message of the user.

    Raises:
        ValueError: there is none.
    """
    for message in reversed(task.messages()):
        if message.role == "user":
            return shown_text(message.content)
    raise ValueError(f"task {task.id!r} has no message of role 'user'; add the question")


def make_answer(
    task: Task, result: EvalResult, method: Method, retrieval: Retrieved | None = None
) -> Answer:
    """Put a question and what came of it on one line."""
    name, task_id, attempt = key_of(task)
    gold = task.payload.get("answers")
    fields: dict[str, Any] = {
        "method": method,
        "set": name,
        "id": task_id,
        "attempt": attempt,
        "type": _text(task.metadata.get("type")),
        "hops": _text(task.metadata.get("hops", task.metadata.get("hop"))),
        "question": question_of(task),
        "prompt": task.messages(),
        "payload": task.payload,
        "answers": gold if isinstance(gold, list) else None,
        "failed": result.failed,
        "reason": result.reason,
        "retrieval": retrieval,
    }
    if result.scored is not None:
        fields |= _of_trajectory(result.scored.trajectory)
        reward = result.scored.reward
        if reward is not None and not result.failed:
            fields |= {
                "prediction": reward.prediction,
                "reward": reward.total,
                "components": reward.components,
                "component_tokens": reward.tokens,
                "em": reward.components.get("exact_match"),
                "f1": reward.components.get("f1"),
                "substring_match": reward.components.get("substring_match"),
            }
    return Answer.model_validate(fields)


def _text(value: JsonValue) -> str | None:
    return None if value is None else str(value)


def _of_trajectory(trajectory: Trajectory) -> dict[str, Any]:
    calls, cost = trajectory.calls(), trajectory.decoding
    spent: dict[str, Any] = {"sampled_tokens": trajectory.num_action_tokens}
    if cost is not None:
        kept = sum(call.status in ANSWERED for call in calls)
        spent = {
            "sampled_tokens": cost.sampled_tokens,
            "scorer_tokens": cost.scorer_tokens,
            "scores": cost.scores,
            "places": cost.places,
            "discarded_calls": cost.calls - kept,
            "replayed_calls": cost.replayed_calls,
            "place": None if cost.probe is None else _place(trajectory, cost.probe),
        }
    return spent | {
        "status": trajectory.status,
        "reason": trajectory.reason,
        "num_turns": len(trajectory.turns),
        "num_calls": len(calls),
        "seconds": trajectory.latency_ms / 1000,
        "policy_versions": trajectory.policy_versions(),
        "seed": trajectory.seed,
        "turns": [TurnLine.model_validate(t, from_attributes=True) for t in trajectory.turns],
    }


def _place(trajectory: Trajectory, probe: Probe) -> Place:
    turns = score_turns([one.turn for one in probe.candidates])
    return Place(
        turns=score_turns(trajectory.turns[: probe.after]) if probe.after else [],
        greedy_logprob=probe.greedy_logprob,
        candidates=[
            Candidate.model_validate({**one.model_dump(exclude={"turn"}), "turn": turn})
            for turn, one in zip(turns, probe.candidates, strict=True)
        ],
    )


def parse_answers(data: bytes, path: Path) -> list[Answer]:
    """Parse the lines of a result file; the last one may lack its newline.

    Raises:
        ValueError: a line is malformed or a question comes twice; file and line are named.
    """
    answers: list[Answer] = []
    line_of: dict[Key, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            answer = Answer.model_validate_json(line)
        except ValidationError as exc:
            first = exc.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            problem = f"{where}: {first['msg']}" if where else first["msg"]
            raise ValueError(
                f"{path}:{number}: {problem}; a line is one JSON object that `agent-r1 evaluate` "
                "wrote; remove the line, or create the file again"
            ) from exc
        if answer.key in line_of:
            raise ValueError(
                f"{path}:{number}: question {answer.id!r} of set {answer.set!r} is already in "
                f"line {line_of[answer.key]}; keep one of the two"
            )
        line_of[answer.key] = number
        answers.append(answer)
    return answers


def read_answers(path: Path) -> list[Answer]:
    """Read a result file.

    Raises:
        ValueError: it cannot be read, is empty, or a line is malformed; file and line are named.
    """
    try:
        data = path.read_bytes()
    except OSError as exc:
        raise ValueError(f"{path}: the result file cannot be read: {exc.strerror}") from exc
    answers = parse_answers(data, path)
    if not answers:
        raise ValueError(f"{path}: the file holds no answer; let `agent-r1 evaluate` write it")
    return answers


def meta_file(out: Path) -> Path:
    """Return where the facts of a result file lie."""
    return out.with_name(out.name + ".meta.json")


def summary_file(out: Path) -> Path:
    """Return where the summary of a result file lies."""
    return out.with_suffix(".summary.json")


def components_of(out: Path) -> dict[str, float]:
    """Return the weights of the components that were measured for a result file; {}: unknown."""
    try:
        return _measured(json.loads(meta_file(out).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _measured(facts: Mapping[str, Any]) -> dict[str, float]:
    return measured_components(facts.get("reward.rule", "weighted"), facts[COMPONENTS])


def differences(there: Facts, here: Facts) -> list[str]:
    """Say, one line a name, in what two evaluations differ."""
    return [
        f"{name} is {_shown(there, name)} there and {_shown(here, name)} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]


def _shown(facts: Facts, name: str) -> str:
    if name not in facts:
        return "not set"
    text = json.dumps(facts[name], ensure_ascii=False)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 1] + "…"


class ResultFile:
    """A result file that is being written: what it has, and where further lines go.

    Raises:
        ValueError: the file belongs to another evaluation, or a line of it is malformed.
    """

    def __init__(self, out: Path, facts: Facts, *, overwrite: bool = False) -> None:
        self.out = out
        self.notes: list[str] = []
        """Notes for the user about the file that was found."""
        self.answers: dict[Key, Answer] = {}
        """Answers of the file, by set and id."""
        out.parent.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for path in (out, meta_file(out), summary_file(out)):
                path.unlink(missing_ok=True)
        if out.exists():
            self._check_facts(facts)
            self._take_over()
        else:
            write_json(meta_file(out), facts)

    def append(self, answer: Answer) -> None:
        """Write one line; it is in the file when this returns.

        Raises:
            ValueError: the file cannot be written (a full disk, say).
        """
        try:
            with self.out.open("ab") as file:
                file.write(answer.model_dump_json().encode() + b"\n")
        except OSError as exc:
            raise ValueError(f"--out ({self.out}) cannot be written: {exc.strerror}") from exc
        self.answers[answer.key] = answer

    def _check_facts(self, facts: Facts) -> None:
        remedy = "choose another --out, or use --overwrite to discard the answers in the file"
        path = meta_file(self.out)
        try:
            there: Any = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise ValueError(
                f"--out ({self.out}) exists and {path.name}, which says what its answers belong "
                f"to, cannot be read ({exc.strerror}); {remedy}"
            ) from exc
        except ValueError as exc:
            raise ValueError(f"{path} is not JSON ({exc}); {remedy}") from exc
        if not isinstance(there, dict):
            raise ValueError(f"{path} is not a JSON object; {remedy}")
        if COMPONENTS in facts and components_of(self.out) == _measured(facts):
            there[COMPONENTS] = facts[COMPONENTS]  # written otherwise, such as {} for the default
        found = differences(there, facts)
        if found:
            raise ValueError(
                f"--out ({self.out}) holds the answers of another evaluation: {'; '.join(found)}; "
                f"{remedy}"
            )

    def _take_over(self) -> None:
        data = self.out.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            self.notes.append(f"{self.out}: dropped the last line, which was only half written")
        answers = parse_answers(whole, self.out)
        kept = [answer for answer in answers if not answer.failed]
        if len(kept) < len(answers):
            # An outage is nobody's answer.
            self.notes.append(
                f"{self.out}: {len(answers) - len(kept)} failed questions will be asked again"
            )
        if len(kept) < len(answers) or whole != data:
            write_atomically(self.out, "".join(answer.model_dump_json() + "\n" for answer in kept))
        self.answers = {answer.key: answer for answer in kept}


def write_json(path: Path, values: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write JSON for people and programs, whole or not at all."""
    write_atomically(path, json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
