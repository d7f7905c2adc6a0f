"""One coroutine per trajectory, from its task to its end.

worker.py hands in a `RolloutTask` and gets the `Trajectory`. In between: prompt tokens from
chat_format.py, turns from turns.py, and, where the task asks for a search, several branches, of
which decoding/search.py chooses one.

A limit ends a trajectory as TRUNCATED, an outage as FAILED.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agent_r1.attempts.tool_client import ToolClient
from agent_r1.rollout.call_runner import CallRunner
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.decoding.scorer import BranchScorer
from agent_r1.rollout.decoding.search import Search
from agent_r1.rollout.envs import ToolEnv
from agent_r1.rollout.turns import AttemptFailedError, Branch, BranchState, Turns, raised
from agent_r1.runtime.tracing import span
from agent_r1.text.chat_format import ChatFormat, PromptMessage, Rendered, asked_dialogue
from agent_r1.text.chat_template import ChatTemplateError
from agent_r1.text.tokens import (
    EngineDeadError,
    Interaction,
    PolicyError,
    Sampler,
    TokenLoop,
    turn_seed,
)
from agent_r1_proto.component_notes import begin_component
from agent_r1_proto.tasks import Decoding, RolloutTask, Task
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import DecodingCost, Trajectory

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class AgentLoop:
    """Runs trajectories against one policy. Safe to use from many coroutines at once."""

    policy: Sampler
    """Samples tokens."""
    chat: ChatFormat
    """The model's chat template, in tokens."""
    tools: ToolClient
    """Calls tools; its specs are known."""
    env: EnvConfig
    """Limits."""
    make_env: Callable[[Task], ToolEnv]
    """Makes the environment of one trajectory."""
    max_context: int
    """Most tokens of one segment, prompt included (`model.max_context`)."""
    run_seed: int
    """`run.seed`."""
    server_id: str
    """Name of this rollout server."""
    scorer: BranchScorer | None = None
    """Scores the branches of searches; None where none is there."""

    def __post_init__(self) -> None:
        tokens = TokenLoop(
            self.policy,
            self.chat,
            max_context=min(self.max_context, self.policy.max_context),
            max_tokens_per_turn=self.env.max_tokens_per_turn,
            answer_pattern=self.env.answer_pattern,
        )
        self._turns = Turns(tokens, self.env, self.run_seed)
        self._prompt_logged = False
        self._long_prompt_logged = False

    async def run(self, rollout: RolloutTask) -> Trajectory:
        """Run one attempt to its end.

        Raises:
            EngineDeadError: the policy cannot sample any more; the attempt is nobody's fault.
        """
        started_at, started = time.time(), time.monotonic()
        interaction = Interaction(rollout)
        cost: DecodingCost | None = None
        failure: str | None = None
        limit = self.env.trajectory_timeout_s
        deadline = None if limit is None else started + limit
        states: list[BranchState] = []
        try:
            await begin_component(f"environment {self.env.type!r}")
            interaction = branch = self._begin(rollout, states, deadline)
            async with asyncio.timeout(limit):
                interaction, cost = await self._interact(branch, states)
        except AttemptFailedError as exc:
            failure = str(exc)
        except TimeoutError:
            failure = f"trajectory_timeout: not done within {limit} s (env.trajectory_timeout_s)"
        except EngineDeadError:
            raise
        except PolicyError as exc:
            logger.error("policy failed rollout_id=%s error=%s", rollout.key, exc)
            failure = f"policy_error: {exc}"
        finally:
            closing = (state.close(self.env.step_timeout_s) for state in states)
            await asyncio.shield(asyncio.gather(*closing))
        if failure is not None:
            interaction.ended = ("FAILED", failure)
        return interaction.finish(
            seed=turn_seed(self.run_seed, rollout, 0),
            server_id=self.server_id,
            started_at=started_at,
            latency_ms=(time.monotonic() - started) * 1000,
            decoding=cost,
        )

    def prompt_tokens(self, task: Task) -> list[int]:
        """Return the prompt of a task, as a trajectory begins with it.

        Raises:
            ValueError: the task asks for a tool that is not offered or holds an image, or the chat
                template cannot render it.
        """
        try:
            names, asked = self._offered_names(task), self._asked(task)
        except AttemptFailedError as exc:
            raise ValueError(str(exc)) from exc
        specs = [self.tools.directory.spec(name) for name in names]
        return self._prompt(asked, specs, task.id).token_ids

    def _begin(
        self, rollout: RolloutTask, states: list[BranchState], deadline: float | None
    ) -> Branch:
        """Return the branch that an attempt begins with: its prompt; its state is in `states`."""
        names = self._offered_names(rollout.task)
        env = self._open_env(rollout.task)
        pins = self.tools.directory.pin(names) if self.env.pin == "trajectory" else {}
        specs = {name: self.tools.directory.spec(name, pins.get(name)) for name in names}
        calls = CallRunner(self.tools, self.env, specs, rollout, pins=pins, deadline=deadline)
        states.append(BranchState(env, calls))
        if rollout.decoding is not None:
            _check_decoding(rollout.decoding, specs, self.scorer)
        branch = Branch(rollout, states[0])
        branch.messages, branch.tools = self._asked(rollout.task), list(specs.values())
        try:
            branch.add_prompt(self._prompt(branch.messages, branch.tools, rollout.task.id))
        except ChatTemplateError as exc:
            raise AttemptFailedError(f"chat_template_error: {exc}") from exc
        return branch

    async def _interact(
        self, branch: Branch, states: list[BranchState]
    ) -> tuple[Branch, DecodingCost | None]:
        """Let a branch come to its end; return it, or the one that was chosen instead of it."""
        if branch.prompt_length >= self._turns.tokens.max_context:
            self._refuse_prompt(branch)
        elif branch.rollout.decoding is not None:
            seed = turn_seed(self.run_seed, branch.rollout, 0)
            search = Search(self._turns, branch.rollout.decoding, states, self.scorer, seed)
            return await search.run(branch)
        while branch.ended is None:
            with span("turn", number=len(branch.turns)):
                await self._turns.sample(branch)
                if branch.ended is None:
                    await self._turns.carry_out(branch)
        return branch, None

    # -- prompt and turns ------------------------------------------------------------------------

    def _offered_names(self, task: Task) -> list[str]:
        names = self.tools.specs if self.env.enable_tools is None else self.env.enable_tools
        if task.tools is not None:
            missing = sorted(set(task.tools) - set(names))
            if missing:
                raise AttemptFailedError(
                    f"unknown_tool_in_task: {', '.join(missing)}; offered: "
                    f"{', '.join(sorted(names)) or 'none'}"
                )
            names = task.tools
        return list(names)

    def _asked(self, task: Task) -> list[PromptMessage]:
        """Return the dialogue of a task.

        Raises:
            AttemptFailedError: it holds an image.
        """
        for message in task.messages():
            self._turns.text(message.content)
        return asked_dialogue(task, self.env.system_prompt, partial(self._turns.outside, "tool"))

    def _prompt(
        self, messages: Sequence[PromptMessage], tools: Sequence[ToolSpec], task_id: str
    ) -> Rendered:
        rendered = self.chat.render_prompt(messages, tools)
        if not self._prompt_logged:
            self._prompt_logged = True
            logger.info(
                "first prompt task_id=%s num_tokens=%d\n%s",
                task_id,
                len(rendered.token_ids),
                rendered.text,
            )
        return rendered

    def _refuse_prompt(self, branch: Branch) -> None:
        """End a trajectory whose prompt leaves no room: the task's fault, so no retry helps.

        The tokens are cut to the context, so that no reader meets a longer sequence than allowed.
        """
        max_context = self._turns.tokens.max_context
        level = logging.DEBUG if self._long_prompt_logged else logging.ERROR
        self._long_prompt_logged = True
        logger.log(
            level,
            "prompt leaves no room for an answer task_id=%s num_tokens=%d limit=%d; raise "
            "model.max_context or shorten the task; its trajectories end as TRUNCATED "
            "(further ones are logged at DEBUG)",
            branch.rollout.task.id,
            branch.prompt_length,
            max_context,
        )
        branch.cut_prompt(max_context)
        branch.ended = ("TRUNCATED", "prompt_too_long")

    # -- the environment -------------------------------------------------------------------------

    def _open_env(self, task: Task) -> ToolEnv:
        try:
            return self.make_env(task)
        except Exception as exc:
            logger.exception("environment not created task_id=%s", task.id)
            made = getattr(self.make_env, "func", self.make_env)  # of a partial, its class
            name = getattr(made, "__name__", "the environment")
            raise AttemptFailedError(f"env_error: {name}(...) {raised(exc)}") from exc


def _check_decoding(
    decoding: Decoding, specs: Mapping[str, ToolSpec], scorer: BranchScorer | None
) -> None:
    """Refuse a search that this server cannot make.

    Raises:
        AttemptFailedError: a branch could not be discarded, or nothing scores one.
    """
    lasting = sorted(name for name, spec in specs.items() if spec.outside_effects)
    if lasting:
        raise AttemptFailedError(
            f"decoding_refused: calls of {', '.join(lasting)} have effects outside their "
            f"session, which cannot be undone when {decoding.method} discards a branch"
        )
    if (decoding.scorer is not None or decoding.continuations) and scorer is None:
        raise AttemptFailedError(
            "decoding_refused: this server knows no reward service; set rollout.scorer_url"
        )
