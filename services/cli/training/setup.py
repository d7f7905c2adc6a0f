"""`agent-r1 setup cpu|gpu`: the packages that training needs, into the environment of this command.

The lock comes with the package (deploy/constraints). A checkout has `make setup` instead.
"""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path

from agent_r1.config.packages import installed_version
from agent_r1.config.sources import ConfigError
from agent_r1.setup import lock_install, preflight
from agent_r1.setup.native_libraries import MissingLibraryError

NEXT_STEP = "agent-r1 init my_task"


def setup_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `setup`."""
    variant_help = "for CPUs alone, or for NVIDIA GPUs"
    parser.add_argument("variant", choices=("cpu", "gpu"), help=variant_help)


def setup(arguments: argparse.Namespace) -> int:
    """Install exactly the packages of the lock that comes with agent-r1.

    They go into the virtual environment of this command. If you run it again, it continues where
    it stopped.
    """
    if sys.prefix == sys.base_prefix:
        raise ConfigError(
            f"agent-r1 is installed in the Python of the system ({sys.prefix}), whose packages "
            "set-up must not replace; make an environment with `python3 -m venv .venv`, install "
            f"agent-r1 there, and run `.venv/bin/agent-r1 setup {arguments.variant}`"
        )
    prefix = Path(sys.prefix)
    installed = bool(installed_version("torch"))
    findings = preflight.check_machine(installed, prefix, arguments.variant)
    print(preflight.report(findings, installed=True))
    if not all(finding.ok for finding in findings):
        raise ConfigError("set-up stopped: this machine lacks what the lines above name")
    lock = resources.files("agent_r1_deploy").joinpath("constraints", f"{arguments.variant}.txt")
    target = lock_install.Target(prefix, Path(str(lock)))
    try:
        lock_install.install_lock(target)
    except lock_install.InstallError as exc:
        raise ConfigError(lock_install.explain(target, str(exc))) from exc
    except MissingLibraryError as exc:
        raise ConfigError(f"set-up stopped: {exc}") from exc
    print(f"every package of the lock is installed; continue with: {NEXT_STEP}")
    return 0
