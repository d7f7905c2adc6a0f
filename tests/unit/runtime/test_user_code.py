"""What is said of users' code that cannot be imported, or that raises."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from agent_r1.runtime.user_code import describe, import_named


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("own_task", "own_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def problem(folder: Path, task: str, helper: str = "") -> str:
    (folder / "own_task.py").write_text(task)
    (folder / "own_helper.py").write_text(helper)
    with pytest.raises(ValueError, match=r"^key: module own_task cannot be imported: ") as caught:
        import_named("own_task:Name", "key")
    return str(caught.value).removeprefix("key: module own_task cannot be imported: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax (own_task.py, line 2)"),
        (
            "if True:\nx = 1\n",
            "IndentationError: expected an indented block after 'if' statement on line 1 "
            "(own_task.py, line 2)",
        ),
    ],
)
def test_a_syntax_error_is_shown_with_its_own_file_and_line(folder: Path, text: str, said: str):
    assert problem(folder, text) == said
    in_helper = said.replace("own_task", "own_helper")
    assert problem(folder, "\nimport own_helper\n", text) == in_helper


def test_an_error_is_shown_with_the_users_line_and_not_with_a_librarys(folder: Path):
    # json raises in its own decoder.py; line 3 called it
    said = problem(folder, 'import json\n\nX = json.loads("no")\n')
    assert said.endswith("(own_task.py, line 3)")
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("no")
    assert describe(caught.value).endswith(f"({Path(__file__).name}, line {caught.tb.tb_lineno})")


def test_a_missing_dependency_is_no_wrong_name(folder: Path):
    said = problem(folder, "import own_helper\n", "x = 1\nfrom no_such_package.part import y\n")
    assert said.startswith(
        "ModuleNotFoundError: No module named 'no_such_package' (own_helper.py, line 2)"
    )
    assert "pip install no_such_package" in said
    assert "check the name" not in said
    # A name that an installed package lacks: no name of ours is wrong, and nothing is to install.
    said = problem(folder, "from json import no_such_name\n")
    assert said.startswith("ImportError: cannot import name 'no_such_name' from 'json'")
    assert said.endswith("(own_task.py, line 1)")
    said = problem(folder, "import email.no_such_part\n")
    assert said.endswith("the installed email has no email.no_such_part: check name and version")


@pytest.mark.parametrize("name", ["no_module_here:X", "own_package.no_part:X"])
def test_a_module_that_is_not_there_is_a_wrong_name(folder: Path, name: str):
    (folder / "own_package").mkdir()
    (folder / "own_package" / "__init__.py").write_text("")
    with pytest.raises(ValueError, match=r"check the name, and that its folder is in run\.plugins"):
        import_named(name, "key")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"x = 1\n\0y = 2\n", "line 2 has a null byte; remove it: tr"),
        (b"# a\0b\n", "line 1 has a null byte; remove it: tr"),
        ("x = 1\n".encode("utf-16"), "it is UTF-16 text; save it as UTF-8: iconv -f UTF-16 "),
        ("x = 1\n".encode("utf-16-le"), "line 1 has null bytes, as UTF-16 text has; save it"),
        ("x = 1\n".encode("utf-16-be"), "iconv -f UTF-16BE -t UTF-8"),
        (
            "x = 1\ny = '東京は日本の'\n".encode("shift_jis"),
            "as CP932 it reads \"y = '東京は日本の'\"",
        ),
        (
            "x = 1\ny = '서울은 대한민국'\n".encode("euc_kr"),
            "as CP949 it reads \"y = '서울은 대한민국'\"",
        ),
        ("y = 'Sénégal'\n".encode("cp1252"), "line 1: Invalid UTF-8 (0xe96ee967 at byte 7 of the"),
    ],
)
@pytest.mark.parametrize(
    "task",
    [
        "import own_helper\n",
        "import os, own_helper\n",
        "from own_helper import x\n",
        "def load():\n    import own_helper\nload()\n",
    ],
)
def test_a_module_that_is_no_text_is_named_with_the_reason(
    folder: Path, task: str, data: bytes, said: str
):
    (folder / "own_helper.py").write_bytes(data)
    (folder / "own_task.py").write_text(task)
    for name in ("own_task", "own_helper"):
        with pytest.raises(ValueError, match="cannot be imported: SyntaxError: ") as caught:
            import_named(f"{name}:x", "key")
        assert f"SyntaxError: {folder / 'own_helper.py'}: " in str(caught.value)
        assert said in str(caught.value)


def test_a_module_of_a_package_that_is_no_text_is_named(folder: Path):
    package = folder / "odd_package"
    package.mkdir()
    (package / "__init__.py").write_text("from . import parts\n")
    (package / "parts.py").write_bytes(b"x = '\0'\n")
    with pytest.raises(ValueError, match=re.escape(f"SyntaxError: {package / 'parts.py'}: line 1")):
        import_named("odd_package:x", "key")


def test_text_in_another_encoding_that_a_module_reads_is_no_fault_of_the_module(folder: Path):
    (folder / "names.txt").write_bytes(b"\xe9\n")
    read = f"Path({str(folder / 'names.txt')!r}).read_text('utf-8')"
    code = f"from pathlib import Path\nNAMES = {read}\n"
    assert problem(folder, code).startswith("UnicodeDecodeError: 'utf-8' codec")
