"""`agent-r1 init FOLDER`: a task that runs as it is, in a folder of the user's own.

Copies an example that comes with the package; writes nothing elsewhere and starts nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import agent_r1
from agent_r1.config.sources import ConfigError, at_hand

STARTER, TINY_WORLD, ANY_AGENT = "starter", "tiny_world", "any_agent"
AGENT = "raw_client.py"
"""The agent that `--agent` writes."""
README_OF_AGENT = f"""
## With an agent of your own
`agent.toml` is the run of `run.toml` with {AGENT} in place of our loop: a program that asks for
its turns over HTTP. Change it, or name another one as `agent.command`, and train it with
`agent-r1 train agent.toml --run-dir runs/agent`.
"""
NOT_COPIED = ("__pycache__", "data", ".index", ".pytest_cache")
"""Files of tiny_world that are not copied, since its data is generated."""


def examples_folder() -> Path:
    """Return the folder of the examples: beside this package, or in the checkout it runs from."""
    package = Path(agent_r1.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"


def init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `init`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder that is new or empty")
    parser.add_argument(
        "--example",
        choices=(STARTER, TINY_WORLD),
        default=STARTER,
        help="starter (the default): 20 tasks and your own code to change. tiny_world: the search "
        "agent of the documentation, with its generator",
    )
    parser.add_argument(
        "--agent",
        action="store_true",
        help="tiny_world with an agent of your own in place of our loop: a program that asks for "
        "its turns over HTTP, and agent.toml, which trains it",
    )


def init(arguments: argparse.Namespace) -> int:
    """Write a task that trains on this machine as it is.

    FOLDER gets data, a tool, an environment, a reward, a configuration, a test and a README that
    says what to change. Nothing is overwritten.
    """
    folder: Path = arguments.folder
    _check_free(folder)
    if arguments.agent:
        _copy_tiny_world(folder)
        _copy_agent(folder)
        steps = (
            "agent-r1 train agent.toml --run-dir runs/agent",
            "agent-r1 show runs/agent",
        )
    elif arguments.example == TINY_WORLD:
        _copy_tiny_world(folder)
        steps = ("agent-r1 train run.toml --run-dir runs/demo", "agent-r1 show runs/demo")
    else:
        _copy_starter(folder)
        steps = (
            "agent-r1 try run.toml --policy none",
            "agent-r1 try run.toml -n 2",
            "agent-r1 train run.toml --run-dir runs/first",
        )
    print(f"{at_hand(folder.resolve())} holds a task that runs as it is; its README.md explains it")
    print(f"continue with:\n  cd {shlex.quote(str(folder))}")
    for step in steps:
        print(f"  {step}")
    return 0


def _check_free(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; name a folder that is new or empty")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty; nothing was written: name a folder that is new or empty"
        )


def _copy_starter(folder: Path) -> None:
    examples = examples_folder()
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", "runs")
    shutil.copytree(examples / STARTER, folder, ignore=ignored, dirs_exist_ok=True)
    shutil.copytree(examples / TINY_WORLD / "base", folder / "base")


def _copy_tiny_world(folder: Path) -> None:
    source = examples_folder() / TINY_WORLD
    ignored = shutil.ignore_patterns(*NOT_COPIED)
    shutil.copytree(source, folder, ignore=ignored, dirs_exist_ok=True)
    print("generating the questions and the encyclopedia")
    generate = [sys.executable, folder / "generate.py", "--out", folder / "data", "--no-sft"]
    subprocess.run(generate, check=True)


def _copy_agent(folder: Path) -> None:
    shutil.copyfile(examples_folder() / ANY_AGENT / AGENT, folder / AGENT)
    command = json.dumps([sys.executable, str((folder / AGENT).resolve())])
    (folder / "agent.toml").write_text(
        f"""# The run of run.toml with {AGENT} in place of our loop.

extends = "run.toml"

[run]
id = "agent"

[agent]
command = {command}
answer = "output"            # what it prints
max_session_tokens = 3072
""",
        encoding="utf-8",
    )
    with (folder / "README.md").open("a", encoding="utf-8") as readme:
        readme.write(README_OF_AGENT)
