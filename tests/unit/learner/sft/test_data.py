"""SFT data: files read strictly, weights per token, batches that repeat."""

from __future__ import annotations

import gzip
import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from agent_r1.learner.config import SftConfig
from agent_r1.learner.sft.data import LINE, load_dialogues, plan_batches
from agent_r1.learner.sft.loss_mask import DialogueEncoder
from tests.support.tiny_models import save_model

GOOD = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann"}]}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> DialogueEncoder:
    return DialogueEncoder(str(save_model(tmp_path_factory.mktemp("model"), layers=1)))


def write_lines(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def make_table(path: Path, **settings) -> SftConfig:
    return SftConfig.model_validate({"data": [path], "output": path.with_name("out"), **settings})


def test_weights_are_one_for_the_assistant_and_zero_elsewhere(tmp_path: Path, encoder):
    table = make_table(write_lines(tmp_path / "d.jsonl", GOOD, "", GOOD))
    data = load_dialogues(table, encoder, 512)
    assert len(data.samples) == 2
    sample = data.samples[0]
    # "Ann" is three bytes, and the end-of-turn token
    assert sample.advantages.sum() == 4.0
    assert np.array_equal(sample.loss_mask, sample.advantages > 0)
    assert sample.loss_mask[-4:].all()


def test_other_tokens_may_weigh_something(tmp_path: Path, encoder):
    path = write_lines(tmp_path / "d.jsonl", GOOD)
    table = make_table(path, other_token_weight=0.25)
    sample = load_dialogues(table, encoder, 512).samples[0]
    assert sample.advantages[0] == 0.0  # nothing predicts the first token
    assert set(sample.advantages[1:].tolist()) == {0.25, 1.0}
    assert not sample.loss_mask[0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "Invalid JSON"),
        ({"messages": []}, "messages: List should have at least 2 items"),
        ({**GOOD, "extra": 1}, "extra: Extra inputs are not permitted"),
        ({"messages": [{"role": "bot", "content": "x"}] * 2}, r"messages\.0\.role"),
        ({"messages": GOOD["messages"][::-1]}, "must end with an assistant message"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, encoder, line, problem: str):
    path = write_lines(tmp_path / "d.jsonl", GOOD, line)
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 2: .*{problem}"):
        load_dialogues(make_table(path), encoder, 512)


def test_a_dialogue_longer_than_the_context_is_an_error(tmp_path: Path, encoder):
    path = write_lines(tmp_path / "d.jsonl", GOOD)
    with pytest.raises(ValueError, match=r"line 1: the dialogue has \d\d tokens; .* is 15"):
        load_dialogues(make_table(path), encoder, 15)


def test_missing_and_empty_files_are_errors(tmp_path: Path, encoder):
    with pytest.raises(ValueError, match=r"sft\.data .*none\.jsonl\) is missing"):
        load_dialogues(make_table(tmp_path / "none.jsonl"), encoder, 512)
    with pytest.raises(ValueError, match="holds no dialogue"):
        load_dialogues(make_table(write_lines(tmp_path / "e.jsonl")), encoder, 512)


def test_a_saved_data_set_is_called_one(tmp_path: Path, encoder):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a folder and not JSON lines; .*load_from_disk"):
        load_dialogues(make_table(tmp_path), encoder, 512)


def test_every_epoch_is_a_new_order_of_all_dialogues(tmp_path: Path):
    table = make_table(tmp_path / "d", epochs=2, batch_sequences=4)
    batches = plan_batches([5] * 10, table, seed=3)
    assert [len(batch) for batch in batches] == [4, 4, 2] * 2
    epochs = [list(chain(*batches[:3])), list(chain(*batches[3:]))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert plan_batches([5] * 10, table, seed=3) == batches
    assert plan_batches([5] * 10, table, seed=4) != batches


def test_batches_by_tokens_stay_within_them(tmp_path: Path):
    table = make_table(tmp_path / "d", batch_sequences=None, batch_tokens=10)
    lengths = [4, 9, 3, 12, 2]
    batches = plan_batches(lengths, table, seed=0)
    assert sorted(chain(*batches)) == list(range(5))
    assert all(len(b) == 1 or sum(lengths[i] for i in b) <= 10 for b in batches)


def test_what_continues_one_state_stays_together(tmp_path: Path):
    table = make_table(tmp_path / "d", epochs=3, batch_sequences=4)
    states = [[0, 1, 2], [4, 5], [6, 7, 8, 9, 10]]  # 3 is alone; the last is more than a batch
    batches = plan_batches([5] * 11, table, 0, states)
    assert sorted(chain(*batches)) == sorted([*range(11)] * 3)
    for state in ([3], *states):
        assert sum(set(state) <= set(batch) for batch in batches) == 3
    assert {len(batch) for batch in batches if not {6, 7} & set(batch)} <= {1, 2, 3, 4}
    assert [batch for batch in batches if 6 in batch] == [states[2]] * 3


def test_limits_end_the_plan(tmp_path: Path):
    by_steps = make_table(tmp_path / "d", epochs=9, batch_sequences=2, steps=4)
    assert len(plan_batches([5] * 6, by_steps, 0)) == 4
    by_tokens = make_table(tmp_path / "d", epochs=9, batch_sequences=2, max_tokens=35)
    # ten tokens a step: 30 after three steps are too few, 40 after four are enough
    assert len(plan_batches([5] * 6, by_tokens, 0)) == 4


def test_batch_size_is_given_one_way(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot be combined"):
        make_table(tmp_path / "d", batch_tokens=100)


def test_a_byte_order_mark_and_a_packed_file_are_read(tmp_path: Path, encoder):
    text = b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n"
    plain, packed = tmp_path / "d.jsonl", tmp_path / "d.jsonl.gz"
    plain.write_bytes(text)
    packed.write_bytes(gzip.compress(text, mtime=0))
    of_plain, of_packed = (load_dialogues(make_table(p), encoder, 512) for p in (plain, packed))
    assert len(of_plain.samples) == 1
    assert of_plain.digest == of_packed.digest


def test_the_first_ten_bad_lines_are_shown_and_all_are_counted(tmp_path: Path, encoder):
    # Twelve bad lines, 1 to 12, and a good one
    path = write_lines(tmp_path / "d.jsonl", *["{"] * 11, {"messages": []}, GOOD)
    with pytest.raises(ValueError, match="12 of 13 lines cannot be used") as caught:
        load_dialogues(make_table(path), encoder, 512)
    _, *shown, rest = str(caught.value).split("\n  ")
    assert [text.partition(": ")[0] for text in shown] == [
        f"{path}, line {number}" for number in range(1, 11)
    ]
    assert rest == f"and 2 more; {LINE}"


def test_latin_1_is_called_no_utf_8(tmp_path: Path, encoder):
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(GOOD).replace("Ann", "Zoë").encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 1: Invalid UTF-8 \(0xeb"):
        load_dialogues(make_table(path), encoder, 512)


SEARCH_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "Emma"}'},
}
WRITTEN = '<tool_call>{"name": "search", "arguments": {"query": "Emma"}}</tool_call>'


def dialogue_with(call: dict[str, object]) -> list[dict[str, object]]:
    return [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", **call},
        {"role": "tool", "tool_call_id": "call_1", "content": "Jane"},
        {"role": "assistant", "content": "Jane"},
    ]


def test_calls_are_written_as_the_model_writes_them_where_the_template_shows_none(
    tmp_path: Path, encoder
):
    calling = {"messages": dialogue_with({"content": None, "tool_calls": [SEARCH_CALL]})}
    written = {"messages": dialogue_with({"content": WRITTEN})}
    path = write_lines(tmp_path / "d.jsonl", calling, written)
    of_calls, of_text = load_dialogues(make_table(path), encoder, 512).samples
    assert of_calls.token_ids.tolist() == of_text.token_ids.tolist()
    assert of_calls.loss_mask.tolist() == of_text.loss_mask.tolist()


def test_lines_of_sharegpt_are_read(tmp_path: Path, encoder):
    talk = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ann"}]
    tools = [{"name": "search", "description": "", "parameters": {}}]
    told = {"messages": [{"role": "system", "content": "Be brief."}, *GOOD["messages"]]}
    path = write_lines(
        tmp_path / "d.jsonl",
        GOOD,
        {"conversations": talk},
        told,
        {"conversations": talk, "system": "Be brief."},
        {**GOOD, "tools": tools},
        {"conversations": talk, "tools": json.dumps(tools)},
    )
    samples = load_dialogues(make_table(path), encoder, 512).samples
    tokens = [sample.token_ids.tolist() for sample in samples]
    assert tokens[0::2] == tokens[1::2]
