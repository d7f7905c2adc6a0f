"""Files as editors write them: byte order marks, other encodings, several bad lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from agent_r1.cli.task.episodes import read_episode
from agent_r1.config.files import ConfigError, read_file
from agent_r1.tools.search.corpus import read_passages
from agent_r1_service.files.data_source import DataSource
from agent_r1_service.files.foreign import read_text
from agent_r1_service.files.source import read_records
from agent_r1_service.files.tasks import TaskFileError, read_task_file

BOM = b"\xef\xbb\xbf"


def line(number: int, text: str = "Wer schrieb «Faust»?") -> str:
    return json.dumps({"id": f"q{number}", "prompt": text}, ensure_ascii=False) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_tasks_are_read_behind_a_byte_order_mark(path: Path, newline: str):
    text = (line(1) + line(2)).replace("\n", newline).encode()
    path.write_bytes(BOM + text)
    assert [task.id for task in read_task_file(path)] == ["q1", "q2"]
    packed = path.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(BOM + text, mtime=0))
    assert [task.id for task in read_task_file(packed)] == ["q1", "q2"]
    # `cat` joins files with their marks.
    path.write_bytes(BOM + line(1).encode() + BOM + line(2).encode())
    assert [task.id for task in read_task_file(path)] == ["q1", "q2"]


def test_the_other_readers_skip_a_byte_order_mark(path: Path):
    path.write_bytes(BOM + b'{"q": "x", "a": "1"}\n')
    columns = {"prompt": "q", "answers": "a"}
    assert read_task_file(DataSource(source=path, columns=columns))[0].prompt == "x"
    path.write_bytes(BOM + b'{"id": "1", "title": "Ada", "text": "Ada wrote."}\n')
    assert [passage.title for passage in read_passages(path)] == ["Ada"]
    for text in (b'{"q": "x"}\n', b'[{"q": "x"}]'):
        path.write_bytes(BOM + text)
        assert [record for _, record in read_records(path)] == [{"q": "x"}]
    path.write_bytes(BOM + b'{"task": "t", "turns": ["a"]}')
    assert read_episode(path).task == "t"
    for name, text in (
        ("run.toml", b"[run]\r\nid = 'x'\r\n"),
        ("config.json", b'{"run":{"id":"x"}}'),
    ):
        file = path.with_name(name)
        file.write_bytes(BOM + text)
        assert read_file(file) == {"run": {"id": "x"}}


def test_text_has_the_line_ends_of_this_system(path: Path):
    path.write_bytes(BOM + b"a\r\nb\rc\n")
    assert read_text(path) == "a\nb\nc\n"


def test_latin_1_is_called_no_utf_8_with_its_line(path: Path):
    path.write_bytes((line(1, "Wer?") + line(2)).encode("latin-1"))
    # The first character that UTF-8 does not have alone is «, 0xab in Latin-1.
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:2: Invalid UTF-8 \(byte 0xab\); save"):
        read_task_file(path)
    columns = {"prompt": "prompt"}
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:2: Invalid UTF-8"):
        read_task_file(DataSource(source=path, columns=columns))
    path.write_bytes('{"id": "1", "title": "é", "text": "x"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tasks.jsonl:1: Invalid UTF-8"):
        list(read_passages(path))
    file = path.with_name("run.toml")
    file.write_bytes("[run]\nid = 'é'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run.toml: line 2: Invalid UTF-8 \(byte 0xe9\)"):
        read_file(file)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_called_by_its_name(path: Path, encoding: str):
    path.write_bytes(("\ufeff" + line(1)).encode(encoding))
    with pytest.raises(TaskFileError, match=r"tasks.jsonl is UTF-16 text .*iconv -f UTF-16"):
        read_task_file(path)
    file = path.with_name("run.toml")
    file.write_bytes("\ufeff[run]\n".encode(encoding))
    with pytest.raises(ConfigError, match=r"run.toml: it is UTF-16 text; .*iconv -f UTF-16"):
        read_file(file)


def test_the_first_ten_bad_lines_are_shown_and_all_are_counted(path: Path):
    # Of 30 lines, every even one lacks its prompt: 15 bad ones, from the second to the thirtieth.
    lines = [line(n) if n % 2 else json.dumps({"id": f"q{n}"}) + "\n" for n in range(1, 31)]
    path.write_text("".join(lines))
    with pytest.raises(TaskFileError) as caught:
        read_task_file(path)
    head, *shown, rest = str(caught.value).split("\n  ")
    assert head == f"{path}: 15 of 30 lines cannot be used:"
    assert shown == [f"{path}:{number}: prompt: Field required" for number in range(2, 21, 2)]
    assert rest.startswith("and 5 more; a line is one JSON object with `id`, `prompt`")


def test_faults_of_different_kinds_are_shown_together(path: Path):
    path.write_bytes(b"".join([line(1).encode(), b"\n", b"{\n", line(1).encode(), b"\xff\n"]))
    with pytest.raises(TaskFileError) as caught:
        read_task_file(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: 4 of 5 lines cannot be used:\n")
    assert f"{path}:2: the line is empty; remove it\n" in text
    assert f"{path}:3: Invalid JSON" in text
    assert f"{path}:4: id 'q1' was used in {path}:1\n" in text
    assert f"{path}:5: Invalid UTF-8 (byte 0xff)" in text


def test_the_bad_lines_of_a_corpus_are_shown_together(path: Path):
    good = b'{"id": "1", "title": "t", "text": "x"}\n'
    path.write_bytes(good + b"{}\n" + good + b'{"id": 1}\n')
    with pytest.raises(ValueError, match=r"2 of 4 lines cannot be used:\n.*:2: .*\n.*:4: "):
        list(read_passages(path))
