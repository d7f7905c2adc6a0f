"""`[tools.<name>]`: wrong tables are refused with value and remedy."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from agent_r1.runtime.config import RedisConfig, RunConfig
from agent_r1.tools.config import ToolConfig
from agent_r1.tools.kinds import AnyToolConfig
from agent_r1.tools.loading import import_tool_class, load_tool
from agent_r1.tools.main import serve
from agent_r1.tools.search.config import SearchConfig

CORPUS = Path("c.jsonl")
ELASTICSEARCH = {
    "backend": "elasticsearch",
    "elasticsearch_url": "http://es:9200",
    "index": "wiki",
}


def any_tool(values: dict[str, Any]) -> ToolConfig:
    return TypeAdapter[ToolConfig](AnyToolConfig).validate_python(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, 'type = "search" needs corpus'),
        ({"corpus": CORPUS, "settings": {"a": 1}}, "belong to tools of other types"),
        ({"type": "sarch"}, "must be one of search, calculator"),
        ({"type": "mine:Tool", "top_k": 3}, "top_k: not a key of a tool of type 'mine:Tool'"),
        ({"url": "localhost:80"}, "must start with http"),
        ({"corpus": CORPUS, "passage_template": "{nummer}"}, "its fields are {number}"),
        ({"corpus": CORPUS, "passage_template": "{}{text}"}, "does not format"),
        ({"corpus": CORPUS, "passage_template": "{number}"}, "neither {title} nor {text}"),
        ({"corpus": CORPUS, "backend": "bm52"}, "'bm25'"),
        ({"corpus": CORPUS, "topk": 3}, "topk"),
        ({"backend": "elasticsearch"}, "needs elasticsearch_url"),
        ({"backend": "elasticsearch", "elasticsearch_url": "http://es:9200"}, "needs index"),
        ({**ELASTICSEARCH, "elasticsearch_url": "es:9200"}, "must start with http"),
        ({**ELASTICSEARCH, "elasticsearch_url": "http://u:p@es:9200"}, "_ELASTICSEARCH_PASSWORD"),
        ({**ELASTICSEARCH, "index_dir": CORPUS}, "index_dir: not a key of backend 'elastic"),
        ({**ELASTICSEARCH, "search_threads": 2}, "search_threads: not a key of backend 'elastic"),
        ({"corpus": CORPUS, "index": "wiki", "gather_ms": 5}, "gather_ms, index: not a key of"),
    ],
)
def test_a_wrong_table_is_refused(values: dict[str, Any], message: str):
    with pytest.raises(ValidationError) as caught:
        any_tool(values)
    assert message in str(caught.value)


def test_a_service_that_runs_elsewhere_needs_only_its_url():
    assert any_tool({"url": "http://search:8000"}).settings == {}


@pytest.mark.parametrize(
    "values",
    [
        {"corpus": CORPUS, "top_k": 3},
        ELASTICSEARCH,
        {"type": "calculator"},
        {"type": "mine:Tool", "settings": {"a": 1}, "port": 8100},
    ],
)
def test_a_resolved_table_is_valid_again(values: dict[str, Any]):
    table = any_tool(values)
    assert any_tool(table.model_dump(mode="json")) == table


def test_elasticsearch_leaves_a_corpus_unread_so_that_one_key_switches_the_backend():
    table = any_tool({**ELASTICSEARCH, "corpus": CORPUS})
    assert isinstance(table, SearchConfig)
    assert table.corpus == CORPUS


TOOL_CODE = """
from agent_r1.tools.base import Tool

class Add(Tool):
    name = "add"
    description = "Adds."
    parameters = {"type": "object"}

    def __init__(self, offset=0):
        self.offset = offset

    async def call(self, arguments, context):
        return str(self.offset)

class NotATool:
    pass

class Raising(Add):
    def __init__(self, path="/nowhere"):
        open(path)

class Choosy(Add):
    def __init__(self):
        int("seven")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "adding_tool.py").write_text(TOOL_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "adding_tool"


def test_a_users_tool_is_built_with_its_settings(plugin: str):
    tool = load_tool("add", ToolConfig(type=f"{plugin}:Add", settings={"offset": 3}))
    assert tool.spec().name == "add"
    assert vars(tool) == {"offset": 3}


@pytest.mark.parametrize("settings", [{"api": "s3cret", "ofset": 3}, {"path": "s3cret"}])
def test_what_is_wrong_with_settings_tells_none_of_their_values(
    plugin: str, settings: dict[str, Any]
):
    kind = "Raising" if "path" in settings else "Add"
    with pytest.raises(ValueError, match=r"settings \(.*(ofset|path)") as caught:
        load_tool("add", ToolConfig(type=f"{plugin}:{kind}", settings=settings))
    own = str(caught.value).partition("correct")[2] if kind == "Raising" else str(caught.value)
    assert "s3cret" not in own  # what the user's class says is its own


@pytest.mark.parametrize(
    ("name", "type_", "settings", "message"),
    [
        ("add", "Missing", {}, "module adding_tool has no Missing"),
        ("add", "NotATool", {}, "is not a subclass of agent_r1.Tool"),
        ("add", "Add", {"ofset": 3}, r"settings .* do not fit Add: .*unexpected keyword"),
        (
            "add",
            "Raising",
            {"path": "/no/such"},
            r"tools\.add: Raising\(\.\.\.\) raised FileNotFoundError: .*/no/such.*; correct "
            r"tools\.add\.settings .* or the class$",
        ),
        ("add", "Choosy", {}, r"Choosy\(\.\.\.\) raised ValueError: invalid literal"),
        ("plus", "Add", {}, r"\[tools.plus\] serves .* whose name is 'add'"),
    ],
)
def test_a_users_tool_that_cannot_be_served_is_explained(
    plugin: str, name: str, type_: str, settings: dict[str, Any], message: str
):
    with pytest.raises(ValueError, match=message):
        load_tool(name, ToolConfig(type=f"{plugin}:{type_}", settings=settings))


def test_a_module_that_raises_is_one_line_that_keeps_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "raising_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="cannot be imported: ZeroDivisionError") as caught:
        load_tool("add", ToolConfig(type="raising_module:Add"))
    assert len(str(caught.value).splitlines()) == 1
    # The log of the service has the whole chain.
    chain = "".join(traceback.format_exception(caught.value))
    assert 'raising_module.py", line 1' in chain


def test_a_module_that_is_not_on_the_path_names_run_plugins():
    with pytest.raises(ValueError, match=r"cannot be imported: No module .* run\.plugins"):
        load_tool("add", ToolConfig(type="nowhere_at_all:Add"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("agent_r1.tools.python_exec:PythonExec", "agent_r1.tools.sandbox.python_exec"),
        ("agent_r1.tools.code_tests:CodeTests", "agent_r1.tools.sandbox.code_tests"),
        ("agent_r1.tools.mcp_client:McpTool", "agent_r1.tools.mcp.client"),
        ("agent_r1.tools.search:SearchTool", "agent_r1.tools.search.tool"),
    ],
)
def test_a_class_whose_module_has_moved_is_found_under_the_name_that_is_answered(
    old: str, new: str
):
    module, _, class_name = old.partition(":")
    with pytest.raises(ValueError, match=re.escape(f"{module} is now {new}") + "$"):
        import_tool_class(old, "type")
    assert import_tool_class(f"{new}:{class_name}", "type").__name__ == class_name


def test_a_tool_that_runs_elsewhere_is_not_served_here():
    with pytest.raises(ValueError, match="names a service that already runs"):
        serve(
            name="x",
            run=RunConfig(),
            redis=RedisConfig(),
            tool=ToolConfig(url="http://x"),
            token=None,
            announce_dir=None,
        )
