"""The processes bench_rollout.py measures: one rollout server, one tool with a chosen latency.

    bench_service.py tool FILE       serves `search`: passages of a corpus after a wait
    bench_service.py rollout FILE    serves samples of a run, as `agent-r1 serve rollout` does

FILE holds the settings as JSON. A model without training writes no tool calls; with `scripted` the
engine samples a set number of tokens a turn and the last of them are replaced by a call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from agent_r1 import Tool
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.main import RolloutSettings, build_chat_format, serve, serve_policy
from agent_r1.rollout.vllm.settings import VllmSettings
from agent_r1.runtime.config import ModelConfig, RedisConfig, RunConfig
from agent_r1.text.chat_template import load_tokenizer
from agent_r1.text.sampler import Generation
from agent_r1.tools.base import Arguments, CallContext
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.main import serve as serve_tool
from agent_r1_proto.trajectory import VersionSpan

SCRIPTED_TURNS = 4
SHORTEST_TURN = 24
TURN_SPREAD = 41
CALL = '<tool_call>{"name":"search","arguments":{"query":" x"}}</tool_call><|im_end|>'
ANSWER = "<answer> x</answer><|im_end|>"


class BenchSearch(Tool):
    """Two passages chosen by the query's hash, `tool_context` seconds after it was asked."""

    name = "search"
    description = "Answers every query with two passages."
    parameters = {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    }

    def __init__(self, corpus: str) -> None:
        with open(corpus, encoding="utf-8") as file:
            self._texts = [json.loads(line)["text"] for line in file]

    async def call(self, arguments: Arguments, context: CallContext) -> str:
        """Wait, then answer."""
        latency_s = context.tool_context
        if isinstance(latency_s, float) and latency_s > 0:
            await asyncio.sleep(latency_s)
        digest = hashlib.blake2b(str(arguments["query"]).encode(), digest_size=8).digest()
        first = int.from_bytes(digest) % (len(self._texts) - 1)
        return "\n".join(f" {text}" for text in self._texts[first : first + 2])


class ScriptedPolicy:
    """A real policy whose turns have set lengths and end in a call, the last one in an answer."""

    def __init__(self, policy: Any, call_ids: list[int], answer_ids: list[int]) -> None:
        self._policy = policy
        self._call_ids = call_ids
        self._answer_ids = answer_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    async def generate(self, token_ids: list[int], **options: Any) -> Generation:
        """Sample a turn, and write the call over its end."""
        length = SHORTEST_TURN + options["seed"] % TURN_SPREAD
        options["max_tokens"] = min(length, options["max_tokens"])
        result: Generation = await self._policy.generate(token_ids, **options)
        turn = int(options["request_id"].rsplit("/", 1)[1])
        ending = self._answer_ids if turn + 1 == SCRIPTED_TURNS else self._call_ids
        tokens = [*result.token_ids[: -len(ending)], *ending]
        span = VersionSpan(policy_version=0, start=0, end=len(tokens))
        return dataclasses.replace(
            result,
            token_ids=tokens,
            logprobs=(result.logprobs + [0.0] * len(tokens))[: len(tokens)],
            version_spans=[span],
            finish_reason="stop",
        )


def engine_settings(model: ModelConfig, rollout: RolloutConfig) -> VllmSettings:
    """Return the engine's settings of a rollout server with these tables."""
    return VllmSettings(
        model_path=model.path,
        dtype=model.dtype,
        max_context=model.max_context,
        max_num_seqs=rollout.max_num_seqs or rollout.max_concurrent,
        kv_cache_gib=rollout.kv_cache_gib,
        threads=rollout.threads,
    )


def _serve_rollout(settings: dict[str, Any]) -> None:
    rollout = RolloutSettings(
        run=RunConfig(id=settings["run_id"]),
        model=ModelConfig.model_validate(settings["model"]),
        redis=RedisConfig(url=settings["redis_url"]),
        env=EnvConfig.model_validate(settings["env"]),
        rollout=RolloutConfig.model_validate(settings["rollout"]),
        tools={"search": settings["tool_url"]},
        weights_dir=Path(settings["announce_dir"]).parent,
        announce_dir=Path(settings["announce_dir"]),
    )
    if settings["scripted"]:
        asyncio.run(_serve_scripted(rollout))
        return
    serve(rollout)


async def _serve_scripted(settings: RolloutSettings) -> None:
    from agent_r1.rollout.vllm.policy import VllmPolicy
    from agent_r1.rollout.vllm.settings import prepare_environment, read_model

    engine = engine_settings(settings.model, settings.rollout)
    prepare_environment(engine)
    facts = await asyncio.to_thread(read_model, engine)
    chat = build_chat_format(
        settings.env, str(facts.directory), facts.eos_token_ids, has_tools=True
    )
    tokenizer = load_tokenizer(str(facts.directory))
    call, answer = (tokenizer.encode(text, add_special_tokens=False) for text in (CALL, ANSWER))
    policy: Any = ScriptedPolicy(VllmPolicy(engine), call, answer)
    await serve_policy(policy, chat, settings)


def main() -> None:
    """Serve until SIGTERM."""
    logging.basicConfig(level="WARNING")
    kind, file = sys.argv[1:]
    settings = json.loads(Path(file).read_text(encoding="utf-8"))
    if kind == "rollout":
        _serve_rollout(settings)
        return
    table = ToolConfig(type="bench_service:BenchSearch", settings={"corpus": settings["corpus"]})
    serve_tool(
        name="search",
        run=RunConfig(id=settings["run_id"]),
        redis=RedisConfig(),
        tool=table,
        announce_dir=Path(settings["announce_dir"]),
    )


if __name__ == "__main__":
    main()
