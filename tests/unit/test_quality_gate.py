"""The gate itself: schemas are current, refused words are found, and CI runs what `make` runs."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
CODE = ("services", "proto", "deploy", "scripts", "benchmarks", "examples", "tests")


def load_script(name: str) -> ModuleType:
    """Import a file of scripts, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def words() -> ModuleType:
    """scripts/files.py."""
    return load_script("files")


@pytest.fixture
def generated() -> ModuleType:
    """scripts/generated.py."""
    return load_script("generated")


@pytest.mark.parametrize("script", ["schemas", "benchmark_page"])
def test_what_is_written_in_the_repository_is_current(script: str) -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / script), "--check"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr


def test_help_of_a_script_that_writes_a_page_says_what_for_and_writes_nothing() -> None:
    page = REPOSITORY / "docs" / "config.md"
    before = page.stat().st_mtime_ns
    command = [sys.executable, REPOSITORY / "scripts" / "config_page", "--help"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "Write docs/config.md: every key" in found.stdout
    assert "--check" in found.stdout
    assert page.stat().st_mtime_ns == before


def test_generated_files_are_written_once_and_stale_ones_are_named(
    tmp_path: Path, generated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generated, "ROOT", tmp_path)
    files = {tmp_path / "one.md": "1\n", tmp_path / "two.md": "2\n"}
    generated.write_or_check("Write pages.", files, [])
    assert [path.read_text() for path in files] == ["1\n", "2\n"]
    generated.write_or_check("Write pages.", files, ["--check"])
    (tmp_path / "two.md").write_text("3\n")
    with pytest.raises(SystemExit, match=r"stale: two\.md; run scripts/"):
        generated.write_or_check("Write pages.", files, ["--check"])
    assert (tmp_path / "two.md").read_text() == "3\n"
    (tmp_path / "gone.md").write_text("")
    with pytest.raises(SystemExit, match=r"stale: two\.md, gone\.md"):
        generated.write_or_check("", files, ["--check"], gone=[tmp_path / "gone.md"])
    generated.write_or_check("", files, [], gone=[tmp_path / "gone.md"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.md", "two.md"]
    with pytest.raises(SystemExit):
        generated.write_or_check("Write pages.", files, ["--cheque"])


@pytest.mark.parametrize(
    "line",
    [
        "x = 1  # TODO later",  # allow-word
        "raise NotImplementedError",  # allow-word
        "    breakpoint()",  # allow-word
        "path = '/home/someone/data'",  # allow-word
        "<<<<<<< HEAD",
        "data = Path('../shared/data')",  # allow-word
    ],
)
def test_a_refused_word_is_found_with_its_line(words: ModuleType, line: str) -> None:
    found = words.check_text("services/x.py", f"fine\n{line}\n")
    assert len(found) == 1
    assert found[0].startswith("services/x.py:2: ")


def test_plain_text_and_allowed_lines_pass(words: ModuleType) -> None:
    assert words.check_text("a.py", "todo list\n# TODO  allow-word\n") == []
    assert words.check_text("tests/conftest.py", "../shared/data\n") == []  # allow-word


@pytest.mark.parametrize("failing", ["", "setup", "check", "test"])
def test_ci_of_an_ordinary_user_sets_up_checks_and_tests_up_to_the_first_failure(
    tmp_path: Path, failing: str
) -> None:
    write_program(tmp_path / "bin" / "id", "echo 1000\n")  # as root CI makes a user
    write_program(tmp_path / "bin" / "make", f'echo "$1"\n[ "$1" != "{failing}" ] || exit 3\n')
    write_program(
        tmp_path / "scripts" / "check", f"echo check\n[ check != '{failing}' ] || exit 3\n"
    )
    write_program(tmp_path / ".venv" / "bin" / "python", "echo Python 3.11.2\n")
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci" / "run")
    found = subprocess.run(
        [str(tmp_path / ".ci" / "run")],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    steps = ["setup", "check", "test"]
    wanted = steps[: steps.index(failing) + 1] if failing else steps
    assert [line for line in found.stdout.splitlines() if line in steps] == wanted, found.stderr
    assert found.returncode == (3 if failing else 0)
    assert "with Python 3.11.2" in found.stdout or failing == "setup"


def write_program(file: Path, script: str) -> None:
    """Write a shell script that can be run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{script}")
    file.chmod(0o755)


def test_ci_started_by_root_leaves_the_suite_to_an_ordinary_user() -> None:
    as_root = (REPOSITORY / ".ci" / "run").read_text().partition("user=agent-r1-ci\n")[2]
    commands = [
        line for line in as_root.splitlines() if re.match(r"\s*in_copy .*(make|run|pytest)", line)
    ]
    *first, root, last = commands
    assert all('"${as_user[@]}"' in command or "git clean" in command for command in [*first, last])
    assert last.endswith(".ci/run")
    assert "pytest" in root


@pytest.mark.parametrize("name", [".ci/run", "scripts/setup", "scripts/check", "scripts/lock"])
def test_commands_are_executable(name: str) -> None:
    assert (REPOSITORY / name).stat().st_mode & 0o111


def test_the_hooks_run_commands_of_this_environment_only() -> None:
    config = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())
    assert {repository["repo"] for repository in config["repos"]} == {"local"}
    hooks = {hook["id"]: hook for repository in config["repos"] for hook in repository["hooks"]}
    assert {"ruff-format", "ruff", "pyright", "lint-imports", "unit-tests"} <= set(hooks)


def test_no_code_uses_except_star_which_raises_otherwise_before_python_3_11_4() -> None:
    # 3.11.2, Debian 12's, wraps what is raised inside `except*` in a group; 3.11.4 does not.
    # `except ExceptionGroup` is the same in all.
    files = [file for folder in CODE for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    assert len(files) > len(CODE)
    sources = {file: file.read_text() for file in files}
    found = [
        f"{file.relative_to(REPOSITORY)}:{node.lineno}"
        for file, source in sources.items()
        if re.search(r"except\s*\*", source)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.TryStar)
    ]
    assert found == []


def test_no_service_runs_code_that_a_model_folder_brings() -> None:
    # Without the argument, transformers asks whoever sits at the terminal.
    sources = {file: file.read_text() for file in (REPOSITORY / "services").rglob("*.py")}
    calls = [
        (f"{file.relative_to(REPOSITORY)}:{node.lineno}", node)
        for file, source in sources.items()
        if ".from_" in source
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and re.match(r"Auto\w+\.from_(pretrained|config)$", ast.unparse(node.func))
    ]
    assert len(calls) > 5
    trusting = [
        where for where, call in calls if "trust_remote_code=False" not in ast.unparse(call)
    ]
    assert trusting == []


def test_each_folder_imports_what_the_architecture_page_says() -> None:
    """import-linter forbids the rest with few exceptions; the page says it in one place."""
    page = (REPOSITORY / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `((?:proto|services|deploy)[\w/]*)` \|.*\| ([^|]*) \|$", page, re.M)
    names = {
        folder: folder.split("/")[0 if folder.startswith("proto") else -1] for folder, _ in rows
    }
    assert len(names) == 19
    above: set[str] = set()
    for folder, text in rows:
        said = set(re.findall(r"`(\w+)`", text))
        allowed = above - said if text.startswith("all above") else said
        assert allowed <= above, folder
        found = {name for file in (REPOSITORY / folder).rglob("*.py") for name in _imported(file)}
        assert found - {names[folder]} <= allowed, folder
        above.add(names[folder])


def _imported(file: Path) -> set[str]:
    """Return the folders of this project that a file imports from."""
    found = re.findall(r"^ *(?:from|import) agent_r1(?:_(\w+)|\.(\w+))", file.read_text(), re.M)
    return {package or folder for package, folder in found}
