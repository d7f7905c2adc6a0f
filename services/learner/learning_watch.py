"""Signs that a run can learn: rewards that differ, tools that answer, instances that keep pace.

collector.py --complete groups, trajectories--> `LearningWatch` --what is wrong now-->
stop_rules.py, which shows it while it lasts. Nothing here ends a run. Pure: no clock, no Redis.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from agent_r1.learner.groups import Group, total_reward
from agent_r1_proto.failures import call_error
from agent_r1_proto.trajectory import ToolCallRecord, Trajectory

Found = dict[str, tuple[str, str]]
"""Troubles by kind: what is wrong, and what can be done."""

BATCHES = 3
"""Batches of groups that are looked at together."""
FEWEST_GROUPS = 8
EQUAL_SHARE = 0.95
"""Share of groups with equal rewards from which on they are reported."""
EQUAL_SHARE_OVER = 0.8
"""Share of groups with equal rewards below which it is over: a policy that rarely succeeds does not
begin and end all the time."""
ANY = ""
"""Stand-in for a tool's name."""
FEWEST_CALLS = 8
MOST_CALLS = 64
"""Calls of one tool that are looked at together."""
ANSWERED_SHARE_OVER = 0.1
MOST_TIMED = 1024
"""Calls of one tool among which instances are compared: a slow one gets few of them, since those
that wait for it are counted as its load."""
LAST_OF_AN_INSTANCE = 8
FEWEST_OF_AN_INSTANCE = 5
FEWEST_OF_PEERS = 8
"""Fewer are no comparison: the first calls after a start are slow."""
SLOW_FACTOR = 10.0
"""An instance whose median call takes so many times as long as its peers' is said."""
SLOW_FACTOR_OVER = 5.0
SLOW_MS = 100.0
"""Differences below are no matter, whatever the factor."""


class LearningWatch:
    """Keeps the last groups and calls of one run.

    Args:
        groups_per_batch: of the learner.
        compares_groups: the advantage compares trajectories of one group, so that equal rewards
            within each are enough to teach nothing; else those of all groups must be equal.
    """

    def __init__(self, *, groups_per_batch: int, compares_groups: bool) -> None:
        self._compares_groups = compares_groups
        size = max(FEWEST_GROUPS, BATCHES * groups_per_batch)
        self._groups: deque[frozenset[float]] = deque(maxlen=size)
        """The rewards of each group."""
        self._calls: dict[str, deque[ToolCallRecord]] = {}
        """Newest calls by tool; all together by ANY."""
        self._times: dict[str, deque[tuple[str, float]]] = {}
        """Instance and milliseconds of calls, by the tool."""
        self._found: Found = {}

    def saw_group(self, group: Group) -> None:
        """Note a complete group, trained on or not."""
        rewards = {total_reward(scored) for scored in group.survivors}
        if group.greedy is not None:
            rewards.add(total_reward(group.greedy))
        if len(group.survivors) > 1 or group.greedy is not None:  # one always equals itself
            self._groups.append(frozenset(rewards))

    def saw_calls(self, trajectory: Trajectory) -> None:
        """Note the tool calls of a trajectory."""
        for call in trajectory.calls():
            for name in (ANY, *([call.tool] if call.status != "unknown_tool" else [])):
                self._calls.setdefault(name, deque(maxlen=MOST_CALLS)).append(call)
        self.saw_times(trajectory)

    def saw_times(self, trajectory: Trajectory) -> None:
        """Note how long instances took; one that never answers took all the time of its calls.

        Of a call that was sent again, the time says nothing of the instance that answered.
        """
        for call in trajectory.calls():
            if call.instance and call.attempt == 0:
                times = self._times.setdefault(call.tool, deque(maxlen=MOST_TIMED))
                times.append((call.instance, call.latency_ms))

    def look(self) -> Found:
        """Return what is wrong now."""
        found = dict(self._equal_rewards())
        for tool, calls in self._calls.items():
            found.update(self._failing(tool, calls))
        for tool, times in self._times.items():
            found.update(self._slow(tool, times))
        self._found = found
        return found

    def _equal_rewards(self) -> Iterator[tuple[str, tuple[str, str]]]:
        kind, groups = "learning:equal_rewards", self._groups
        if len(groups) < (groups.maxlen or 0):
            return
        equal = sum(len(rewards) == 1 for rewards in groups)
        if not self._compares_groups and len(frozenset[float]().union(*groups)) > 1:
            return
        least = EQUAL_SHARE_OVER if kind in self._found else EQUAL_SHARE
        if equal >= least * len(groups):
            common = Counter(r for rewards in groups for r in rewards).most_common(1)[0][0]
            yield (
                kind,
                (
                    f"the run cannot learn: in {equal} of the last {len(groups)} groups every "
                    f"trajectory has the same reward (most often {common:g})",
                    "look at what the policy does with `agent-r1 show`, and choose tasks that it "
                    "neither always nor never solves, or a reward with more than two values",
                ),
            )

    def _failing(
        self, tool: str, calls: Sequence[ToolCallRecord]
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        kind = f"learning:failing_calls:{tool}"
        if tool == ANY:  # of these, whether they are of a tool at all
            answered = sum(call.status != "unknown_tool" for call in calls)
        else:
            answered = sum(call.status == "ok" for call in calls)
        most = ANSWERED_SHARE_OVER * len(calls) if kind in self._found else 0
        if len(calls) < FEWEST_CALLS or answered > most:
            return
        reasons = Counter(call_error(call) or call.error or call.status for call in calls)
        failed = "named no tool, or cannot be read" if tool == ANY else f"of tool {tool!r} failed"
        yield (
            kind,
            (
                f"each of the last {len(calls)} calls {failed} (most often: "
                f"{reasons.most_common(1)[0][0]})",
                "correct the tool, or show the model in the prompt how it is called",
            ),
        )

    def _slow(
        self, tool: str, times: Iterable[tuple[str, float]]
    ) -> Iterator[tuple[str, tuple[str, str]]]:
        by_instance: dict[str, deque[float]] = {}
        for instance, took_ms in times:
            by_instance.setdefault(instance, deque(maxlen=LAST_OF_AN_INSTANCE)).append(took_ms)
        for instance, own in by_instance.items():
            peers = [ms for name, of in by_instance.items() if name != instance for ms in of]
            if len(own) < FEWEST_OF_AN_INSTANCE or len(peers) < FEWEST_OF_PEERS:
                continue
            kind = f"slow:{tool}:{instance}"
            takes, usual = statistics.median(own), statistics.median(peers)
            factor = SLOW_FACTOR_OVER if kind in self._found else SLOW_FACTOR
            if takes >= factor * usual and takes - usual >= SLOW_MS:
                yield (
                    kind,
                    (
                        f"instance {instance} of tool {tool!r} takes {takes / 1000:.2f} s a call, "
                        f"its peers {usual / 1000:.2f} s",
                        f"look at its machine, or take it out: `agent-r1 tools drain {tool} "
                        f"--instance {instance}`",
                    ),
                )
