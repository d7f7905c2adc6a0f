"""The gateway against vLLM's own API server: equal requests, one engine's settings, one client.

    make bench CASE=gateway ARGS="--sessions 1 64 --body-kb 5 50 --rounds 3"

A session sends a history that grows by an answer and a question each time, as agents do, with a
text of so many KB before it that all sessions share. "ours" are sampled tokens a second through
gateway, journal in Redis and rollout server; "other" those of vLLM's server with the worker that
our CPU engine has; that one is asked for log-probabilities too with `--logprobs 1`, which ours
records in any case. Nothing is an agent here: the service that runs them is in this process, and
opens sessions. Sessions are opened before the clock starts. With one session, "added ms" is what
one request takes longer, by the medians. "cached" is the share of prompt tokens that was not
computed again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from agent_r1.launch.local_redis import free_port
from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.tools import main as tool_service
from agent_r1.tools.base import Arguments, CallContext, Tool
from agent_r1.tools.config import ToolConfig
from agent_r1_proto.agents import AGENTS, AgentAttempt, AgentEnd
from agent_r1_proto.registry import Registry
from agent_r1_proto.streams import Broker
from agent_r1_proto.tasks import RolloutKey, RolloutTask, Task
from agent_r1_proto.tools import ToolResult
from agent_r1_proto.trajectory import Trajectory
from agent_r1_proto.weights import NewestVersion
from benchmarks.harness import OUT, Row, compare, read_options, write_report
from benchmarks.models import random_model
from benchmarks.processes import START_TIMEOUT_S, announced_url, process, redis_server

AGENT_R1 = Path(sys.executable).with_name("agent-r1")
GOAL = "≥ 0.93"
TURNS = 3
MAX_TOKENS = 32
WORD = " grandfather"
"""One token of the tiny tokenizer: a long text has few tokens, so that its bytes weigh most."""
MAX_CONTEXT = 8192
NORMS = {"rms_norm": ["agent_r1_cpu"], "fused_add_rms_norm": ["agent_r1_cpu"]}
ENGINE = {
    "max-model-len": MAX_CONTEXT,
    "max-num-batched-tokens": MAX_CONTEXT,
    "max-num-seqs": 64,
    "kv-cache-memory-bytes": 1 << 30,
    "block-size": 32,
    "dtype": "float32",
    "ir-op-priority": json.dumps(NORMS),
    "worker-cls": "agent_r1.rollout.vllm.cpu.worker.FastCPUWorker",
    "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}
"""As the rollout server has it on CPUs (rollout/vllm/engine_process.py), and the variables."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
COMPUTED = re.compile(r'agent_r1_rollout_engine_tokens_total\{kind="prompt"\} (\S+)')
"""Tokens of prompts that the engine has computed, on the rollout server's page of metrics."""
CONFIG = f"""
run = {{{{id = "bench", log_level = "WARNING"}}}}
model = {{{{path = "{{model}}", max_context = {MAX_CONTEXT}}}}}
redis = {{{{url = "{{redis}}"}}}}
env = {{{{max_tokens_per_turn = {MAX_TOKENS}}}}}
rollout = {{{{max_num_seqs = 64, kv_cache_gib = 1.0}}}}
agent = {{{{command = ["true"], timeout_s = 500, max_concurrent = 128}}}}
"""


class Door(Tool):
    """The service of agents as gateways call it: hands the session out, and waits."""

    name = AGENTS
    description = "Opens sessions for the benchmark."
    parameters = {"type": "object", "properties": {}}
    sessions = True
    opened: asyncio.Queue[AgentAttempt]
    over: asyncio.Event

    async def call(self, arguments: Arguments, context: CallContext) -> ToolResult:
        """Hand a session out, and return once it is over."""
        Door.opened.put_nowait(AgentAttempt.model_validate(context.tool_context))
        await Door.over.wait()
        return ToolResult(data=AgentEnd(exit="ok").model_dump(mode="json"))


@dataclass
class Answered:
    """What a client has been answered."""

    sampled: int = 0
    prompt: int = 0
    cached: int = 0
    seconds: list[float] = field(default_factory=list)
    """Of each request."""


@dataclass(frozen=True)
class Model:
    """Where one session's model is."""

    url: str
    key: str
    name: str
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Fields of its requests."""


async def converse(client: aiohttp.ClientSession, model: Model, text: str, number: int) -> Answered:
    """Ask as an agent does, each time with all that was said before."""
    found, is_vllm = Answered(), model.key == "none"
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"{number}"}]
    for turn in range(TURNS):
        body = {
            "model": model.name,
            "messages": messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": number * TURNS + turn,
            **model.more,
        }
        started = time.perf_counter()
        async with client.post(
            f"{model.url}/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {model.key}"},
        ) as answer:
            said = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {said}")
        found.seconds.append(time.perf_counter() - started)
        usage = said["usage"]
        found.sampled += usage["completion_tokens"]
        found.prompt += usage["prompt_tokens"]
        if is_vllm:  # a session says what it has sent before; what was found, its engine knows
            details = usage.get("prompt_tokens_details") or {}
            found.cached += details.get("cached_tokens") or 0
        content = said["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "on"}]
    return found


async def ask(models: Sequence[Model], text: str, numbers: range) -> tuple[float, list[Answered]]:
    """Let every session converse at once; return tokens a second, and what each was answered."""
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as client:
        started = time.perf_counter()
        pairs = zip(models, numbers, strict=True)
        found = await asyncio.gather(*(converse(client, one, text, i) for one, i in pairs))
        seconds = time.perf_counter() - started
    return sum(one.sampled for one in found) / seconds, found


@contextlib.asynccontextmanager
async def sessions(broker: Broker, numbers: range) -> AsyncIterator[list[Model]]:
    """Open sessions of the gateway, and close them.

    Raises:
        RuntimeError: an attempt failed.
    """
    Door.opened, Door.over = asyncio.Queue(), asyncio.Event()
    prompt = [{"role": "user", "content": "-"}]
    tasks = [
        RolloutTask(
            key=RolloutKey(run_id="bench", incarnation=0, group_id=number, sample_index=0),
            group_size=1,
            task=Task.model_validate({"id": str(number), "prompt": prompt}),
        )
        for number in numbers
    ]
    names = {"group": "bench", "consumer": "bench"}
    async with broker.consumer(broker.keys.trajectories, Trajectory, **names) as consumer:
        await broker.publish_many(broker.keys.tasks, tasks)
        opened = [await asyncio.wait_for(Door.opened.get(), 60) for _ in tasks]
        yield [Model(one.url, one.key, one.model) for one in opened]
        Door.over.set()
        left = len(tasks)
        while left:
            for entry in await consumer.read(64, 1.0):
                if entry.message.status == "FAILED":
                    raise RuntimeError(f"an attempt failed: {entry.message.reason}")
                await consumer.finish(entry)
                left -= 1


@contextlib.contextmanager
def api_server(model: Path, log: Any) -> Iterator[Model]:
    """Serve a model with vLLM alone; yield its address."""
    port = free_port()
    words = [f"--{name}={value}" for name, value in ENGINE.items()]
    words += [f"--model={model}", "--served-model-name=policy", f"--port={port}"]
    words += ["--host=127.0.0.1", "--enforce-eager", "--no-enable-chunked-prefill"]
    words += ["--enable-prompt-tokens-details", "--generation-config=vllm"]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with process(*command, stdout=log, stderr=log, env=os.environ | ENVIRONMENT) as server:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"vLLM's server did not come up; see {OUT}/gateway.log")
            time.sleep(0.2)
        yield Model(f"{url}/v1", "none", "policy")


def _computed(rollout_url: str) -> int:
    found = COMPUTED.search(httpx.get(f"{rollout_url}/metrics").text)
    assert found is not None
    return int(float(found[1]))


async def measure(other: Model, rollout_url: str, redis_url: str, options: Any) -> list[Row]:
    """Measure both sides by turns, in pairs of equal requests."""
    rows: list[Row] = []
    started = 0
    async with await Broker.connect(redis_url, "bench") as broker:
        for kb in options.body_kb:
            text = WORD * (1000 * kb // len(WORD))
            for count, logprobs in product(options.sessions, options.logprobs):
                asked = replace(other, more={"logprobs": bool(logprobs)})
                rates: dict[str, list[float]] = {"ours": [], "other": []}
                answers: dict[str, list[Answered]] = {"ours": [], "other": []}
                for number in range(options.rounds + 1):
                    numbers = range(started, started := started + count)
                    for side in ("ours", "other") if number % 2 else ("other", "ours"):
                        if side == "ours":
                            computed = _computed(rollout_url)
                            async with sessions(broker, numbers) as models:
                                rate, found = await ask(models, text, numbers)
                            read = sum(one.prompt for one in found)
                            found[0].cached += read - (_computed(rollout_url) - computed)
                        else:
                            rate, found = await ask([asked] * count, text, numbers)
                        if number:  # the first warms up
                            rates[side].append(rate)
                            answers[side] += found
                    print({side: found[-1:] for side, found in rates.items()}, flush=True)
                what = f"{kb} KB, {count} sessions" + ", log-probabilities" * logprobs
                row = compare(what, **rates, goal=GOAL)
                rows.append(row | _details(answers, count))
    return rows


def _details(answers: dict[str, list[Answered]], count: int) -> Row:
    cached = {
        side: sum(one.cached for one in found) / sum(one.prompt for one in found)
        for side, found in answers.items()
    }
    middle = {
        side: statistics.median(s for one in found for s in one.seconds)
        for side, found in answers.items()
    }
    added = 1000 * (middle["ours"] - middle["other"]) if count == 1 else None
    return {"added ms": added, "cached": cached["ours"], "cached, other": cached["other"]}


async def serve_and_measure(
    other: Model, rollout_url: str, redis_url: str, config: Path, log: Any, options: Any
) -> list[Row]:
    """Start the gateway beside the service that opens its sessions."""
    folder = config.parent
    door = asyncio.create_task(
        tool_service._serve(
            AGENTS,
            RunConfig(id="bench"),
            RedisConfig(url=redis_url),
            ToolConfig(type="__main__:Door"),
            None,
            None,
            print,
        )
    )
    try:
        async with await Broker.connect(redis_url, "bench") as broker:
            registry = Registry(broker)
            await registry.set_incarnation(0)
            await registry.set_newest_version(NewestVersion(policy_version=0))
        command = [AGENT_R1, "serve", "gateway", config, "--announce-dir", folder]
        with process(*command, stdout=log, stderr=log) as gateway:
            await asyncio.to_thread(announced_url, folder, "gateway", gateway)
            measuring = asyncio.create_task(measure(other, rollout_url, redis_url, options))
            await asyncio.wait([measuring, door], return_when=asyncio.FIRST_COMPLETED)
            if not measuring.done():
                sys.exit("interrupted")
            return measuring.result()
    finally:
        door.cancel()
        await asyncio.gather(door, return_exceptions=True)


def main() -> None:
    """Start both sides, and measure them."""
    options = read_options(__doc__, sessions=(1, 64), body_kb=(5, 50), logprobs=(0, 1), rounds=3)
    OUT.mkdir(parents=True, exist_ok=True)
    model = random_model("90m_long")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((OUT / "gateway.log").open("wb"))
        redis_url, _ = stack.enter_context(redis_server(folder))
        config = folder / "run.toml"
        config.write_text(CONFIG.format(model=model, redis=redis_url), encoding="utf-8")
        command = [AGENT_R1, "serve", "rollout", config, "--announce-dir", folder]
        rollout = stack.enter_context(process(*command, stdout=log, stderr=log))
        rollout_url = announced_url(folder, "rollout", rollout)
        other = stack.enter_context(api_server(model, log))
        rows = asyncio.run(serve_and_measure(other, rollout_url, redis_url, config, log, options))
    write_report("gateway", rows)


if __name__ == "__main__":
    main()
