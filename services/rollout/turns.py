"""One turn of an interaction: the model writes, its calls run, the results come back as tokens.

agent_loop.py and decoding/search.py hand in a `Branch`, which is longer by a turn afterwards: its
tokens come from text/tokens.py, tool results from call_runner.py, and what they mean from the
`ToolEnv`. An attempt begins with one branch; a search has several, which share what their parent
has done and go on from there, each on its own.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent_r1.attempts.tool_client import ToolOutageError
from agent_r1.rollout.call_runner import CallRunner
from agent_r1.rollout.config import EnvConfig
from agent_r1.rollout.envs import CallResult, EnvStep, ModelTurn, ToolEnv
from agent_r1.rollout.envs.base import Observation
from agent_r1.rollout.envs.checks import WrongStepError, check_step
from agent_r1.runtime.tracing import span
from agent_r1.runtime.unicode import repair_text
from agent_r1.text.chat_format import OutsideMessage
from agent_r1.text.chat_template import ChatTemplateError
from agent_r1.text.reading import TurnText
from agent_r1.text.tokens import Interaction, TokenLoop, UnreadableTurnError, turn_seed
from agent_r1_proto.component_notes import begin_component
from agent_r1_proto.parts import ImageRefusedError, StoredImage, parts_of, shown_text, text_of
from agent_r1_proto.tasks import Role, RolloutTask
from agent_r1_proto.trajectory import Turn

logger = logging.getLogger(__name__)


class AttemptFailedError(Exception):
    """This attempt ends as FAILED; the message is the trajectory's reason."""


@dataclass(eq=False)
class BranchState:
    """The environment and the tool sessions of a branch."""

    env: ToolEnv
    calls: CallRunner

    async def fork(self, path: str, turns: Sequence[Turn]) -> BranchState:
        """Return a state like this one that changes on its own.

        Args:
            path: names the branch that gets it.
            turns: that led to this state.

        Raises:
            AttemptFailedError: the environment cannot be copied, or a tool forked no session.
        """
        try:
            calls = await self.calls.fork(path, turns)
        except ToolOutageError as exc:
            raise AttemptFailedError(exc.reason) from exc
        try:
            return BranchState(self.env.fork(), calls)
        except Exception as exc:
            await calls.close()
            kind = type(self.env).__name__
            logger.exception("environment not forked env=%s", kind)
            raise AttemptFailedError(
                f"env_error: {kind}.fork {raised(exc)}; write {kind}.fork so that it returns a copy"
            ) from exc

    async def close(self, step_timeout_s: float) -> None:
        """Close the sessions and the environment; what fails is logged."""
        await self.calls.close()
        try:
            async with asyncio.timeout(step_timeout_s):
                await self.env.close()
        except Exception:
            logger.exception("environment not closed rollout_id=%s", self.calls.rollout_id)


class Branch(Interaction):
    """An interaction whose calls are carried out here."""

    def __init__(self, rollout: RolloutTask, state: BranchState) -> None:
        super().__init__(rollout)
        self.state = state
        self.path = ""
        """Names it among the branches of an attempt; "" where there is only one."""

    @property
    def num_calls(self) -> int:
        """Calls of the last turn that would reach a tool."""
        return self.state.calls.num_runnable(self.last)

    def sprout(self, path: str) -> Branch:
        """Return a branch with the same tokens. It shares the state until it gets its own."""
        twin = self.copy()
        twin.path = path
        return twin


@dataclass(frozen=True)
class Turns:
    """Takes branches from turn to turn."""

    tokens: TokenLoop
    env: EnvConfig
    run_seed: int

    async def sample(self, branch: Branch, temperature: float | None = None) -> int:
        """Let the model write the next turn; a limit that cuts it ends the branch.

        Args:
            branch: gets the turn.
            temperature: None takes that of its rollout.

        Returns:
            Tokens that were sampled.

        Raises:
            AttemptFailedError: the tool format failed.
            PolicyError: nothing was sampled.
        """
        await begin_component("the engine")
        rollout, number, before = branch.rollout, len(branch.turns), len(branch.token_ids)
        # Clients number their questions alike; their reply streams differ.
        names = (rollout.reply_stream, str(rollout.key), branch.path, str(number))
        heat = rollout.sampling.temperature if temperature is None else temperature
        read = len(branch.context)
        try:
            with span("generate", temperature=heat, input_tokens=read) as note:
                await self.tokens.sample(
                    branch,
                    temperature=heat,
                    seed=turn_seed(self.run_seed, rollout, number, branch.path),
                    request_id="/".join(filter(None, names)),
                )
                note(output_tokens=len(branch.token_ids) - before)
        except UnreadableTurnError as exc:
            why = exc.__cause__
            assert isinstance(why, Exception)
            logger.exception("turn not read")
            raise AttemptFailedError(f"tool_format_error: reading a turn {raised(why)}") from why
        return len(branch.token_ids) - before

    async def carry_out(self, branch: Branch) -> None:
        """Run the calls of the last turn and show what the environment says, or end the branch.

        Raises:
            AttemptFailedError: a tool, the environment, the tool format or the template failed.
        """
        step, call_ids = await self._react(branch)
        if step.done:
            branch.ended = ("COMPLETED", step.reason or "done")
        elif len(branch.turns) == (branch.rollout.sampling.max_turns or self.env.max_turns):
            branch.ended = ("TRUNCATED", "max_turns")
        images = _images(step)
        if branch.ended is not None:
            step = _without_images(step)  # the model sees nothing of it, but rewards do
        reply = self._reply(step, call_ids)
        if reply:
            branch.add_replies([message.recorded(images[i]) for i, message in enumerate(reply)])
        if branch.ended is None:
            try:
                self.tokens.append(branch, reply)
            except ChatTemplateError as exc:
                raise AttemptFailedError(f"chat_template_error: {exc}") from exc

    # -- its calls -------------------------------------------------------------------------------

    async def _react(self, branch: Branch) -> tuple[EnvStep, list[str]]:
        """Run the calls of the last turn, and ask the environment.

        Returns:
            What the environment says, and what the model called its calls.
        """
        number, turn, last = len(branch.turns) - 1, branch.last, branch.turns[-1]
        sampled = branch.token_ids[last.start : last.end]
        ends = self.tokens.chat.call_end_indexes(sampled, turn.text, turn.calls)
        outcomes = await branch.state.calls.run(number, turn, [last.start + end for end in ends])
        branch.set_calls([outcome.record for outcome in outcomes])
        results: list[CallResult] = []
        for outcome in outcomes:
            if outcome.outage is not None:
                raise AttemptFailedError(outcome.outage.reason) from outcome.outage
            if outcome.result is not None:
                results.append(outcome.result)
        step = await self._step(branch.state.env, number, turn, results)
        branch.add_step(
            turn_reward=step.turn_reward,
            process_rewards=step.process_rewards,
            data=step.data,
            state_key=step.state_key,
        )
        return step, [call.id for call in turn.calls]

    async def _step(
        self, env: ToolEnv, number: int, turn: TurnText, results: Sequence[CallResult]
    ) -> EnvStep:
        view = ModelTurn(number, turn.text, turn.thought, turn.answer, turn.said)
        name = f"{type(env).__name__}.step"
        await begin_component(f"the environment's {name}")
        try:
            async with asyncio.timeout(self.env.step_timeout_s):
                step = await env.step(view, results)
            return check_step(env, step, len(results))
        except TimeoutError as exc:
            limit = f"{self.env.step_timeout_s:g} s (env.step_timeout_s)"
            raise AttemptFailedError(f"env_timeout: {name} took over {limit}") from exc
        except ImageRefusedError as exc:
            raise AttemptFailedError(f"image_refused: {name}: {exc}") from exc
        except WrongStepError as exc:
            logger.exception("environment returned a wrong step turn=%d", number)
            raise AttemptFailedError(f"env_error: {exc}") from exc
        except Exception as exc:
            logger.exception("environment failed env=%s turn=%d", type(env).__name__, number)
            raise AttemptFailedError(f"env_error: {name} {raised(exc)}") from exc

    # -- what the model sees ---------------------------------------------------------------------

    def _reply(self, step: EnvStep, call_ids: Sequence[str]) -> list[OutsideMessage]:
        """Return the environment's reaction as the model sees it."""
        reply = [self.outside("tool", observation) for observation in step.observations]
        for i, call_id in enumerate(call_ids[: len(reply)]):
            reply[i] = replace(reply[i], call_id=call_id, call=i)
        return reply if step.message is None else [*reply, self.outside("user", step.message)]

    def outside(self, role: Role, content: Observation) -> OutsideMessage:
        """Return a message from outside, cut to the limits.

        Raises:
            AttemptFailedError: it holds an image.
        """
        return self.tokens.chat.outside_message(
            role,
            self.text(content),
            max_chars=self.env.max_tool_response_chars,
            max_tokens=self.env.max_tool_response_tokens,
        )

    @staticmethod
    def text(content: Observation) -> str:
        """Return the text of a message from outside.

        Raises:
            AttemptFailedError: it holds an image.
        """
        try:
            return repair_text(text_of(content))
        except ImageRefusedError as exc:
            raise AttemptFailedError(f"image_refused: {exc}") from exc


def _images(step: EnvStep) -> list[list[StoredImage]]:
    """Return the images of each message that a step shows."""
    shown = [*step.observations, *([] if step.message is None else [step.message])]
    return [[part for part in parts_of(one) if isinstance(part, StoredImage)] for one in shown]


def _without_images(step: EnvStep) -> EnvStep:
    """Return a step whose images are named in brackets."""
    message = None if step.message is None else shown_text(step.message)
    return replace(step, observations=list(map(shown_text, step.observations)), message=message)


def raised(exc: Exception) -> str:
    """Say what an exception of a user's code was."""
    return f"raised {traceback.format_exception_only(exc)[-1].strip()}"
