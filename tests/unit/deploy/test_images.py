"""What `make images` has docker do; docker itself is a stand-in that writes down its commands."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "images"
ON_CPU = "-f docker-compose.yml -f deploy/compose.cpu.yml"
DOCKER = """#!/bin/sh
echo "$IMAGE_PREFIX $TAG: $*" >>"$WRITTEN"
[ "$4" != "$FAILS" ]
"""


def images(tmp_path: Path, **variables: str) -> tuple[int, list[str], list[str]]:
    """Run the script; return its status, what docker was told, and the lines it printed."""
    docker, written = tmp_path / "docker", tmp_path / "written"
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    done = subprocess.run(
        [SCRIPT],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "WRITTEN": str(written), **variables},
        capture_output=True,
        text=True,
    )
    told = written.read_text().splitlines() if written.exists() else []
    return done.returncode, told, (done.stdout + done.stderr).splitlines()


@pytest.mark.parametrize("registry", ["registry.example/me", "registry.example/me/"])
def test_images_are_built_and_pushed_under_the_name_of_the_registry(tmp_path: Path, registry: str):
    status, told, printed = images(
        tmp_path, REGISTRY=registry, TAG="1", PUSH="1", IMAGES="tools cpu"
    )
    assert status == 0
    assert told == [
        "registry.example/me/ 1: compose -f docker-compose.yml build search",
        "registry.example/me/ 1: compose -f docker-compose.yml push search",
        f"registry.example/me/ 1: compose {ON_CPU} build rollout",
        f"registry.example/me/ 1: compose {ON_CPU} push rollout",
    ]
    assert printed == ["registry.example/me/agent-r1-tools:1", "registry.example/me/agent-r1-cpu:1"]


def test_all_images_are_built_and_none_is_pushed_unless_told(tmp_path: Path):
    status, told, printed = images(tmp_path, REGISTRY="", TAG="", PUSH="", IMAGES="")
    assert status == 0
    assert [line.split()[-2:] for line in told] == [
        ["build", name]
        for name in ("search", "reward", "gateway", "console", "rollout", "learner", "rollout")
    ]
    assert printed == [
        f"agent-r1-{name}:latest"
        for name in ("tools", "reward", "gateway", "console", "rollout", "learner", "cpu")
    ]


def test_an_unknown_image_is_refused_with_the_names_there_are(tmp_path: Path):
    status, told, printed = images(tmp_path, IMAGES="tool")
    assert (status, told) == (2, [])
    there = "tools, reward, gateway, console, rollout, learner and cpu"
    assert printed == [f"IMAGES names tool; the images are {there}"]


@pytest.mark.parametrize("fails", ["build", "push"])
def test_what_cannot_be_built_or_pushed_ends_the_command(tmp_path: Path, fails: str):
    status, told, printed = images(tmp_path, PUSH="1", IMAGES="tools reward", FAILS=fails)
    assert status == 1
    assert told[-1].endswith(f"{fails} search")
    assert printed == []
