"""vLLM's own server with OpenAI's API, on a port of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Of the engine's own process; by default the one worker has another, which waits in a loop."""
PROGRAM = Path(__file__).with_name("vllm_program.py")
START_TIMEOUT_S = 180.0
POLL_S = 0.2


@contextlib.contextmanager
def openai_server(model: Path, name: str, log: Path) -> Iterator[str]:
    """Serve a model folder under a name; yield the base URL, which ends with /v1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(PROGRAM), "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    command += ["--distributed-executor-backend", EXECUTOR]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else even an eager engine compiles, at the first request
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(POLL_S)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False
