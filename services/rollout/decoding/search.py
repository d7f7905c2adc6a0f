"""A search over the branches of one interaction, in rounds of one turn.

agent_loop.py hands in the branch that holds the prompt and gets the one that was chosen. Each round
samples the next turn of every branch: once, after several first turns (`best_of_n`, `majority`), or
several times, of which the best are kept (`value_guided`, `beam`).

A branch's prompt is its parent's tokens and its own, so the engine finds them in its prefix cache.
A branch gets a state of its own (sessions, environment) when its calls are run, not before.

Source: best of n and choosing by value at every step, arXiv:2310.17022; beam search over scored
steps, arXiv:2408.03314, section 5; majority, arXiv:2203.11171.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from agent_r1.rollout.branch import Branch, BranchState
from agent_r1.rollout.decoding.scorer import BranchScorer, as_interaction
from agent_r1.rollout.decoding.spending import CallBudget, Spending
from agent_r1.rollout.turns import Turns
from agent_r1_proto.tasks import Decoding
from agent_r1_proto.trajectory import ANSWERED, DecodingCost
from agent_r1_service.answers import most_frequent
from agent_r1_service.together import run_together

OUT_OF_CALLS = "decoding_max_calls"
"""Reason of a branch that ends because the budget has no calls left for its last turn."""


class Search:
    """Searches for the answer of one attempt.

    Branches that are given up are closed at once; the caller closes the states that are left.

    Args:
        turns: takes branches from turn to turn.
        decoding: says how.
        states: those that are open; the caller begins with the one of the first branch.
        scorer: scores branches; None where the method needs none.
    """

    def __init__(
        self,
        turns: Turns,
        decoding: Decoding,
        states: list[BranchState],
        scorer: BranchScorer | None,
    ) -> None:
        self._turns = turns
        self._decoding = decoding
        self._states = states
        self._scorer = scorer
        self._spent = Spending(states=list(states))
        self._scores: dict[Branch, float] = {}

    async def run(self, first: Branch) -> tuple[Branch, DecodingCost]:
        """Return the branch that is chosen, at its end, and what the search has cost.

        Raises:
            AttemptFailedError: a tool, the environment or the scorer failed, or the task names no
                budget.
        """
        self._budget = CallBudget.of(self._decoding.max_calls, first.rollout.task)
        chosen = await (self._by_turn(first) if self._decoding.by_turn else self._whole(first))
        score = self._scores.get(chosen)
        return chosen, self._spent.message(None if score == -math.inf else score)

    # -- whole interactions ----------------------------------------------------------------------

    async def _whole(self, first: Branch) -> Branch:
        branches = [first.sprout(str(i)) for i in range(self._decoding.candidates)]
        while going := [branch for branch in branches if branch.ended is None]:
            await self._sample(going)
            await self._run_calls(self._admit(going))
        if self._decoding.method == "majority":
            return branches[most_frequent(self._turns.answer(branch) for branch in branches)]
        await self._score([branch for branch in branches if branch not in self._scores])
        return self._best(branches)[0]

    # -- turn by turn ----------------------------------------------------------------------------

    async def _by_turn(self, first: Branch) -> Branch:
        """Keep the best branches after every turn; one that has ended competes with its score."""
        kept = [first]
        while any(branch.ended is None for branch in kept):
            ended = [branch for branch in kept if branch.ended is not None]
            candidates = await self._candidates([b for b in kept if b.ended is None])
            if self._decoding.lookahead == 0:
                kept = await self._keep_as_written(ended, candidates)
            else:
                kept = await self._keep_by_outcome(ended, candidates)
            await self._close_all_but(kept)
        return kept[0]

    async def _candidates(self, parents: Sequence[Branch]) -> list[Branch]:
        """Return branches that are one turn longer; equal ones of one parent count once."""
        children = [
            parent.sprout(f"{parent.path}.{i}".lstrip("."))
            for parent in parents
            for i in range(self._decoding.candidates)
        ]
        await self._sample(children)
        fresh: dict[tuple[object, ...], Branch] = {}
        for child in children:
            fresh.setdefault((child.state, *child.record.token_ids), child)
        return list(fresh.values())

    async def _keep_as_written(
        self, ended: Sequence[Branch], candidates: Sequence[Branch]
    ) -> list[Branch]:
        """Score turns before their calls are run, and run those of the branches that are kept."""
        await self._score(candidates)
        ranked = self._best([*ended, *candidates])
        kept: list[Branch] = []
        for branch in ranked:
            if len(kept) < self._decoding.keep and (branch.ended or self._admit([branch])):
                kept.append(branch)
        await self._run_calls([branch for branch in kept if branch.ended is None])
        return kept or ranked[:1]

    async def _keep_by_outcome(
        self, ended: Sequence[Branch], candidates: Sequence[Branch]
    ) -> list[Branch]:
        """Score turns by what their calls lead to, after more turns where that is asked for."""
        await self._run_calls(self._admit(candidates))
        unscored = [branch for branch in candidates if branch not in self._scores]
        probes = [await self._probe(branch) for branch in unscored]
        going = [probe for probe in probes if probe.ended is None]
        for _ in range((self._decoding.lookahead or 1) - 1):
            await self._sample(going)
            going = [p for p in going if p.ended is None and self._affords(p)]
            await self._run_calls(going)
            going = [probe for probe in going if probe.ended is None]
        await self._score(probes)
        for branch, probe in zip(unscored, probes, strict=True):
            self._scores[branch] = self._scores[probe]
        return self._best([*ended, *candidates])[: self._decoding.keep]

    async def _probe(self, branch: Branch) -> Branch:
        """Return what looks ahead for a branch: itself, where there is nothing more to see."""
        if branch.ended is not None or (self._decoding.lookahead or 1) == 1:
            return branch
        probe = branch.sprout(f"{branch.path}~")
        await self._fork(probe)
        return probe

    # -- steps -----------------------------------------------------------------------------------

    async def _sample(self, branches: Sequence[Branch]) -> None:
        counts = await run_together(self._turns.sample(branch) for branch in branches)
        self._spent.sampled_tokens += sum(counts)

    def _affords(self, branch: Branch) -> bool:
        """Take the calls of a branch's last turn from the budget, if it has them."""
        return self._budget.take(self._turns.num_calls(branch))

    def _admit(self, branches: Sequence[Branch]) -> list[Branch]:
        """Return the branches whose calls the budget has; the others end, as the worst of all."""
        going = [branch for branch in branches if branch.ended is None]
        admitted: list[Branch] = []
        for branch in going:
            if self._affords(branch):
                admitted.append(branch)
            else:
                branch.ended = ("TRUNCATED", OUT_OF_CALLS)
                self._scores[branch] = -math.inf
        return admitted

    async def _run_calls(self, branches: Sequence[Branch]) -> None:
        """Carry out the last turns; of branches that share a state, the last one inherits it."""
        heirs = {branch.state: branch for branch in branches}
        for branch in branches:
            if heirs[branch.state] is not branch:
                await self._fork(branch)
        await run_together(self._turns.carry_out(branch) for branch in branches)
        calls = [call for branch in branches for call in branch.record.turns[-1].calls]
        self._spent.calls += sum(call.status in ANSWERED for call in calls)

    async def _fork(self, branch: Branch) -> None:
        """Give a branch a state of its own, equal to the one that it shares."""
        branch.state = await branch.state.fork(branch.path, branch.record.turns)
        self._states.append(branch.state)
        self._spent.states.append(branch.state)

    async def _score(self, branches: Sequence[Branch]) -> None:
        component = self._decoding.scorer
        assert self._scorer is not None
        assert component is not None
        asked = [self._scorer.value(component, as_interaction(branch)) for branch in branches]
        for branch, value in zip(branches, await run_together(asked), strict=True):
            self._scores[branch] = value.value
            self._spent.scores += 1
            self._spent.scorer_tokens += value.tokens

    def _best(self, branches: Sequence[Branch]) -> list[Branch]:
        """Return branches by their scores, the highest first; equal ones in their order."""
        return sorted(branches, key=lambda branch: -self._scores[branch])

    async def _close_all_but(self, kept: Sequence[Branch]) -> None:
        needed = [branch.state for branch in kept if branch.ended is None]
        for state in [state for state in self._states if state not in needed]:
            self._states.remove(state)
            await asyncio.shield(state.close(self._turns.env.step_timeout_s))
