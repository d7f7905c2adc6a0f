"""Finding estimators and losses by name, and the example of docs/add-an-algorithm.md."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.learner.algorithms import (
    ADVANTAGES,
    POLICY_LOSSES,
    find_advantage,
    find_policy_loss,
    is_per_token,
    make_advantage,
)
from agent_r1.learner.algorithms.advantages import AdvantageBatch
from agent_r1.learner.algorithms.losses import LossInputs, LossOptions
from agent_r1.learner.algorithms.losses.ppo import ppo_loss
from agent_r1.learner.config import LearnerConfig

REPOSITORY = Path(__file__).resolve().parents[4]
DOCUMENT = (REPOSITORY / "docs" / "add-an-algorithm.md").read_text()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_table_knows_which_losses_judge_each_token_alone(name: str):
    # Two tokens of one trajectory, with ratios on both sides of 1: together, and one by one.
    new, old = torch.tensor([-1.0, -2.0]), torch.tensor([-1.1, -1.5])

    def losses(*tokens: int) -> torch.Tensor:
        rows = torch.zeros(len(tokens), dtype=torch.int64)
        t = list(tokens)
        inputs = LossInputs(new[t], old[t], torch.full((len(t),), 0.5), rows, 1)
        return find_policy_loss(name)(inputs, LossOptions()).loss

    apart = torch.cat([losses(0), losses(1)])
    assert torch.equal(losses(0, 1), apart) == is_per_token(name)


def test_names_of_the_tables_are_found():
    for name, estimator in ADVANTAGES.items():
        assert find_advantage(name) is estimator
    assert find_policy_loss("ppo") is ppo_loss
    assert len({find_policy_loss(name) for name in POLICY_LOSSES}) == len(POLICY_LOSSES)


def test_finding_an_estimator_does_not_wait_for_torch():
    program = (
        "import sys; from agent_r1.learner.algorithms import find_advantage; "
        "find_advantage('gae'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "grop",
            r'learner.advantage \("grop"\) is unknown; did you mean "grpo"\? .* gae, gigpo, grpo',
        ),
        ("zzz", r'learner.advantage \("zzz"\) is unknown; choose one of gae, .*module:name'),
        (":function", "is unknown"),
        ("math:", "is unknown"),
        ("no_such_module:f", "no_such_module cannot be imported: .*in run.plugins"),
        ("math:sqrtt", r'module math has no sqrtt; did you mean "sqrt"\?'),
        ("math:zzzzzz", "module math has no zzzzzz; check its name"),
        ("math:pi", r"is float \(3.14.*; it must be a class derived from .*AdvantageEstimator"),
    ],
)
def test_what_cannot_be_found_is_an_error(name: str, message: str):
    with pytest.raises(ValueError, match=message):
        find_advantage(name)


def test_an_unknown_loss_names_its_key_and_the_known_ones():
    with pytest.raises(
        ValueError, match=r'learner.policy_loss \("gppo"\) is unknown; did you mean'
    ):
        find_policy_loss("gppo")


def test_a_module_that_cannot_import_something_says_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "needs_more.py").write_text("import package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="No module named 'package_that_is_missing'"):
        find_advantage("needs_more:f")


@pytest.fixture
def learner_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Write the document's module where its `run.plugins` says; return its [learner] table."""
    code = re.search(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    table = re.search(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert code is not None
    assert table is not None
    assert code[1].count("\n") < 32
    config = tomllib.loads(table[1])
    (folder,) = config["run"]["plugins"]
    module = config["learner"]["advantage"].partition(":")[0]
    assert f"`{folder}/{module}.py`" in DOCUMENT
    (tmp_path / folder).mkdir()
    (tmp_path / folder / f"{module}.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.delitem(sys.modules, module, raising=False)
    return config["learner"]


def test_the_estimator_of_the_document_works(learner_table: dict[str, Any]):
    # group 1: rewards 1, 0 and 4, median 1; group 2: 2, median 2
    mask = np.array([False, True, False, True])
    rewards = [np.array([0.0, 0.0, 0.0, total]) for total in (1.0, 0.0, 2.0, 4.0)]
    batch = AdvantageBatch([1, 1, 2, 1], rewards, [mask] * 4)
    found = make_advantage(learner_table["advantage"], learner_table["advantage_options"])(batch)
    np.testing.assert_array_equal(
        found.advantages, [[0, 0, 0, 0], [0, -1, 0, -1], [0, 0, 0, 0], [0, 3, 0, 3]]
    )
    assert found.returns is None


def test_parameters_of_the_document_s_estimator_are_checked(learner_table: dict[str, Any]):
    name = learner_table["advantage"]
    with pytest.raises(ValueError, match=r"has the parameters quantile, .* quantil .*Extra inputs"):
        make_advantage(name, {"quantil": 0.5})
    with pytest.raises(ValueError, match=r"do not fit them: quantile .*valid number"):
        make_advantage(name, {"quantile": "half"})


def test_an_estimator_of_ones_own_gets_a_critic_a_greedy_answer_and_keys_of_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_estimators.py").write_text(
        "from agent_r1.learner.algorithms.advantages import AdvantageEstimator\n\n"
        "class Own(AdvantageEstimator):\n"
        "    gamma: float\n    scale: float = 1.0\n"
        "    needs_critic = needs_greedy_baseline = compares_group = True\n"
        "    def __call__(self, batch): ...\n\n"
        "class Unfinished(AdvantageEstimator):\n    scale: float = 1.0\n\n"
        "class Older(AdvantageEstimator):\n    def __call__(self, batch, options): ...\n"
    )
    keys = {"advantage": "own_estimators:Own", "gamma": 0.5, "advantage_options": {"scale": 2.0}}
    table = LearnerConfig.model_validate({**keys, "critic_lr": 1e-4, "group_size": 4})
    assert not table.has_critic  # while its folder is not on the import path
    monkeypatch.syspath_prepend(tmp_path)
    assert (table.has_critic, table.has_greedy_baseline, table.slots_per_group) == (True, True, 5)
    made = make_advantage(table.advantage, table.advantage_parameters)
    assert made.model_dump() == {"gamma": 0.5, "scale": 2.0}
    with pytest.raises(ValueError, match=r'group_size \(1\) must be >= 2 .* "own_estimators:Own"'):
        table.model_copy(update={"group_size": 1}).check_group_size(table.estimator)
    with pytest.raises(ValueError, match=r'Unfinished"\) is .*; it must be a class .*__call__'):
        make_advantage("own_estimators:Unfinished", {})
    with pytest.raises(ValueError, match=r"is called as .*\(self, batch\).*'options'"):
        make_advantage("own_estimators:Older", {})


def test_the_loss_of_the_document_works(learner_table: dict[str, Any]):
    # ratio 1.5 for an advantage of 2: -3, and the gradient is the same
    logprobs = torch.tensor([0.6], dtype=torch.float64).log().requires_grad_()
    old = torch.tensor([0.4], dtype=torch.float64).log()
    advantages = torch.tensor([2.0], dtype=torch.float64)
    inputs = LossInputs(logprobs, old, advantages, torch.tensor([0]), 1)
    found = find_policy_loss(learner_table["policy_loss"])(inputs, LossOptions())
    assert found.loss.tolist() == pytest.approx([-3.0])
    assert found.clipped.tolist() == [False]
    found.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-3.0])
