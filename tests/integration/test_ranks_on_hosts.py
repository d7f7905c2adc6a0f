"""Learner ranks on hosts that share nothing: they train, stop, resume, and fail with a reason.

The short form runs in the suite; `make test-ranks` adds every ZeRO stage, 3 ranks and torchrun.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agent_r1.learner.config import SftConfig, SupervisedEngineConfig
from agent_r1.learner.sft import train as sft
from agent_r1.runtime.config import ModelConfig, RunConfig
from tests.support.hosts import Host, Hosts, why_not
from tests.support.rank_hosts import (
    CONFIG,
    LOG,
    complaint,
    ends,
    furnish,
    start_rank,
    start_ranks,
    wait_for_steps,
    write_demonstrations,
)
from tests.support.tiny_models import save_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
FULL = pytest.mark.ranks
STEPS = 100
STOPPED = 130
SOON_S = 20.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def one_rank(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that one rank, never interrupted, comes to."""
    folder = tmp_path_factory.mktemp("one_rank")
    table = SftConfig(
        data=[write_demonstrations(folder / "demonstrations.jsonl")],
        output=folder / "out",
        batch_sequences=6,
        steps=STEPS,
        epochs=STEPS,
        engine=SupervisedEngineConfig(lr=0.1, adam_eps=1.0, device="cpu"),
    )
    assert sft.run(
        run=RunConfig(seed=3), model=ModelConfig(path=str(model), max_context=512), sft=table
    )
    return load_file(folder / "out" / "model.safetensors")


@pytest.fixture
def hosts(model: Path, tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path / "hosts", ["node-0", "node-1"]) as hosts:
        for host in hosts:
            furnish(host, model, steps=STEPS)
        yield hosts


def add_third(hosts: Hosts, model: Path) -> None:
    furnish(hosts.add("node-2"), model, steps=STEPS)


def listening(host: Host) -> set[str]:
    """The addresses that programs of a host listen on."""
    lines = host.run(["ss", "-Hltn"]).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in lines}


def assert_same(host: Host, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(host.inside("/tmp/out/model.safetensors"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("stage", "numbers"),
    [
        (3, (2, 1)),
        *(pytest.param(n, (2, 3), marks=FULL) for n in (1, 2, 3)),
        *(pytest.param(n, (3, 2), marks=FULL) for n in (1, 2, 3)),
        pytest.param(1, (2, 1), marks=FULL),
        pytest.param(2, (2, 1), marks=FULL),
    ],
)
def test_ranks_that_share_nothing_stop_resume_in_another_number_and_export(
    hosts: Hosts,
    model: Path,
    one_rank: dict[str, torch.Tensor],
    stage: int,
    numbers: tuple[int, int],
):
    if 3 in numbers:
        add_third(hosts, model)
    names = [host.name for host in hosts]
    first, second = names[: numbers[0]], names[: numbers[1]]
    stage_option = f"sft.engine.zero_stage={stage}"
    ranks = start_ranks(hosts, first, stage_option)
    wait_for_steps(hosts["node-0"], 3, ranks[0])
    for name in first:
        assert listening(hosts[name]) == {hosts[name].address}
    ranks[-1].send_signal(signal.SIGTERM)  # of any rank: all stop, and rank 0 saves
    assert ends(ranks) == [STOPPED] * len(first)
    taken = len(hosts["node-0"].inside(LOG).read_text().splitlines())
    assert 3 <= taken < STEPS
    assert ends(start_ranks(hosts, second, stage_option, log="resumed")) == [0] * len(second)
    assert f"resumed step={taken}" in hosts["node-0"].log("resumed")
    assert_same(hosts["node-0"], one_rank)
    for name in names[1:]:  # the others wrote nothing
        own = {path.name for path in hosts[name].folder.iterdir() if not path.name.startswith(".")}
        assert own >= {"model"}
        assert not own & {"out", "out.sft"}


@FULL
@pytest.mark.parametrize(("number", "victim"), [(2, 1), (2, 0), (3, 1), (3, 0)])
def test_a_killed_rank_ends_the_others_with_its_name(
    hosts: Hosts, model: Path, number: int, victim: int
):
    if number == 3:
        add_third(hosts, model)
    names = [host.name for host in hosts]
    ranks = start_ranks(hosts, names)
    wait_for_steps(hosts["node-0"], 3, ranks[0])
    started = time.monotonic()
    hosts[names[victim]].kill()
    codes = ends(ranks)
    assert time.monotonic() - started < SOON_S
    for rank, name in enumerate(names):
        if rank != victim:
            assert codes[rank] == (2 if rank == 0 else 1)
            assert re.search(rf"rank {victim} ended$", complaint(hosts[name]))


@FULL
def test_ranks_that_do_not_fit_each_other_say_so_on_every_host(hosts: Hosts):
    # Rank 1 reads another learning rate.
    config = hosts["node-1"].inside("/tmp/run.toml")
    config.write_text(CONFIG.format(steps=STEPS).replace("lr = 0.1", "lr = 0.2"))
    ranks = start_ranks(hosts, ["node-0", "node-1"])
    assert ends(ranks) == [2, 1]
    for host in hosts:
        assert "configured differently from rank 0: sft.engine.lr is 0.2, not 0.1;" in complaint(
            host
        )


@FULL
def test_a_rank_that_never_comes_is_named(hosts: Hosts, model: Path):
    add_third(hosts, model)
    names = [host.name for host in hosts]
    timeout = "sft.engine.rank_join_timeout_s=30"
    ranks = [start_rank(hosts, names, rank, timeout) for rank in (0, 1)]
    assert ends(ranks) == [2, 1]
    for name in names[:2]:
        assert "rank 2 of 3 did not come to node-0:29500 within 30 s" in complaint(hosts[name])


@FULL
def test_a_missing_rank_0_is_missed(hosts: Hosts):
    rank = start_rank(hosts, ["node-0", "node-1"], 1, "sft.engine.rank_join_timeout_s=5")
    assert ends([rank]) == [1]
    assert "rank 0 was not at node-0:29500 within 5 s" in complaint(hosts["node-1"])


@FULL
def test_ranks_that_cannot_connect_name_the_interface(hosts: Hosts):
    rule = "-p tcp --syn ! --dport 29500 -j DROP"  # only the store is open
    for host in hosts:
        host.run(["iptables", "-A", "INPUT", *rule.split()])
    ranks = start_ranks(hosts, ["node-0", "node-1"], "sft.engine.rank_join_timeout_s=20")
    assert ends(ranks) == [1, 1]
    for host in hosts:
        assert "could not connect to each other within 20 s" in complaint(host)
        assert "on the interface eth0" in complaint(host)


@FULL
def test_ranks_with_other_weights_are_refused(hosts: Hosts, tmp_path: Path):
    save_model(tmp_path / "other", seed=7).joinpath("model.safetensors").replace(
        hosts["node-1"].inside("/tmp/model/model.safetensors")
    )
    assert all(ends(start_ranks(hosts, ["node-0", "node-1"])))  # rank 0's collective may hang
    for host in hosts:
        assert "/tmp/model has other weights here than on rank 0's machine" in complaint(host)


@FULL
def test_a_full_disk_of_rank_0_ends_all_and_of_another_rank_hurts_nobody(
    hosts: Hosts, one_rank: dict[str, torch.Tensor]
):
    names = ["node-0", "node-1"]
    full = ["sh", "-c", "mkdir -p /tmp/$1; mount -t tmpfs -o size=$2 none /tmp/$1", "sh"]
    hosts["node-0"].run([*full, "small", "256k"])
    every = "sft.checkpoint_every=1"
    ranks = start_ranks(hosts, names, every, "sft.work_dir=/tmp/small/work")
    assert ends(ranks) == [2, 1]
    for host in hosts:
        assert "the disk is full" in complaint(host)
    # Rank 1 has nowhere to write: it needs no disk.
    hosts["node-1"].run([*full, "full", "64k"])
    hosts["node-1"].run(["sh", "-c", "cat /dev/zero >/tmp/full/zeros"], check=False)
    ranks = [
        start_rank(
            hosts, names, rank, log="again", env={"TMPDIR": "/tmp/full", "HOME": "/tmp/full"}
        )
        if rank
        else start_rank(hosts, names, rank, log="again")
        for rank in range(2)
    ]
    assert ends(ranks) == [0, 0]
    assert_same(hosts["node-0"], one_rank)


@FULL
def test_a_host_that_falls_silent_is_lost_within_a_minute(hosts: Hosts):
    ranks = start_ranks(hosts, ["node-0", "node-1"])
    wait_for_steps(hosts["node-0"], 3, ranks[0])
    started = time.monotonic()
    hosts["node-1"].run(["ip", "link", "set", "eth0", "down"])
    assert ends(ranks) == [1, 1]
    assert 40 <= time.monotonic() - started < 60
    assert "rank 1 gave no sign of life for 40 s" in complaint(hosts["node-0"])
    assert "rank 0 gave no sign of life for 40 s" in complaint(hosts["node-1"])


@FULL
def test_torchrun_starts_the_ranks_of_two_nodes(hosts: Hosts, one_rank: dict[str, torch.Tensor]):
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    agent_r1 = str(Path(sys.executable).with_name("agent-r1"))
    nodes = [
        host.start(
            [
                *(torchrun, "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(n)),
                *("--master-addr", "node-0", "--master-port", "29500", "--no-python"),
                *(agent_r1, "sft", "/tmp/run.toml", "--set", "sft.engine.ranks=2"),
            ],
            log="rank",
            cwd=Path("/tmp"),
        )
        for n, host in enumerate(hosts)
    ]
    assert ends(nodes) == [0, 0]
    assert_same(hosts["node-0"], one_rank)
