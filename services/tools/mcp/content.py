"""Tool results as MCP writes them, and back.

`client.py` turns what an MCP server answered into a `ToolResult`; `server.py` turns a
`ToolResult` into what an MCP client reads.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import get_args

from mcp_types import (
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from agent_r1.tools.base import error_result
from agent_r1_proto.parts import ImagePart, ResultPart, TextPart
from agent_r1_proto.tools import ToolResult

MAX_RESULT_CHARS = 4 << 20
"""A larger answer is an error text for the model, which may ask for less."""
IMAGE_TYPES: tuple[str, ...] = get_args(ImagePart.model_fields["media_type"].annotation)


class _UnshowableError(Exception):
    """Content that no result part can hold; the text is for the model."""


def to_tool_result(answer: CallToolResult) -> ToolResult:
    """Return an MCP answer as a result of ours.

    Text stays text and images stay images; structured content becomes `data`, and its JSON is
    shown where the server sent no text. Content of other kinds, or too much of it, is an error the
    model reads.
    """
    size = len(answer.model_dump_json())
    if size > MAX_RESULT_CHARS:
        return error_result(
            f"Error: the answer has {size} characters and the limit is {MAX_RESULT_CHARS}; "
            "ask for less at a time"
        )
    try:
        parts = [_part_of(block) for block in answer.content]
    except _UnshowableError as exc:
        return error_result(f"Error: {exc}")
    data = answer.structured_content
    if data is not None and not any(isinstance(part, TextPart) for part in parts):
        parts.append(TextPart(text=json.dumps(data, ensure_ascii=False)))
    return ToolResult(status="error" if answer.is_error else "ok", parts=parts, data=data)


def to_mcp_result(result: ToolResult) -> CallToolResult:
    """Return a result of ours as an MCP answer; `data` stays here, it is never for the model."""
    return CallToolResult(
        content=[_block_of(part) for part in result.parts], is_error=result.status == "error"
    )


def _part_of(block: ContentBlock) -> ResultPart:
    match block:
        case TextContent():
            return TextPart(text=block.text)
        case ImageContent():
            return _image(block.mime_type, block.data)
        case ResourceLink():
            return TextPart(text=f"{block.title or block.name}: {block.uri}")
        case EmbeddedResource():
            resource = block.resource
            if isinstance(resource, BlobResourceContents):
                return _image(resource.mime_type or "no stated type", resource.blob)
            return TextPart(text=resource.text)
        case _:
            raise _UnshowableError(
                f"the answer holds {block.type} ({block.mime_type}), which cannot be shown"
            )


def _image(media_type: str, data: str) -> ImagePart:
    if media_type not in IMAGE_TYPES:
        raise _UnshowableError(
            f"the answer holds data of type {media_type}, which cannot be shown; "
            f"images must be {', '.join(IMAGE_TYPES)}"
        )
    try:
        base64.b64decode(data, validate=True)
    except binascii.Error as exc:
        raise _UnshowableError(f"the answer's image is not valid base64: {exc}") from exc
    return ImagePart.model_validate({"media_type": media_type, "data_base64": data})


def _block_of(part: ResultPart) -> ContentBlock:
    if isinstance(part, TextPart):
        return TextContent(text=part.text)
    return ImageContent(data=part.data_base64, mime_type=part.media_type)
