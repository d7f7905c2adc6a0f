"""No program scores without solving the task: as the user of the tests, and as an ordinary one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_r1.sandbox import bubblewrap
from tests.conftest import REPOSITORY
from tests.integration.reward_hack_programs import HACKS, PROGRAM_HACKS
from tests.integration.reward_hacks import TESTS

ORDINARY_UID = 1000
RUN_TIMEOUT_S = 240.0
PATH = "/usr/bin:/bin"
_START = (
    "import runpy, site, sys; site.addsitedir(sys.argv.pop(1)); "
    "sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module('tests.integration.reward_hacks', run_name='__main__')"
)

Results = tuple[dict[str, Any], dict[str, list[str]]]


def run_script(python: str, uid: int | None, unreadable: Path) -> Results:
    """Run all hacks in a process of `uid`; skips where that user cannot run the tools.

    Args:
        python: runs the script.
        uid: None is the user of the tests.
        unreadable: a folder that stands first in PATH, as a login of root leaves it to others.
    """
    try:
        settings = {"bwrap": bubblewrap.find_bwrap(None)}
    except ValueError as exc:
        pytest.skip(str(exc))
    user: dict[str, Any] = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    packages = sysconfig.get_path("purelib")
    done = subprocess.run(
        [python, "-I", "-c", _START, packages, str(REPOSITORY), json.dumps(settings)],
        cwd="/",
        env={"PATH": f"{unreadable}:{PATH}", "LANG": "C.UTF-8", "HOME": "/tmp"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
        **user,
    )
    if "the sandbox cannot be started" in done.stderr:
        pytest.skip(done.stderr[-500:])
    assert done.returncode == 0, done.stderr
    codes, programs = json.loads(done.stdout)
    return codes, programs


def find_ordinary_python() -> str:
    """Return a Python that an ordinary user can run with these packages; skips without one."""
    question = "import runpy, site, sys; site.addsitedir(sys.argv[1]); import agent_r1.tools.base"
    problems: list[str] = []
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            done = subprocess.run(
                [python, "-I", "-c", question, sysconfig.get_path("purelib")],
                cwd="/",
                env={"PATH": PATH},
                user=ORDINARY_UID,
                group=ORDINARY_UID,
                extra_groups=[],
                capture_output=True,
                text=True,
                timeout=60.0,
                check=False,
            )
        except OSError as exc:
            problems.append(f"{python}: {exc}")
            continue
        if done.returncode == 0:
            return python
        problems.append(f"{python}: {done.stderr[-200:]}")
    pytest.skip("; ".join(problems))


def run_as_this_user(unreadable: Path) -> Results:
    return run_script(sys.executable, None, unreadable)


def run_as_ordinary_user(unreadable: Path) -> Results:
    if os.getuid() != 0:
        pytest.skip("the tests run as an ordinary user already")
    return run_script(find_ordinary_python(), ORDINARY_UID, unreadable)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [run_as_this_user, run_as_ordinary_user], ids=["this user", "ordinary user"]
)
def test_no_program_scores_without_solving_the_task(tmp_path: Path, run: Callable[[Path], Results]):
    tmp_path.chmod(0)
    try:
        codes, programs = run(tmp_path)
    finally:
        tmp_path.chmod(0o700)
    assert len(HACKS) >= 100
    assert codes.pop("the solution") == {"passed": TESTS, "failed": 0, "total": TESTS}
    assert codes.keys() == HACKS.keys()
    assert {name: found for name, found in codes.items() if found["passed"]} == {}
    assert {found["total"] for found in codes.values()} == {TESTS}
    # Those who come after a program, in the same sandbox, read their own output and no other's.
    assert programs.keys() == PROGRAM_HACKS.keys()
    for name, texts in programs.items():
        assert texts[0] == "of_another_caller"
        assert "FOUND" not in texts[1], name
        assert texts[2:] == ["42"] * 3, name
