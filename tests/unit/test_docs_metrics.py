"""docs/metrics-file.md explains every name that the learner's source has, and no other.

tests/e2e/test_training_run.py compares it with the lines of a run.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.metrics_page import explained_names

REPOSITORY = Path(__file__).resolve().parents[2]
LEARNER = REPOSITORY / "services" / "learner"
LITERAL = re.compile(r'"((?:[a-z]+)/[a-z_]+)"')
MADE_OF_PARTS = re.compile(
    r"^(reward|advantage)/(mean|std|min|max)$|^(time|results|failures|queue)/"
)
AREAS_OF_USERS = re.compile(r"^(reward|versions|calls|eval)/<|^step$")


def literals() -> set[str]:
    """Return what looks like a name in the learner's source."""
    found: set[str] = set()
    for path in LEARNER.rglob("*.py"):
        found |= set(LITERAL.findall(path.read_text()))
    return found


def test_every_name_of_the_source_is_explained():
    areas = {name.partition("/")[0] for name in explained_names()}
    written = {name for name in literals() if name.partition("/")[0] in areas}
    assert len(written) > 40
    assert written - explained_names() == set()


def test_every_name_that_is_explained_is_written():
    explained = {n for n in explained_names() if not AREAS_OF_USERS.match(n)}
    source = literals()
    unknown = {n for n in explained if n not in source and not MADE_OF_PARTS.match(n)}
    assert unknown == {"grad/norm", "learn/lr", "learn/tokens_per_s"} - source
