"""Compares mathematical answers, in a process of its own: `python -m agent_r1.reward.math_worker`.

Reads a line of JSON {"answers": […], "prediction": "…"} from standard input, writes a line
{"equal": true}. A model can write expressions that take forever to expand (9^{9^{9^9}}), and
nothing interrupts the arithmetic of large integers but the end of the process; so each comparison
gets seconds of CPU time after which the kernel ends this process, and `math_equal.py` starts
another. CPU time, not wall time: a busy machine must not turn a right answer into a wrong one.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import resource
import sys
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from agent_r1.reward.math_forms import as_latex, base_of, choice_of

MEMORY_BYTES = 2 << 30
_CONFIG = [LatexExtractionConfig(boxed_match_priority=0)]
_WRAPPERS = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_PERCENT = re.compile(r"\s*\\?%\s*\Z")
_NOISE = re.compile(r"\\left|\\right|\\!|\\,|\\;|\\ |\\displaystyle|\$|\s")


def equal(answer: str, prediction: str) -> bool:
    """Say whether a prediction means the same as the accepted answer.

    The same text, but for spaces, dollar signs and `\\text{}`, is equal whatever it means; the rest
    is for math-verify: numbers, fractions, expressions, sets, intervals, matrices, units.
    """
    if (choice := choice_of(answer)) is not None and choice == choice_of(prediction):
        return True
    answer, prediction = as_latex(answer), as_latex(prediction)
    if _differ_in_base(answer, prediction):
        return False
    if plain(answer) == plain(prediction) or same_mathematics(answer, prediction):
        return True
    # A percentage is its number too: math-verify says so of 50%, and not of -50%.
    bare = _PERCENT.sub("", answer), _PERCENT.sub("", prediction)
    return bare != (answer, prediction) and same_mathematics(*bare)


def _differ_in_base(answer: str, prediction: str) -> bool:
    """Say whether both name a base, which math-verify does not look at, and not the same."""
    bases = base_of(answer), base_of(prediction)
    return None not in bases and bases[0] != bases[1]


def same_mathematics(answer: str, prediction: str) -> bool:
    """Compare two texts as LaTeX mathematics."""
    return verify(_parsed(answer), _parsed(prediction), timeout_seconds=0)


def plain(text: str) -> str:
    """Return a text without what changes its looks only."""
    bare = _NOISE.sub("", _WRAPPERS.sub(r"\1", text)).rstrip(".").replace("\u2013", "-")
    return bare.replace("dfrac", "frac").replace("tfrac", "frac")


def _parsed(text: str) -> list[Any]:
    # In a box, and for LaTeX alone: plain expressions would go through Python's eval.
    return parse(f"\\boxed{{{text}}}", extraction_config=_CONFIG, parsing_timeout=0)


def main() -> None:
    """Answer until standard input ends. The one argument is the CPU seconds of a comparison."""
    cpu_s = float(sys.argv[1])
    logging.disable(logging.CRITICAL)  # of math-verify: that its own time-outs are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Answers leave on a copy of standard output; what a library prints goes to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        spent_s = usage.ru_utime + usage.ru_stime
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(spent_s + cpu_s), hard))
        try:
            found = any(equal(answer, request["prediction"]) for answer in request["answers"])
        except (MemoryError, RecursionError):
            found = False  # the library catches every other error of an expression itself
        answers.write(json.dumps({"equal": found}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
