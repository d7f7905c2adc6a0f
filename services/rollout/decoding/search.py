"""A search over the branches of one interaction, in rounds of one turn.

agent_loop.py hands in the branch that holds the prompt and gets the one that was chosen. Each round
samples the next turn of every branch: once, after several first turns (`best_of_n`, `majority`), or
several times, of which some are taken (`value_guided`, `beam`), as tilting.py says.

A branch's prompt is its parent's tokens and its own, so the engine finds them in its prefix cache.
A branch gets a state of its own (sessions, environment) when its calls are run, not before.

Source: best of n and choosing by value at every step, arXiv:2310.17022; beams kept by resampling,
arXiv:2606.05296; majority, arXiv:2203.11171.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from agent_r1.rollout.decoding.particles import Particle, elected, resampled
from agent_r1.rollout.decoding.scorer import BranchScorer, as_interaction
from agent_r1.rollout.turns import AttemptFailedError, Branch, BranchState, Turns
from agent_r1.runtime.tilting import Proposal, tilted
from agent_r1.runtime.together import run_together
from agent_r1.text.reading import most_frequent
from agent_r1_proto.tasks import Decoding, Task
from agent_r1_proto.trajectory import ANSWERED, DecodingCost, Probe, ProbedTurn, Status

OUT_OF_CALLS: tuple[Status, str] = ("TRUNCATED", "decoding_max_calls")
"""End of a branch when the budget has no calls left for its last turn."""


@dataclass(eq=False)
class Search:
    """Searches for the answer of one attempt.

    Branches that are given up are closed at once; the caller closes the states that are left.
    """

    turns: Turns
    """Runner that takes branches from turn to turn."""
    decoding: Decoding
    """Settings of the search."""
    states: list[BranchState]
    """States that are open; the caller begins with the one of the first branch."""
    scorer: BranchScorer | None
    """Scores branches; None where the method needs none."""
    seed: int
    """Seed of what is drawn."""

    def __post_init__(self) -> None:
        self._beta = 1.0 if self.decoding.beta is None else self.decoding.beta
        self._rng = random.Random(self.seed)
        self._all_states = list(self.states)
        self._sampled_tokens = self._num_calls = self._num_scores = self._scorer_tokens = 0
        self._scores: dict[Branch, float] = {}
        self._remembered: dict[Branch, ProbedTurn] = {}
        """Candidates for one turn, before their calls are run, all in one state."""
        self._lookahead = self.decoding.lookahead if self._beta else 0
        """Nothing is looked ahead for where no value counts."""
        self._greedy_logprob = 0.0
        """Of the turn that is remembered, as `branch_below` takes it."""
        self._num_places = 0
        """States so far that had several candidates."""

    async def run(self, first: Branch) -> tuple[Branch, DecodingCost]:
        """Return the branch that is chosen, at its end, and what the search has cost.

        Raises:
            AttemptFailedError: a tool, the environment or the scorer failed, or the task names no
                budget.
        """
        self._budget = CallBudget.of(self.decoding.max_calls, first.rollout.task)
        chosen = await (self._by_turn(first) if self.decoding.by_turn else self._whole(first))
        probe = await self._probed()
        return chosen, DecodingCost(
            sampled_tokens=self._sampled_tokens,
            calls=self._num_calls,
            replayed_calls=sum(state.calls.replayed for state in self._all_states),
            scores=self._num_scores,
            scorer_tokens=self._scorer_tokens,
            score=self._scores.get(chosen),
            places=self._num_places if self.decoding.by_turn else None,
            probe=probe,
        )

    # -- whole interactions ----------------------------------------------------------------------

    async def _whole(self, first: Branch) -> Branch:
        """Choose among whole interactions, of which the first is the greedy one."""
        branches = [first.sprout(str(i)) for i in range(self.decoding.candidates)]
        while going := [branch for branch in branches if branch.ended is None]:
            await self._sample([b for b in going if b is branches[0]], temperature=0.0)
            await self._sample([b for b in going if b is not branches[0]])
            await self._run_calls(self._admit(going))
        paid = self._paid(branches)
        if self.decoding.method == "majority":
            return paid[most_frequent(branch.last.answer for branch in paid)]
        await self._score(paid)
        return max(paid, key=lambda branch: self._scores[branch])

    # -- turn by turn ----------------------------------------------------------------------------

    async def _by_turn(self, first: Branch) -> Branch:
        """Take one turn after the other; branches that have ended keep their weights."""
        kept = [Particle(first, copies=self.decoding.keep)]
        while going := [particle for particle in kept if particle.branch.ended is None]:
            await self._propose(going)
            await self._weigh(going)
            places = [particle for particle in going if len(particle.candidates) > 1]
            self._num_places += len(places)
            if self.decoding.continuations and places:
                await self._remember(places[0])
            kept = self._take(kept)
            if self._lookahead == 0:
                await self._run_calls(self._admit([particle.branch for particle in kept]))
            going_on = [p.branch.state for p in kept if p.branch.ended is None]
            await self._close_all_but([*going_on, *(b.state for b in self._remembered)])
        return await self._vote(kept)

    async def _propose(self, particles: Sequence[Particle]) -> None:
        """Find what may follow: the greedy turn and, unless that is all but sure, sampled ones."""
        for particle in particles:
            particle.greedy = particle.sprout("g")
            particle.candidates = [particle.greedy]
        await self._sample([particle.greedy for particle in particles], temperature=0.0)
        unsure = [particle for particle in particles if self._is_unsure(particle.greedy)]
        sampled = [[p.sprout(str(i)) for i in range(self.decoding.candidates)] for p in unsure]
        await self._sample([branch for branches in sampled for branch in branches])
        for particle, branches in zip(unsure, sampled, strict=True):
            # Sampled ones first: their log-probabilities are those of the temperature.
            distinct: dict[tuple[int, ...], Branch] = {}
            for branch in (*branches, particle.greedy):
                distinct.setdefault(tuple(branch.token_ids), branch)
            particle.candidates = list(distinct.values())

    def _is_unsure(self, greedy: Branch) -> bool:
        limit = self.decoding.branch_below
        return limit is None or math.exp(greedy.turn_logprob) < limit

    async def _weigh(self, particles: Sequence[Particle]) -> None:
        """Score candidates where there are several: as they are written, or by what follows."""
        several = [b for p in particles if len(p.candidates) > 1 for b in p.candidates]
        if self._lookahead == 0:
            self._end_unpayable(several)
            await self._score(self._paid(several))
        else:
            await self._run_calls(self._admit([b for p in particles for b in p.candidates]))
            await self._look_ahead(self._paid(several))
        for particle in particles:
            paid = self._paid(particle.candidates)
            candidates = [self._candidate(branch) for branch in paid]
            particle.candidates = paid
            particle.tilted = tilted(candidates, self._beta, self.decoding.answer_bias or 0.0)

    def _candidate(self, branch: Branch) -> Proposal:
        return Proposal(
            branch.turn_logprob,
            calls=bool(branch.last.calls),
            value=self._scores.get(branch, 0.0),
        )

    def _take(self, particles: Sequence[Particle]) -> list[Particle]:
        """Return what goes on: the candidate that counts most, or some that are drawn.

        A search that shows what turns are worth draws, so that it comes to many places.
        """
        if self.decoding.method == "beam" or self.decoding.continuations:
            return resampled(particles, self._rng)
        (particle,) = particles
        return [Particle(particle.candidates[particle.tilted.index(max(particle.tilted))])]

    async def _look_ahead(self, branches: Sequence[Branch]) -> None:
        """Score branches by what their calls lead to, after more turns where that is asked for."""
        probes = [await self._probe(branch) for branch in branches]
        going = [probe for probe in probes if probe.ended is None]
        for _ in range((self._lookahead or 1) - 1):
            await self._sample(going)
            going = [p for p in going if p.ended is None and self._budget.take(p.num_calls)]
            await self._run_calls(going)
            going = [probe for probe in going if probe.ended is None]
        await self._score(probes)
        for branch, probe in zip(branches, probes, strict=True):
            if probe in self._scores:
                self._scores[branch] = self._scores[probe]

    async def _probe(self, branch: Branch) -> Branch:
        """Return what looks ahead for a branch: itself, where there is nothing more to see."""
        if branch.ended is not None or (self._lookahead or 1) == 1:
            return branch
        probe = branch.sprout(f"{branch.path}~")
        await self._fork(probe)
        return probe

    async def _vote(self, particles: Sequence[Particle]) -> Branch:
        """Return a branch whose answer has the most votes; each is judged once as a whole."""
        paid = self._paid([particle.branch for particle in particles])
        if len(paid) > 1:
            await self._score(paid)
        voting = [particle for particle in particles if particle.branch in paid]
        return elected(voting, self._scores, self._beta)

    # -- what turns are worth --------------------------------------------------------------------

    async def _remember(self, particle: Particle) -> None:
        """Keep the candidates of one of the turns that have several, each turn equally likely."""
        if self._rng.random() * self._num_places >= 1.0:
            return
        spare = particle.sprout("?")
        await self._fork(spare)
        self._remembered = {}
        self._greedy_logprob = particle.greedy.turn_logprob
        for branch in particle.candidates:
            copy = branch.sprout(f"{branch.path}?")
            copy.state = spare.state
            read = branch.path.rpartition(".")[2]
            self._remembered[copy] = ProbedTurn(
                turn=branch.turns[-1],
                calls=bool(branch.last.calls),
                sample=int(read) if read.isdecimal() else None,
                greedy=branch.token_ids == particle.greedy.token_ids,
                logprob=branch.turn_logprob,
                value=self._scores.get(branch),
            )

    async def _probed(self) -> Probe | None:
        """Return what the remembered candidates are worth, each followed to the end."""
        if not self._remembered:
            return None
        copies = {branch: self._copies(branch) for branch in self._remembered}
        going = [branch for of_one in copies.values() for branch in of_one]
        while going := [branch for branch in going if branch.ended is None]:
            await self._run_calls(going)
            going = [branch for branch in going if branch.ended is None]
            await self._sample(going)
        candidates = [
            turn.model_copy(update={"outcomes": await self._outcomes(copies[branch])})
            for branch, turn in self._remembered.items()
        ]
        (first, *_) = self._remembered
        return Probe(
            after=len(first.turns) - 1,
            greedy_logprob=self._greedy_logprob,
            candidates=candidates,
        )

    def _copies(self, branch: Branch) -> list[Branch]:
        """Return a branch as often as it is to be continued: once, where it calls nothing."""
        number = (self.decoding.continuations or 0) if branch.last.calls else 1
        return [branch.sprout(f"{branch.path}{i}") for i in range(number)]

    async def _outcomes(self, branches: Sequence[Branch]) -> list[float]:
        assert self.scorer is not None
        return await run_together(
            self.scorer.outcome(as_interaction(branch, branch.rollout.task.payload))
            for branch in branches
        )

    # -- steps -----------------------------------------------------------------------------------

    async def _sample(self, branches: Sequence[Branch], temperature: float | None = None) -> None:
        counts = await run_together(self.turns.sample(b, temperature) for b in branches)
        self._sampled_tokens += sum(counts)

    def _admit(self, branches: Sequence[Branch]) -> list[Branch]:
        """Return the branches whose calls the budget has; the others end."""
        going = [branch for branch in branches if branch.ended is None]
        admitted = [branch for branch in going if self._budget.take(branch.num_calls)]
        for branch in going:
            if branch not in admitted:
                branch.ended = OUT_OF_CALLS
        return admitted

    def _end_unpayable(self, branches: Sequence[Branch]) -> None:
        """End the branches whose calls the budget does not have, of whose others one is taken."""
        for branch in branches:
            if branch.ended is None and not self._budget.has(branch.num_calls):
                branch.ended = OUT_OF_CALLS

    def _paid(self, branches: Sequence[Branch]) -> Sequence[Branch]:
        """Return those that did not end for lack of calls, or all where all did."""
        return [branch for branch in branches if branch.ended != OUT_OF_CALLS] or branches

    async def _run_calls(self, branches: Sequence[Branch]) -> None:
        """Carry out the last turns; of branches that share a state, the last one inherits it."""
        heirs = {branch.state: branch for branch in branches}
        for branch in branches:
            if heirs[branch.state] is not branch:
                await self._fork(branch)
        await run_together(self.turns.carry_out(branch) for branch in branches)
        calls = [call for branch in branches for call in branch.turns[-1].calls]
        self._num_calls += sum(call.status in ANSWERED for call in calls)

    async def _fork(self, branch: Branch) -> None:
        """Give a branch a state of its own, equal to the one that it shares."""
        branch.state = await branch.state.fork(branch.path, branch.turns)
        self.states.append(branch.state)
        self._all_states.append(branch.state)

    async def _score(self, branches: Sequence[Branch]) -> None:
        """Score the branches that have no score yet, where the method needs scores."""
        if not self.decoding.needs_scorer:
            return
        component = self.decoding.scorer
        assert self.scorer is not None
        assert component is not None
        fresh = [branch for branch in branches if branch not in self._scores]
        asked = [self.scorer.value(component, as_interaction(branch)) for branch in fresh]
        for branch, value in zip(fresh, await run_together(asked), strict=True):
            self._scores[branch] = value.value
            self._num_scores += 1
            self._scorer_tokens += value.tokens

    async def _close_all_but(self, needed: Sequence[BranchState]) -> None:
        for state in [state for state in self.states if state not in needed]:
            self.states.remove(state)
            await asyncio.shield(state.close(self.turns.env.step_timeout_s))


@dataclass
class CallBudget:
    """Tool calls that all branches of a search share."""

    left: float

    @classmethod
    def of(cls, max_calls: int | str | None, task: Task) -> CallBudget:
        """Return the budget of a task: `Decoding.max_calls`, or what that names in the payload.

        Raises:
            AttemptFailedError: the payload has no such number.
        """
        if not isinstance(max_calls, str):
            return cls(math.inf if max_calls is None else max_calls)
        found = task.payload.get(max_calls)
        if not isinstance(found, int) or isinstance(found, bool) or found < 0:
            raise AttemptFailedError(
                f"decoding_refused: decoding.max_calls names {max_calls!r}, which is {found!r} in "
                f"the payload of task {task.id!r}; give every task a whole number there"
            )
        return cls(found)

    def has(self, num_calls: int) -> bool:
        """Say whether so many calls are left."""
        return num_calls <= self.left

    def take(self, num_calls: int) -> bool:
        """Take some calls, if so many are left."""
        affords = self.has(num_calls)
        self.left -= num_calls if affords else 0
        return affords
