"""Files as editors write them: byte order marks, other encodings, several bad lines."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest

from agent_r1.cli.task.episodes import read_episode
from agent_r1.config.sources import ConfigError, read_file
from agent_r1.runtime.files.file_formats import read_text
from agent_r1.runtime.files.published_data import read_records
from agent_r1.runtime.files.task_source import DataSource
from agent_r1.runtime.files.tasks import TaskFileError, read_task_file
from agent_r1.tools.search.corpus import read_passages

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
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:2: Invalid UTF-8 \(0xab"):
        read_task_file(path)
    columns = {"prompt": "prompt"}
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:2: Invalid UTF-8"):
        read_task_file(DataSource(source=path, columns=columns))
    path.write_bytes('{"id": "1", "title": "é", "text": "x"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"tasks.jsonl:1: Invalid UTF-8"):
        list(read_passages(path))
    file = path.with_name("run.toml")
    file.write_bytes("[run]\nid = 'é'\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run.toml: line 2: Invalid UTF-8 \(0xe927 at byte 7 of"):
        read_file(file)


@pytest.mark.parametrize(
    "text", ["", '{"run": {"id"', "\0" * 64, "[" * 100_000, "[1]", "null", "-3"]
)
def test_a_damaged_config_of_a_run_is_named_in_one_line(path: Path, text: str):
    file = path.with_name("config.json")
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=r"config.json (does not parse|is not a JSON obj)"
    ) as said:
        read_file(file)
    assert "\n" not in str(said.value)


QUESTIONS = {
    "shift_jis": ("CP932", ["東京は日本の首都ですか。", "富士山の高さは何メートルですか。"]),
    "euc_jp": ("EUC-JP", ["東京は日本の首都ですか。", "富士山の高さは何メートルですか。"]),
    "euc_kr": ("CP949", ["서울은 대한민국의 수도인가?", "한라산의 높이는 얼마입니까?"]),
    "gb18030": ("GB18030", ["北京是中国的首都吗。", "长江有多长。这是一个问题。"]),
    "big5": ("BIG5", ["臺北是一個城市。", "玉山有多高。"]),
    "cp1252": ("CP1252", ["Où est l’été ?", "Quelle est la capitale du Sénégal ?"]),  # noqa: RUF001 - as French is printed
    "cp1251": ("CP1251", ["Москва — столица России?", "Какова высота Эльбруса?"]),
    "koi8_r": ("KOI8-R", ["Москва столица России?", "Какова высота Эльбруса?"]),
}


@pytest.mark.parametrize("encoding", QUESTIONS)
def test_another_encoding_is_shown_with_how_it_reads_and_none_is_asserted_wrongly(
    path: Path, encoding: str
):
    name, questions = QUESTIONS[encoding]
    path.write_bytes("".join(line(i, q) for i, q in enumerate(questions)).encode(encoding))
    with pytest.raises(TaskFileError, match="2 of 2 lines") as refused:
        read_task_file(path)
    said = str(refused.value)
    assert said.count("iconv") == 1
    assert "LATIN" not in said
    (reading,) = re.findall(rf"as {name} it reads ['\"](.*?)['\"][,:]", said)
    assert reading[-10:] in line(0, questions[0])
    converts = re.findall(r"iconv -f (\S+) -t UTF-8", said)
    assert converts in ([name], ["ENCODING"])
    # Where one encoding alone is named, the command gives the text back.
    if converts == [name]:
        command = ["iconv", "-f", name, "-t", "UTF-8", str(path)]
        done = subprocess.run(command, capture_output=True, check=True)
        assert questions[1] in done.stdout.decode()


def test_a_single_line_that_is_not_utf_8_is_not_to_be_converted_with_the_others(path: Path):
    path.write_bytes(line(1, "Où ?").encode() + line(2, "Où ?").encode("latin-1"))
    with pytest.raises(TaskFileError, match=r":2: Invalid UTF-8 .*damaged.*write it again"):
        read_task_file(path)


def test_bytes_of_no_encoding_leave_the_question_open(path: Path):
    path.write_bytes(b'{"id": "\xed\xa0\x80"}\n')
    with pytest.raises(TaskFileError, match=r"0xeda08022 at byte 9 .*iconv -f ENCODING"):
        read_task_file(path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_text_with_a_mark_of_another_encoding_is_called_by_its_name(path: Path, encoding: str):
    name = encoding[:6].upper()
    path.write_bytes(("\ufeff" + line(1)).encode(encoding))
    with pytest.raises(TaskFileError, match=rf"tasks.jsonl is {name} text .*iconv -f {name} "):
        read_task_file(path)
    file = path.with_name("run.toml")
    file.write_bytes("\ufeff[run]\n".encode(encoding))
    with pytest.raises(ConfigError, match=rf"run.toml: it is {name} text; .*iconv -f {name} "):
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
    assert f"{path}:5: Invalid UTF-8 (0xff at byte 1 of the line)" in text


def test_the_bad_lines_of_a_corpus_are_shown_together(path: Path):
    good = b'{"id": "1", "title": "t", "text": "x"}\n'
    path.write_bytes(good + b"{}\n" + good + b'{"id": 1}\n')
    with pytest.raises(ValueError, match=r"2 of 4 lines cannot be used:\n.*:2: .*\n.*:4: "):
        list(read_passages(path))
