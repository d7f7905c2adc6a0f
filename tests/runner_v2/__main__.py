"""Runs the engine tests on vLLM's Model Runner V2, which GPUs take, here on a CPU.

    python -m tests.runner_v2 [PYTEST_ARGUMENT]...

Triton's kernels run in its interpreter, so a step takes tens of milliseconds. gpu_engine.py lets
`VllmPolicy` start its engine with the arguments of a GPU. Without arguments: all of it
(`make test-v2`); `make test` runs the short form, through tests/integration/test_runner_v2.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRITON = Path(sys.prefix) / "triton"
FILES = (
    "tests/runner_v2",
    "tests/integration/test_vllm_policy.py",
    "tests/integration/test_vllm_weights.py",
    "tests/integration/test_lora.py",
)


def environment() -> dict[str, str]:
    """Return the environment of a Python with Triton; it is read while vLLM is imported."""
    path = [str(TRITON), str(Path(__file__).parent / "shim"), str(ROOT)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }


def main() -> None:
    """Replace this process by pytest."""
    if not (TRITON / "triton" / "__init__.py").is_file():
        sys.exit(f"Triton is not in {TRITON}; `make test-v2` installs it")
    arguments = sys.argv[1:] or [*FILES, "-m", "vllm"]
    command = [sys.executable, "-m", "pytest", "-p", "tests.runner_v2.gpu_engine", *arguments]
    os.chdir(ROOT)
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main()
