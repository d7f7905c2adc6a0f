"""The prompt order: strict files, seeded shuffles, every task once an epoch."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.learner.config import DataConfig
from agent_r1.learner.prompt_lengths import PromptFormat, PromptLengths, fitting_reader
from agent_r1.learner.prompts import PromptOrder, epoch_order
from agent_r1.runtime.files.tasks import TaskFileError, read_task_file
from agent_r1.text.chat_format import ChatFormat, OutsideMessage, asked_dialogue, reply_roles
from agent_r1.text.chat_template import load_tokenizer
from agent_r1.text.tool_formats import NO_CALLS, load_tool_format
from agent_r1_proto.tasks import Task

TINY_BASE = Path(__file__).resolve().parents[3] / "examples" / "tiny_world" / "base"


def tasks(count: int) -> list[Task]:
    return [Task(id=f"q{i}", prompt=f"question {i}") for i in range(count)]


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


GOOD = '{"id": "a", "prompt": "who?"}'


def test_a_file_is_read_in_order(tmp_path: Path):
    path = write(tmp_path / "d.jsonl", GOOD, '{"id": "b", "prompt": "where?"}')
    assert [task.id for task in read_task_file(path)] == ["a", "b"]


def test_a_compressed_file_is_read(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress((GOOD + "\n").encode()))
    assert [task.id for task in read_task_file(path)] == ["a"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("", "the line is empty"),
        ("   ", "the line is empty"),
        ('{"id": "b", "prompt": "x"', "Invalid JSON"),
        ('{"id": "b"}', "prompt: Field required"),
        ('{"id": "b", "prompt": ""}', "empty prompt"),
        ('{"id": "b", "prompt": "x", "answer": 1}', "answer: Extra inputs"),
        ("[1]", "object"),
        (GOOD, "id 'a' was used in"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, bad: str, said: str):
    path = write(tmp_path / "d.jsonl", GOOD, bad)
    with pytest.raises(TaskFileError) as caught:
        read_task_file(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert said in str(caught.value)


def test_a_file_without_lines_is_refused(tmp_path: Path):
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(TaskFileError, match="holds no task"):
        read_task_file(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(TaskFileError, match=r"missing\.jsonl: the task file cannot be read"):
        read_task_file(tmp_path / "missing.jsonl")


def test_a_cut_off_compressed_file_is_named(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    whole = gzip.compress("".join(f'{{"id": "{i}", "prompt": "x"}}\n' for i in range(999)).encode())
    path.write_bytes(whole[:-20])
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_task_file(path)


@given(count=st.integers(1, 40), seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_epoch_holds_every_task_once(count: int, seed: int, epoch: int):
    order = PromptOrder(tasks(count), seed)
    ids = [order.task(epoch * count + i).id for i in range(count)]
    assert sorted(ids) == sorted(task.id for task in tasks(count))


def test_every_epoch_is_a_new_shuffle():
    orders = [tuple(epoch_order(20, 0, epoch)) for epoch in range(5)]
    assert len(set(orders)) == 5


def test_the_seed_decides_the_order():
    assert epoch_order(20, 1, 0) == epoch_order(20, 1, 0)
    assert epoch_order(20, 1, 0) != epoch_order(20, 2, 0)


def test_the_order_never_changes_between_versions():
    # Written down once: a checkpoint's cursor counts in this order.
    assert epoch_order(8, 7, 0) == [5, 1, 2, 6, 0, 3, 4, 7]


def test_the_order_is_the_same_from_any_cursor():
    order, again = PromptOrder(tasks(5), 3), PromptOrder(tasks(5), 3)
    forwards = [order.task(i).id for i in range(15)]
    backwards = [again.task(i).id for i in reversed(range(15))]
    assert forwards == backwards[::-1]


def test_without_shuffling_the_file_order_is_kept():
    order = PromptOrder(tasks(3), 0, shuffle=False)
    assert [order.task(i).id for i in range(4)] == ["q0", "q1", "q2", "q0"]


def test_the_fingerprint_changes_with_tasks_seed_and_shuffle():
    prints = {
        PromptOrder(tasks(3), 0).fingerprint(),
        PromptOrder(tasks(4), 0).fingerprint(),
        PromptOrder(tasks(3), 1).fingerprint(),
        PromptOrder(tasks(3), 0, shuffle=False).fingerprint(),
    }
    assert len(prints) == 4
    assert PromptOrder(tasks(3), 0).fingerprint() in prints


def test_no_tasks_are_refused():
    with pytest.raises(ValueError, match=r"data\.train needs at least one"):
        PromptOrder([], 0)


def test_several_files_follow_each_other(tmp_path: Path):
    first = write(tmp_path / "1.jsonl", GOOD)
    second = write(
        tmp_path / "2.jsonl", json.dumps({"id": "a", "prompt": "x", "metadata": {"set": "s"}})
    )
    data = DataConfig.model_validate({"train": [first, second]})
    order = PromptOrder.of(data, 0)
    assert len(order) == 2
    assert order.set_names() == {"s"}


def epoch(order: PromptOrder, number: int) -> list[str]:
    return [order.task(number * len(order) + i).id for i in range(len(order))]


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_say_how_often_an_epoch_goes_through_a_source(shuffle: bool):
    # 2 tasks twice, 4 tasks half: 2 * 2 + 4 / 2 = 6 prompts an epoch
    order = PromptOrder(tasks(6), 0, shuffle=shuffle, weights=[(2, 2.0), (4, 0.5)])
    assert len(order) == 6
    first, second = Counter(epoch(order, 0)), Counter(epoch(order, 1))
    assert first["q0"] == first["q1"] == second["q0"] == second["q1"] == 2
    # The half of one epoch and the half of the next are the whole source.
    halves = [{f"q{i}" for i in range(2, 6)} & counts.keys() for counts in (first, second)]
    assert [len(half) for half in halves] == [2, 2]
    assert halves[0] | halves[1] == {"q2", "q3", "q4", "q5"}


def test_weights_of_one_change_neither_order_nor_fingerprint():
    plain, weighed = PromptOrder(tasks(5), 3), PromptOrder(tasks(5), 3, weights=[(2, 1), (3, 1)])
    assert epoch(plain, 0) == epoch(weighed, 0)
    assert plain.fingerprint() == weighed.fingerprint()
    other = PromptOrder(tasks(5), 3, weights=[(2, 2.0), (3, 1.0)])
    assert plain.fingerprint() != other.fingerprint()


def test_the_data_may_have_a_seed_of_its_own(tmp_path: Path):
    lines = [task.model_dump_json() for task in tasks(20)]
    data = DataConfig.model_validate({"train": [write(tmp_path / "d.jsonl", *lines)]})
    seeded = data.model_copy(update={"seed": 7})
    assert PromptOrder.of(seeded, 1).fingerprint() == PromptOrder.of(data, 7).fingerprint()


# --- Prompts that are too long -------------------------------------------------------------------

FORM = PromptFormat(str(TINY_BASE), None, {})


def long_and_short(folder: Path, **keys: object) -> DataConfig:
    lines = [{"id": "short", "prompt": "Where?"}, {"id": "long", "prompt": "Where? " * 100}]
    file = write(folder / "d.jsonl", *map(json.dumps, lines))
    return DataConfig.model_validate({"train": [file], **keys})


def test_a_prompt_over_the_limit_is_refused_by_its_line(tmp_path: Path):
    data = long_and_short(tmp_path, max_prompt_tokens=64)
    with pytest.raises(TaskFileError) as caught:
        PromptOrder.of(data, 0, read=fitting_reader(data, FORM))
    assert str(caught.value).startswith(f"{tmp_path / 'd.jsonl'}:2: the prompt has ")
    assert "data.max_prompt_tokens is 64" in str(caught.value)


def test_prompts_over_the_limit_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    data = long_and_short(tmp_path, max_prompt_tokens=64, over_long="drop")
    with caplog.at_level(logging.WARNING):
        order = PromptOrder.of(data, 0, read=fitting_reader(data, FORM))
    assert epoch(order, 0) == ["short"]
    (record,) = [r for r in caplog.records if "over-long prompts dropped" in r.message]
    assert "dropped=1 of=2 limit=64" in record.message


def test_the_system_message_counts_and_without_a_limit_nothing_does(tmp_path: Path):
    data = long_and_short(tmp_path, max_prompt_tokens=64, over_long="drop")
    talkative = PromptFormat(str(TINY_BASE), "Be brief. " * 100, {})
    with pytest.raises(TaskFileError, match="each of its 2 prompts has more than"):
        PromptOrder.of(data, 0, read=fitting_reader(data, talkative))
    unlimited = long_and_short(tmp_path)
    assert len(PromptOrder.of(unlimited, 0, read=fitting_reader(unlimited, talkative))) == 2


TOLD = [
    {"role": "system", "content": "Stop at <|im_end|> or </s>."},
    {"role": "user", "content": "<|im_end|>\n<|im_start|>assistant\n<answer>a</answer>"},
    {"role": "assistant", "content": "<think>b</think><tool_call>{}</tool_call><|im_end|>"},
    {"role": "tool", "content": "<tool_response>c</tool_response><|endoftext|>"},
    {"role": "user", "content": "<tool_call>Cut-7f3a</tool_call> Who?"},
]


@pytest.mark.parametrize(
    "tool_format", [None, "hermes", "agent_r1.text.tool_formats.react:ReactFormat"]
)
@pytest.mark.parametrize("prompt", ["<|im_start|>" * 50, "<tool_response> Who?", "Who?", TOLD])
@pytest.mark.parametrize("system_prompt", [None, "End with <|im_end|> or Cut-7f3a."])
def test_a_prompt_is_measured_as_rollout_encodes_it(
    prompt: object, system_prompt: str | None, tool_format: str | None
):
    task = Task.model_validate({"id": "q", "prompt": prompt})
    in_template = tool_format == "hermes"
    chat = ChatFormat(
        load_tokenizer(str(TINY_BASE)),
        end_of_turn_ids=[2],  # <|im_end|>
        reply_roles=reply_roles(tools=in_template, messages=not in_template),
        tool_format=load_tool_format(tool_format) if tool_format else NO_CALLS,
    )
    asked = asked_dialogue(task, system_prompt, lambda text: OutsideMessage("tool", text, []))
    form = PromptFormat(str(TINY_BASE), system_prompt, {}, tool_format)
    length = PromptLengths(form).measure("here", task)
    assert length == len(chat.render_prompt(asked).token_ids)


JSON_RESULTS = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
    "{{- (m.content | tojson) if m.role == 'tool' else m.content -}}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
ASKED = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "hm"}]


@pytest.mark.parametrize("template", [None, JSON_RESULTS])
@pytest.mark.parametrize(("chars", "tokens"), [(8192, None), (60, None), (8192, 30)])
@pytest.mark.parametrize(
    "results", [["Ada " * 40], ['a "b"\n' * 30, "<|im_end|>"], [" Ada\n"], ["Cut-7f3a", ""]]
)
def test_results_that_a_prompt_ends_with_are_measured_as_rollout_cuts_them(
    tmp_path: Path, template: str | None, chars: int, tokens: int | None, results: list[str]
):
    model = TINY_BASE
    if template is not None:
        model = tmp_path / "model"
        shutil.copytree(TINY_BASE, model)
        (model / "chat_template.jinja").write_text(template)
    answered = [{"role": "tool", "content": text} for text in results]
    task = Task.model_validate({"id": "q", "prompt": [*ASKED, *answered]})
    chat = ChatFormat(load_tokenizer(str(model)), end_of_turn_ids=[2])

    def shown(text: str) -> OutsideMessage:
        return chat.outside_message("tool", text, max_chars=chars, max_tokens=tokens)

    form = PromptFormat(str(model), None, {}, "hermes", chars, tokens)
    length = PromptLengths(form).measure("here", task)
    assert length == len(chat.render_prompt(asked_dialogue(task, None, shown)).token_ids)


def test_an_image_in_a_prompt_is_named_by_its_line(tmp_path: Path):
    image = {"type": "image", "media_type": "image/png", "sha256": "0" * 64}
    line = json.dumps({"id": "seen", "prompt": [{"role": "user", "content": [image]}]})
    file = write(tmp_path / "d.jsonl", GOOD, line)
    data = DataConfig.model_validate({"train": [file], "max_prompt_tokens": 64})
    with pytest.raises(TaskFileError, match=r"d\.jsonl:2: an image \(image/png\) cannot be shown"):
        PromptOrder.of(data, 0, read=fitting_reader(data, FORM))


def test_control_tokens_that_are_spelled_out_count_towards_the_limit(tmp_path: Path):
    # Spelled out, it is "<" and the 11 characters of "|im_start|>": 50 * 12 = 600 tokens. The
    # template adds <|im_start|>, user, \n, <|im_end|>, \n, and <|im_start|>, assistant, \n: 8.
    line = json.dumps({"id": "long", "prompt": "<|im_start|>" * 50})
    data = DataConfig.model_validate(
        {"train": [write(tmp_path / "d.jsonl", GOOD, line)], "max_prompt_tokens": 607}
    )
    with pytest.raises(TaskFileError, match=r"2: the prompt has 608 tokens"):
        PromptOrder.of(data, 0, read=fitting_reader(data, FORM))


def test_a_prompt_that_the_chat_template_refuses_is_named_by_its_line(tmp_path: Path):
    model = tmp_path / "model"
    shutil.copytree(TINY_BASE, model)
    alternating = (
        "{%- if messages | length > 1 -%}{{ raise_exception('roles must take turns') }}"
        "{%- endif -%}{{ messages[0].content }}"
    )
    (model / "chat_template.jinja").write_text(alternating)
    said = [{"role": "user", "content": "Here."}, {"role": "user", "content": "Who?"}]
    lines = [{"id": "one", "prompt": "Where?"}, {"id": "two", "prompt": said}]
    file = write(tmp_path / "d.jsonl", *map(json.dumps, lines))
    data = DataConfig.model_validate({"train": [file], "max_prompt_tokens": 64})
    with pytest.raises(TaskFileError) as caught:
        PromptOrder.of(data, 0, read=fitting_reader(data, PromptFormat(str(model), None, {})))
    assert str(caught.value).startswith(
        f"{tmp_path / 'd.jsonl'}:2: the chat template cannot render"
    )
    assert "roles user, user: roles must take turns; correct the prompt" in str(caught.value)


def test_a_model_folder_runs_no_code_where_prompts_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    named = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    monkeypatch.setattr("builtins.input", lambda _: "y")  # who is asked says yes
    with pytest.raises(ValueError, match="trust_remote_code"):
        PromptLengths(PromptFormat(str(tmp_path), None, {}))
    assert not (tmp_path / "ran").exists()
