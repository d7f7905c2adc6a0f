"""The wheel in a project of the user's own: init, validate and its test; `make test-wheel` trains.

The project has packages of the names that the folders of the checkout have. The environment holds
the wheel alone and finds the other packages where the tests have them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from tests.support.doc_blocks import blocks_of, commands

pytestmark = [pytest.mark.slow, pytest.mark.redis, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[2]
TUTORIAL = REPOSITORY / "docs" / "tutorial.md"
SOURCES = ("deploy", "examples", "proto", "services")
MAX_WHEEL_BYTES = 6_000_000
PACKAGES = Path(numpy.__file__).parents[1]
FOLDERS_OF_OTHERS = ("deploy", "examples", "proto", "services", "task")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in SOURCES:
        made = ("runs", ".index") if name == "examples" else ()  # services/runs is a package
        unwanted = shutil.ignore_patterns("__pycache__", *made)
        shutil.copytree(REPOSITORY / name, source / name, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder)]
    run([sys.executable, "-m", "pip", *build, str(source)])
    (built,) = folder.glob("*.whl")
    return built


@dataclass(frozen=True)
class Project:
    """A user's project and the environment that it uses."""

    folder: Path
    programs: Path

    def run(self, program: str, *arguments: str, folder: str = ".") -> str:
        """Run a program of the environment in the project."""
        return run([str(self.programs / program), *arguments], cwd=self.folder / folder)


def run(command: list[str], cwd: Path | None = None) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("AGENT_R1_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    environment = tmp_path_factory.mktemp("environment")
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = environment / "bin" / "python"
    (site_packages,) = environment.glob("lib/python*/site-packages")
    # A path in a .pth file is searched, but its own .pth files (that of the checkout) are not read.
    (site_packages / "packages_of_the_tests.pth").write_text(f"{PACKAGES}\n")
    install = ["install", "--no-deps", "--no-index", str(wheel)]
    run([sys.executable, "-m", "pip", "--python", str(python), *install])
    redis = Path(sys.executable).with_name("redis-server")
    if redis.exists():
        (environment / "bin" / redis.name).symlink_to(redis)
    for name in FOLDERS_OF_OTHERS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('the user's own')\n")
    project = Project(folder, environment / "bin")
    project.run("agent-r1", "init", "my_task")
    return project


def test_the_wheel_is_small_and_holds_what_no_module_is(wheel: Path):
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {
        "agent_r1_deploy/constraints/cpu.txt",
        "agent_r1_deploy/constraints/gpu.txt",
        "agent_r1/runtime/logging.json",
        "agent_r1/examples/tiny_world/base/model.safetensors",
        "agent_r1/examples/starter/data/train.jsonl",
    } <= names
    # What is generated or belongs to the checkout stays there.
    assert not [name for name in names if "tiny_world/data" in name or name.startswith("tests")]


def test_a_task_is_written_checked_and_tested_beside_packages_of_the_same_names(project: Project):
    where = project.run("python", "-P", "-c", "import agent_r1; print(agent_r1.__file__)")
    assert str(project.programs.parent) in where
    assert "no problems" in project.run("agent-r1", "try", "my_task/run.toml", "--policy", "none")
    tested = project.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", folder="my_task")
    assert "6 passed" in tested


@pytest.mark.wheel
@pytest.mark.vllm
def test_the_tutorial_does_what_it_says(project: Project, tmp_path: Path):
    folder, said = tmp_path, dict[str, str]()
    for block in blocks_of(TUTORIAL, "sh"):
        for command in commands(block.text):
            program, *arguments = shlex.split(command)
            if program == "cd":
                folder = folder / arguments[0]
                continue
            if program == "pytest":
                program, arguments = "python", ["-m", "pytest", *arguments]
            name = " ".join([program, *arguments[:1]])
            printed = run([str(project.programs / program), *arguments], cwd=folder)
            said[name] = said.get(name, "") + printed
    assert "no problems" in said["agent-r1 try"]
    assert "rewards of train-" in said["agent-r1 try"]
    assert "evaluation after at step 30: held_out" in said["agent-r1 train"]
    assert "answered 6 of 6" in said["agent-r1 evaluate"]
    assert "<answer>" in said["agent-r1 chat"]
    assert "the policy of step 30" in said["agent-r1 export"]


@pytest.mark.wheel
@pytest.mark.vllm
def test_the_demo_trains_without_the_repository(project: Project):
    project.run("agent-r1", "init", "demo", "--example", "tiny_world")
    small = ["learner.steps=2", "learner.groups_per_batch=2", "evaluation.max_questions=5"]
    options = [word for key in small for word in ("--set", key)]
    text = project.run("agent-r1", "train", "demo/run.toml", "--run-dir", "second", *options)
    assert "step 2/2" in text
