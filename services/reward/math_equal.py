"""Component `math_equal`: tests whether the final answer is mathematically equal to the payload's.

Finds the answer in the text, compares it in worker processes (`math_worker.py`), which a
pathological expression can stop but not this service.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from agent_r1.reward import math_forms, scoring
from agent_r1.text.reading import of_read_turns
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn

logger = logging.getLogger(__name__)

CPU_S = 5.0
"""CPU time of one comparison; an expression that needs more does not equal the answer."""
WAIT_S = 45.0
"""Longest wait for one comparison; after it the machine is to blame, and scoring fails."""
END_TIMEOUT_S = 5.0
MAX_ANSWER_CHARS = 2000
MAX_WORKERS = min(4, os.cpu_count() or 1)

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])(?!\s*\{)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*)")
_LAST_LINE = re.compile(r"\A[^\n]*\s*\Z")


def math_answer(turn: ScoreTurn, *, number: bool = False) -> str | None:
    """Return the answer that a turn ends with, as LaTeX; None when it gives none.

    It is the last of: the turn's answer (what is boxed in it, where something is), or the last
    `\\boxed{}`, or what stands after `####` and is a number or in the last line, or, with
    `number`, the last number. Thoughts are left out.
    """
    text = turn.text if turn.said is None else turn.said
    if turn.answer is not None:
        boxed = _last_boxed(turn.answer)
        return _bare(boxed if boxed is not None else turn.answer) or None
    boxed = _last_boxed(text)
    if boxed is not None:
        return _bare(boxed) or None
    marked = _marked(text)
    if marked is not None:
        return _bare(marked) or None
    if number:
        return math_forms.last_number(text)
    return None


def _marked(text: str) -> str | None:
    """Return the last answer after `####`, which begins headings too; None without one."""
    for found in reversed(list(_HASHES.finditer(text))):
        marked = found[1] if found[1][0] in "*_" else found[1].rstrip("*_ ")  # of **#### 73**
        if math_forms.is_number(_bare(marked)) or _LAST_LINE.match(text, found.end(1)):
            return marked
    return None


def _last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{}` whose braces close, or else of `\\boxed 42`."""
    boxes = {match.end(): match.start() for match in _BOXED.finditer(text)}
    opened: list[int] = []
    last: tuple[int, int] | None = None
    for brace in _BRACE.finditer(text):
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened and (start := opened.pop()) in boxes:
            last = max(last or (0, 0), (start, brace.start()))
    if last is None:
        return _last_bare_box(text)
    (start, end), before = last, text[: boxes[last[0]]]
    return math_forms.boxed_with_sign(before, text[start:end].strip(), text[end + 1 :])


def _last_bare_box(text: str) -> str | None:
    """Return the expression behind the last `\\boxed` without braces."""
    boxes = list(_BARE_BOX.finditer(text))
    if not boxes:
        return None
    content = math_forms.leading_expression(text[boxes[-1].end() :][:MAX_ANSWER_CHARS])
    return content and math_forms.boxed_with_sign(text[: boxes[-1].start()], content, "")


def _bare(answer: str) -> str:
    answer = math_forms.without_emphasis(answer.strip().strip("`").strip())
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        inside = answer.startswith(opening) and answer.endswith(closing)
        if inside and len(answer) > len(opening + closing):
            return answer[len(opening) : -len(closing)].strip()
    return answer


@of_read_turns
def math_equal(request: ScoreRequest) -> float:
    r"""Return 1.0 when the last turn's answer equals one of the payload's `answers`, else 0.0.

    Symbolically: 0.5 equals \frac{1}{2}, 3\pi equals \pi \cdot 3. The payload's
    `"answer_type": "number"` lets the last number of the text count as the answer, and that of an
    answer in words.

    Raises:
        ValueError: the payload has no `answers`, or they are not texts.
        RuntimeError: no comparison within WAIT_S, for which the machine is to blame.
    """
    answers = scoring.accepted_answers(request.payload)
    number = request.payload.get("answer_type") == "number"
    prediction = math_answer(request.turns[-1], number=number)
    if prediction is None or len(prediction) > MAX_ANSWER_CHARS:
        return 0.0
    if number:
        prediction = math_forms.number_of(prediction)
    return float(_WORKERS.equal(answers, prediction))


class MathWorkers:
    """Worker processes that compare answers; started when they are needed, kept afterwards.

    Args:
        size: most processes; further comparisons wait.
        cpu_s: CPU time of one comparison, in seconds.
        wait_s: longest wait for one, the wait for a free process included, in seconds.
    """

    def __init__(
        self, size: int = MAX_WORKERS, *, cpu_s: float = CPU_S, wait_s: float = WAIT_S
    ) -> None:
        self._cpu_s = cpu_s
        self._wait_s = wait_s
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for _ in range(size):
            self._idle.put(None)  # a place whose process is not started yet
        self._lock = threading.Lock()
        self._started: set[subprocess.Popen[bytes]] = set()

    def equal(self, answers: Sequence[str], prediction: str) -> bool:
        """Say whether the prediction equals one of the answers; blocks, so call it in a thread.

        Raises:
            RuntimeError: no verdict in time, or the workers do not work.
        """
        deadline = time.monotonic() + self._wait_s
        try:
            worker = self._idle.get(timeout=self._wait_s)
        except queue.Empty as exc:
            raise RuntimeError(
                f"no worker became free for a comparison within {self._wait_s:g} s; this machine "
                "is too busy: lower reward.max_concurrent"
            ) from exc
        try:
            if worker is None or worker.poll() is not None:
                worker = self._start()
            return self._ask(worker, answers, prediction, deadline)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            started, self._started = self._started, set()
        for worker in started:
            _end(worker)

    def _start(self) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.math_worker", str(self._cpu_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with self._lock:
            self._started = {known for known in self._started if known.poll() is None} | {worker}
        return worker

    def _ask(
        self,
        worker: subprocess.Popen[bytes],
        answers: Sequence[str],
        prediction: str,
        deadline: float,
    ) -> bool:
        assert worker.stdin is not None  # both are pipes
        assert worker.stdout is not None
        line = json.dumps({"answers": list(answers), "prediction": prediction}) + "\n"
        try:
            worker.stdin.write(line.encode())
            worker.stdin.flush()
        except BrokenPipeError as exc:
            _end(worker, timeout_s=END_TIMEOUT_S)
            raise RuntimeError("a math worker ended by itself; its error is in the log") from exc
        left_s = deadline - time.monotonic()
        answered = select.poll()  # not select, whose files have numbers below 1,024
        answered.register(worker.stdout, select.POLLIN)
        if not answered.poll(max(left_s, 0) * 1000):
            _end(worker)
            raise RuntimeError(
                f"no comparison within {self._wait_s:g} s; this machine is too busy: lower "
                f"reward.max_concurrent (answer {prediction[:80]!r})"
            )
        reply = worker.stdout.readline()
        if reply:
            return bool(json.loads(reply)["equal"])
        code = _end(worker, timeout_s=END_TIMEOUT_S)
        if code >= 0:
            raise RuntimeError(f"a math worker ended with status {code}; its error is in the log")
        logger.warning(
            "answer not comparable within its limits signal=%d answer=%r", -code, prediction[:80]
        )
        return False


def _end(worker: subprocess.Popen[bytes], *, timeout_s: float = 0.0) -> int:
    """End a process that has not ended in time; return its status, negative for a signal."""
    try:
        code = worker.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        worker.kill()
        code = worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        with suppress(BrokenPipeError):  # what was written last was never read
            if pipe is not None:
                pipe.close()
    return code


_WORKERS = MathWorkers()
atexit.register(_WORKERS.close)
