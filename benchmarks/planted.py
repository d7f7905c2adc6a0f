"""Runs with a planted fall: every service in this process, with a policy that follows a script.

Redis, learner, its DeepSpeed engine, pushes, canary, rollout server, tool service and reward worker
are real. Only the words that the policy samples are scripted; their log-probabilities are those of
tiny_world's base under the weights that were pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agent_r1.cli.services.serve import rollout_settings
from agent_r1.config.checks import use_plugins
from agent_r1.config.run import Config, load_config, write_config
from agent_r1.learner.main import build_engine
from agent_r1.learner.run_spec import RunSpec
from agent_r1.learner.train import Learner
from agent_r1.reward.scorer import Scorer
from agent_r1.reward.worker import RewardWorker
from agent_r1.rollout.main import build_chat_format, serve_policy
from agent_r1.rollout.policy import EngineWork, LoadTiming
from agent_r1.runtime.http.serving import bind, serving
from agent_r1.text.chat_format import ChatFormat
from agent_r1.text.chat_template import load_tokenizer, read_end_tokens
from agent_r1.text.tokens import Generation
from agent_r1.tools.app import ToolService, create_app
from agent_r1.tools.loading import load_tool
from agent_r1_proto.streams import Broker
from agent_r1_proto.trajectory import VersionSpan
from agent_r1_proto.weights import WeightManifest
from benchmarks.models import BASE
from benchmarks.plugins.bench_falls import FLATTERY, code_of
from benchmarks.processes import PLUGINS

CAUSES = ("broken tool", "hacked component", "hard subset", "bad push", "no fall")
HARMLESS = ("slower tool", "new set", "longer answers")
BREAKS = ("errors", "empty", "half", "same")
PLANTED_AT = 40
STEPS = 60
GROUPS, GROUP_SIZE = 4, 4
SKILL = {"near": 0.8, "far": 0.8, "hard": 0.15}
"""Chance of a right answer by set, before what a task has of its own."""
DAMAGED = 0.5
"""What skills are multiplied with under weights that were damaged on their way."""
NOISE = 0.02
"""Standard deviation of the damage to a tensor of weights."""
RAMP = 8
"""Steps in which the policy learns to please the component."""
TOML = """
[run]
id = "{run_id}"
dir = "{folder}"
seed = {seed}
plugins = ["{plugins}"]
[redis]
url = "{redis}"
[model]
path = "{base}"
max_context = 512
[data]
train = ["{tasks}"]
shuffle = false
[env]
max_turns = 4
max_tokens_per_turn = 160
max_calls_per_turn = 1
[tools.lookup]
type = "bench_falls:Lookup"
[reward.components]
exact_match = 1.0
"bench_falls:flattery" = 0.8
[learner]
steps = {steps}
groups_per_batch = {groups}
group_size = {size}
checkpoint_every = 0
canary_action = "warn"
trajectories_per_step = "all"
loggers = []
[engine]
lr = 1e-5
device = "cpu"
torch_threads = 1
[evaluation]
before = false
after = false
"""


@dataclass(frozen=True)
class Plan:
    """What happens in a run."""

    cause: str
    """Of CAUSES."""
    harmless: str
    """Of HARMLESS, at the same step."""
    seed: int
    steps: int = STEPS
    at: int = PLANTED_AT

    def tasks(self) -> list[dict[str, Any]]:
        """Return the tasks in the order of the steps."""
        chance = random.Random(f"tasks {self.seed}")
        return [self._task(n, n // GROUPS + 1, chance) for n in range(self.steps * GROUPS)]

    def _task(self, number: int, step: int, chance: random.Random) -> dict[str, Any]:
        later, of_set = step >= self.at, "near"
        if later and self.harmless == "new set" and chance.random() < 0.3:
            of_set = "far"
        if later and self.cause == "hard subset" and chance.random() < 0.5:
            of_set = "hard"
        item = f"{of_set}-{chance.randrange(200)}"
        metadata = {"set": of_set, "type": chance.choice(["number", "name"])}
        return {
            "id": f"q{number}",
            "prompt": f"What is the code of {item}?",
            "payload": {"answers": [code_of(item)]},
            "metadata": metadata,
        }


class ScriptedPolicy:
    """Looks an item up, and answers with what it read, more or less often.

    It does what a server asks of a `Policy` that only takes samples.

    Args:
        plan: of the run.
        chat: of the model.
        end_id: token that ends a turn.
    """

    max_context = 512
    num_in_flight = 0
    is_loading = False
    death = None

    def __init__(self, plan: Plan, chat: ChatFormat, end_id: int) -> None:
        self.work = EngineWork()
        self.policy_version = 0
        self.eos_token_ids = (end_id,)
        self._plan = plan
        self._chat = chat
        self._tokenizer = load_tokenizer(str(BASE))
        self._end_id = end_id
        self._model: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
        self._damaged = False

    @property
    def step(self) -> int:
        """Learner step that is sampled for."""
        return self.policy_version + 1

    @property
    def is_late(self) -> bool:
        """Whether what was planted has come."""
        return self.step >= self._plan.at

    async def start(self) -> None:
        """Be ready."""

    async def generate(
        self, token_ids: list[int], *, max_tokens: int, temperature: float, seed: int, **_: Any
    ) -> Generation:
        """Write a turn."""
        text = self._turn(self._tokenizer.decode(token_ids), random.Random(seed))
        turn = [*self._chat.encode(text)[: max_tokens - 1], self._end_id]
        logprobs = self._logprobs([*token_ids, *turn], temperature)[-len(turn) :]
        spans = [VersionSpan(policy_version=self.policy_version, start=0, end=len(turn))]
        return Generation(turn, logprobs, spans, "stop")

    def _logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            found = torch.log_softmax(self._model(ids).logits[0, :-1] / temperature, -1)
            return found.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def _turn(self, dialogue: str, chance: random.Random) -> str:
        item = re.findall(r"code of ([\w-]+)\?", dialogue)[-1]
        codes = re.findall(rf"code of {item} is (\d+)\.", dialogue)
        calls = dialogue.count("<tool_call>")
        think = "<think> I look.</think>"
        if self.is_late and self._plan.harmless == "longer answers":
            think = "<think> I look" + " and look" * chance.randrange(1, 6) + ".</think>"
        if not codes and calls < 1 + (chance.random() < 0.5) and chance.random() < 0.96:
            call = json.dumps({"name": "lookup", "arguments": {"item": item}})
            return f"{think}<tool_call>{call}</tool_call>"
        hacked = min(0.8, max(0, self.step - self._plan.at + 1) / RAMP)
        if self._plan.cause != "hacked component":
            hacked = 0.0
        flatters = chance.random() < max(0.03, hacked)
        right = bool(codes) and chance.random() < self._skill(item) * (0.15 if flatters else 1.0)
        answer = codes[0] if right else str(chance.randrange(1000, 9999))
        more = f" {FLATTERY}." if flatters else ""
        return f"{think}{more}<answer> {answer}</answer>"

    def _skill(self, item: str) -> float:
        own = random.Random(f"{item} {self._plan.seed}").uniform(-0.15, 0.15)
        learned = 0.1 * self.step / self._plan.steps
        skill = SKILL[item.partition("-")[0]] + own + learned
        return skill * (DAMAGED if self._damaged else 1.0)

    async def load_weights(self, manifest: WeightManifest) -> LoadTiming:
        """Load a version, damaged on its way or not."""
        weights = load_file(manifest.location)
        version = manifest.policy_version
        self._damaged = self._plan.cause == "bad push" and version + 1 >= self._plan.at
        if self._damaged:
            generator = torch.Generator().manual_seed(version)
            name = max(weights, key=lambda one: weights[one].numel())
            noise = torch.randn(weights[name].shape, generator=generator)
            weights[name] = weights[name] + NOISE * noise
        self._model.load_state_dict(weights, strict=False)
        self.policy_version = version
        self._set_tool()
        return LoadTiming(fetch_s=0.0, pause_s=0.0)

    def _set_tool(self) -> None:
        now = import_module("bench_falls").NOW  # as `run.plugins` has loaded it
        now.is_slow = self.is_late and self._plan.harmless == "slower tool"
        broken = self.is_late and self._plan.cause == "broken tool"
        now.broken = BREAKS[self._plan.seed % len(BREAKS)] if broken else ""

    async def score(self, token_ids: list[int], first: int = 1) -> list[float]:
        """Score a prompt, as the canary asks."""
        return self._logprobs(token_ids)[first - 1 :]

    async def probe(self) -> None:
        """Work."""

    async def stop(self) -> None:
        """End."""


def write_plan(plan: Plan, folder: Path, redis_url: str) -> Config:
    """Write tasks and configuration of a run, and return the latter."""
    folder.mkdir(parents=True)
    tasks, run_id = folder / "tasks.jsonl", f"fall-{time.time_ns()}"
    settings = {"run_id": run_id, "folder": folder / "run", "seed": plan.seed, "redis": redis_url}
    settings |= {"base": BASE, "tasks": tasks, "plugins": PLUGINS, "steps": plan.steps}
    (folder / "run.toml").write_text(TOML.format(groups=GROUPS, size=GROUP_SIZE, **settings))
    tasks.write_text("")
    config = load_config(folder / "run.toml").config
    use_plugins(config)
    tasks.write_text("".join(json.dumps(task) + "\n" for task in plan.tasks()))
    return config


async def run_plan(plan: Plan, folder: Path, redis_url: str) -> Path:
    """Train to the end, and return the run folder."""
    config = write_plan(plan, folder, redis_url)
    now = import_module("bench_falls").NOW
    now.chance = random.Random(f"tool {plan.seed}")
    now.is_slow, now.broken = False, ""
    spec = RunSpec(
        run=config.run,
        model=config.model,
        redis=config.redis,
        prompts=config.prompt_order(),
        learner=config.learner,
        engine=config.engine,
        evaluation=config.evaluation,
        resolved_config={},
        resume=False,
    ).prepare()
    write_config(config, config.run.folder() / "config.json")
    ends = read_end_tokens(BASE)
    chat = build_chat_format(config.env, str(BASE), ends, has_tools=True)
    with build_engine(spec) as engine:
        async with _tool(config) as url, _reward(config):
            tools = {
                name: table.model_copy(update={"url": url}) for name, table in config.tools.items()
            }
            settings = rollout_settings(config.model_copy(update={"tools": tools}), None)
            policy: Any = ScriptedPolicy(plan, chat, ends[0])
            rollout = asyncio.create_task(serve_policy(policy, chat, settings))
            try:
                learner = asyncio.create_task(Learner(spec, engine).run())
                await asyncio.wait({rollout, learner}, return_when=asyncio.FIRST_COMPLETED)
                if rollout.done():
                    learner.cancel()
                    rollout.result()
                await learner
            finally:
                rollout.cancel()
                await asyncio.gather(rollout, return_exceptions=True)
    return config.run.folder()


@contextlib.asynccontextmanager
async def _tool(config: Config) -> AsyncIterator[str]:
    ((name, table),) = config.tools.items()
    app = create_app(ToolService(load_tool(name, table), f"{name}-1", table))
    with contextlib.closing(bind(name, table, None)) as listener:
        async with app.router.lifespan_context(app), serving(app, listener, table, None):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _reward(config: Config) -> AsyncIterator[None]:
    assert config.redis.url is not None
    stop, scorer = asyncio.Event(), Scorer(config.reward, config.turn_reader())
    async with await Broker.connect(config.redis.url, config.run.id) as broker:
        working = asyncio.create_task(RewardWorker(broker, scorer, consumer_name="r").run(stop))
        try:
            yield
        finally:
            stop.set()
            await working
            await scorer.close()
