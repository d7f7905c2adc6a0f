"""What is said of users' code that cannot be imported, or that raises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agent_r1_service.user_code import describe, import_named


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
