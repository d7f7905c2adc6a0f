"""One coroutine per trajectory: the model writes, its calls run, the results come back as tokens.

worker.py hands in a `RolloutTask` and gets the `Trajectory`. In between: prompt tokens from
chat_format.py, sampled tokens from the `Sampler`, tool results from tool_calls/client.py, and what
they mean from the `ToolEnv`.

Every sampled token is kept as it was sampled, with mask 1 and its log-probability; everything else
(prompt, glue, tool text) has mask 0. A limit ends a trajectory as TRUNCATED, an outage as FAILED.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from agent_r1.rollout.chat_format import ChatFormat
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.rollout.envs.checks import WrongStepError, check_step
from agent_r1.rollout.parsing import TurnText
from agent_r1.rollout.policy import EngineDeadError, Generation, PolicyError, Sampler
from agent_r1.rollout.tool_calls.client import ToolClient
from agent_r1.rollout.tool_calls.runner import CallRunner
from agent_r1.rollout.trajectory_builder import TrajectoryBuilder, turn_seed
from agent_r1_proto.tasks import ChatMessage, Role, RolloutTask, Task
from agent_r1_proto.tools import ToolSpec
from agent_r1_proto.trajectory import Status, Trajectory
from agent_r1_service.answers import find_answer
from agent_r1_service.tracing import span
from agent_r1_service.unicode import repair_text

logger = logging.getLogger(__name__)


class _AttemptFailedError(Exception):
    """This attempt ends as FAILED; the message is the trajectory's reason."""


class AgentLoop:
    """Runs trajectories against one policy. Safe to use from many coroutines at once.

    Args:
        policy: samples tokens.
        chat: the model's chat template, in tokens.
        tools: calls tools; its specs are known.
        env: limits.
        make_env: makes the environment of one trajectory.
        max_context: most tokens of one trajectory, prompt included (`model.max_context`).
        run_seed: `run.seed`.
        server_id: name of this rollout server.
    """

    def __init__(
        self,
        *,
        policy: Sampler,
        chat: ChatFormat,
        tools: ToolClient,
        env: EnvConfig,
        make_env: Callable[[Task], ToolEnv],
        max_context: int,
        run_seed: int,
        server_id: str,
    ) -> None:
        unknown = sorted(set(env.enable_tools or ()) - set(tools.specs))
        if unknown:
            raise ValueError(
                f"env.enable_tools names {', '.join(unknown)}, which no [tools.<name>] configures; "
                f"configured: {', '.join(sorted(tools.specs)) or 'none'}"
            )
        self._policy = policy
        self._chat = chat
        self._tools = tools
        self._env = env
        self._make_env = make_env
        self._max_context = min(max_context, policy.max_context)
        self._run_seed = run_seed
        self._server_id = server_id
        self._prompt_logged = False
        self._long_prompt_logged = False

    async def run(self, rollout: RolloutTask) -> Trajectory:
        """Run one attempt to its end.

        Raises:
            EngineDeadError: the policy cannot sample any more; the attempt is nobody's fault.
        """
        started_at, started = time.time(), time.monotonic()
        record = TrajectoryBuilder()
        calls: CallRunner | None = None
        env: ToolEnv | None = None
        status: Status = "FAILED"
        limit = self._env.trajectory_timeout_s
        try:
            names = self._offered_names(rollout.task)
            pins = self._tools.directory.pin(names) if self._env.pin == "trajectory" else {}
            specs = {name: self._tools.directory.spec(name, pins.get(name)) for name in names}
            deadline = None if limit is None else started + limit
            calls = CallRunner(self._tools, self._env, specs, rollout, pins=pins, deadline=deadline)
            record.add_prompt(self._prompt(rollout.task, specs))
            env = self._open_env(rollout.task)
            async with asyncio.timeout(limit):
                status, reason = await self._interact(rollout, record, env, calls)
        except _AttemptFailedError as exc:
            reason = str(exc)
        except TimeoutError:
            reason = f"trajectory_timeout: not done within {limit} s (env.trajectory_timeout_s)"
        except EngineDeadError:
            raise
        except PolicyError as exc:
            logger.error("policy failed rollout_id=%s error=%s", rollout.key, exc)
            reason = f"policy_error: {exc}"
        finally:
            await asyncio.shield(self._close(rollout, calls, env))
        return record.finish(
            rollout,
            status,
            repair_text(reason),
            seed=turn_seed(self._run_seed, rollout, 0),
            server_id=self._server_id,
            started_at=started_at,
            latency_ms=(time.monotonic() - started) * 1000,
        )

    def prompt_tokens(self, task: Task) -> list[int]:
        """Return the prompt of a task, as a trajectory begins with it.

        Raises:
            ValueError: the task asks for a tool that is not offered, or the chat template cannot
                render it.
        """
        try:
            names = self._offered_names(task)
        except _AttemptFailedError as exc:
            raise ValueError(str(exc)) from exc
        return self._prompt(task, {name: self._tools.directory.spec(name) for name in names})

    async def _interact(
        self, rollout: RolloutTask, record: TrajectoryBuilder, env: ToolEnv, calls: CallRunner
    ) -> tuple[Status, str]:
        """Alternate turns of the model and the environment; return how it ended."""
        if record.prompt_length >= self._max_context:
            return self._refuse_prompt(rollout, record)
        max_turns = rollout.sampling.max_turns or self._env.max_turns
        for number in range(max_turns):
            with span("turn", number=number):
                with span("generate"):
                    generation = await self._sample(rollout, record, number)
                text = self._chat.decode_turn(generation.token_ids)
                start = record.add_sampled(generation, text)
                if generation.finish_reason == "length":
                    full = len(record.token_ids) >= self._max_context
                    return "TRUNCATED", "max_trajectory_tokens" if full else "max_tokens_per_turn"
                step, call_ids = await self._react(record, env, calls, number, start)
            if step.done:
                return "COMPLETED", step.reason or "done"
            if number + 1 == max_turns:
                break
            reply = self._reply(step, call_ids)
            if len(record.token_ids) + len(reply) >= self._max_context:
                return "TRUNCATED", "max_trajectory_tokens"
            record.token_ids += reply
        return "TRUNCATED", "max_turns"

    async def _react(
        self, record: TrajectoryBuilder, env: ToolEnv, calls: CallRunner, number: int, start: int
    ) -> tuple[EnvStep, list[str]]:
        """Run the calls of the turn that begins at `start`, and ask the environment.

        Returns:
            What the environment says, and what the model called its calls.
        """
        turn = self._read(record.turns[-1].text)
        sampled = record.token_ids[start:]
        ends = self._chat.call_end_indexes(sampled, turn.text, turn.calls)
        outcomes = await calls.run(number, turn, [start + end for end in ends])
        record.set_calls([outcome.record for outcome in outcomes])
        results: list[CallResult] = []
        for outcome in outcomes:
            if outcome.outage is not None:
                raise _AttemptFailedError(outcome.outage.reason) from outcome.outage
            if outcome.result is not None:
                results.append(outcome.result)
        step = await self._step(env, number, turn, results)
        record.add_step(step)
        return step, [call.id for call in turn.calls]

    def _read(self, text: str) -> TurnText:
        try:
            return self._chat.read_turn(text)
        except Exception as exc:
            logger.exception("turn not read")
            raise _AttemptFailedError(f"tool_format_error: reading a turn {_raised(exc)}") from exc

    # -- prompt and turns ------------------------------------------------------------------------

    def _offered_names(self, task: Task) -> list[str]:
        names = self._tools.specs if self._env.enable_tools is None else self._env.enable_tools
        if task.tools is not None:
            missing = sorted(set(task.tools) - set(names))
            if missing:
                raise _AttemptFailedError(
                    f"unknown_tool_in_task: {', '.join(missing)}; offered: "
                    f"{', '.join(sorted(names)) or 'none'}"
                )
            names = task.tools
        return list(names)

    def _prompt(self, task: Task, specs: Mapping[str, ToolSpec]) -> list[int]:
        messages = task.messages()
        if self._env.system_prompt is not None and messages[0].role != "system":
            messages.insert(0, ChatMessage(role="system", content=self._env.system_prompt))
        asked = list(messages)
        while asked[-1].role == "tool":
            asked.pop()
        results = [self._limited(message.content, "tool") for message in messages[len(asked) :]]
        rendered = self._chat.render_prompt(asked, list(specs.values()), results)
        if not self._prompt_logged:
            self._prompt_logged = True
            logger.info(
                "first prompt task_id=%s num_tokens=%d\n%s",
                task.id,
                len(rendered.token_ids),
                rendered.text,
            )
        return rendered.token_ids

    def _refuse_prompt(self, rollout: RolloutTask, record: TrajectoryBuilder) -> tuple[Status, str]:
        """End a trajectory whose prompt leaves no room: the task's fault, so no retry helps.

        The tokens are cut to the context, so that no reader meets a longer sequence than allowed.
        """
        level = logging.DEBUG if self._long_prompt_logged else logging.ERROR
        self._long_prompt_logged = True
        logger.log(
            level,
            "prompt leaves no room for an answer task_id=%s num_tokens=%d limit=%d; raise "
            "model.max_context or shorten the task; its trajectories end as TRUNCATED "
            "(further ones are logged at DEBUG)",
            rollout.task.id,
            record.prompt_length,
            self._max_context,
        )
        record.cut_prompt(self._max_context)
        return "TRUNCATED", "prompt_too_long"

    async def _sample(
        self, rollout: RolloutTask, record: TrajectoryBuilder, number: int
    ) -> Generation:
        room = self._max_context - len(record.token_ids)
        generation = await self._policy.generate(
            record.token_ids,
            max_tokens=min(self._env.max_tokens_per_turn, room),
            temperature=rollout.sampling.temperature,
            seed=turn_seed(self._run_seed, rollout, number),
            # Clients number their questions alike; their reply streams differ.
            request_id="/".join(filter(None, (rollout.reply_stream, f"{rollout.key}/{number}"))),
        )
        if not generation.token_ids or len(generation.logprobs) != len(generation.token_ids):
            raise PolicyError(
                f"the policy returned {len(generation.token_ids)} tokens with "
                f"{len(generation.logprobs)} log-probabilities; expected one each, at least one"
            )
        return generation

    def _reply(self, step: EnvStep, call_ids: Sequence[str]) -> list[int]:
        """Return the tokens of the environment's reaction, generation prompt included."""
        roles: list[Role] = ["tool"] * len(step.observations)
        texts = list(step.observations)
        if step.message is not None:
            roles.append("user")
            texts.append(step.message)
        bodies = [self._limited(text, role)[1] for role, text in zip(roles, texts, strict=True)]
        return self._chat.encode_reply(roles, bodies, call_ids)

    def _limited(self, text: str, role: Role) -> tuple[str, list[int]]:
        """Return outside text as the model sees it, and its tokens."""
        return self._chat.encode_limited(
            repair_text(text),
            max_chars=self._env.max_tool_response_chars,
            max_tokens=self._env.max_tool_response_tokens,
            role=role,
        )

    # -- the environment -------------------------------------------------------------------------

    def _open_env(self, task: Task) -> ToolEnv:
        try:
            return self._make_env(task)
        except Exception as exc:
            logger.exception("environment not created task_id=%s", task.id)
            made = getattr(self._make_env, "func", self._make_env)  # of a partial, its class
            name = getattr(made, "__name__", "the environment")
            raise _AttemptFailedError(f"env_error: {name}(...) {_raised(exc)}") from exc

    async def _step(
        self, env: ToolEnv, number: int, turn: TurnText, results: Sequence[CallResult]
    ) -> EnvStep:
        pattern = self._env.answer_pattern
        answer = turn.answer if pattern is None else find_answer(turn.text, pattern)
        view = ModelTurn(number=number, text=turn.text, thought=turn.thought, answer=answer)
        name = f"{type(env).__name__}.step"
        try:
            async with asyncio.timeout(self._env.step_timeout_s):
                step = await env.step(view, results)
            return check_step(env, step, len(results))
        except TimeoutError as exc:
            limit = f"{self._env.step_timeout_s:g} s (env.step_timeout_s)"
            raise _AttemptFailedError(f"env_timeout: {name} took over {limit}") from exc
        except WrongStepError as exc:
            logger.exception("environment returned a wrong step turn=%d", number)
            raise _AttemptFailedError(f"env_error: {exc}") from exc
        except Exception as exc:
            logger.exception("environment failed env=%s turn=%d", type(env).__name__, number)
            raise _AttemptFailedError(f"env_error: {name} {_raised(exc)}") from exc

    async def _close(
        self, rollout: RolloutTask, calls: CallRunner | None, env: ToolEnv | None
    ) -> None:
        if calls is not None:
            await calls.close()
        if env is None:
            return
        try:
            async with asyncio.timeout(self._env.step_timeout_s):
                await env.close()
        except Exception:
            logger.exception("environment not closed rollout_id=%s", rollout.key)


def _raised(exc: Exception) -> str:
    return f"raised {traceback.format_exception_only(exc)[-1].strip()}"
