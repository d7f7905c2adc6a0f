"""Runs the engine tests on vLLM's Model Runner V2, which GPUs take, here on a CPU.

    python -m tests.runner_v2 [--short | PYTEST_ARGUMENT...]

Triton's kernels run in its interpreter, so a step takes tens of milliseconds. gpu_engine.py lets
`VllmPolicy` start its engine with the arguments of a GPU. Without arguments: all of it
(`make test-v2`). `make test` runs the short form, through tests/integration/test_runner_v2.py.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRITON = Path(sys.prefix) / "triton"
POLICY = "tests/integration/test_vllm_policy.py"
WEIGHTS = "tests/integration/test_vllm_weights.py"
ALL = ("tests/runner_v2", POLICY, WEIGHTS, "tests/integration/test_lora.py", "-m", "vllm")
SHORT = (
    f"{POLICY}::test_scores_are_those_of_a_transformers_forward[100]",
    f"{POLICY}::test_sampled_logprobs_are_those_of_a_transformers_forward[0.7]",
    f"{WEIGHTS}::test_requests_in_flight_cross_updates_and_label_every_token",
)
"""One engine, which starts in half of the time that they take."""


def environment() -> dict[str, str]:
    """Return the environment of a Python with Triton; it is read while vLLM is imported."""
    path = [str(TRITON), str(Path(__file__).parent / "shim"), str(ROOT)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }


def main() -> None:
    """Replace this process by pytest."""
    if not (TRITON / "triton" / "__init__.py").is_file():
        sys.exit(f"Triton is not in {TRITON}; `make test-v2` installs it")
    arguments = sys.argv[1:] or ALL
    if arguments == ["--short"]:
        arguments = SHORT
    command = [sys.executable, "-m", "pytest", "-p", "tests.runner_v2.gpu_engine", *arguments]
    os.chdir(ROOT)
    os.execve(sys.executable, command, environment())


if __name__ == "__main__":
    main()
