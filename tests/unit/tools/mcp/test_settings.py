"""The settings of `type = "mcp"`, and how MCP content maps to results."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    TextContent,
)

from agent_r1.tools.base import parse_settings
from agent_r1.tools.mcp.content import to_mcp_result, to_tool_result
from agent_r1.tools.mcp.settings import McpSettings
from agent_r1_proto.parts import ImagePart, TextPart
from agent_r1_proto.tools import ToolResult

COMMAND: dict[str, Any] = {"tool": "search", "command": ["python", "server.py"]}
URL: dict[str, Any] = {"tool": "search", "url": "http://wiki:8000/mcp"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool": "search"}, "settings: set exactly one of command .* and url"),
        (COMMAND | URL, "set exactly one of command"),
        ({"command": ["x"]}, "settings.tool: Field required"),
        (COMMAND | {"command": []}, "command is empty"),
        (COMMAND | {"headers": {"A": "b"}}, "headers belongs to servers with url"),
        (URL | {"env": ["TOKEN"]}, "env belongs to servers with command"),
        (URL | {"url": "wiki:8000"}, "must start with http://"),
        (URL | {"isolation": "trajectory"}, "settings.isolation: Input should be 'shared'"),
        (URL | {"max_sessions": 0}, "settings.max_sessions: Input should be greater"),
        (URL | {"toool": "x"}, r"settings.toool is unknown; did you mean tool\?"),
        (
            URL | {"headers": {"Authorization": "Bearer abc"}},
            r'holds a secret; .*headers = \{ Authorization = "\$\{NAME\}" \}',
        ),
    ],
)
def test_wrong_settings_are_named_with_the_remedy(settings: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        parse_settings(McpSettings, settings)


def test_headers_and_variables_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WIKI_TOKEN", "t0")
    headers = {"Authorization": "Bearer ${WIKI_TOKEN}", "Accept-Language": "de"}
    settings = parse_settings(McpSettings, URL | {"headers": headers})
    assert settings.resolved_headers() == {
        "Authorization": "Bearer t0",
        "Accept-Language": "de",
    }
    assert "t0" not in settings.model_dump_json()
    assert parse_settings(McpSettings, COMMAND | {"env": ["WIKI_TOKEN"]}).passed_environment() == {
        "WIKI_TOKEN": "t0"
    }
    monkeypatch.delenv("WIKI_TOKEN")
    with pytest.raises(ValueError, match=r"headers names .*WIKI_TOKEN, which is not set"):
        settings.resolved_headers()


def test_structured_content_is_shown_as_json_only_where_there_is_no_text():
    image = ImageContent(data="AAAA", mime_type="image/webp")
    alone = to_tool_result(CallToolResult(content=[image], structured_content={"é": 1}))
    assert alone.parts == [
        ImagePart(media_type="image/webp", data_base64="AAAA"),
        TextPart(text='{"é": 1}'),
    ]
    both = to_tool_result(CallToolResult(content=[TextContent(text="t")], structured_content=[1]))
    assert (both.text(), both.data) == ("t", [1])
    assert to_tool_result(CallToolResult(content=[])) == ToolResult()


def test_an_error_keeps_its_content():
    answer = CallToolResult(content=[TextContent(text="no")], is_error=True)
    assert to_tool_result(answer) == ToolResult(status="error", parts=[TextPart(text="no")])


def test_an_embedded_image_is_an_image_and_other_bytes_are_refused():
    def embedded(media_type: str | None) -> ToolResult:
        blob = BlobResourceContents(uri="file:///b", blob="AAAA", mime_type=media_type)
        return to_tool_result(CallToolResult(content=[EmbeddedResource(resource=blob)]))

    assert embedded("image/jpeg").parts == [ImagePart(media_type="image/jpeg", data_base64="AAAA")]
    assert "application/pdf" in embedded("application/pdf").text()
    assert "no stated type" in embedded(None).text()


def test_a_result_of_ours_survives_the_way_there_and_back():
    result = ToolResult(
        status="error",
        parts=[TextPart(text="a"), ImagePart(media_type="image/png", data_base64="AAAA")],
    )
    assert to_tool_result(to_mcp_result(result)) == result
