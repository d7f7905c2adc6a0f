"""The rollout service's tables of `run.toml`: `[env]` and `[rollout]`.

`agent_r1.config.run` joins them with the other services' tables; main.py gets them as arguments.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from agent_r1.runtime.config import ListenConfig, StrictConfig

TOOL_FORMAT_PATTERN = r"^(hermes|llama3_json|mistral|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
ENV_TYPE_PATTERN = r"^(tool|math|code|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"


def check_pattern(pattern: str) -> str:
    """Return a pattern that can be searched for.

    Raises:
        ValueError: it is no regular expression, or has more than one group.
    """
    try:
        groups = re.compile(pattern).groups
    except re.error as exc:
        raise ValueError(f"({pattern!r}) is not a regular expression: {exc}; correct it") from exc
    if groups > 1:
        raise ValueError(
            f"({pattern!r}) has {groups} groups; the answer is what its one group matches: write "
            "(?:...) for the others"
        )
    return pattern


class EnvConfig(StrictConfig):
    """`[env]`: what the agent may do before it answers, and where a trajectory is cut."""

    type: Annotated[str, Field(pattern=ENV_TYPE_PATTERN)] = "tool"
    """`tool` (ToolEnv), `math` (MathEnv), `code` (CodeEnv), or `module:Name` of a ToolEnv subclass
    found through `run.plugins`."""
    options: dict[str, JsonValue] = {}
    """Keyword arguments for a ToolEnv subclass."""
    max_turns: Annotated[int, Field(ge=1)] = 5
    """Most turns of the model; a task's `sampling.max_turns` overrides it."""
    max_calls_per_turn: Annotated[int, Field(ge=1)] = 4
    """Tool calls of one turn that are run; further ones are answered with an error text."""
    max_tokens_per_turn: Annotated[int, Field(ge=1)] = 1024
    """Most sampled tokens of one turn; a turn cut here ends the trajectory as TRUNCATED."""
    max_tool_response_tokens: Annotated[int, Field(ge=16)] | None = None
    """Most tokens of one tool response; the rest is cut and marked. None: no token limit."""
    max_tool_response_chars: Annotated[int, Field(ge=64)] = 2048
    """Most characters of one tool response; the rest is cut and marked."""
    system_prompt: str | None = None
    """System message of every dialogue that does not bring its own: where a task's `prompt` begins
    with a message of role system, that one is used and this one is not. Control tokens in it are
    kept, while those in a task's messages are spelled out."""
    system_prompt_file: Path | None = None
    """File to read the system prompt from, instead of setting `system_prompt`. It is read together
    with the configuration, so a run keeps the text it began with."""
    answer_pattern: Annotated[str, AfterValidator(check_pattern)] | None = None
    """Regular expression that finds the answer in a turn. Its last match counts: what its one group
    matches, or the whole match if it has no group. A dot matches line ends too. Thoughts and calls
    are not searched. None: the text of the last `<answer>` block."""
    tool_format: Annotated[str, Field(pattern=TOOL_FORMAT_PATTERN)] = "hermes"
    """Format of the tool calls, as the model's chat template tells it: `hermes` (Qwen2.5, Qwen3),
    `llama3_json` (Llama 3.x), `mistral`, or `module:Name` of a ToolFormat subclass found through
    `run.plugins`."""
    enable_tools: list[str] | None = None
    """Names of the tools offered to the model; None offers all of `[tools.<name>]`, [] none."""
    pin: Literal["trajectory", "none"] = "trajectory"
    """`trajectory`: a trajectory keeps the tool versions it began with. `none`: each call takes a
    version anew."""
    follow_tool_schemas: bool = False
    """Whether tool versions are taken up whose description or parameters change the prompt of a
    running run."""
    trajectory_timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time one attempt at a trajectory may take, in seconds; then it has FAILED. None: no limit
    but the learner's `sample_timeout_s`."""
    tool_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """Time one tool call may take, retries included, in seconds; then the attempt has FAILED.
    Waiting for a tool that has no free place (429) does not count, up to 300 seconds."""
    tool_retries: Annotated[int, Field(ge=0)] = 6
    """Retries of one call on lost connections and 5xx, within `tool_timeout_s`."""
    step_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Time one `ToolEnv.step` may take, in seconds; then the attempt has FAILED."""
    chat_template_kwargs: dict[str, JsonValue] = {}
    """Variables given to the model's chat template, such as `enable_thinking`."""
    rewritten_history: Literal["refuse", "segments"] = "refuse"
    """Treatment of a chat template that rewrites earlier turns, as those do that remove earlier
    thinking. `refuse`: do not start. `segments`: the rewritten history begins a new segment of the
    trajectory, so that every turn is trained with the context it was sampled in."""

    @model_validator(mode="after")
    def _check_system_prompt(self) -> Self:
        if self.system_prompt is not None and self.system_prompt_file is not None:
            raise ValueError(
                f"env.system_prompt and env.system_prompt_file ({self.system_prompt_file}) cannot "
                "be combined; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.type == "tool" and self.options:
            names = ", ".join(sorted(self.options))
            raise ValueError(
                f"env.options ({names}) must be empty with env.type = 'tool': ToolEnv takes none; "
                "name your own class in env.type = 'module:Name' or remove the options"
            )
        return self


class RolloutConfig(ListenConfig):
    """`[rollout]`: how the sampling servers run."""

    max_concurrent: Annotated[int, Field(ge=1)] = 64
    """Trajectories one server works on at a time; more samples stay in the queue."""
    max_num_seqs: Annotated[int, Field(ge=1)] | None = None
    """Most sequences in one engine step; None: max_concurrent. A smaller number keeps the engine
    full while other trajectories wait for slow tools."""
    server_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] | None = None
    """Name of the server; None derives one from host, port and process id."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 1.0
    """Memory for the KV cache of an engine on the CPU, in GiB."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory the engine may take (weights and KV cache)."""
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs one engine is spread over."""
    max_batched_tokens: Annotated[int, Field(ge=64)] | None = None
    """Most tokens one engine step computes; None lets the engine choose."""
    model_runner: Literal["v1", "v2"] | None = None
    """vLLM's model runner that samples. None: `v2` on GPUs, as vLLM itself chooses, and `v1` on the
    CPU, which has no other. Try `v1` on a GPU where `v2` fails."""
    threads: Annotated[int, Field(ge=1)] = 1
    """Threads of the engine on the CPU."""
    enforce_eager: bool | None = None
    """Run without compiled graphs; None: on the CPU yes, on GPUs no."""
    engine_start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time to load the model and warm up, in seconds; beyond it the server gives up."""
    engine_stall_timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Silence after which an engine counts as wedged, in seconds: it has requests and ends no step,
    or it is idle and does not sample one token. It is killed, its samples go to other servers, and
    the server exits to be started again. Weight loads and the start, which compiles and captures
    graphs, have limits of their own; a GPU's kernel that the start did not meet is compiled in a
    step, and counts."""
    weight_load_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """Time one weight load may take, in seconds, and a second more for every 50 MB; beyond it the
    server gives up and exits. A pull over HTTP that takes longer is tried again, and continues
    where it was; what is sent from memory is sent again."""
    weights_dir: Path | None = None
    """Folder that weights come into with learner.transport = "http" or "collective". It needs room
    for two versions (a tmpfs such as /dev/shm takes memory). None: the system's folder for
    temporary files."""
    tool_start_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Time to wait at start for every tool service to answer, in seconds."""
    max_tool_requests: Annotated[int, Field(ge=1)] = 64
    """HTTP requests to one tool in flight at a time; further ones wait."""
    scorer_url: Annotated[str, Field(pattern=r"^https?://")] | None = None
    """Base URL of the reward service that scores branches for decoding. None: the one that is
    started beside this server; without one, decoding by a scorer is refused."""
    announce_expiry_s: Annotated[float, Field(gt=0)] = 15.0
    """An announcement in Redis disappears after this many seconds without renewal."""
