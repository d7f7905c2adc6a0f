"""Tries in a process of its own what a run does first on a GPU: CUDA, and a kernel of Triton.

    python services/setup/gpu_probe.py [STAGE ...]

config/gpu_checks.py, lock_install.py --python--> `probe` --> this file as a program, which writes
a line for each stage that it reached. A driver that hangs or ends a process then harms no other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROBE_TIMEOUT_S = 180.0
STAGES = ("torch", "cuda", "triton")
SIZE = 1000
"""Values of the vectors: no multiple of the kernel's block."""


@dataclass(frozen=True)
class Probe:
    """Result of a probe: how far it came."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Findings by stage; a stage that is not there was not reached."""
    error: str = ""
    """Why the next stage failed; empty where all passed."""

    @property
    def failed(self) -> str:
        """The stage that failed; "" for none."""
        return "" if not self.error else next(s for s in STAGES if s not in self.facts)


def probe(python: Path, stages: Sequence[str] = STAGES) -> Probe:
    """Run the program below.

    Args:
        python: the interpreter, whose packages are tried.
        stages: the first of STAGES.
    """
    # -P: modules of the folder it runs in must not shadow installed ones.
    command = [str(python), "-P", __file__, *stages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        output, said, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as exc:
        output = (exc.stdout or b"").decode(errors="replace")
        said, status = f"nothing happened for {PROBE_TIMEOUT_S:.0f} s", 1
    except OSError as exc:
        output, said, status = "", str(exc), 1
    facts: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            facts.update(json.loads(line))
    (*_, last) = said.strip().splitlines() or [f"exit status {status}"]
    return Probe(facts, last if status != 0 else "")


def _try_torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda}


def _try_cuda() -> dict[str, Any]:
    import torch

    torch.cuda.init()
    for index in range(torch.cuda.device_count()):
        # Fails on a GPU that the build has no kernels for.
        assert torch.ones(SIZE, device=f"cuda:{index}").sum().item() == SIZE
    return {"gpus": torch.cuda.device_count(), "architectures": torch.cuda.get_arch_list()}


def _try_triton(device: str = "cuda") -> dict[str, Any]:
    import torch
    import triton  # pyright: ignore[reportMissingImports] - not installed with the build for CPUs

    sys.path.insert(0, str(Path(__file__).parent))
    from gpu_kernel import add  # pyright: ignore[reportMissingImports] - found through the line above

    x = torch.arange(SIZE, dtype=torch.float32, device=device)
    assert torch.equal(add(x, x), 2 * x), "a kernel computed something else"
    return {"version": triton.__version__}


def main(stages: Sequence[str]) -> None:
    """Try the stages in order, and write what each found."""
    tries = {"torch": _try_torch, "cuda": _try_cuda, "triton": _try_triton}
    for stage in stages:
        sys.stdout.write(json.dumps({stage: tries[stage]()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:] or STAGES)
