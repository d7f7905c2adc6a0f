"""Parts of a training step, by sampled stacks; profile_run.py counts them.

A stack is one line of py-spy's raw format: functions from the outermost to the innermost, as
`name (file:line)`, joined by semicolons, and how often it was seen.
"""

from __future__ import annotations

import re
from collections import Counter

OTHER = "other"

# For each process, what its parts look like. The innermost frame that a pattern finds decides, and
# of the patterns of one frame the first.
RULES: dict[str, dict[str, str]] = {
    "engine": {
        "load weights": r"weight_update|update_weights|weight_transfer|layerwise_reload"
        r"|pause_scheduler",
        "scheduler": r"^schedule \(|^(add_request|has_requests) \(.*(core|scheduler)\.py",
        "input preparation": r"^(_update_states|_prepare_inputs|_build_attention_metadata"
        r"|_preprocess|_get_slot_mappings|_determine_batch|_prepare_padding|preprocess_add_request"
        r"|_make_sampling_metadata|refresh_metadata)",
        "output layer": r"compute_logits",
        "model": r"_model_forward",
        "log-probabilities": r"gather_logprobs|compute_logprobs|_get_prompt_logprobs",
        "sampler": r"^_sample \(|sampler\.py",
        "output handling": r"update_from_output|_bookkeeping_sync|_update_states_after"
        r"|_attach_weight_version",
        "messages to and from the server": r"process_(input|output)_sockets|_handle_client_request"
        r"|_process_input_queue|serial_utils",
        "rest of a step": r"^(step|execute_model|sample_tokens|_process_engine_step) \(",
    },
    "rollout": {
        "load weights": r"_swap_weights|verify_snapshot|weights/(versions|file|http)\.py",
        "canary": r"^score \(",
        "answers of the engine": r"output_handler|output_processor|process_outputs"
        r"|engine/(logprobs|detokenizer)\.py|vllm/answers\.py",
        "requests to the engine": r"add_request|input_processor|sampling_params"
        r"|core_client\.py|^generate \(.*(policy|async_llm)",
        "Redis": r"redis/|streams\.py|stream_consumer\.py|registry\.py",
        "encode and decode": r"agent_r1_proto/(trajectory|tasks|wire|codec)|pydantic"
        r"|^finish \(.*text/tokens",
        "HTTP": r"attempts/tool_(client|transport)|httpx|aiohttp|uvicorn|starlette|fastapi",
        "agent loop": r"agent_loop\.py|parsing\.py|chat_format\.py|call_runner\.py|attempts/|envs/"
        r"|attempts/worker\.py|tokenization|tracing\.py|logging/",
        "event loop": r"asyncio/|selectors\.py",
    },
    "learner": {
        "publish weights: gather": r"^(collect|gathered|full_weights) \(",
        "publish weights: write": r"snapshot\.py|publisher\.py|weights/transports",
        "canary": r"canary\.py",
        "optimizer": r"optim/adam|clip_grad|^step \(.*(zero|engine|stage)|_take_model_step",
        "backward": r"^backward \(|autograd",
        "loss": r"algorithms/losses|_policy_share|_value_share|metric_accumulator",
        "forward": r"^forward \(.*engine/linear\.py|engine/(model|attention|layout)\.py|"
        r"modeling_|transformers/|torch/nn",
        "build samples": r"train_samples\.py|microbatches\.py|advantages/|schedule\.py",
        "report": r"reporting/|tensorboard",
        "Redis": r"redis/|streams\.py|stream_consumer\.py|registry\.py",
        "encode and decode": r"agent_r1_proto/|pydantic",
        "collect": r"collector\.py|groups\.py",
        "HTTP": r"httpx|aiohttp|uvicorn|starlette|fastapi",
        "rest of a step": r"train_step|ranks/",
        "event loop": r"asyncio/|selectors\.py",
    },
    "reward": {
        "score": r"reward/(scorer|components|scoring)",
        "Redis": r"redis/|streams\.py|stream_consumer\.py|registry\.py",
        "encode and decode": r"agent_r1_proto/|pydantic",
        "work loop": r"reward/worker\.py|tracing\.py|logging/",
        "HTTP": r"uvicorn|starlette|fastapi",
        "event loop": r"asyncio/|selectors\.py",
    },
    "search": {
        "search": r"tools/search",
        "HTTP": r"tools/app\.py|uvicorn|starlette|fastapi|pydantic|httptools",
        "Redis": r"redis/|streams\.py|registry\.py",
        "event loop": r"asyncio/|selectors\.py",
    },
}
# The innermost frame of a thread that waits: the system still calls some of them running.
IDLE = re.compile(r"^(wait|poll|select|_worker|get|monitor_engine_liveness|_try_wait|acquire) \(")


def part_of(process: str, frames: list[str]) -> str | None:
    """Return the part of a step that a stack belongs to; None for a thread that waits."""
    if IDLE.search(frames[-1]):
        return None
    for frame in reversed(frames):
        for part, pattern in RULES[process].items():
            if re.search(pattern, frame):
                return part
    return OTHER


def count_parts(process: str, text: str) -> Counter[str]:
    """Return how many samples each part of a process has.

    Args:
        process: a key of `RULES`.
        text: py-spy's raw format, a stack and its count a line. Names may hold any character, even
            other ends of lines: py-spy reads the memory of a process that runs on.
    """
    counts: Counter[str] = Counter()
    for line in filter(None, text.split("\n")):
        stack, _, seen = line.rpartition(" ")
        # py-spy writes methods as Class.method; the patterns name the method alone.
        frames = [re.sub(r"^(?:[\w<>]+\.)+(?=[\w<>]+ \()", "", frame) for frame in stack.split(";")]
        if part := part_of(process, frames):
            counts[part] += int(seen)
    return counts
