"""What the papers promise exists: links, files, commands and the example of a tool."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from agent_r1 import Tool
from agent_r1.cli.parser import build_parser
from agent_r1.tools.base import CallContext

REPOSITORY = Path(__file__).resolve().parents[2]
PAPERS = [
    *sorted(REPOSITORY.glob("*.md")),
    *sorted((REPOSITORY / "docs").rglob("*.md")),
    *sorted(REPOSITORY.glob("[!.]*/README.md")),
    *sorted((REPOSITORY / "examples").glob("*/README.md")),
]
README = (REPOSITORY / "README.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def relative(path: Path) -> str:
    """Name a paper in test ids."""
    return str(path.relative_to(REPOSITORY))


def code_block(text: str, language: str) -> str:
    """Return the first code block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("paper", PAPERS, ids=relative)
def test_links_lead_somewhere(paper: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", paper.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (paper.parent / target).exists(), target


def anchors(paper: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a paper."""
    headings = re.findall(r"^#+ (.*)$", paper.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("paper", PAPERS, ids=relative)
def test_links_into_a_page_name_one_of_its_headings(paper: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)]+)\)", paper.read_text()):
        page = paper.parent / target if target else paper
        assert anchor in anchors(page), f"{target}#{anchor}"


@pytest.mark.parametrize("paper", PAPERS, ids=relative)
def test_make_targets_that_are_named_exist(paper: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z0-9-]+)", paper.read_text(), re.MULTILINE))
    assert named <= targets


def test_the_tour_is_numbered_and_passes_every_file_once() -> None:
    tour = README.split("## Follow one prompt through the code")[1].split("\n## ")[0]
    stops = re.findall(r"^(\d+)\. \[.*?\]\((.*?\.py)\)", tour, re.MULTILINE)
    assert [int(number) for number, _ in stops] == list(range(1, len(stops) + 1))
    assert len({path for _, path in stops}) == len(stops) > 9
    assert (stops[0][1], stops[-1][1]) == (
        "services/learner/prompts.py",
        "services/rollout/vllm/weight_transfer.py",
    )


def test_readers_start_with_the_minimal_loop() -> None:
    assert README.index("examples/minimal_loop.py") < README.index("## ")


def test_the_index_leads_to_every_page() -> None:
    listed = re.findall(r"\]\(([^)#\s]+)", (REPOSITORY / "docs" / "index.md").read_text())
    reached = {(REPOSITORY / "docs" / target).resolve() for target in listed}
    assert {relative(p) for p in PAPERS if p.resolve() not in reached} == {"docs/index.md"}


OWN_FILES = [
    "README.md",
    "AGENTS.md",
    "CONTRIBUTING.md",
    "proto/README.md",
    "services/runtime/README.md",
    "docs/architecture.md",
]
"""Papers that name no files but the repository's."""
CODE = [
    path
    for folder in ("services", "proto", "deploy", "scripts", "benchmarks", "examples", "tests")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]
PATHS = ["/" + relative(path) for path in CODE]


def unknown_files(names: list[str]) -> list[str]:
    """Return those names of Python files that no file of the repository ends in."""
    return [name for name in names if not any(path.endswith("/" + name) for path in PATHS)]


@pytest.mark.parametrize("paper", OWN_FILES)
def test_source_files_that_are_named_exist(paper: str) -> None:
    text = (REPOSITORY / paper).read_text()
    assert unknown_files(re.findall(r"`([\w/]+\.py)`", text)) == []


@pytest.mark.parametrize(
    ("page", "package"),
    [
        ("proto/README.md", "proto/agent_r1_proto"),
        ("services/runtime/README.md", "services/runtime"),
    ],
)
def test_the_page_of_a_shared_package_lists_every_module(page: str, package: str) -> None:
    text = (REPOSITORY / page).read_text()
    modules = [path.name for path in (REPOSITORY / package).glob("[!_]*.py")]
    assert len(modules) > 5
    assert [name for name in modules if f"`{name}`" not in text] == []


@pytest.mark.parametrize("package", ["services", "proto", "deploy"])
def test_source_files_that_source_files_name_exist(package: str) -> None:
    files = [path for path in CODE if path.is_relative_to(REPOSITORY / package)]
    assert len(files) > 5
    named = {path: re.findall(r"(?<![\w/*])\w[\w/]*\.py\b", path.read_text()) for path in files}
    unknown = {relative(path): unknown_files(names) for path, names in named.items()}
    assert {path: names for path, names in unknown.items() if names} == {}


def test_every_subcommand_is_in_the_readme() -> None:
    help_text = build_parser().format_help()
    commands = re.findall(r"^ {2,6}([a-z][a-z-]*)(?: {2,}|$)", help_text, re.MULTILINE)
    listed = code_block(README.split("## The command")[1], "text")
    assert "train" in commands, help_text
    assert [name for name in commands if f"agent-r1 {name}" not in listed] == []


async def test_the_tool_of_the_readme_works(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("population")
    monkeypatch.setitem(sys.modules, "population", module)
    exec(code_block(README, "python"), vars(module))
    tool: Tool = module.Population()
    assert tool.spec().name == "population"
    context = CallContext(rollout_id="r/1/0/0/0", turn=0, tool_context=None, timeout_s=1.0)
    assert await tool.call({"city": "Rome"}, context) == "2750000 people"


def test_the_table_of_the_readmes_tool_is_valid() -> None:
    from agent_r1.config.run import Config

    table = tomllib.loads(code_block(README, "toml"))
    config = Config.model_validate({**table, "model": {"path": "any"}})
    assert config.tools["population"].type == "population:Population"


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (REPOSITORY / "LICENSE").read_text()
    assert text.lstrip().startswith("Apache License\n                           Version 2.0")
    assert [n for n in range(1, 10) if re.search(rf"^   {n}\. [A-Z]", text, re.MULTILINE)] == list(
        range(1, 10)
    )
    assert "END OF TERMS AND CONDITIONS" in text


def test_every_default_model_and_set_of_the_examples_has_its_licence_written_down() -> None:
    third_party = (REPOSITORY / "THIRD_PARTY.md").read_text()
    for file in sorted((REPOSITORY / "examples").glob("*/*.toml")):
        path = tomllib.loads(file.read_text()).get("model", {}).get("path", "")
        if "/" in path and not path.startswith("."):
            assert path.split("/")[1] in third_party, f"{file}: {path}"
