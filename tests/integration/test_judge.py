"""The component judge against a real server with OpenAI's API: vLLM's own, with the tiny base."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from agent_r1.reward.config import JudgeConfig, RewardConfig
from agent_r1.reward.scorer import ComponentError, Scorer
from agent_r1_proto.rewards import ScoreRequest, ScoreTurn
from agent_r1_proto.tasks import ChatMessage

pytestmark = pytest.mark.vllm

BASE = Path(__file__).resolve().parents[2] / "examples" / "tiny_world" / "base"
START_TIMEOUT_S = 180.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE)]
    command += ["--served-model-name", "judge", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    log = tmp_path_factory.mktemp("judge") / "server.log"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)
        yield f"{url}/v1"
    finally:
        process.terminate()
        process.wait(60)


def asked(text: str) -> ScoreRequest:
    return ScoreRequest(
        prompt=[ChatMessage(role="user", content="Where does Harim Abak live?")],
        payload={},
        turns=[ScoreTurn(text=text)],
    )


def scorer_of(url: str, **changes: object) -> Scorer:
    judge = {"url": url, "model": "judge", "prompt": "$question $transcript Score it."} | changes
    return Scorer(RewardConfig(components={"judge": 1.0}, judge=JudgeConfig.model_validate(judge)))


async def test_a_real_model_scores_and_its_refusals_are_shown(server: str):
    choices = {"structured_outputs": {"choice": ["Score: 4", "Score: 8"]}}
    scorer = scorer_of(server, extra_body=choices)
    reward = await scorer.score(asked("In Bexi."))
    assert reward.total in (0.4, 0.8)
    assert reward.components["judge"] == reward.total

    unknown = scorer_of(server, model="another")
    with pytest.raises(ComponentError, match=r"refuses the request with 404.*another"):
        await unknown.score(asked("In Bexi."))
    with pytest.raises(ComponentError, match="refuses the request with 400"):
        await scorer.score(asked("In Bexi. " * 600))  # longer than the model's context
    for one in (scorer, unknown):
        await one.close()
