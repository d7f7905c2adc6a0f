"""Every supported architecture, end to end: its chat template, a call, an engine, a training step.

A tiny random model of the architecture has the published chat template. Its first turn is a call,
put in its mouth; the last one it samples. Two architectures run in the suite, all of them with
`make test-models`. The hub's own models were not run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.learner.engine.interface import LossSpec, TrainSample
from agent_r1.rollout.agent_loop import AgentLoop
from agent_r1.rollout.config import EnvConfig, RolloutConfig
from agent_r1.rollout.envs import EnvStep, ToolEnv
from agent_r1.rollout.main import build_chat_format
from agent_r1.rollout.vllm.policy import VllmPolicy
from agent_r1.rollout.vllm.settings import VllmSettings, read_model
from agent_r1.runtime.config import ModelConfig
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.chat_template import ChatTemplateError, load_tokenizer
from agent_r1.text.tokens import Generation
from agent_r1_proto.parts import TextPart
from agent_r1_proto.tasks import Role, Task
from agent_r1_proto.tools import ToolResult
from agent_r1_proto.trajectory import Trajectory, VersionSpan
from tests.support.architectures import (
    ARCHITECTURES,
    ARGUMENTS,
    CALL_ID,
    RESULT,
    Architecture,
    save,
)
from tests.support.builders import rollout_task
from tests.support.engines import make_engine, sequence_logprobs
from tests.support.fakes import FakeToolServer
from tests.support.snapshot_files import write_version

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]
IN_SUITE = ("mistral-v3", "smollm2")
MAX_CONTEXT = 1024
SAMPLED_TOKENS = 24
QUESTION = "Who is Ada?"


class TwoTurns(ToolEnv):
    """Asks on after the first turn, with a message of role user."""

    sends_messages = True

    async def step(self, turn: Any, results: Any) -> EnvStep:
        return EnvStep(message=RESULT) if turn.number == 0 else EnvStep(done=True)


class Insisting(ToolEnv):
    """Asks on, with a message of role user, after each turn without a call but the third."""

    sends_messages = True

    async def step(self, turn: Any, results: Any) -> EnvStep:
        if results:
            return EnvStep(observations=[result.text for result in results])
        return EnvStep(message="Are you sure?") if turn.number < 2 else EnvStep(done=True)


class FirstTurnsGiven:
    """A policy that samples all but its first turns, whose log-probabilities are its own."""

    def __init__(self, policy: VllmPolicy, turns: Sequence[list[int]]) -> None:
        self._policy = policy
        self._turns = turns
        self.max_context = policy.max_context

    async def generate(self, token_ids: list[int], **options: Any) -> Generation:
        number = int(options["request_id"].rsplit("/", 1)[1])
        if number >= len(self._turns):
            return await self._policy.generate(token_ids, **options)
        turn = self._turns[number]
        logprobs = await self._policy.score([*token_ids, *turn])
        span = VersionSpan(policy_version=0, start=0, end=len(turn))
        return Generation(turn, logprobs[len(token_ids) - 1 :], [span], "stop")


class Run:
    """One architecture: its model on disk, an engine, and the trajectory it wrote."""

    def __init__(self, kind: Architecture, folder: Path) -> None:
        self.kind = kind
        self.model = save(kind, folder / "model")
        settings = VllmSettings(
            ModelConfig(path=str(self.model), max_context=MAX_CONTEXT),
            RolloutConfig(max_concurrent=4, kv_cache_gib=0.25),
        )
        self.facts = read_model(settings)
        self.loop = asyncio.new_event_loop()
        self.env = EnvConfig.model_validate(
            {
                "type": "tool" if kind.call else f"{__name__}:TwoTurns",
                "tool_format": kind.tool_format,
                "max_tokens_per_turn": SAMPLED_TOKENS,
            }
        )
        self.chat = self.build_chat()
        self.policy = VllmPolicy(settings)
        self.loop.run_until_complete(self.policy.start())

    def build_chat(self) -> ChatFormat:
        has_tools = self.kind.call is not None
        ends = self.facts.eos_token_ids
        if has_tools:
            return build_chat_format(self.env, str(self.model), ends, has_tools=True)
        tokenizer = load_tokenizer(str(self.model))
        return ChatFormat(tokenizer, end_of_turn_ids=ends, reply_roles=("user",))

    def sample(self) -> Trajectory:
        said = self.kind.call or "Let me think."
        make_env = ToolEnv if self.kind.call else TwoTurns
        return self.write(self.chat, [said], make_env)

    def write(self, chat: ChatFormat, said: Sequence[str], make_env: type[ToolEnv]) -> Trajectory:
        """Return the trajectory of an interaction whose first turns are given."""
        return self.loop.run_until_complete(self._write(chat, said, make_env))

    async def _write(
        self, chat: ChatFormat, said: Sequence[str], make_env: type[ToolEnv]
    ) -> Trajectory:
        turns = [[*chat.encode(text), self.facts.eos_token_ids[0]] for text in said]
        async with FakeToolServer("search", answer=_answer) as server:
            tools = ToolClient({"search": server.url} if self.kind.call else {})
            try:
                await tools.start(wait_s=60.0)
                loop = AgentLoop(
                    policy=FirstTurnsGiven(self.policy, turns),  # pyright: ignore[reportArgumentType]
                    chat=chat,
                    tools=tools,
                    env=self.env,
                    make_env=make_env,
                    max_context=MAX_CONTEXT,
                    run_seed=0,
                    server_id="server-1",
                )
                return await loop.run(rollout_task(task=Task(id="q", prompt=QUESTION)))
            finally:
                await tools.stop()

    def close(self) -> None:
        self.loop.run_until_complete(self.policy.stop())
        self.loop.close()


def _answer(call: Any) -> ToolResult:
    assert call.arguments == ARGUMENTS
    return ToolResult(parts=[TextPart(text=RESULT)])


def _cases() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in IN_SUITE else pytest.mark.models)
        for name in ARCHITECTURES
    ]


@pytest.fixture(scope="module", params=_cases())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    started = Run(ARCHITECTURES[request.param], tmp_path_factory.mktemp("architecture"))
    yield started
    started.close()


def dialogue(kind: Architecture) -> list[dict[str, Any]]:
    """What was said before the second turn, as a client would give it to the template."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    if kind.call is None:
        messages.append({"role": "assistant", "content": "Let me think."})
        return [*messages, {"role": "user", "content": RESULT}]
    function = {"name": "search", "arguments": ARGUMENTS}
    call = {"id": CALL_ID, "type": "function", "function": function}
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    result = {"role": "tool", "name": "search", "tool_call_id": CALL_ID, "content": RESULT}
    return [*messages, result]


def test_an_architecture_runs_from_its_template_to_a_training_step(run: Run, tmp_path: Path):
    trajectory = run.sample()
    assert (trajectory.status, trajectory.reason) == ("TRUNCATED", "max_tokens_per_turn")
    first, second = trajectory.turns
    if run.kind.call is not None:
        (call,) = first.calls
        assert (call.tool, call.arguments, call.status) == ("search", ARGUMENTS, "ok")
        assert call.end_token_index == first.end - 2  # its last token; the next one ends the turn

    # The tokens are those of the template, and of nothing else.
    tokenizer = load_tokenizer(str(run.model))
    tools = [_spec(run)] if run.kind.call else None
    rendered = tokenizer.apply_chat_template(
        dialogue(run.kind), tools=tools, add_generation_prompt=True, tokenize=False
    )
    assert run.kind.in_prompt in rendered
    before = trajectory.token_ids[: second.start].tolist()
    assert run.chat.decode(before) == rendered
    assert before == run.chat.encode(rendered)

    check_learner(run, trajectory, tmp_path)


def check_learner(run: Run, trajectory: Trajectory, folder: Path) -> None:
    """Train on a trajectory; learner and engine agree on every segment, before and after."""
    # The learner finds the log-probabilities that the engine has told.
    engine = make_engine(run.model, max_tokens_per_microbatch=2048)
    ids, mask = trajectory.token_ids, trajectory.action_mask
    sample = TrainSample(
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=trajectory.rollout_logprobs,
        advantages=mask.astype(np.float32),
        segment_starts=trajectory.segment_starts,
    )
    (found,) = engine.token_logprobs([sample])
    assert np.abs(found - trajectory.rollout_logprobs)[mask].max() <= 1e-4

    # A step changes the weights; the engine takes the new ones, and both agree again.
    first = write_version(engine, folder / "v0", "run", 0)
    metrics = engine.train_batch([sample, replace(sample, advantages=-sample.advantages / 2)], SPEC)
    assert np.isfinite(metrics["loss/policy"])
    manifest = write_version(engine, folder / "v1", "run", 1)
    run.loop.run_until_complete(run.policy.load_weights(manifest))
    (after,) = engine.token_logprobs([sample])
    assert np.abs(after - found)[mask].max() > 1e-3
    segments = [ids[start:end] for start, end in trajectory.segment_bounds()]
    for segment, ours in zip(segments, sequence_logprobs(engine, segments), strict=True):
        theirs = run.loop.run_until_complete(run.policy.score(segment.tolist()))
        assert np.abs(ours - np.array(theirs)).mean() <= 2e-5
    run.loop.run_until_complete(run.policy.load_weights(first))
    engine.close()


# As Qwen3's does, but at every reply: a turn that is not the last one loses its thought.
FORGETFUL_CHATML = (
    "{%- for m in messages -%}{%- set said = m.content if loop.last else "
    "m.content.split('</think>')[-1].lstrip('\\n') -%}"
    "{{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@pytest.mark.parametrize(
    "run",
    ["smollm2", pytest.param("qwen3", marks=pytest.mark.models)],
    indirect=True,
)
def test_a_template_that_removes_earlier_thinking_makes_segments(run: Run, tmp_path: Path):
    tokenizer = load_tokenizer(str(run.model))
    roles: tuple[Role, ...] = ("user",)
    thought = "<think>\nWho may that be?\n</think>\n\n"
    if run.kind.call is None:
        tokenizer.chat_template = FORGETFUL_CHATML
        said = [f"{thought}A poet.", f"{thought}Yes."]
    else:
        roles = ("tool", "user")
        said = [thought + run.kind.call, f"{thought}A poet."]
    chat = ChatFormat(
        tokenizer, end_of_turn_ids=run.facts.eos_token_ids, reply_roles=roles, segments=True
    )
    trajectory = run.write(chat, said, Insisting)
    assert (trajectory.reason, len(trajectory.turns)) == ("max_tokens_per_turn", 3)

    # Where the template rewrites, at a message of the user, the prompt is its own rendering.
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    begins: list[int] = []
    for i, turn in enumerate(trajectory.turns):
        if i == 0 or messages[-1]["role"] == "user":
            start = [0, *trajectory.segment_starts][len(begins)]
            begins.append(start)
            prompt = tokenizer.apply_chat_template(
                messages,
                tools=[_spec(run)] if run.kind.call else None,
                add_generation_prompt=True,
                tokenize=False,
            )
            assert chat.decode(trajectory.token_ids[start : turn.start].tolist()) == prompt
            assert trajectory.token_ids[start : turn.start].tolist() == chat.encode(prompt)
        reply = {"role": "tool", "name": "search", "tool_call_id": CALL_ID, "content": RESULT}
        if not turn.calls:
            reply = {"role": "user", "content": "Are you sure?"}
        messages += [{"role": "assistant", "content": turn.text}, reply]
    assert begins == [0, *trajectory.segment_starts]
    assert len(begins) == (2 if run.kind.call else 3)
    last = chat.decode(trajectory.token_ids[begins[-1] : trajectory.turns[-1].start].tolist())
    assert "Who may that be?" not in last

    check_learner(run, trajectory, tmp_path)


SPEC = LossSpec(policy_loss="ppo", optimizer_steps=1)


def _spec(run: Run) -> dict[str, Any]:
    return FakeToolServer("search").spec.as_function()


@pytest.mark.models
def test_a_template_that_removes_earlier_thinking_is_refused_where_it_does(tmp_path: Path):
    model = save(ARCHITECTURES["qwen3"], tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    end = tokenizer.eos_token_id
    ChatFormat(tokenizer, end_of_turn_ids=[end])  # between calls it keeps them
    with pytest.raises(ChatTemplateError, match="rewrites earlier turns"):
        ChatFormat(tokenizer, end_of_turn_ids=[end], reply_roles=("tool", "user"))


@pytest.mark.models
def test_a_template_without_tools_says_so(tmp_path: Path):
    model = save(ARCHITECTURES["gemma3"], tmp_path / "model")
    end = json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        build_chat_format(EnvConfig(), str(model), (end,), has_tools=True)
    build_chat_format(EnvConfig(enable_tools=[]), str(model), (end,), has_tools=True)
