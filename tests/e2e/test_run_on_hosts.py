"""A short run on hosts that share nothing; `make test-hosts` is the long one.

`make test-ranks` adds more learner ranks, under every ZeRO stage, which send weights from memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.hosts import Hosts, Link, why_not
from tests.support.run_on_hosts import RunOnHosts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

LINK = Link(mbit=100, loss=0.01, delay_s=0.02)
END_TIMEOUT_S = 400.0
OPTIONS = (
    "learner.steps=2",
    "learner.groups_per_batch=2",
    "learner.group_size=4",
    "evaluation.before=false",
    "evaluation.after=false",
)


SENT = (*OPTIONS, 'learner.transport="collective"')


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (OPTIONS, 1),
        *(
            pytest.param((*SENT, f"engine.zero_stage={stage}"), ranks, marks=pytest.mark.ranks)
            for ranks, stage in itertools.product((2, 3), (1, 2, 3))
        ),
    ],
)
def test_services_join_a_run_on_other_hosts_and_every_sample_is_trained_once(
    tmp_path: Path, options: Sequence[str], ranks: int
):
    others = [f"learner-{rank}" for rank in range(1, ranks)]
    with Hosts(tmp_path / "hosts", ["learner", *others, "rollout", "services"], LINK) as hosts:
        run = RunOnHosts(hosts["learner"], options, [hosts[name] for name in others])
        run.start_redis()
        run.start_learner()
        run.join(hosts["rollout"], "rollout", "rollout.server_id=one")
        run.join(hosts["services"], "reward")
        run.join(hosts["services"], "search")
        assert run.wait_for_end(hosts["learner"], "learner", END_TIMEOUT_S) == 0, hosts[
            "learner"
        ].log("learner")
        assert set(run.stop().values()) == {0}
        trained = run.trained()
        summary = run.summary()
        assert not list(hosts["rollout"].folder.glob("agent_r1_*"))  # what it pulled goes with it
    # 2 steps of 2 groups of 4 samples.
    samples = sorted((one["group_id"], one["sample_index"]) for one in trained)
    assert samples == [(group, sample) for group in range(4) for sample in range(4)]
    assert (summary["status"], summary["trajectories_trained"]) == ("finished", 16)
    assert {one["server_id"] for one in trained} == {"one"}
    assert all(step["push/bytes_sent"] >= step["push/size_bytes"] > 0 for step in run.metrics())
